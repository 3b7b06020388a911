"""Tell gradings apart: a key of all that decides which answers of a domain are right.

    environment, its settings, limits of an episode                    by value
    code of the environment, of its own module and of this package's   by content
    files and modules that its settings name (rows, reward functions)  by content

What a named module imports is not followed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import rllib_srl.envs
from rllib_srl.cli.serving.job import KeptDomain
from rllib_srl.common.environments import resolve


def grading_key(domain: KeptDomain, limits: Mapping[str, Any]) -> str:
    """Return the key of a domain's grading.

    Args:
        domain: of the served model.
        limits: of an episode, as JSON values.
    """
    env = resolve(domain.world)(dict(domain.env_config))
    env.close()
    files = {source for one in type(env.unwrapped).__mro__ if (source := _source(one)) is not None}
    files |= set(_named_files([domain.world, dict(domain.env_config)]))
    about = [domain.world, domain.env_config, limits, _package_digest(), sorted(map(_digest, files))]
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def _named_files(value: Any) -> Iterator[Path]:
    """Yield the files that settings name: by path, or as "module:name"."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _named_files(one)
    elif isinstance(value, str | Path) and str(value):
        path = Path(value).expanduser()
        if path.is_file():
            yield path
        elif ":" in str(value) and (source := _module_file(str(value).partition(":")[0])) is not None:
            yield source
    elif callable(value) and (source := _source(value)) is not None:
        yield source


def _module_file(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # no name of a module
        return None
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


def _source(what: Any) -> Path | None:
    try:
        found = inspect.getsourcefile(what)
    except TypeError:  # built in
        return None
    return Path(found) if found and Path(found).is_file() else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _package_digest() -> str:
    """Return a digest of the environments of this package: their grading is in several modules."""
    root = Path(rllib_srl.envs.__path__[0])
    return hashlib.sha256("".join(_digest(one) for one in sorted(root.rglob("*.py"))).encode()).hexdigest()

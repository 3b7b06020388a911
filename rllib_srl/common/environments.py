"""Resolves environments by name and checks them: `resolve`, `check_environment`.

    creator = resolve("chain_sum")        an entry point of the group "rllib_srl.envs"
    creator = resolve("my.module:MyEnv")  an import path; "my_env.py:MyEnv" is a class of a file
    creator = resolve(MyEnv)              a class, or any callable that takes the env_config
    creator = resolve("compare#small")    the environment before the "#"; the part after it names a separate domain
    env = creator({"num_shots": 4})

An environment (`env` in identifiers) is an ordinary `gymnasium.Env` whose observations and actions are text.
Optional attributes:

    prompt_ids                                  prompts of a split; needs reset(options={"prompt_id", "history"})
    num_prompts                                 of a finite set: their number
    domain, stop_strings, gold_turns
    data_question(prompt_id)                    question and answer of a row of data
    shot_ids                                    prompts that every prompt shows as solved examples
    tool_schemas, system_prompt                 of the episode, for the chat template
    pass_reward                                 lowest reward that counts as a pass
    is_unpaid                                   True: it pays no reward, people rate the answers (docs/serving.md)
    info["parsed"], info["expected"]            in the last step
    info["role"] = "tool"                       if the observation is a tool's result

Without `prompt_ids`, `reset(seed=...)` is the prompt and "seed:<number>" its prompt id.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import gymnasium

from rllib_srl.common.foreign_names import nearest
from rllib_srl.common.loading import load, reason

ENTRY_POINT_GROUP = "rllib_srl.envs"
SEED_PREFIX = "seed:"
NAMED = "#"  # separates the environment and the domain in an environment id

Environment = gymnasium.Env[Any, Any]
Creator = Callable[[Mapping[str, Any]], Environment]
Registry = Callable[[str], "Creator | None"]


class EnvError(ValueError):
    """An environment cannot be created or breaks the contract; the message explains the error and the fix."""


def resolve(spec: str | Callable[..., Environment], registry: Registry | None = None) -> Creator:
    """Return a callable that creates environments from an env_config; `registry` looks up other names (Tune's).

    Raises:
        EnvError: `spec` is unknown, cannot be imported or is not callable.
    """
    if not isinstance(spec, str):
        if callable(spec):
            return _taking_config(spec, getattr(spec, "__name__", repr(spec)))
        raise EnvError(f"environment {spec!r} is of type {type(spec).__name__}; expected {_WAYS}")
    spec = spec.partition(NAMED)[0]
    if ":" in spec:
        return _imported(spec, spec)
    paths = _installed(tuple(sys.path))
    if spec in paths:
        return _imported(spec, paths[spec])
    creator = registry(spec) if registry is not None else None
    if creator is None:
        known = known_envs()
        near = nearest(spec.casefold().replace("-", "_"), known)
        raise EnvError(
            f"environment {spec!r} is unknown; {f'did you mean {near}? ' if near else ''}"
            f"expected one of {', '.join(known) or 'none'}, or {_WAYS}"
        )
    return creator


def environment_id(env: str, domain: str = "") -> str:
    """Return the id of an environment, "env#domain" if `domain` is given."""
    return f"{env}{NAMED}{domain}" if domain else env


def known_envs() -> list[str]:
    """Return the names of the installed entry points, sorted."""
    return sorted(_installed(tuple(sys.path)))


@lru_cache(maxsize=8)
def _installed(path: tuple[str, ...]) -> dict[str, str]:
    """Return the import path of each entry point. Cached by `sys.path`: all installed packages are searched."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def check_environment(env: Any, name: str) -> None:
    """Check the mandatory part of the contract; resets the environment once.

    Raises:
        EnvError: the message lists all violations.
    """
    errors = lacks(env)
    if isinstance(env, gymnasium.Env):
        errors += _errors_of_reset(env)
    if errors:
        raise EnvError(f"environment {name!r} cannot be played: " + "; ".join(errors))


def lacks(env: Any) -> list[str]:
    """Return the violations of the contract that can be found without a reset, [] if there is none."""
    errors = []
    if not isinstance(env, gymnasium.Env):
        errors.append(f"it is a {type(env).__name__}; expected a gymnasium.Env")
    for method in ("reset", "step"):
        if not callable(getattr(env, method, None)):
            errors.append(f"it has no method {method}")
    if isinstance(env, gymnasium.Env) and hasattr(env.unwrapped, "prompt_ids") and not _takes_options(env):
        errors.append("it has prompt_ids, but its reset takes no options; expected reset(seed=None, options=None)")
    stops = getattr(env, "stop_strings", ())
    if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
        errors.append(f"stop_strings = {stops!r}; expected a tuple of non-empty strings")
    return errors


def grading_digest(env: Environment, env_config: Mapping[str, Any]) -> str:
    """Return a digest of everything that grades an environment's answers: its config and its code.

    The code is that of the modules of its classes, wrappers included, and of modules of the same packages from which
    these take a class or function. Data that is read from files is not part of it.
    """
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    names = {kind.__module__ for layer in layers for kind in type(layer).__mro__}
    packages = {name.partition(".")[0] for name in names} - {"builtins", "typing", "abc", "gymnasium"}
    values = [value for name in names if name in sys.modules for value in vars(sys.modules[name]).values()]
    names |= {str(getattr(value, "__module__", "")) for value in values}
    config = json.dumps(env_config, sort_keys=True, default=lambda obj: getattr(obj, "__qualname__", str(type(obj))))
    digest = hashlib.blake2b(config.encode(), digest_size=8)
    for name in sorted(names):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and name.partition(".")[0] in packages:
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()


_EXPECTED_MODULE = "expected a module that every env runner can import: in this directory, installed, or on PYTHONPATH"
_WAYS = '"package.module:Class", a class, a callable, or a name registered with ray.tune.register_env'


def _imported(name: str, path: str) -> Creator:
    if path.startswith(":") or path.endswith(":"):
        raise EnvError(f'environment {path!r} is not an import path; expected "package.module:Class"')
    try:
        creator = load(path)
    except Exception as error:  # user code can raise anything during import
        raise EnvError(f"environment {name!r} cannot be imported ({reason(error)}); {_EXPECTED_MODULE}") from error
    if not callable(creator):
        raise EnvError(f"environment {name!r} is a {type(creator).__name__}; expected a class or a callable")
    return _taking_config(creator, name)


def _taking_config(make: Callable[..., Environment], name: str) -> Creator:
    """Return `make`, wrapped if it takes no arguments: many environments take no env_config."""
    try:
        inspect.signature(make).bind({})
    except TypeError:
        return partial(_make_plain, make, name)
    except ValueError:  # builtins have no signature
        return make
    return make


def _make_plain(make: Callable[..., Environment], name: str, env_config: Mapping[str, Any]) -> Environment:
    if env_config:
        settings = dict(env_config)
        raise EnvError(f"environment {name!r} takes no settings; expected an empty env_config, not {settings!r}")
    return make()


def _errors_of_reset(env: Environment) -> list[str]:
    try:
        result = env.reset(seed=0)
    except Exception as error:  # user code can raise anything
        return [f"reset(seed=0) raised {type(error).__name__}: {error}"]
    if not isinstance(result, tuple) or len(result) != 2:
        return [f"reset returned {type(result).__name__}; expected (observation, info)"]
    observation, info = result
    errors = []
    if not isinstance(observation, str):
        errors.append(f"its observation is a {type(observation).__name__}; expected text (str)")
    if not isinstance(info, dict):
        errors.append(f"its info is a {type(info).__name__}; expected a dict")
    return errors


def _takes_options(env: Any) -> bool:
    parameters = inspect.signature(env.unwrapped.reset).parameters.values()
    return any(p.name == "options" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

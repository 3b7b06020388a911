"""From the name of a world to environments that can be played: `resolve`, `check_world`, `prompts_of`.

    creator = resolve("chain_sum")        an entry point of the group "rllib_srl.envs"
    creator = resolve("my.module:MyEnv")  an import path
    creator = resolve(MyEnv)              a class, or any callable that takes the env_config
    creator = resolve("compare#small")    the world before the "#"; what follows names a domain of its own
    env = creator({"num_shots": 4})

A world is an ordinary `gymnasium.Env` whose observations and actions are text. It may offer more
(`prompt_ids`, `reset(options={"prompt_id", "history"})`, `domain`, `stop_strings`, `gold_turns`, `tool_schemas` of the
episode for the chat template, and `info["role"]` = "tool" where an observation is a tool's result); for a foreign
environment that does not, `reset(seed=...)` is the prompt and "seed:<number>" its prompt id.
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import gymnasium

ENTRY_POINT_GROUP = "rllib_srl.envs"
SPLITS = ("train", "heldout")
SEED_PREFIX = "seed:"
NAMED = "#"  # stands between a world and the domain that one of its settings is

Creator = Callable[[Mapping[str, Any]], gymnasium.Env]
Registry = Callable[[str], "Creator | None"]


class WorldError(ValueError):
    """A world cannot be made or does not keep the contract; the message says what is wrong and how to mend it."""


def resolve(spec: str | Callable[..., gymnasium.Env], registry: Registry | None = None) -> Creator:
    """Return what makes environments from an env_config.

    Args:
        spec: the name of an entry point, "package.module:Class", a class, or a callable
        registry: says what else a name may stand for (Tune's registry), or None if nothing

    Raises:
        WorldError: if `spec` names nothing that can be called.
    """
    if not isinstance(spec, str):
        if callable(spec):
            return _taking_config(spec, getattr(spec, "__name__", repr(spec)))
        raise WorldError(f"world {spec!r} is a {type(spec).__name__}; expected {_WAYS}")
    spec = spec.partition(NAMED)[0]
    if ":" in spec:
        return _imported(spec)
    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if spec in found:
        return _loaded(found[spec])
    creator = registry(spec) if registry is not None else None
    if creator is None:
        raise WorldError(f"world {spec!r} is unknown; known: {', '.join(known_worlds()) or 'none'}; or give {_WAYS}")
    return creator


def environment_id(world: str, domain: str = "") -> str:
    """Return the id of a world, or with `domain` of that world under one of its settings."""
    return f"{world}{NAMED}{domain}" if domain else world


def named_domain(env_id: str) -> str:
    """Return the domain that an environment id gives, "" where the world itself says it."""
    return env_id.partition(NAMED)[2]


def known_worlds() -> list[str]:
    """Return the names of the installed entry points, sorted."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def check_world(env: Any, name: str) -> None:
    """Check the part of the contract that every world must keep, by resetting it once.

    Raises:
        WorldError: naming everything that is missing.
    """
    faults = []
    if not isinstance(env, gymnasium.Env):
        faults.append(f"it is a {type(env).__name__}; expected a gymnasium.Env")
    for method in ("reset", "step"):
        if not callable(getattr(env, method, None)):
            faults.append(f"it has no method {method}")
    if not faults:
        faults = _faults_of_reset(env)
    if hasattr(env, "prompt_ids") and not _takes_options(env):
        faults.append("it has prompt_ids, but its reset takes no options to be given a prompt_id with")
    stops = getattr(env, "stop_strings", ())
    if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
        faults.append(f"stop_strings = {stops!r}; expected a tuple of non-empty strings")
    if faults:
        raise WorldError(f"world {name!r} cannot be played: " + "; ".join(faults))


def prompts_of(env: gymnasium.Env, split: str, seed: int) -> Iterator[str]:
    """Yield the prompt ids of a split: the world's own (each once), or seeds without end for a world that has none.

    Even seeds train and odd seeds are held out, so that the two never meet.

    Args:
        env: a world
        split: "train" or "heldout"
        seed: of the order
    """
    if split not in SPLITS:
        raise WorldError(f"split = {split!r}; expected one of {', '.join(SPLITS)}")
    plain = env.unwrapped
    if hasattr(plain, "prompt_ids"):
        yield from plain.prompt_ids(split, seed)
        return
    generator = random.Random(f"{split}:{seed}")
    while True:
        yield f"{SEED_PREFIX}{2 * generator.getrandbits(30) + SPLITS.index(split)}"


def seed_of(prompt_id: str) -> int:
    """Return the seed that stands for a prompt of a world without prompt ids, as `prompts_of` names it.

    Raises:
        WorldError: if `prompt_id` is no such name.
    """
    number = prompt_id.removeprefix(SEED_PREFIX)
    if number == prompt_id or not (number.isascii() and number.isdigit()):
        raise WorldError(f"prompt_id = {prompt_id!r}; expected '{SEED_PREFIX}<number>' for a world without prompt_ids")
    return int(number)


_WAYS = '"package.module:Class", a class, a callable, or a name registered with ray.tune.register_env'


def _imported(spec: str) -> Creator:
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise WorldError(f'world {spec!r} is not an import path; expected "package.module:Class"')
    return _loaded(EntryPoint(name=spec, value=spec, group=ENTRY_POINT_GROUP))


def _loaded(point: EntryPoint) -> Creator:
    module_name, _, attribute = point.value.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever a foreign module raises while it is imported
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise WorldError(
            f"world {point.name!r}: module {module_name!r} cannot be imported ({reason}); "
            "expected a module that is installed, or on PYTHONPATH, wherever environments run"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise WorldError(f"world {point.name!r}: module {module_name!r} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise WorldError(f"world {point.name!r} is a {type(found).__name__}; expected a class or a callable")
    return _taking_config(found, point.name)


def _taking_config(make: Callable[..., gymnasium.Env], name: str) -> Creator:
    """Return `make` itself, or what calls it without arguments if it takes none, as many environments do."""
    try:
        inspect.signature(make).bind({})
    except TypeError:
        return partial(_make_plain, make, name)
    except ValueError:  # a builtin tells nothing about its arguments
        return make
    return make


def _make_plain(make: Callable[..., gymnasium.Env], name: str, env_config: Mapping[str, Any]) -> gymnasium.Env:
    if env_config:
        raise WorldError(f"world {name!r} takes no settings; expected an empty env_config, not {dict(env_config)!r}")
    return make()


def _faults_of_reset(env: gymnasium.Env) -> list[str]:
    try:
        result = env.reset(seed=0)
    except Exception as error:  # a foreign environment raises what it likes
        return [f"reset(seed=0) raised {type(error).__name__}: {error}"]
    if not isinstance(result, tuple) or len(result) != 2:
        return [f"reset returned {type(result).__name__}; expected (observation, info)"]
    observation, info = result
    faults = []
    if not isinstance(observation, str):
        faults.append(f"its observation is a {type(observation).__name__}; expected text (str)")
    if not isinstance(info, dict):
        faults.append(f"its info is a {type(info).__name__}; expected a dict")
    return faults


def _takes_options(env: Any) -> bool:
    parameters = inspect.signature(env.unwrapped.reset).parameters.values()
    return any(p.name == "options" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

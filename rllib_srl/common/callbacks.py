"""Callbacks that SRL adds to RLlib's: on an iteration's plan and prompts, after it, after a stage, at the end.

    class Mine(SRLCallback):
        def augment_batch(self, *, algorithm, prompts, now, metrics_logger, **kwargs):
            return [old_prompt]                        played in this iteration, beside `prompts`
    config.callbacks(Mine)

`SRL.training_step` calls them on the driver, in the order of the list passed to `callbacks`. RLlib calls its own
callback methods as usual. Like RLlib's callbacks, the classes are also instantiated in each env runner.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray import cloudpickle
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.callbacks.utils import make_callback

from rllib_srl.common.loading import CONTRIB, PREFIX
from rllib_srl.common.rules import Rules
from rllib_srl.types import GroupMeta, Prompt

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm import Algorithm
    from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

CALLBACKS: Rules[Any] = Rules("callbacks", {})  # classes by name, for settings that are given as text


class SRLCallback(RLlibCallback):
    """RLlib's callbacks and SRL's; by default each does nothing.

    Each gets `algorithm`, `now` (the training iteration), `metrics_logger` (the algorithm's), and `kwargs` for what
    later versions may add.
    """

    def change_plan(
        self, *, algorithm: Algorithm, plan: Any, now: int, metrics_logger: MetricsLogger, **kwargs: Any
    ) -> Any:
        """Return the `curriculum.Plan` of an iteration: `plan`, as earlier callbacks left it, or another.

        `dataclasses.replace(plan, fresh={domain: share})` changes one; `algorithm.source.domain_weights()` are the
        shares without a plan.
        """
        return plan

    def get_state(self) -> dict[str, Any]:
        """Return this callback's state for a checkpoint, as JSON types; {} if it has none."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned, after a checkpoint was loaded; not called without a saved state."""

    def augment_batch(
        self,
        *,
        algorithm: Algorithm,
        prompts: Sequence[Prompt],
        now: int,
        metrics_logger: MetricsLogger,
        **kwargs: Any,
    ) -> Sequence[Prompt]:
        """Return prompts to play besides `prompts`, which are the plan and those of earlier callbacks."""
        return ()

    def post_step(
        self,
        *,
        algorithm: Algorithm,
        groups: Sequence[GroupMeta],
        reused: Sequence[GroupMeta],
        now: int,
        metrics_logger: MetricsLogger,
        **kwargs: Any,
    ) -> None:
        """Run after the weight sync of an iteration that played `groups` and drew `reused` from the memory."""

    def post_domain(
        self, *, algorithm: Algorithm, domain: str, now: int, metrics_logger: MetricsLogger, **kwargs: Any
    ) -> None:
        """Run after the last iteration of a domain's stage; never called for a stream without boundaries."""

    def on_stop(self, *, algorithm: Algorithm, **kwargs: Any) -> None:
        """Run when the algorithm stops, also after a start that failed."""


_UNCHANGED = SRLCallback.change_plan


def hooks(algorithm: Algorithm) -> list[SRLCallback]:
    """Return the callbacks of an algorithm that are `SRLCallback`s."""
    return [callback for callback in listed(algorithm.callbacks) if isinstance(callback, SRLCallback)]


def may_plan(config: Any) -> bool:
    """Return whether a callback of a config changes plans."""
    return any(getattr(one, "change_plan", _UNCHANGED) is not _UNCHANGED for one in listed(config.callbacks_class))


def listed(callbacks: Any) -> Sequence[Any]:
    """Return RLlib's callbacks, or their classes, which are one or several, as a sequence."""
    return callbacks if isinstance(callbacks, list | tuple) else [callbacks]


def call_finished(
    algorithm: Algorithm, groups: Sequence[GroupMeta], reused: Sequence[GroupMeta], ended: Sequence[str], now: int
) -> None:
    """Call `post_step` of all callbacks, and `post_domain` for each domain whose stage ended in this iteration."""
    shared = {"algorithm": algorithm, "now": now, "metrics_logger": algorithm.metrics}
    for callback in hooks(algorithm):
        callback.post_step(groups=groups, reused=reused, **shared)
        for domain in ended:
            callback.post_domain(domain=domain, **shared)


def call_stopped(algorithm: Algorithm) -> None:
    """Call `on_stop` of all callbacks, if they were made."""
    for callback in hooks(algorithm) if hasattr(algorithm, "callbacks") else ():
        callback.on_stop(algorithm=algorithm)


def call_rllibs(algorithm: Algorithm, name: str, **arguments: Any) -> None:
    """Call a method of RLlib's callbacks on the driver, such as "on_evaluate_end"."""
    shared = {"algorithm": algorithm, "metrics_logger": algorithm.metrics}
    of_config = getattr(algorithm.config, f"callbacks_{name}")
    make_callback(name, algorithm.callbacks, of_config, kwargs={**shared, **arguments})


def planned(algorithm: Algorithm, plan: Any, now: int) -> Any:
    """Return the plan of an iteration as callbacks change it; TypeError: a callback returned anything but a plan."""
    for callback in hooks(algorithm):
        changed = callback.change_plan(algorithm=algorithm, plan=plan, now=now, metrics_logger=algorithm.metrics)
        if not isinstance(changed, type(plan)):
            raise TypeError(f"{type(callback).__name__}.change_plan returned {changed!r:.200}; expected a Plan")
        plan = changed
    return plan


def states_of(algorithm: Algorithm) -> dict[str, dict[str, Any]]:
    """Return the states of callbacks that have one, by class name."""
    states = {type(callback).__name__: callback.get_state() for callback in hooks(algorithm)}
    return {name: state for name, state in states.items() if state}


def set_states(algorithm: Algorithm, states: dict[str, dict[str, Any]]) -> None:
    """Restore what `states_of` returned; states of callbacks that this run does not have are left out."""
    for callback in hooks(algorithm):
        if state := states.get(type(callback).__name__):
            callback.set_state(state)


def augmented(algorithm: Algorithm, prompts: Sequence[Prompt], now: int) -> list[Prompt]:
    """Return the planned prompts and those that callbacks add.

    Raises:
        TypeError: a callback returned anything but a list or tuple of prompts.
    """
    together = list(prompts)
    for callback in hooks(algorithm):
        shared = {"algorithm": algorithm, "now": now, "metrics_logger": algorithm.metrics}
        more = callback.augment_batch(prompts=tuple(together), **shared)
        if not isinstance(more, list | tuple) or not all(isinstance(prompt, Prompt) for prompt in more):
            name = type(callback).__name__
            raise TypeError(f"{name}.augment_batch returned {more!r:.200}; expected a list of Prompt, () for none")
        together += more
    return together


def callbacks_of(value: Any) -> Any:
    """Return callbacks with names replaced by classes; RLlib's own form of a class, "module.Class", stays."""
    if isinstance(value, list | tuple):
        return [callbacks_of(part) for part in value]
    is_name = isinstance(value, str) and (":" in value or value.startswith(CONTRIB) or "." not in value)
    return _callback(value) if is_name else value


def _callback(name: str) -> type[RLlibCallback]:
    callback = CALLBACKS.named(name)
    if not isinstance(callback, type) or not issubclass(callback, RLlibCallback):
        raise ValueError(f"callbacks = {name!r}; expected a subclass of RLlibCallback, got {callback!r}")
    if callback.__module__.startswith(PREFIX):  # a file that other processes cannot import by its name
        cloudpickle.register_pickle_by_value(sys.modules[callback.__module__])
    return callback

"""Hooks of an iteration, beside RLlib's own: what to play on top, after an iteration, after a stage of a stream.

    class Mine(SRLCallback):
        def augment_batch(self, *, algorithm, prompts, now, metrics_logger, **kwargs):
            return [old_prompt]                        played in this iteration, beside `prompts`
    config.callbacks(Mine)

`SRL.training_step` calls them on the driver, in the order of the list that `callbacks` got; RLlib calls its own methods
as ever. The classes are also made in each env runner, as RLlib's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray.rllib.callbacks.callbacks import RLlibCallback

from rllib_srl.types import GroupMeta, Prompt

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm import Algorithm
    from ray.rllib.utils.metrics.metrics_logger import MetricsLogger


class SRLCallback(RLlibCallback):
    """RLlib's callbacks and three more, which do nothing unless a subclass says so."""

    def augment_batch(
        self,
        *,
        algorithm: Algorithm,
        prompts: Sequence[Prompt],
        now: int,
        metrics_logger: MetricsLogger,
        **kwargs: Any,
    ) -> Sequence[Prompt]:
        """Return prompts to be played on top of those of the plan.

        Args:
            algorithm: that trains.
            prompts: of the plan, revisits first, and what earlier callbacks added.
            now: the training iteration.
            metrics_logger: of the algorithm.
            kwargs: for what later versions hand over.
        """
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
        """Run after the weights of an iteration were learned and brought to the engines.

        Args:
            algorithm: that trains.
            groups: that were played.
            reused: that were drawn from the memory to be trained on again.
            now: the training iteration.
            metrics_logger: of the algorithm.
            kwargs: for what later versions hand over.
        """

    def post_domain(
        self, *, algorithm: Algorithm, domain: str, now: int, metrics_logger: MetricsLogger, **kwargs: Any
    ) -> None:
        """Run after the last iteration of a domain's stage of a stream; never for a stream without boundaries.

        Args:
            algorithm: that trains.
            domain: whose stage ended.
            now: the training iteration.
            metrics_logger: of the algorithm.
            kwargs: for what later versions hand over.
        """


def hooks(algorithm: Algorithm) -> list[SRLCallback]:
    """Return the callbacks of an algorithm that have our methods."""
    callbacks = algorithm.callbacks
    listed = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    return [callback for callback in listed if isinstance(callback, SRLCallback)]


def augmented(algorithm: Algorithm, prompts: Sequence[Prompt], now: int) -> list[Prompt]:
    """Return the prompts of the plan and what callbacks add to them."""
    together = list(prompts)
    for callback in hooks(algorithm):
        more = callback.augment_batch(
            algorithm=algorithm, prompts=tuple(together), now=now, metrics_logger=algorithm.metrics
        )
        if not isinstance(more, list | tuple) or not all(isinstance(one, Prompt) for one in more):
            name = type(callback).__name__
            raise TypeError(f"{name}.augment_batch returned {more!r:.200}; expected a list of Prompt, () for none")
        together += more
    return together

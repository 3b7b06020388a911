"""The learner's side of the verified weight transfer: pack, score, and perturb for the self-test.

    learner 0: send(version, canary) -> (ObjectRef of a WeightBundle, canary log-probs)
    driver:    hands the reference to every runner and compares canaries (weight_sync.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch

from rllib_srl.engine.canary import perturbed
from rllib_srl.engine.sync import WeightBundle, pack

SELF_TEST_SEED = 7
Sent = tuple[Any, list[np.ndarray]]  # (ObjectRef of a WeightBundle, canary log-probs)


class WeightSender:
    """Mixin of the learner that sends its weights.

    Invariant: the weights in training are the same, bit for bit, before and after every method.
    """

    model: torch.nn.Module
    config: Any

    def score(
        self, sequences: list[list[int]], share_prefixes: bool = False, is_exact: bool = False
    ) -> list[np.ndarray]:
        """See `GRPOTorchLearner.score`."""
        raise NotImplementedError

    def send(self, version: int, sequences: list[list[int]], scale: float = 0.0) -> Sent:
        """Put the weights into the object store, cast to the engine's number format.

        Args:
            version: the number the engine will carry.
            sequences: the canary's token ids.
            scale: 0 sends the weights themselves; above 0 the self-test's perturbed ones.

        Returns:
            A reference to the `WeightBundle`, and the canary log-probs under the weights in it.
        """
        with _moved(self.model, scale):
            return ray.put(self._pack(version)), self.score(sequences)

    def _pack(self, version: int) -> WeightBundle:
        return pack(self.model.named_parameters(), version, self.config.compute_dtype)


@contextmanager
def _moved(model: torch.nn.Module, scale: float) -> Iterator[None]:
    """Perturb every parameter inside the block, and put the exact old values back after it."""
    if not scale:
        yield
        return
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        with torch.no_grad():
            for name, tensor in perturbed(kept.items(), scale, SELF_TEST_SEED):
                model.get_parameter(name).copy_(tensor)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in kept.items():
                model.get_parameter(name).copy_(tensor)

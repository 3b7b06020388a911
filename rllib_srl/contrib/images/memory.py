"""Memories of the arms: none, the newest images, a reservoir, or the schedule of `SRLReplayBuffer`.

    indices = memory.draw(num, now)        stored images to train on beside the new ones
    memory.see(fresh, replayed, now)       after the draw, before the step on both

Mapping of an image to an item of the buffer, which is made for prompts and groups:

    prompt   the image's index; domain: its stage          group    one episode per view: [index, predicted class]
    reward   1 if the view's class is right                logp     log-prob of the predicted class
    visit    classify the image, then train on it          vectors  features of the views, through `embed`

`due` draws the images to replay, and `add` grades them by the share of views classified correctly before the training.

Sources of the reservoir: Vitter 1985, ACM TOMS 11(1); drawn by random keys: Efraimidis and Spirakis 2006, IPL 97(5);
as replay: Chaudhry et al. 2019, arXiv 1902.10486.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from rllib_srl.contrib.images.model import Recalled
from rllib_srl.replay import SRLReplayBuffer
from rllib_srl.replay.selection.candidates import Candidates, SelectionSettings
from rllib_srl.replay.selection.eviction import EVICTIONS
from rllib_srl.types import Group, Prompt, StopReason

Look = Callable[[np.ndarray], Recalled]  # indices -> the classifier's current predictions for these images


class Memory(Protocol):
    """Holds indices of images. Invariant: at most its capacity, and a draw has no image twice."""

    def draw(self, num: int, now: int) -> np.ndarray:
        """Return `num` stored images to train on at update `now`, or all if there are fewer."""

    def see(self, fresh: np.ndarray, replayed: np.ndarray, now: int) -> None:
        """Store new images, and update the schedule of the replayed ones."""

    def stored(self) -> np.ndarray:
        """Return the indices of the stored images."""

    def measures(self, now: int) -> dict[str, float]:
        """Return the memory's own metrics by name."""

    def close(self) -> None:
        """Release resources."""


class NoMemory:
    """Replays nothing."""

    def draw(self, num: int, now: int) -> np.ndarray:
        """Return nothing."""
        return np.empty(0, np.int64)

    def see(self, fresh: np.ndarray, replayed: np.ndarray, now: int) -> None:
        """Do nothing."""

    def stored(self) -> np.ndarray:
        """Return nothing."""
        return np.empty(0, np.int64)

    def measures(self, now: int) -> dict[str, float]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class Recent(NoMemory):
    """Control that replays the newest images only: as many images as the replaying arms, but none from old stages."""

    def __init__(self, capacity: int, seed: int) -> None:
        """Create a memory for the newest `capacity` images."""
        self._capacity, self._generator = capacity, np.random.default_rng(seed)
        self._held = np.empty(0, np.int64)

    def draw(self, num: int, now: int) -> np.ndarray:
        """Draw uniformly from the newest images."""
        return self._generator.choice(self._held, min(num, len(self._held)), replace=False)

    def see(self, fresh: np.ndarray, replayed: np.ndarray, now: int) -> None:
        """Store new images and remove the oldest."""
        self._held = np.concatenate([self._held, fresh])[-self._capacity :]

    def stored(self) -> np.ndarray:
        """Return the newest images."""
        return self._held


class Reservoir(NoMemory):
    """Reservoir sampling: holds a uniform sample of all images seen, and replays uniformly from it.

    Invariant: holds the same images as a `Scheduled` memory with reservoir eviction and the same seed, so the two
    differ only in their draws.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        """Create a memory for `capacity` images with the random keys of `seed`."""
        self._capacity, self._generator = capacity, np.random.default_rng(seed)
        self._lottery = SelectionSettings(reservoir_seed=seed)
        self._held, self._seq = np.empty(0, np.int64), np.empty(0, np.int64)
        self._num_seen = 0

    def draw(self, num: int, now: int) -> np.ndarray:
        """Draw uniformly from the sample."""
        return self._generator.choice(self._held, min(num, len(self._held)), replace=False)

    def see(self, fresh: np.ndarray, replayed: np.ndarray, now: int) -> None:
        """Store new images, and evict those with the lowest random keys."""
        self._held = np.concatenate([self._held, fresh])
        self._seq = np.concatenate([self._seq, self._num_seen + np.arange(len(fresh))])
        self._num_seen += len(fresh)
        candidates, surplus = Candidates.of(len(self._seq), seq=self._seq), max(0, len(self._seq) - self._capacity)
        gone = EVICTIONS["reservoir"](candidates, surplus, self._generator, self._lottery)
        self._held, self._seq = np.delete(self._held, gone), np.delete(self._seq, gone)

    def stored(self) -> np.ndarray:
        """Return the sample."""
        return self._held


class Scheduled:
    """`SRLReplayBuffer` with one item per image: replayed when due, graded by its recall."""

    def __init__(
        self, capacity: int, seed: int, look: Look, label_N: np.ndarray, domains: Sequence[str], **settings: Any
    ) -> None:
        """Open an in-memory buffer.

        Args:
            capacity: number of images.
            seed: seed of all draws and of the reservoir eviction.
            look: returns the classifier's current predictions.
            label_N: labels of all training images.
            domains: name of the stage of each class.
            settings: fields of `ReplaySettings`.
        """
        self._look, self._label_N, self._domains = look, label_N, domains
        # One reservoir seed per run; otherwise the runs of all seeds would evict by the same random keys.
        lottery = {**settings.pop("selection_config", {}), "reservoir_seed": seed}
        self._buffer = SRLReplayBuffer(seed=seed, capacity=capacity, selection_config=lottery, **settings)
        self._num_visits = 0

    def draw(self, num: int, now: int) -> np.ndarray:
        """Draw images that are due, filled up with those due next."""
        return np.array([int(prompt.prompt_id) for prompt in self._buffer.due(num, now)], np.int64)

    def see(self, fresh: np.ndarray, replayed: np.ndarray, now: int) -> None:
        """Grade the replayed images, store the new ones, and pass the features to the buffer.

        Raises:
            ValueError: the buffer refused a new image, so the memory would hold fewer images than the other arms.
        """
        indices = np.concatenate([replayed, fresh])
        recalled = self._look(indices)
        groups = [self._group(int(index), recalled, at, now) for at, index in enumerate(indices)]
        visits = self._buffer.add(groups, now)
        if refused := [visit.refused for visit in visits[len(replayed) :] if visit.refused]:
            raise ValueError(f"step {now}: {len(refused)} new images were refused: {', '.join(sorted(set(refused)))}")
        keys = [group.prompt.key for group in groups]
        self._buffer.embed(dict(zip(keys, recalled.features_PGD, strict=True)), now)

    def stored(self) -> np.ndarray:
        """Return the images that are items of the buffer."""
        store = self._buffer.store
        return np.array([int(store.prompt_of(int(slot)).prompt_id) for slot in store.slots()], np.int64)

    def measures(self, now: int) -> dict[str, float]:
        """Return the median number of reviews, the load ratio, and the calibration of recall."""
        stats = self._buffer.stats(now)
        named = {"median_reviews": "reviews_median", "load_ratio": "load_ratio", **{name: name for name in CALIBRATION}}
        return {name: float(stats[of]) for name, of in named.items() if np.isfinite(stats[of])}

    def close(self) -> None:
        """Close the buffer."""
        self._buffer.close()

    def _group(self, index: int, recalled: Recalled, at: int, now: int) -> Group:
        label = int(self._label_N[index])
        predicted_G, logp_G = recalled.predicted_PG[at], np.minimum(recalled.logp_PG[at], 0)
        size = len(predicted_G)
        return Group(
            group_id=f"{now}.{at}",
            prompt=Prompt("images", str(index), domain=self._domains[label]),
            token_ids_N=np.stack([np.full(size, index), predicted_G], axis=1).ravel().astype(np.int32),
            loss_mask_N=np.tile([False, True], size),
            behaviour_logp_N=np.stack([np.zeros(size), logp_G], axis=1).ravel().astype(np.float32),
            offsets=2 * np.arange(size + 1),
            rewards_G=(predicted_G == label).astype(np.float32),
            versions_G2=np.full((size, 2), now - 1),
            stop_reasons=(StopReason.TERMINATED,) * size,
        )


CALIBRATION = ("predicted_recall_mean", "observed_recall_mean", "recall_log_loss", "recall_constant_log_loss")

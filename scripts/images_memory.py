"""What an arm replays: nothing, today's images once more, a reservoir, or the schedule of `SRLReplayBuffer`.

    indices = memory.draw(num, now)        stored images to train on beside the new ones
    memory.see(fresh, replayed, now)       after the draw, before the step on both

How an image becomes an item of the buffer, which was made for prompts and groups:

    prompt   the image's index, its stage as domain        group    one episode a view: [index, predicted class]
    reward   1 where the view's class is right             log-prob of the prediction
    visit    the image is looked at, then trained on       vectors  features of the views, through `embed`

So `due` draws what is replayed, and `add` grades it by the share of views that were recognised before training on it.

Sources of the reservoir: Vitter 1985, ACM TOMS 11(1); drawn by random keys: Efraimidis and Spirakis 2006, IPL 97(5);
as replay: Chaudhry et al. 2019, arXiv 1902.10486.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from rllib_srl.replay import SRLReplayBuffer
from rllib_srl.replay.candidates import Candidates, SelectionSettings
from rllib_srl.replay.eviction import EVICTIONS
from rllib_srl.types import Group, Prompt, StopReason
from scripts.images_model import Recalled

Look = Callable[[np.ndarray], Recalled]  # indices -> what the classifier says of these images now


class Memory(Protocol):
    """Holds indices of images. Invariant: never more than its capacity, and a draw has no image twice."""

    def draw(self, num: int, now: int) -> np.ndarray:
        """Return what to train on beside new images at update `now`: `num` of those stored, all if there are fewer."""

    def see(self, fresh: np.ndarray, replayed: np.ndarray, now: int) -> None:
        """Take new images in, and learn what replaying the others showed."""

    def stored(self) -> np.ndarray:
        """Return the indices of the images that are held."""

    def measures(self, now: int) -> dict[str, float]:
        """Return what the memory says of itself, by name."""

    def close(self) -> None:
        """Let go of what it holds."""


class NoMemory:
    """Replays nothing."""

    def draw(self, num: int, now: int) -> np.ndarray:
        """Return nothing."""
        return np.empty(0, np.int64)

    def see(self, fresh: np.ndarray, replayed: np.ndarray, now: int) -> None:
        """Forget them."""

    def stored(self) -> np.ndarray:
        """Return nothing."""
        return np.empty(0, np.int64)

    def measures(self, now: int) -> dict[str, float]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class Recent(NoMemory):
    """Trains once more on the newest images: as many images as replay trains on, none of them old."""

    def __init__(self, capacity: int, seed: int) -> None:
        """Hold `capacity` images."""
        self._capacity, self._generator = capacity, np.random.default_rng(seed)
        self._held = np.empty(0, np.int64)

    def draw(self, num: int, now: int) -> np.ndarray:
        """Return images of the last steps, uniformly."""
        return self._generator.choice(self._held, min(num, len(self._held)), replace=False)

    def see(self, fresh: np.ndarray, replayed: np.ndarray, now: int) -> None:
        """Push the oldest out."""
        self._held = np.concatenate([self._held, fresh])[-self._capacity :]

    def stored(self) -> np.ndarray:
        """Return the newest images."""
        return self._held


class Reservoir(NoMemory):
    """Holds a uniform sample of everything seen, and replays uniformly from it.

    Invariant: holds what a `Scheduled` memory holds that evicts by the same lottery, so the two differ in draws alone.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        """Hold `capacity` images, by the lottery of this seed."""
        self._capacity, self._generator = capacity, np.random.default_rng(seed)
        self._lottery = SelectionSettings(reservoir_seed=seed)
        self._held, self._seq = np.empty(0, np.int64), np.empty(0, np.int64)
        self._num_seen = 0

    def draw(self, num: int, now: int) -> np.ndarray:
        """Return images of the sample, uniformly."""
        return self._generator.choice(self._held, min(num, len(self._held)), replace=False)

    def see(self, fresh: np.ndarray, replayed: np.ndarray, now: int) -> None:
        """Take new images in, and let those go that have the lowest lottery numbers."""
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
    """The package's buffer: each image an item, replayed when it is due, graded by how well it was recalled."""

    def __init__(
        self, capacity: int, seed: int, look: Look, label_N: np.ndarray, domains: Sequence[str], **settings: Any
    ) -> None:
        """Open a buffer that need not last.

        Args:
            capacity: images.
            seed: of all draws, and of the lottery by which images leave.
            look: asks the classifier.
            label_N: of all training images.
            domains: name of each class's stage.
            settings: fields of `ReplaySettings`.
        """
        self._look, self._label_N, self._domains = look, label_N, domains
        # Its own for each seed, or all seeds would share the luck of one lottery.
        lottery = {**settings.pop("selection_config", {}), "reservoir_seed": seed}
        self._buffer = SRLReplayBuffer(seed=seed, capacity=capacity, selection_config=lottery, **settings)
        self._num_visits = 0

    def draw(self, num: int, now: int) -> np.ndarray:
        """Return images that are due, and those next due where these do not fill."""
        return np.array([int(prompt.prompt_id) for prompt in self._buffer.due(num, now)], np.int64)

    def see(self, fresh: np.ndarray, replayed: np.ndarray, now: int) -> None:
        """Grade what was replayed, take in what is new, and pass the features on.

        Raises:
            ValueError: the buffer refused an image, so that capacity and counts are not what the arm says.
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
        """Return the images that are items."""
        store = self._buffer.store
        return np.array([int(store.prompt_of(int(slot)).prompt_id) for slot in store.slots()], np.int64)

    def measures(self, now: int) -> dict[str, float]:
        """Return reviews of the median item, load, and predicted beside observed recall."""
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

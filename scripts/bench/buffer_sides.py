"""The sides of the draw benchmark: this package's buffer, RLlib's prioritised one, and cpprb's.

    side = Side(groups);  side.copy(side.take(num), batch)      num groups, in one contiguous batch

Every side stores the same groups, draws by its own priorities, and copies into the same memory: token ids, loss mask,
log-probs, rewards. `InActor` runs any side in another process and returns its draws as in a training run: our groups
as object references, which learners fetch; the others' as the return value of the call.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rllib_srl.types import Group, Prompt, StopReason

# Every stored group can be drawn, and again and again; no vectors, which a draw does not read.
SETTINGS: dict[str, Any] = {"max_uses": 1 << 30, "max_age": 1 << 30, "on_secret": "keep", "embedding": "policy"}


@dataclass(frozen=True)
class Batch:
    """A contiguous training batch of `B` episodes of `T` tokens."""

    ids_BT: np.ndarray
    mask_BT: np.ndarray
    logp_BT: np.ndarray
    rewards_B: np.ndarray

    @classmethod
    def of(cls, num_episodes: int, num_tokens: int) -> Batch:
        """Return one of zeros, written once so that its memory is allocated."""
        shape = (num_episodes, num_tokens)
        logp_BT, rewards_B = np.zeros(shape, np.float32), np.zeros(num_episodes, np.float32)
        batch = cls(np.zeros(shape, np.int32), np.zeros(shape, bool), logp_BT, rewards_B)
        for array in vars(batch).values():
            array.fill(0)
        return batch


def made_group(number: int, num_episodes: int, num_tokens: int, generator: np.random.Generator, born: int = 1) -> Group:
    """Return a group of random tokens, the first third of each episode the prompt, half of the rewards 1."""
    total = num_episodes * num_tokens
    mask_N = np.arange(total) % num_tokens >= max(1, num_tokens // 3)
    return Group(
        group_id=f"{born}.{number}",
        prompt=Prompt("bench", str(number), "bench"),
        token_ids_N=generator.integers(0, 50_000, total).astype(np.int32),
        loss_mask_N=mask_N,
        behaviour_logp_N=np.where(mask_N, -generator.random(total), 0).astype(np.float32),
        offsets=np.arange(num_episodes + 1) * num_tokens,
        rewards_G=(np.arange(num_episodes) % 2).astype(np.float32),
        versions_G2=np.full((num_episodes, 2), born),
        stop_reasons=(StopReason.TERMINATED,) * num_episodes,
    )


class Side(Protocol):
    """A buffer filled with groups."""

    def take(self, num: int) -> Any:
        """Draw as many episodes as `num` groups have, in the buffer's own format."""

    def copy(self, taken: Any, batch: Batch) -> int:
        """Copy the drawn episodes into `batch`; return their number of tokens."""

    def close(self) -> None:
        """Release all resources."""


class Ours:
    """`SRLReplayBuffer`, with a journal on disk: a draw is durable before it is answered."""

    def __init__(self, groups: Sequence[Group], directory: str) -> None:
        """Store `groups` in a journal below `directory`."""
        from rllib_srl.replay.buffer import SRLReplayBuffer

        self._now = 1
        self._scratch = tempfile.TemporaryDirectory(dir=directory, prefix=".bench_buffer_")
        self._buffer = SRLReplayBuffer(directory=self._scratch.name, **SETTINGS)
        for start in range(0, len(groups), 64):
            self._buffer.add(groups[start : start + 64], self._now)

    def take(self, num: int) -> list[Group]:
        """See `Side.take`: groups, in an iteration of its own."""
        self._now += 1
        return self._buffer.sample(num, self._now, f"{self._now}.sample")

    @staticmethod
    def copy(taken: list[Group], batch: Batch) -> int:
        """See `Side.copy`."""
        for name, column in (("token_ids_N", batch.ids_BT), ("loss_mask_N", batch.mask_BT)):
            _laid_end_to_end([getattr(group, name) for group in taken], column)
        _laid_end_to_end([group.behaviour_logp_N for group in taken], batch.logp_BT)
        _laid_end_to_end([group.rewards_G for group in taken], batch.rewards_B)
        return sum(len(group.token_ids_N) for group in taken)

    def close(self) -> None:
        """See `Side.close`."""
        self._buffer.close()
        self._scratch.cleanup()


def _laid_end_to_end(arrays: Sequence[np.ndarray], column: np.ndarray) -> None:
    np.concatenate(arrays, out=column.reshape(-1)[: sum(map(len, arrays))])


class OursInActor(Ours):
    """`ReplayBufferActor` in a process of its own; groups are passed by reference, as to the learners."""

    def __init__(self, groups: Sequence[Group], directory: str) -> None:
        """Store `groups` in a journal below `directory`."""
        import ray

        from rllib_srl.replay.actor import ReplayBufferActor
        from rllib_srl.replay.settings import ReplaySettings

        self._now = 1
        self._scratch = tempfile.TemporaryDirectory(dir=directory, prefix=".bench_buffer_")
        actor = ray.remote(ReplayBufferActor).options(num_cpus=0)
        self._actor = actor.remote(ReplaySettings(**SETTINGS), directory=self._scratch.name)
        for start in range(0, len(groups), 64):
            ray.get(self._actor.add.remote(groups[start : start + 64], self._now))

    def take(self, num: int) -> list[Group]:
        """See `Side.take`."""
        import ray

        self._now += 1
        metas, groups = self._actor.sample_apart.remote(num, self._now, f"{self._now}.sample")
        drawn: list[Group] = ray.get([metas, groups])[1]
        return drawn

    def close(self) -> None:
        """See `Side.close`."""
        import ray

        ray.get(self._actor.close.remote())
        ray.kill(self._actor)
        self._scratch.cleanup()


class RLlibTurns:
    """RLlib's prioritised buffer with one step per turn: a whole episode is one row, as our runners write them.

    It draws rows, not groups: as many as the groups would have.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        """Store `groups`."""
        from ray.rllib.utils.replay_buffers import PrioritizedEpisodeReplayBuffer

        episodes = [episode for group in groups for episode in self._episodes(group)]
        num_steps = sum(len(episode) for episode in episodes)
        self._buffer = PrioritizedEpisodeReplayBuffer(capacity=num_steps)
        self._buffer.add(episodes)
        self._steps = num_steps // len(groups)

    def take(self, num: int) -> list[Any]:
        """See `Side.take`."""
        steps: list[Any] = self._buffer.sample(num_items=num * self._steps, include_extra_model_outputs=True)
        return steps

    @staticmethod
    def copy(taken: list[Any], batch: Batch) -> int:
        """See `Side.copy`."""
        num_tokens = 0
        for row, episode in enumerate(taken):
            asked, written = episode.get_observations(0), episode.get_actions(0)
            cut, end = len(asked), len(asked) + len(written)
            batch.ids_BT[row, :cut], batch.ids_BT[row, cut:end] = asked, written
            batch.mask_BT[row, :cut], batch.mask_BT[row, cut:end] = False, True
            batch.logp_BT[row, :cut] = 0
            batch.logp_BT[row, cut:end] = episode.get_extra_model_outputs("action_logp", 0)
            batch.rewards_B[row] = episode.get_rewards(0)
            num_tokens += end
        return num_tokens

    def close(self) -> None:
        """See `Side.close`."""

    @staticmethod
    def _episodes(group: Group) -> list[Any]:
        from ray.rllib.env.single_agent_episode import SingleAgentEpisode

        episodes = []
        for g in range(group.size):
            span = slice(group.offsets[g], group.offsets[g + 1])
            ids_T, mask_T = group.token_ids_N[span], group.loss_mask_N[span]
            episodes.append(
                SingleAgentEpisode(
                    observations=[ids_T[~mask_T], ids_T[:0]],
                    actions=[ids_T[mask_T]],
                    rewards=[float(group.rewards_G[g])],
                    terminated=True,
                    extra_model_outputs={"action_logp": [group.behaviour_logp_N[span][mask_T]]},
                    len_lookback_buffer=0,
                )
            )
        return episodes


class RLlibTokens(RLlibTurns):
    """RLlib's prioritised buffer with one step per token, the unit in which it counts its capacity and draws."""

    LEAST, MOST = 1, 2048  # groups stored, steps drawn at once: its rate is the same for more

    def __init__(self, groups: Sequence[Group]) -> None:
        """Store some of `groups`."""
        super().__init__(groups[: self.LEAST])

    def take(self, num: int) -> list[Any]:
        """See `Side.take`: at most `MOST` of the steps."""
        num_items = min(num * self._steps, self.MOST)
        steps: list[Any] = self._buffer.sample(num_items=num_items, include_extra_model_outputs=True)
        return steps

    @staticmethod
    def copy(taken: list[Any], batch: Batch) -> int:
        """See `Side.copy`."""
        num = len(taken)
        columns = {name: getattr(batch, name).reshape(-1) for name in ("ids_BT", "mask_BT", "logp_BT")}
        columns["ids_BT"][:num] = [episode.get_observations(0) for episode in taken]
        for column, name in (("mask_BT", "loss_mask"), ("logp_BT", "action_logp")):
            columns[column][:num] = [episode.get_extra_model_outputs(name, 0) for episode in taken]
        batch.rewards_B[0] = sum(episode.get_rewards(0) for episode in taken)
        return num

    @staticmethod
    def _episodes(group: Group) -> list[Any]:
        from ray.rllib.env.single_agent_episode import SingleAgentEpisode

        episodes = []
        for g in range(group.size):
            span = slice(group.offsets[g], group.offsets[g + 1])
            ids = group.token_ids_N[span].tolist()
            columns = {"action_logp": group.behaviour_logp_N, "loss_mask": group.loss_mask_N}
            extra = {name: column[span].tolist() for name, column in columns.items()}
            rewards = [0.0] * (len(ids) - 1) + [float(group.rewards_G[g])]
            episodes.append(
                SingleAgentEpisode(
                    observations=[*ids, 0],
                    actions=ids,
                    rewards=rewards,
                    terminated=True,
                    extra_model_outputs=extra,
                    len_lookback_buffer=0,
                )
            )
        return episodes


class Cpprb:
    """cpprb's `PrioritizedReplayBuffer`, a whole episode in each row, all rows as long as the longest.

    It draws rows, not groups: as many as the groups would have. Nothing of it outlives its process.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        """Store `groups`.

        Raises:
            ImportError: cpprb is not installed.
        """
        from cpprb import PrioritizedReplayBuffer

        self._size, num_tokens = groups[0].size, int(max(group.lengths_G().max() for group in groups))
        columns = {
            "ids": {"shape": num_tokens, "dtype": np.int32},
            "mask": {"shape": num_tokens, "dtype": np.bool_},
            "logp": {"shape": num_tokens, "dtype": np.float32},
            "reward": {"dtype": np.float32},
        }
        self._buffer = PrioritizedReplayBuffer(len(groups) * self._size, columns)
        shape = (self._size, num_tokens)
        for group in groups:
            arrays = {"ids": group.token_ids_N, "mask": group.loss_mask_N, "logp": group.behaviour_logp_N}
            rows = {name: array.reshape(shape) for name, array in arrays.items()}
            self._buffer.add(reward=group.rewards_G, **rows)

    def take(self, num: int) -> dict[str, np.ndarray]:
        """See `Side.take`."""
        rows: dict[str, np.ndarray] = self._buffer.sample(num * self._size)
        return rows

    @staticmethod
    def copy(taken: dict[str, np.ndarray], batch: Batch) -> int:
        """See `Side.copy`."""
        num = len(taken["ids"])
        batch.ids_BT[:num], batch.mask_BT[:num] = taken["ids"], taken["mask"]
        batch.logp_BT[:num], batch.rewards_B[:num] = taken["logp"], taken["reward"][:, 0]
        return taken["ids"].size

    def close(self) -> None:
        """See `Side.close`."""


class InActor:
    """Another side in a process of its own; its draws are the return value of the call."""

    def __init__(self, kind: Any, groups: Sequence[Group]) -> None:
        """Fill a `kind` with `groups` in the other process."""
        import ray

        self._copy: Callable[[Any, Batch], int] = kind.copy
        self._actor = ray.remote(kind).options(num_cpus=0).remote(groups)

    def take(self, num: int) -> Any:
        """See `Side.take`."""
        import ray

        return ray.get(self._actor.take.remote(num))

    def copy(self, taken: Any, batch: Batch) -> int:
        """See `Side.copy`."""
        return self._copy(taken, batch)

    def close(self) -> None:
        """See `Side.close`."""
        import ray

        ray.kill(self._actor)

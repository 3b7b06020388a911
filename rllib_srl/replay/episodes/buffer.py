"""RLlib's replay buffer for episodes, scheduled by this package's rules: `SRLEpisodeReplayBuffer`.

    DQNConfig().training(replay_buffer_config={"type": "rllib_srl.replay.SRLEpisodeReplayBuffer", "capacity": 50_000})

    env runner ──episodes──> add ──segments──> sample ──one-step episodes──> learner ──TD errors──> update_priorities
                              └ evicts by a rule  └ draws by a rule                       grades the drawn segments ┘

It is a `PrioritizedEpisodeReplayBuffer` because RLlib sends TD errors to that class only. Its episodes, n-step rewards
and metrics are those of the parent, whose segment trees it does not use. Differences:

1. An item is a segment of at most `segment_length` steps. A draw takes a segment by the rule, and one of its steps
   uniformly; the steps of shorter segments, at the end of episodes, are drawn somewhat more often.
2. A full buffer evicts segments by the eviction rule, and not whole episodes by age.
3. `weights` are 1 unless the rule has importance weights ("per", "fresh_per"), whose exponent belongs to the rule.
4. A pair of n-steps is a closed interval, as `DQNConfig` says; the parent leaves out the larger number.
5. What cannot be done is an error: sequences (`batch_length_T` above 1) and several agents.

RLlib 2.60 does not write buffers into checkpoints on its new API stack: save `get_state` yourself.

Source: Schaul et al. 2016, arXiv 1511.05952 (the interface: TD errors as priorities).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from ray.rllib.core import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer
from ray.rllib.utils.serialization import gym_space_from_dict, gym_space_to_dict

from rllib_srl.common.setting_checks import is_integer
from rllib_srl.replay.episodes.ledger import EpisodeLedger
from rllib_srl.replay.episodes.schedule import SegmentSchedule
from rllib_srl.replay.episodes.segments import Segment, Segments, Step, Window, discounted_sum
from rllib_srl.replay.episodes.settings import NAMES, faults_of, schedule_settings, unknown_names
from rllib_srl.replay.episodes.vectors import SegmentVectors

_GRADES = ("num_visits", "num_silent", "num_lapses")


class SRLEpisodeReplayBuffer(PrioritizedEpisodeReplayBuffer):
    """Replay buffer of episode segments with a schedule.

    Invariant: every stored step belongs to one segment; at most `capacity` steps are stored.
    """

    def __init__(
        self,
        capacity: int = 10_000,
        *,
        batch_size_B: int = 16,
        batch_length_T: int = 1,
        segment_length: int = 8,
        grade_by: str = "td_error",
        seed: int | None = None,
        metrics_num_episodes_for_smoothing: int = 100,
        **settings: Any,
    ) -> None:
        """Create an empty buffer.

        Args:
            capacity: steps.
            batch_size_B: rows of a batch if `sample` gives no number.
            batch_length_T: 0 or 1; transitions are drawn, not sequences.
            segment_length: most steps of a segment, which is graded and evicted as a whole.
            grade_by: "td_error" or "return"; see `schedule.py`.
            seed: of all draws; None: a random one.
            metrics_num_episodes_for_smoothing: window of the parent's metrics.
            settings: of the schedule, named as in `ReplaySettings`; see `settings.py` for those and their defaults.

        Raises:
            ValueError: settings out of range, all at once; or faiss, which measures diversity, is not installed.
        """
        sizes = {"capacity": capacity, "batch_size_B": batch_size_B, "segment_length": segment_length}
        faults = [f"{k} = {v!r}; expected an integer of at least 1" for k, v in sizes.items() if not is_integer(v, 1)]
        if not faults and capacity < batch_size_B:
            faults.append(f"capacity = {capacity}; expected at least batch_size_B = {batch_size_B}")
        if batch_length_T not in (0, 1):
            faults.append(_not_sequences("batch_length_T", batch_length_T))
        if seed is not None and not is_integer(seed, 0):
            faults.append(f"seed = {seed!r}; expected an integer of at least 0, or None")
        own = ("capacity", "batch_size_B", "batch_length_T", "segment_length", "grade_by", "seed")
        faults += unknown_names(settings, (*own, *NAMES)) + faults_of(capacity, settings, grade_by)
        if faults:
            raise ValueError("SRLEpisodeReplayBuffer has faults:\n  " + "\n  ".join(faults))
        # The parent's constructor would allocate segment trees, which are not used.
        EpisodeReplayBuffer.__init__(
            self,
            capacity,
            batch_size_B=batch_size_B,
            batch_length_T=batch_length_T,
            metrics_num_episodes_for_smoothing=metrics_num_episodes_for_smoothing,
        )
        seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self.rng = np.random.default_rng([seed, sum(b"step")])  # of the step in a segment, and of n
        self._schedule = SegmentSchedule(schedule_settings(capacity, settings), grade_by, seed)
        self._segments = Segments(segment_length)
        self._ledger = EpisodeLedger()
        self._vectors = SegmentVectors(seed)
        self._spaces: dict[str, gymnasium.Space[Any] | None] = {"observation": None, "action": None}
        self._now = 0  # draws so far
        self._drawn: list[int] | None = None  # slots of the last sample, until its TD errors arrive

    # --- add ---------------------------------------------------------------------------------------

    def add(
        self, episodes: SingleAgentEpisode | Sequence[SingleAgentEpisode], weight: float | None = None
    ) -> None:
        """Add episodes, or the next chunks of episodes that are not finished.

        Args:
            episodes: copied.
            weight: None; the priority of a new segment is that of a new item.

        Raises:
            ValueError: a weight, an episode of several agents, or a chunk that does not continue what is stored.
        """
        if weight is not None:
            raise ValueError(f"weight = {weight!r}; expected None: a new segment has the priority of a new item")
        chunks = list(episodes) if isinstance(episodes, Sequence) else [episodes]
        for chunk in chunks:
            if not isinstance(chunk, SingleAgentEpisode):
                raise ValueError(f"episode of type {type(chunk).__name__}; expected SingleAgentEpisode")
        counts, full = Counter[str](), set[int]()
        for chunk in chunks:
            full |= self._add_chunk(chunk, counts)
        if self._schedule.is_measured:
            kept = {slot: self._segments.at[slot] for slot in sorted(full) if slot in self._segments.at}
            space = self._spaces["observation"]
            vectors = {slot: self._vectors.of(segment.observations, space) for slot, segment in kept.items()}
            self._schedule.measure(vectors)
        self._log_added(counts)

    def _add_chunk(self, chunk: SingleAgentEpisode, counts: Counter[str]) -> set[int]:
        """Store the steps of a chunk; return the slots of the segments that are now complete."""
        complete: set[int] = set()
        if not len(chunk):
            return complete
        self._ledger.check(chunk.id_, chunk.t_started)
        for name in self._spaces:
            self._spaces[name] = self._spaces[name] or getattr(chunk, f"{name}_space")
        counts["num_episodes_added"] += chunk.id_ not in self._ledger
        last = (_own(chunk.get_observations(0)), chunk.get_infos(0))
        for at, step in enumerate(_steps(chunk)):
            while self._num_timesteps >= self.capacity:
                self._evict(counts)
            slot = self._ledger.slot_of(chunk.id_)
            if slot is None or self._segments.is_full(slot):
                before = self._segments.at[slot] if slot is not None else None
                seen = (before.observations[-1], before.infos[-1]) if before else last
                slot = self._open_segment(chunk, chunk.t_started + at, seen, slot)
            self._segments.append(slot, step)
            self._ledger.step(chunk.id_, step.reward)
            self._num_timesteps += 1
            self._num_timesteps_added += 1
            last = (step.observation, step.info)
            if self._segments.is_full(slot) or step.is_terminated or step.is_truncated:
                complete.add(slot)
        counts["num_env_steps_added"] += len(chunk)
        if chunk.is_done:
            self._schedule.finish(self._ledger.finish(chunk.id_))
        return complete

    def _open_segment(
        self, chunk: SingleAgentEpisode, start: int, seen: Any, previous: int | None
    ) -> int:
        slot = self._schedule.enter(chunk.id_, start, self._now)
        self._segments.open(slot, Segment(chunk.id_, start, [seen[0]], [seen[1]]), previous)
        self._ledger.open(chunk.id_, slot, start)
        return slot

    def _evict(self, counts: Counter[str]) -> None:
        for slot in self._schedule.evicted(1, self._now):
            self._schedule.leave(slot)
            segment = self._segments.remove(slot)
            self._num_timesteps -= len(segment)
            counts["num_env_steps_evicted"] += len(segment)
            if self._ledger.remove(segment.episode_id, slot):
                counts["num_episodes_evicted"] += 1
                self._num_episodes_evicted += 1
            if self._drawn is not None:  # its TD errors grade nothing any more
                self._drawn = [-1 if one == slot else one for one in self._drawn]

    # --- sample ------------------------------------------------------------------------------------

    def sample(
        self,
        num_items: int | None = None,
        *,
        batch_size_B: int | None = None,
        batch_length_T: int | None = None,
        n_step: int | tuple[int, int] | None = None,
        beta: float | None = None,
        gamma: float = 0.99,
        include_infos: bool = False,
        include_extra_model_outputs: bool = False,
        to_numpy: bool = False,
        sample_episodes: bool = True,
        lookback: int = 0,
        min_batch_length_T: int = 0,
    ) -> list[SingleAgentEpisode]:
        """Draw transitions as episodes of one step, in the form of `PrioritizedEpisodeReplayBuffer.sample`.

        Args:
            num_items: transitions; None: `batch_size_B`.
            batch_size_B: another name of `num_items`; None: that of the constructor.
            batch_length_T: None, 0 or 1.
            n_step: number of steps, or the least and the most of them; None: 1.
            beta: None or 0; see difference 3.
            gamma: discount of the rewards within n steps.
            include_infos: keep the infos of both observations.
            include_extra_model_outputs: keep the model outputs of the first step.
            to_numpy: convert the episodes.
            sample_episodes: True.
            lookback: 0, as is `min_batch_length_T`: both are of sequences.

        Raises:
            ValueError: arguments out of range, or nothing stored is long enough for `n_step`.
        """
        num = self._checked_size(num_items, batch_size_B)
        least, most = _steps_range(n_step)
        _check_transitions(batch_length_T, lookback, min_batch_length_T, beta, sample_episodes)
        self._now += 1
        slots_K, weight_K = self._draw_slots(num, least)
        windows = self._windows(slots_K, least, most)
        drawn = []
        for window, weight in zip(windows, weight_K.tolist(), strict=True):
            extras = window.extras if include_extra_model_outputs else {}
            drawn.append(self._episode(window, weight, gamma, include_infos, extras))
            if to_numpy:
                drawn[-1].to_numpy()
        self._drawn = slots_K.tolist()
        self._log_sampled(windows, slots_K)
        return drawn

    def _checked_size(self, num_items: int | None, batch_size_B: int | None) -> int:
        if num_items is not None and batch_size_B is not None:
            raise ValueError(f"num_items = {num_items} and batch_size_B = {batch_size_B}; expected one of them")
        num = num_items if num_items is not None else batch_size_B
        num = self.batch_size_B if num is None else num
        if not is_integer(num, 1) or num > self.capacity:
            raise ValueError(f"num_items = {num!r}; expected an integer in [1, capacity = {self.capacity}]")
        return int(num)

    def _draw_slots(self, num: int, least: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots and weights of `num` rows; too few segments are repeated in turn."""
        reach_S = self._segments.reach(least - 1)
        too_short = np.flatnonzero((reach_S < least) & (self._segments.length_S > 0))
        if len(too_short) == len(self._schedule):
            what = f"no stored episode has n_step = {least} steps" if len(too_short) else "the buffer is empty"
            raise ValueError(f"{what}; expected add() before sample()")
        drawn = self._schedule.draw(num, self._now, too_short.tolist())
        if not len(drawn.slots_K):
            raise ValueError("no segment may be drawn yet; expected a smaller min_recall_interval")
        return np.resize(drawn.slots_K, num), np.resize(drawn.weight_K, num)

    def _windows(self, slots_K: np.ndarray, least: int, most: int) -> list[Window]:
        """Draw a step of each segment, and a number of steps in [least, most] that are stored from it on."""
        reach_S, windows = self._segments.reach(most - 1), []
        for slot in slots_K.tolist():
            reach = int(reach_S[slot])
            offset = int(self.rng.integers(min(int(self._segments.length_S[slot]), reach - least + 1)))
            size = int(self.rng.integers(least, min(most, reach - offset) + 1)) if most > least else least
            windows.append(self._segments.window(slot, offset, size))
        return windows

    def _episode(
        self, window: Window, weight: float, gamma: float, with_infos: bool, extras: Mapping[str, Any]
    ) -> SingleAgentEpisode:
        own = {"weights": [weight], "n_step": [len(window.rewards)]}
        return SingleAgentEpisode(
            observations=list(window.observations),
            observation_space=self._spaces["observation"],
            infos=list(window.infos) if with_infos else None,
            actions=[window.action],
            action_space=self._spaces["action"],
            rewards=[discounted_sum(window.rewards, gamma)],
            terminated=window.is_terminated,
            truncated=window.is_truncated,
            extra_model_outputs={**own, **{name: [value] for name, value in extras.items()}},
            len_lookback_buffer=0,
            t_started=window.step,
        )

    # --- priorities --------------------------------------------------------------------------------

    def update_priorities(self, priorities: Any, module_id: str | None = None) -> None:
        """Grade the segments of the last sample by the TD errors of its transitions.

        Args:
            priorities: one TD error a row, in the order of the rows; the sign is ignored.
            module_id: ignored; there is one module.

        Raises:
            ValueError: another number of rows than were sampled, a second call, or an error that is not finite.
        """
        error_K = np.abs(np.asarray(priorities, np.float64).reshape(-1))
        if self._drawn is None or len(error_K) != len(self._drawn):
            num = 0 if self._drawn is None else len(self._drawn)
            raise ValueError(f"{len(error_K)} priorities; expected one for each of the {num} rows of the last sample")
        if not np.isfinite(error_K).all():
            raise ValueError(f"{int((~np.isfinite(error_K)).sum())} TD errors are not finite; expected numbers")
        slots_K, self._drawn = np.array(self._drawn, np.int64), None
        is_stored_K = slots_K >= 0
        slots_K, error_K = slots_K[is_stored_K], error_K[is_stored_K]
        if not len(slots_K):
            return
        ids = [self._segments.at[slot].episode_id for slot in slots_K.tolist()]
        return_K = np.array([self._ledger.return_of(one) for one in ids])
        graded = self._schedule.visit(slots_K, error_K, return_K, self._now)
        for name in _GRADES:
            self.metrics.log_value(("srl", name), getattr(graded, name), reduce="sum")
        if graded.num_visits:
            self.metrics.log_value(("srl", "mean_grade"), graded.mean_grade, window=1)

    # --- contents and metrics ----------------------------------------------------------------------

    def get_num_episodes(self, module_id: str | None = None) -> int:
        """Return the number of episodes of which at least one segment is stored."""
        return len(self._ledger)

    def get_num_timesteps(self, module_id: str | None = None) -> int:
        """Return the number of stored steps."""
        return self._num_timesteps

    def get_num_segments(self) -> int:
        """Return the number of stored segments, the items of the schedule."""
        return len(self._schedule)

    def get_metrics(self) -> Any:
        """Return the parent's metrics and, under "srl", those of the schedule."""
        for name, value in self._schedule.metrics(self._now).items():
            self.metrics.log_value(("srl", name), value, window=1)
        return self.metrics.reduce()

    def _log_added(self, counts: Counter[str]) -> None:
        names = [f"num_{what}_{how}" for what in ("episodes", "env_steps") for how in ("added", "evicted")]
        parts = {}
        for name in names:
            for of, key in (("agent", DEFAULT_AGENT_ID), ("module", DEFAULT_MODULE_ID)):
                parts[f"{of}_to_{name.replace('env_', '')}"] = {key: counts[name]}
        self._update_add_metrics(**{name: counts[name] for name in names}, **parts)

    def _log_sampled(self, windows: Sequence[Window], slots_K: np.ndarray) -> None:
        num, num_steps = len(windows), sum(len(window.rewards) for window in windows)
        self.sampled_timesteps += num
        ids = [self._segments.at[slot].episode_id for slot in slots_K.tolist()]
        steps = {(one, window.step) for one, window in zip(ids, windows, strict=True)}
        counts: dict[str, float] = {"num_episodes_per_sample": len(set(ids)), "num_steps_per_sample": len(steps)}
        counts |= {"num_steps_sampled": num, "sampled_n_step": num_steps / num, "num_resamples": 0}
        parts: dict[str, dict[str, float]] = {}
        for of, key in (("agent", DEFAULT_AGENT_ID), ("module", DEFAULT_MODULE_ID)):
            parts |= {f"{of}_to_{name}": {key: value} for name, value in counts.items()}
        whole = {name.replace("num_steps", "num_env_steps"): value for name, value in counts.items()}
        self._update_sample_metrics(**whole, **parts)

    # --- state -------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return everything that later draws depend on; metrics are not part of it."""
        state = {
            "segment_length": self._segments.segment_length,
            "segments": self._segments.get_state(),
            "schedule": self._schedule.get_state(),
            "ledger": self._ledger.get_state(),
            "vectors": self._vectors.get_state(),
            "spaces": {name: one and gym_space_to_dict(one) for name, one in self._spaces.items()},
            "rng": self.rng.bit_generator.state,
            "now": self._now,
            "drawn": self._drawn,
            "num_episodes_evicted": self._num_episodes_evicted,
            "num_timesteps_added": self._num_timesteps_added,
            "sampled_timesteps": self.sampled_timesteps,
        }
        return copy.deepcopy(state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned.

        Raises:
            ValueError: it is of another class, or was written with other settings; nothing has changed.
        """
        if "schedule" not in state:
            raise ValueError(f"a state with {sorted(state)[:5]}; expected one of SRLEpisodeReplayBuffer.get_state()")
        if state["segment_length"] != (own := self._segments.segment_length):
            raise ValueError(f"segment_length = {own}; expected {state['segment_length']}, as in the state")
        state = copy.deepcopy(dict(state))
        self._schedule.set_state(state["schedule"])
        self._segments = Segments.from_state(state["segment_length"], state["segments"])
        self._ledger = EpisodeLedger.from_state(state["ledger"])
        self._vectors.set_state(state["vectors"])
        self._spaces = {name: one and gym_space_from_dict(one) for name, one in state["spaces"].items()}
        self.rng.bit_generator.state = state["rng"]
        self._now, self._drawn = state["now"], state["drawn"]
        self._num_timesteps = self._segments.num_steps
        self._num_episodes_evicted = state["num_episodes_evicted"]
        self._num_timesteps_added = state["num_timesteps_added"]
        self.sampled_timesteps = state["sampled_timesteps"]


def _steps(chunk: SingleAgentEpisode) -> list[Step]:
    """Return the steps of a chunk, copied: a view would keep the arrays of the whole chunk in memory."""
    names, end = list(chunk.extra_model_outputs), len(chunk) - 1
    return [
        Step(
            _own(chunk.get_actions(at)),
            float(chunk.get_rewards(at)),
            _own(chunk.get_observations(at + 1)),
            chunk.get_infos(at + 1),
            {name: _own(chunk.get_extra_model_outputs(name, at)) for name in names},
            bool(chunk.is_terminated and at == end),
            bool(chunk.is_truncated and at == end),
        )
        for at in range(len(chunk))
    ]


def _own(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else copy.deepcopy(value)


def _steps_range(n_step: int | tuple[int, int] | None) -> tuple[int, int]:
    pair = n_step if isinstance(n_step, tuple | list) else (1 if n_step is None else n_step,) * 2
    if len(pair) != 2 or not all(is_integer(one, 1) for one in pair) or pair[0] > pair[1]:
        raise ValueError(f"n_step = {n_step!r}; expected an integer of at least 1, or two of them, the smaller first")
    return pair[0], pair[1]


def _check_transitions(length: int | None, lookback: int, least: int, beta: float | None, are_episodes: bool) -> None:
    given = {"batch_length_T": length or 0, "lookback": lookback, "min_batch_length_T": least}
    most = {"batch_length_T": 1}
    faults = [_not_sequences(name, value) for name, value in given.items() if value > most.get(name, 0)]
    if beta:
        faults.append(f"beta = {beta!r}; expected None or 0: the exponent belongs to the rule (selection_config)")
    if not are_episodes:
        faults.append("sample_episodes = False; expected True: this buffer returns episodes")
    if faults:
        raise ValueError("; ".join(faults))


def _not_sequences(name: str, value: Any) -> str:
    least = " or 1" if name == "batch_length_T" else ""
    return (
        f"{name} = {value!r}; expected 0{least}: transitions are drawn, as from RLlib's prioritised buffer. "
        "Use EpisodeReplayBuffer for sequences of a recurrent module"
    )

"""Schedules segments of episodes with the memory's own rules: grades, intervals, diversity, draws and eviction.

    enter -> draw -> visit -> draw -> ...            measure: vectors of segments -> diversity
       ItemStore (columns)   Recall (grades, spacing)   Draws (selection, eviction)   DiversityTracker

A *visit* of a segment is its part in one batch. The rule that turns it into a grade:

    td_error   reward of a transition = 1 - rank of |TD error| among the last 1,024
    return     reward of a transition = rank of its episode's return among the last 1,024 finished episodes
    a visit    reward = mean over its transitions, a success from `pass_reward`
    grade      1 to 4 from the reward, cut at .35, .65 and .9 (`schedule/grading.py`)

A rank has no unit, so the rule needs no scale of rewards. A segment whose value is predicted well compared with the
others is remembered well: its interval grows. With "return" a segment of an episode that is poor by today's standard
comes back soon, and one of an unfinished episode is not graded yet. A visit has *signal* if a transition fails, and its
variance is the mean squared TD error: as in GRPO the mean squared advantage, it scales the gradient.

Time is the number of draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.replay.diversity.measures import Calibrator
from rllib_srl.replay.diversity.neighbours import check_faiss
from rllib_srl.replay.diversity.tracker import DiversityTracker
from rllib_srl.replay.domain_statistics import DomainStatistics
from rllib_srl.replay.history import after_visit
from rllib_srl.replay.revisits import draw_revisits
from rllib_srl.replay.schedule.recall import Recall
from rllib_srl.replay.selection.eviction import EVICTIONS
from rllib_srl.replay.selection.literature import Proportional, importance_weights
from rllib_srl.replay.selection.rules import SELECTIONS, make_settings
from rllib_srl.replay.selection.sampler import Draws
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store.items import ItemStore
from rllib_srl.replay.store.records import ITEM, Header, key_of, rows_at, with_fields
from rllib_srl.replay.visits import GroupFacts
from rllib_srl.types import Prompt

DOMAIN = "episodes"  # one domain: shares and quotas of domains are for mixtures of tasks
RANKED_OVER = 1024  # recent TD errors, or returns, among which one is ranked
STREAMS = ("draw", "evict")


class Drawn(NamedTuple):
    """Slots of drawn segments, and the loss weight of each in (0, 1]."""

    slots_K: np.ndarray
    weight_K: np.ndarray


class Graded(NamedTuple):
    """What one call of `visit` did."""

    num_visits: int
    num_silent: int
    num_lapses: int
    mean_grade: float  # nan if nothing was graded


class SegmentSchedule:
    """The schedule of all stored segments, by slot.

    Invariant: a draw depends only on the calls so far and the seed; `get_state` holds all of it.
    """

    def __init__(self, settings: ReplaySettings, grade_by: str, seed: int) -> None:
        """Create an empty schedule.

        Args:
            settings: of `settings.schedule_settings`, checked.
            grade_by: "td_error" or "return".
            seed: of all draws.
        """
        self.settings, self.grade_by, self._seed = settings, grade_by, seed
        own_eviction = settings.eviction in EVICTIONS.own and not EVICTIONS.is_users(settings.eviction)
        self.is_measured = settings.diversity_coeff > 0 or settings.eviction == "least_diverse" or not own_eviction
        if self.is_measured:
            check_faiss()
        self._ranks = Calibrator(seed, RANKED_OVER)
        self.generators = {name: np.random.default_rng([seed, sum(name.encode())]) for name in STREAMS}
        self._fill(ItemStore(settings.capacity, 1))

    def _fill(self, store: ItemStore) -> None:
        self.store = store
        self.recall = Recall(self.settings, store)
        self.recall.rebuild()
        self.statistics = DomainStatistics()
        self.draws = Draws(self.settings, store, self.recall, self.statistics)
        self.tracker = DiversityTracker(self.settings, None, self._seed)

    def __len__(self) -> int:
        """Return the number of segments."""
        return len(self.store)

    def enter(self, episode_id: str, step: int, now: int) -> int:
        """Add the segment that begins at a step of an episode; return its slot."""
        prompt = Prompt(env_id=episode_id, prompt_id=str(step), domain=DOMAIN)
        slot = self.store.add_item(key_of(prompt), prompt, DOMAIN, now, diversity=0.5)
        self.store.commit()
        return slot

    def leave(self, slot: int) -> None:
        """Remove a segment."""
        self.recall.forget([slot])
        self.tracker.forget(slot)
        self.store.remove_item(slot)
        self.store.commit()
        self.tracker.commit()

    def evicted(self, num: int, now: int) -> list[int]:
        """Return the slots of `num` segments that the eviction rule removes; they are still stored."""
        slots: list[int] = self.draws.evicted(num, now, self.generators["evict"]).tolist()
        return slots

    def measure(self, vectors: Mapping[int, np.ndarray]) -> None:
        """Set the diversity of segments from their vectors, by slot."""
        measured = self.tracker.receive({slot: vector_D[None] for slot, vector_D in vectors.items()}, self.store)
        if not measured:
            return
        slots, of_items = list(measured), [one.fields() for one in measured.values()]
        fields: dict[str, Any] = {name: np.array([one[name] for one in of_items]) for name in of_items[0]}
        fields["diversity"] = self.tracker.rank([one.parts for one in measured.values()])
        self.recall.change(slots, has_vector=np.ones(len(slots), bool), **fields)
        for slot, one in measured.items():
            if one.vector_D is not None:
                self.tracker.put(slot, one.vector_D)
        self.store.commit()
        self.tracker.commit()

    # --- draws and visits ------------------------------------------------------------------------

    def draw(self, num: int, now: int, without: Sequence[int] = ()) -> Drawn:
        """Draw `num` distinct segments, fewer only if fewer may be drawn.

        Args:
            num: segments wanted.
            now: number of this draw.
            without: slots that may not be drawn.
        """
        self.recall.slots = float(num)
        generator = self.generators["draw"]
        slots_K = draw_revisits(self.draws, self.recall, self.settings, num, now, generator, without).slots_N
        weight_K = self._weights(slots_K, now, without)
        if len(slots_K):
            self.store.update_many(slots_K, last_drawn=now)
        self.store.commit()
        return Drawn(slots_K, weight_K)

    def _weights(self, slots_K: np.ndarray, now: int, without: Sequence[int]) -> np.ndarray:
        """Return the importance weights of a rule that has them, over all segments that may be drawn; else ones."""
        rule = SELECTIONS.named(self.settings.selection)
        if not isinstance(rule, Proportional) or not rule.beta or not len(slots_K):
            return np.ones(len(slots_K))
        slots_N = np.setdiff1d(self.store.slots(), np.asarray(without, np.int64))
        candidates = self.draws.item_candidates(slots_N, now)
        settings = make_settings(self.settings.selection, self.settings.selection_config)
        return importance_weights(rule, candidates, np.searchsorted(slots_N, slots_K), settings)

    def finish(self, episode_return: float) -> None:
        """Note the return of a finished episode, for grades by return."""
        if self.grade_by == "return":
            self._ranks.add(np.array([episode_return]))

    def visit(self, slots_K: np.ndarray, td_error_K: np.ndarray, return_K: np.ndarray, now: int) -> Graded:
        """Grade the segments of a batch, and set their next due dates.

        Args:
            slots_K: segment of each transition.
            td_error_K: absolute TD error of each.
            return_K: return of its episode; nan while the episode runs.
            now: number of the draw.
        """
        reward_K = self._rewards(td_error_K, return_K)
        slots_S, at_K = np.unique(slots_K, return_inverse=True)
        size_S = np.bincount(at_K)
        square_S = np.bincount(at_K, td_error_K**2) / size_S
        is_graded_S = ~np.isnan(np.bincount(at_K, reward_K))
        rest = slots_S[~is_graded_S]
        if len(rest):
            self.store.update_many(rest, variance=square_S[~is_graded_S], score=square_S[~is_graded_S])
        success_S = np.bincount(at_K, reward_K >= self.settings.pass_reward).astype(np.int64)
        sum_S, error_S = np.bincount(at_K, reward_K), np.bincount(at_K, td_error_K) / size_S
        columns = (size_S, success_S, sum_S, square_S, error_S)
        facts = [_facts(*row) for row in zip(*(one[is_graded_S].tolist() for one in columns), strict=True)]
        return self._review(slots_S[is_graded_S].tolist(), facts, square_S[is_graded_S], now)

    def _rewards(self, td_error_K: np.ndarray, return_K: np.ndarray) -> np.ndarray:
        if self.grade_by == "return":
            return np.where(np.isnan(return_K), np.nan, self._ranks.rank(np.nan_to_num(return_K)))
        self._ranks.add(td_error_K)
        return 1 - self._ranks.rank(td_error_K)

    def _review(self, slots: list[int], facts: Sequence[GroupFacts], square_S: np.ndarray, now: int) -> Graded:
        if not slots:
            self.store.commit()
            return Graded(0, 0, 0, float("nan"))
        before_S = rows_at(self.store.items, slots)
        by, half_life = self.settings.history_by, self.settings.history_half_life
        fields = after_visit(before_S, facts, by, half_life, policy_kl=0.0, compares_singles=False)
        size_S, success_S, reward_S = (
            np.array([getattr(one, name) for one in facts]) for name in ("size", "num_success", "reward")
        )
        graded = self.recall.visit(
            slots,
            facts,
            now,
            num_success=success_S,
            group_size=size_S,
            pass_rate=success_S / size_S,
            reward=reward_S,
            variance=square_S,
            score=square_S,
            visits=before_S["visits"] + 1,
            **fields,
        )
        for one, before, is_solved in zip(facts, before_S, fields["is_solved"].tolist(), strict=True):
            self.statistics.note(DOMAIN, one, before, is_solved, compares_singles=False)
        self.store.commit()
        return Graded(
            len(slots),
            sum(one.variance == 0 for one in facts),
            sum(one.is_lapse for one in graded),
            float(np.mean([one.grade for one in graded])),
        )

    # --- state -----------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return all that later draws depend on: numbers, text and numpy arrays."""
        slots_N = self.store.slots()
        prompts = [self.store.prompt_of(slot) for slot in slots_N.tolist()]
        return {
            "settings": {**self.settings.as_dict(), "grade_by": self.grade_by},
            "header": self.store.header.to_json(),
            "slots": slots_N,
            "rows": rows_at(self.store.items, slots_N),
            "names": [(prompt.env_id, prompt.prompt_id) for prompt in prompts],
            "generators": {name: one.bit_generator.state for name, one in self.generators.items()},
            "ranks": self._ranks.get_state(),
            "draws": self.draws.get_state(),
            "slots_per_draw": self.recall.slots,
            "statistics": self.statistics.get_state(),
            "tracker": self.tracker.get_state(),
            "vectors": self.tracker.vectors(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned.

        Raises:
            ValueError: it was written with other settings; nothing has changed.
        """
        own = {**self.settings.as_dict(), "grade_by": self.grade_by}
        given = state["settings"]
        differ = [name for name in own if given.get(name) != own[name]]
        if differ:
            listed = "; ".join(f"{name} = {own[name]!r}, in the state {given.get(name)!r}" for name in differ)
            raise ValueError(f"{listed}; expected the settings that the state was written with")
        prompts = [Prompt(env_id=one, prompt_id=step, domain=DOMAIN) for one, step in state["names"]]
        header, rows_N = Header.from_json(state["header"]), with_fields(np.array(state["rows"]), ITEM)
        no_groups = self.store.groups[:0].copy()
        items = (np.array(state["slots"]), rows_N, prompts)
        self._fill(ItemStore.load(self.settings.capacity, 1, header, items, no_groups))
        for name, generator in self.generators.items():
            generator.bit_generator.state = state["generators"][name]
        self._ranks.set_state(state["ranks"])
        self.draws.set_state(state["draws"])
        self.recall.slots = state["slots_per_draw"]
        self.statistics.set_state(state["statistics"])
        self.tracker.load(state["vectors"], state["tracker"]["fitted"])
        self.tracker.set_state(state["tracker"])

    def metrics(self, now: int) -> dict[str, float]:
        """Return the number of segments, and of those that are due."""
        return {"num_segments": float(len(self.store)), "num_due": float(self.store.num_due(now))}


def _facts(size: int, num_success: int, reward_sum: float, square: float, error: float) -> GroupFacts:
    """Return the summary of a visit; without a failed transition it is silent, so its variance counts as 0."""
    return GroupFacts(
        size=size,
        num_success=num_success,
        reward=reward_sum / size,
        reward_sum=reward_sum,
        variance=square if num_success < size else 0.0,
        abs_advantage=error,
        nll=0.0,
        num_tokens=size,
        num_loss_tokens=size,
        version=0,
        num_rewarded=size,
        lowest=reward_sum / size,
        highest=reward_sum / size,
    )

"""How a batch is filled: the share that adapts in a stream, by hand, and its state."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rllib_srl.curriculum.curriculum import AUTO_BOUNDS, Curriculum, LiveBalance, unknown_domains
from rllib_srl.curriculum.planner import Plan
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.curriculum.settings import PlannerSettings
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import GroupMeta, Prompt
from tests.small_worlds import Even, Odd


def meta(number: int, origin: str) -> GroupMeta:
    zeros = np.zeros(2)
    return GroupMeta(f"1.{number}", Prompt("w", str(number)), zeros, zeros, zeros, zeros, (), 0, origin, None)


def observed(balance: LiveBalance, num: dict[str, int], live: dict[str, int]) -> float:
    """Observe `num` groups of each kind, the first `live` of them trained on; return the fraction."""
    groups = [meta(10 * at + i, origin) for at, origin in enumerate(num) for i in range(num[origin])]
    trained = {f"1.{10 * at + i}" for at, origin in enumerate(num) for i in range(live[origin])}
    balance.observe(groups, trained)
    return balance.fraction


def test_the_share_falls_while_revisits_teach_less_and_rises_while_they_teach_more():
    balance = LiveBalance()
    even = {"fresh": 4, "revisit": 4}
    assert observed(balance, even, {"fresh": 4, "revisit": 0}) == 0.25  # 4 groups of each kind are too few
    # a step is .05 * (.5 - .05) = .0225
    assert observed(balance, {"fresh": 8, "revisit": 8}, {"fresh": 8, "revisit": 0}) == pytest.approx(0.2275)
    for _ in range(20):
        observed(balance, {"fresh": 8, "revisit": 1}, {"fresh": 8, "revisit": 0})
    assert balance.fraction == AUTO_BOUNDS[0]
    for _ in range(200):
        observed(balance, even, {"fresh": 0, "revisit": 4})
    assert balance.fraction == AUTO_BOUNDS[1]


def test_equal_shares_leave_the_fraction():
    balance = LiveBalance()
    for _ in range(9):
        assert observed(balance, {"fresh": 8, "revisit": 8}, {"fresh": 0, "revisit": 0}) == 0.25
    for _ in range(9):  # interleaved equally, so the faded shares are equal
        for origin in ("fresh", "revisit"):
            groups = [meta(i, origin) for i in range(3)]
            balance.observe(groups, {"1.0"})
    assert balance.live_share("fresh") == pytest.approx(balance.live_share("revisit"))


def test_the_faded_share_by_hand():
    balance = LiveBalance()
    balance.observe([meta(0, "fresh"), meta(1, "fresh")], {"1.0"})
    assert balance.live_share("fresh") == pytest.approx(0.985 / 1.985)
    assert balance.live_share("revisit") == 0.0


class Source:
    """Returns numbered prompts."""

    def draw(self, num, shares=None):
        return [Prompt("w", f"fresh {i}") for i in range(num)]


class Memory:
    """Notes the fraction and returns two revisits."""

    is_on, settings = True, ReplaySettings()

    def __init__(self, is_auto):
        self.is_auto = is_auto

    def set_fractions(self, revisit, reuse):
        self.fractions = (revisit, reuse)

    def draw_prompts(self, num, now, in_play):
        assert list(in_play) == []
        return [Prompt("w", "old 0"), Prompt("w", "old 1")]


def curriculum_of(memory, source) -> Curriculum:
    return Curriculum(PlannerSettings(), (0.25, 0.0), source, memory, None)


def test_a_batch_has_its_fraction_of_revisits_and_is_filled_up_with_fresh_prompts():
    adaptive, fixed = Memory(is_auto=True), Memory(is_auto=False)
    batch = curriculum_of(adaptive, Source()).fill(5, 3, Plan(reuse_fraction=0.1))
    assert adaptive.fractions == (0.25, 0.1) and batch.num_revisits == 2
    assert [prompt.prompt_id for prompt in batch.prompts] == ["old 0", "old 1", "fresh 0", "fresh 1", "fresh 2"]
    curriculum_of(fixed, Source()).fill(5, 3, Plan(revisit_fraction=0.4))
    assert fixed.fractions == (0.4, None)


def test_a_balance_goes_on_from_its_state():
    one, other = LiveBalance(), LiveBalance()
    for _ in range(5):
        observed(one, {"fresh": 8, "revisit": 8}, {"fresh": 6, "revisit": 1})
    other.set_state(one.get_state())
    both = [observed(each, {"fresh": 3, "revisit": 2}, {"fresh": 1, "revisit": 2}) for each in (one, other)]
    assert both[0] == both[1] < 0.25 and one.get_state() == other.get_state()


class Mixed(Even):
    """Has two domains: of small and of large numbers."""

    def domain_of(self, prompt_id):
        return "small" if int(prompt_id.split()[1]) < 6 else "large"


class Endless(Mixed):
    """Lists prompts without end."""

    def prompt_ids(self, split, seed):
        return (f"even {number}" for number in itertools.count())


def source_of(**creators) -> PromptSource:
    return PromptSource(creators, {}, dict.fromkeys(creators, 1.0), seed=1)


def test_settings_of_domains_without_prompts_are_warned_of():
    settings = {"domains": ["od", "odd"]}
    source = source_of(even=Even, odd=Odd, mixed=Mixed)
    assert source.known_domains() == {"even", "odd", "small", "large"}
    assert unknown_domains(ReplaySettings(**settings), source) == [
        "replay_domains has 'od', but no training prompt is of this domain; expected some of 'even', 'large', 'odd', "
        "'small'"
    ]
    untouched = source_of(even=Even, odd=Odd, mixed=Mixed)
    assert source.domain_weights() == untouched.domain_weights() and source.draw(9) == untouched.draw(9)
    assert unknown_domains(ReplaySettings(**settings), source_of(odd=Odd, od=Even)) != []  # names of environments
    assert unknown_domains(ReplaySettings(**settings), source_of(odd=Odd, endless=Endless)) == []  # it may come


def test_domains_with_prompts_and_defaults_are_not_warned_of():
    source = source_of(even=Even, mixed=Mixed)
    for settings in ({"domains": ["even"]}, {}, {"domains": "last"}):
        assert unknown_domains(ReplaySettings(**settings), source) == []


def test_the_warning_is_logged_when_a_run_starts(caplog):
    memory = Memory(is_auto=False)
    memory.settings = ReplaySettings(domains=["evem"])
    with caplog.at_level("WARNING", "rllib_srl"):
        curriculum_of(memory, source_of(even=Even))
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "replay_domains has 'evem', but no training prompt is of this domain"
    ]

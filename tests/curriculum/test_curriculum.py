"""How domains are weighted, and what is warned of."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from rllib_srl.batch.advantages import AdvantageBatch
from rllib_srl.curriculum.curriculum import Curriculum, Plan, unsuited, weighted
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import Prompt
from tests.small_envs import Even, Odd


def test_weights_multiply_the_advantages_of_their_domain():
    groups = [SimpleNamespace(prompt=Prompt("env", "1", domain)) for domain in "abc"]
    compared = AdvantageBatch(groups, [np.array([1.0, -1.0])] * 3, [], {})
    made = weighted(compared, {"a": 2.0, "b": 0.5}).advantages
    assert [a.tolist() for a in made] == [[2.0, -2.0], [0.5, -0.5], [1.0, -1.0]]
    assert weighted(compared, {}) is compared


class Mixed(Even):
    def domain_of(self, prompt_id):
        return "small" if int(prompt_id.split()[1]) < 6 else "large"


class Endless(Mixed):
    def prompt_ids(self, split, seed):
        return (f"even {number}" for number in itertools.count())


def source_of(**creators) -> PromptSource:
    return PromptSource(creators, {}, dict.fromkeys(creators, 1.0), seed=1)


def test_settings_of_domains_without_prompts_are_warned_of():
    settings = {"domains": ["od", "odd"]}
    source = source_of(even=Even, odd=Odd, mixed=Mixed)
    assert source.known_domains() == {"even", "odd", "small", "large"}
    assert unsuited(ReplaySettings(**settings), source) == [
        "replay_domains has 'od', but no training prompt is of this domain; expected some of 'even', 'large', 'odd', "
        "'small'"
    ]
    untouched = source_of(even=Even, odd=Odd, mixed=Mixed)
    assert source.domain_weights() == untouched.domain_weights() and source.draw(9) == untouched.draw(9)
    assert unsuited(ReplaySettings(**settings), source_of(odd=Odd, od=Even)) != []  # names of environments
    assert unsuited(ReplaySettings(**settings), source_of(odd=Odd, endless=Endless)) == []  # it may come
    for fine in ({"domains": ["even"]}, {}, {"domains": "last"}):
        assert unsuited(ReplaySettings(**fine), source) == []


def test_too_few_prompts_to_draw_any_from_the_memory_are_warned_of():
    source = PromptSource({"even": Even}, {"even": {"num_prompts": 7}}, {"even": 1.0}, seed=1)
    assert unsuited(ReplaySettings(), source) == [
        "the run has 7 training prompts, fewer than replay_min_buffer_size = 16: nothing is revisited or reused; "
        "expected replay_min_buffer_size <= 7"
    ]
    two = PromptSource({"even": Even, "mixed": Mixed}, {name: {"num_prompts": 5} for name in ("even", "mixed")},
                       {"even": 1.0, "mixed": 1.0}, seed=1)  # fmt: skip
    before = two.get_state(), two.domain_weights()
    (line,) = unsuited(ReplaySettings(revisit_fraction=0, reuse_fraction=0.5), two)
    assert line.startswith("the run has 10 training prompts") and (two.get_state(), two.domain_weights()) == before
    for fine in ({"min_buffer_size": 7}, {"min_buffer_size": 0}, {"capacity": 7}, {"revisit_fraction": 0}):
        assert unsuited(ReplaySettings(**fine), source) == []
    assert unsuited(ReplaySettings().model_copy(update={"on_group": "my_rules:more"}), source) == []
    assert unsuited(ReplaySettings(min_buffer_size=99), source_of(endless=Endless)) == []


def test_the_learned_domains_are_those_with_a_share_of_the_plan():
    memory = SimpleNamespace(is_on=False, settings=ReplaySettings())
    weights = {"even": 1.0, "odd": 0.0, "mixed": 1.0}
    source = PromptSource({"even": Even, "odd": Odd, "mixed": Mixed}, {}, weights, seed=1)
    source.draw(200)  # all 40 prompts of the mixed one, of which three are small
    curriculum = Curriculum(source, memory, None)
    assert curriculum.learned(Plan()) == {"even", "small", "large"}
    assert curriculum.learned(Plan(fresh={"odd": 0.5, "small": 0.5, "even": 0.0})) == {"odd", "small"}
    assert curriculum.learned(Plan(num_reused=4)) == set()


def test_a_fraction_of_a_plan_is_checked():
    assert Plan(revisit_fraction=1, reuse_fraction=0.5).revisit_fraction == 1
    message = r"^a plan has revisit_fraction = -0.5; expected a number in \[0, 1\]; reuse_fraction = 1.0; expected"
    with pytest.raises(ValueError, match=message):
        Plan(revisit_fraction=-0.5, reuse_fraction=1.0)


def test_the_warning_is_logged_when_a_run_starts(caplog):
    memory = SimpleNamespace(is_on=True, settings=ReplaySettings(domains=["evem"]))
    with caplog.at_level("WARNING", "rllib_srl"):
        Curriculum(source_of(even=Even), memory, None)
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "replay_domains has 'evem', but no training prompt is of this domain"
    ]

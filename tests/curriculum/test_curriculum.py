"""How a batch is filled, how domains are weighted, and what is warned of."""

import itertools
from types import SimpleNamespace

import numpy as np

from rllib_srl.batch.advantages import AdvantageBatch
from rllib_srl.curriculum.curriculum import Curriculum, Plan, unknown_domains, weighted
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import Prompt
from tests.small_worlds import Even, Odd


class Source:
    def draw(self, num, shares=None):
        return [Prompt("w", f"fresh {i}") for i in range(num)]


class Memory:
    is_on, settings = True, ReplaySettings()

    def set_fractions(self, revisit, reuse):
        self.fractions = (revisit, reuse)

    def draw_prompts(self, num, now, in_play):
        assert list(in_play) == []
        return [Prompt("w", "old 0"), Prompt("w", "old 1")]


def curriculum_of(memory, source) -> Curriculum:
    return Curriculum(source, memory, None)


def test_a_batch_is_filled_up_with_fresh_prompts():
    memory = Memory()
    batch = curriculum_of(memory, Source()).fill(5, 3, Plan(reuse_fraction=0.1))
    assert memory.fractions == (None, 0.1) and batch.num_revisits == 2
    assert [prompt.prompt_id for prompt in batch.prompts] == ["old 0", "old 1", "fresh 0", "fresh 1", "fresh 2"]


def test_weights_multiply_the_advantages_of_their_domain():
    groups = [SimpleNamespace(prompt=Prompt("world", "1", domain)) for domain in "abc"]
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
    assert unknown_domains(ReplaySettings(**settings), source) == [
        "replay_domains has 'od', but no training prompt is of this domain; expected some of 'even', 'large', 'odd', "
        "'small'"
    ]
    untouched = source_of(even=Even, odd=Odd, mixed=Mixed)
    assert source.domain_weights() == untouched.domain_weights() and source.draw(9) == untouched.draw(9)
    assert unknown_domains(ReplaySettings(**settings), source_of(odd=Odd, od=Even)) != []  # names of environments
    assert unknown_domains(ReplaySettings(**settings), source_of(odd=Odd, endless=Endless)) == []  # it may come
    for fine in ({"domains": ["even"]}, {}, {"domains": "last"}):
        assert unknown_domains(ReplaySettings(**fine), source) == []


def test_the_warning_is_logged_when_a_run_starts(caplog):
    memory = Memory()
    memory.settings = ReplaySettings(domains=["evem"])
    with caplog.at_level("WARNING", "rllib_srl"):
        curriculum_of(memory, source_of(even=Even))
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "replay_domains has 'evem', but no training prompt is of this domain"
    ]

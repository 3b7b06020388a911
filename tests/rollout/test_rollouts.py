"""Names, seeds and order of what `Rollouts` plays, with runners that only note what they are asked."""

from types import SimpleNamespace

import numpy as np
import pytest

from rllib_srl import SRLConfig
from rllib_srl.common.remote_calls import ActorFailure, Failure
from rllib_srl.curriculum.curriculum import Batch
from rllib_srl.replay.payloads import prompt_fields
from rllib_srl.rollout.rollouts import MAX_TRIES, Rollouts
from rllib_srl.types import Prompt

PROMPTS = [Prompt("env", str(number)) for number in range(4)]
DIED = Failure("died (killed)", is_hung=False)


class Runners:
    """Two runners; `dying` of the calls fail first."""

    def __init__(self, dying=0):
        self.ids, self.calls, self.dying = [1, 2], [], dying

    def play_groups(self, arguments, version, timeout_s):
        self.calls.append({i: dict(one) for i, one in arguments.items()})
        for runner_id in arguments:
            self.dying -= 1
            yield runner_id, DIED if self.dying >= 0 else f"batch of {runner_id}"

    def revive(self, runner_id, failure, timeout_s):
        """Succeed."""


@pytest.fixture
def make():
    def of(runners):
        config = SRLConfig().training(group_size=4, num_prompts_per_batch=4)
        notes = SimpleNamespace(warn=lambda line: None, count=lambda name, number: None)
        return Rollouts(runners, config, 2, 7, lambda version, ids: None, notes)

    return of


def named(call):
    return sorted(group_id for one in call.values() for group_id in one["prompts"])


def test_a_repeated_iteration_goes_on_numbering_and_a_restored_one_begins_again(make):
    rollouts = make(runners := Runners())
    assert rollouts.play_training(PROMPTS, 2, num_revisits=1) == ["batch of 1", "batch of 2"]
    assert named(runners.calls[0]) == ["3.0", "3.1", "3.2", "3.3"]
    assert all(one["revisits"] == {"3.0"} for one in runners.calls[0].values())
    rollouts.play_training(PROMPTS[:1], 2)
    assert named(runners.calls[1]) == ["3.4"]
    rollouts.set_state(rollouts.get_state())
    rollouts.play_training(PROMPTS[:1], 2)
    assert named(runners.calls[2]) == ["3.0"]


def test_a_restarted_runner_plays_its_prompts_again_until_they_always_fail(make):
    rollouts = make(runners := Runners(dying=1))
    assert list(rollouts.play(PROMPTS, 5, "greedy", temperature=0.0)) == ["batch of 2", "batch of 1"]
    first, again = runners.calls
    assert list(again) == [1] and again[1] == first[1] and first[1]["temperature"] == 0.0
    words = [7, sum(b"greedy"), 5, 1, 0]
    assert first[1]["seed"] == int(np.random.SeedSequence(words).generate_state(1)[0] >> 1) != first[2]["seed"]
    rollouts = make(Runners(dying=99))
    with pytest.raises(ActorFailure, match=rf"^4 prompts could not be played in {MAX_TRIES} attempts: runner 1 died"):
        list(rollouts.play(PROMPTS, 0))


def test_what_was_in_play_comes_first_after_a_resume(make):
    resumed = make(Runners())
    old, new, *more = PROMPTS
    in_play = [(prompt_fields(old), True), (prompt_fields(new), False)]
    resumed.set_state({"version": 3, "seed": 9, "in_play": in_play})
    assert (resumed.version, resumed.seed, resumed.num_free) == (3, 9, 2)
    assert resumed.in_play == [(old, True), (new, False)] and resumed.get_state()["in_play"] == in_play
    assert resumed.resumed_first(Batch(more, 1)) == Batch([old, more[0], new, more[1]], 2)
    assert resumed.in_play == [] and resumed.num_free == 4
    assert resumed.resumed_first(Batch(more, 1)) == Batch(more, 1)

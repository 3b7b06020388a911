"""Self-iteration: transcripts and rewards by hand, chains of steps, and that nothing changes without a history."""

import gymnasium
import pytest

from rllib_srl.envs.wrappers.self_iteration import ASKED, SelfIteration

COMPARE = "rllib_srl.envs.math.compare:Compare"
PROMPT_ID = "17, 93, 40"
ASK = "Question: Which is largest: 17, 93 or 40?\nAnswer:"


def make(**changes):
    return SelfIteration({"env": COMPARE, "env_config": {"num_shots": 0}, **changes})


def played(env, turn, **options):
    """Return reward, whether the episode is over, and the info of the one turn of an episode."""
    env.reset(options={"prompt_id": PROMPT_ID, **options})
    _, reward, terminated, truncated, info = env.step(turn)
    assert not truncated
    return reward, terminated, info


def test_transcripts_by_hand():
    env = make()
    assert env.reset(options={"prompt_id": PROMPT_ID})[0] == ASK
    improve = "That answer can be improved. Keep what is right in it, correct what is wrong, and answer again.\nAnswer:"
    options = {"prompt_id": PROMPT_ID, "history": [" 17\n", " 40\n"]}
    assert env.reset(options={**options, "step": "improve"})[0] == f"{ASK} 40\n{improve}"
    assert env.reset(options=options)[0] == f"{ASK} 40\n{improve}"  # a history alone is there to be improved
    diverge = env.reset(options={**options, "step": "diverge"})[0]
    assert diverge == f"{ASK} 40\n{ASKED['diverge']}"
    # An answer that does not end its line still stands on one of its own.
    assert env.reset(options={**options, "history": [" 40"]})[0] == f"{ASK} 40\n{improve}"


def test_a_step_is_one_episode_graded_by_the_inner_env():
    env = make()
    for step in ("improve", "diverge"):
        asked = {"history": [" 17\n"], "step": step}
        assert played(env, " 93\n", **asked) == (1.0, True, {})
        assert played(env, " 40\n", **asked) == (0.0, True, {})
        assert played(env, " hm\n", **asked) == (0.0, True, {"stop_reason": "unparsable"})
        thought = " The first number was named. Different: compare all three. Answer: 93\n"
        assert played(env, thought, **asked) == (1.0, True, {})
        assert played(env, "Named Answer: 93.\nNow sorted:\nAnswer: 40\n", **asked)[0] == 0.0  # the last one counts
    assert played(env, " Answer: 93\n")[2] == {"stop_reason": "unparsable"}  # the base task is the inner environment's


def test_a_chain_of_episodes_builds_the_history():
    env, history = make(num_steps=2), []
    said = []
    for turn in (" 17\n", " 40\n", " 93\n"):
        observation, info = env.reset(options={"prompt_id": PROMPT_ID, "history": history})
        said.append(info["can_iterate"])
        assert observation.count("Question:") == 1  # only the last answer is shown, however deep the chain
        env.step(turn)
        history.append(turn)
    assert said == [True, True, False]  # the base answer, step 1, and step 2 of 2
    assert env.can_iterate


class Steady(gymnasium.Env):
    """Pays the number an answer states; with `num_turns` only the last turn ends the episode."""

    stop_strings = ("\n",)

    def __init__(self, env_config=None):
        self.num_turns = (env_config or {}).get("num_turns", 1)

    def prompt_ids(self, split, seed):
        yield "q"

    def reset(self, *, seed=None, options=None):
        self.num_left = self.num_turns
        return "State a number:", {}

    def step(self, action):
        self.num_left -= 1
        return "on:" if self.num_left else "", float(action), self.num_left == 0, False, {}


def test_an_improvement_is_paid_for_what_was_missing():
    env = SelfIteration({"env": f"{__name__}:Steady", "reward": "improvement"})

    def earned(turn, history, step=""):
        env.reset(options={"prompt_id": "q", "history": history, **({"step": step} if step else {})})
        return env.step(turn)[1]

    assert earned("0.5", []) == 0.5  # a base task is paid plainly
    assert earned("0.75", ["0.5"], "improve") == 0.5  # half of what was missing
    assert earned("0.75", ["0.9", "0.5"]) == 0.5  # against the last answer, not the best
    assert earned("0.25", ["0.5"], "improve") == earned("1", ["1"], "improve") == earned("0", ["1"], "improve") == 0.0
    assert earned("0.75", ["0.5"], "diverge") == 0.75  # plainly
    assert earned("0.75", ["0.5", "idea. Answer: 0.25"], "improve") == pytest.approx(2 / 3)
    # The first answer was to the base task, where "Answer:" was part of it, and wrong.
    assert played(make(reward="improvement"), " 93\n", history=["Answer: 93\n"])[0] == 1.0
    assert played(make(reward="improvement"), " 93\n", history=["", "Answer: 93\n"])[0] == 0.0
    plain = SelfIteration({"env": f"{__name__}:Steady"})
    plain.reset(options={"prompt_id": "q", "history": ["0.5"], "step": "improve"})
    assert plain.step("0.75")[1] == 0.75


@pytest.mark.parametrize(("options", "message"), [
    ({"prompt_id": PROMPT_ID, "step": "improve"}, "step = 'improve' and 0 answers in history; expected"),
    ({"prompt_id": PROMPT_ID, "history": ["7"], "step": "repair"}, "expected improve or diverge, and at least 1"),
    ({"prompt_id": PROMPT_ID, "history": "7"}, "history = '7'; expected a list of texts"),
    ({"prompt_id": PROMPT_ID, "history": [7]}, r"history = \[7\]; expected a list of texts"),
    ({"steps": "improve"}, "'steps' is unknown; expected prompt_id and history, or step"),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make().reset(options=options)


class Foreign(gymnasium.Env):
    """Knows no prompt ids."""

    def __init__(self, env_config=None):
        pass

"""Online accuracy: what counts as the first answer to a prompt, by hand."""

import numpy as np

from rllib_srl.studies.online import FirstAnswers
from rllib_srl.types import GroupMeta, Prompt, StopReason


def meta(prompt_id: str, rewards: list[float], domain: str = "a", origin: str = "fresh", **fields) -> GroupMeta:
    num = len(rewards)
    ones, versions = np.ones(num, np.int64), np.zeros((num, 2), np.int64)
    reasons = (StopReason.TERMINATED,) * num
    prompt = Prompt("world", prompt_id, domain)
    rewards_G = np.array(rewards, np.float32)
    return GroupMeta(prompt_id, prompt, rewards_G, ones, ones, versions, reasons, 0, origin, None, **fields)


def test_the_answers_of_a_prompt_count_as_one_and_only_at_its_first_play() -> None:
    first = FirstAnswers()
    first.add([meta("1", [1, 1, 0, 0]), meta("2", [1, 1, 1, 1])])
    first.add([meta("1", [1, 1, 1, 1]), meta("3", [0, 0, 0, 0.5])])  # 1 again: a later pass
    first.add([meta("9", [1, 1], origin="revisit"), meta("7", [0], "b", has_reward_G=np.zeros(1, bool))])
    first.add([meta("8", [1], "b")])
    of_a = {"online_accuracy": (0.5 + 1 + 0) / 3, "online_prompts": 3.0}
    assert first.measures() == {"a": of_a, "b": {"online_accuracy": 1.0, "online_prompts": 1.0}}


def test_a_restored_count_goes_on_where_it_was() -> None:
    unbroken, before = FirstAnswers(), FirstAnswers()
    groups = [meta("1", [1, 0]), meta("2", [1, 1]), meta("1", [0, 0]), meta("3", [0, 0])]
    unbroken.add(groups)
    before.add(groups[:2])
    after = FirstAnswers()
    after.set_state(before.get_state())
    after.add(groups[2:])
    assert after.measures() == unbroken.measures() == {"a": {"online_accuracy": 0.5, "online_prompts": 3.0}}

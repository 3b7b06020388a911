"""MoPPS through a buffer: prompts near the target pass rate come back most."""

from collections import Counter

from tests.replay.groups import a_buffer, a_group


def drawn(target: float) -> Counter:
    """Return how often each of 9 prompts is drawn, prompt i with i right answers of 8 at each of four visits."""
    config = {"target": target}
    buffer = a_buffer(selection="contrib.mopps", selection_config=config, spacing="none", history_half_life=1e9)
    for now in range(1, 5):
        buffer.add([a_group(i, now, i, [1.0] * i + [0.0] * (8 - i)) for i in range(9)], now)
    return Counter(int(prompt.prompt_id[1:]) for now in range(6, 206) for prompt in buffer.draw_prompts(2, now))


def test_prompts_near_the_target_come_back_most():
    assert {i for i, _ in drawn(0.5).most_common(3)} == {3, 4, 5}
    assert drawn(1.0).most_common(1)[0][0] == 8

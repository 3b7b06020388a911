"""What a lapse says of its domain: by hand, and in a buffer whose items have not been asked yet."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.replay.journal.reader import reading
from rllib_srl.replay.schedule.recall import DomainRecall
from rllib_srl.replay.tools.explain import find, why
from tests.replay.groups import a_buffer, a_group, a_prompt

WRONG, RIGHT = (0.0,) * 4, (1.0,) * 4


def test_a_factor_by_hand():
    domains = DomainRecall(half_life=2.0)
    domains.note(np.array([0, 0, 1]), np.array([0.5, 0.0, 1.0]), np.array([0.9, 0.9, 0.8]), now=4)
    domains.note(np.array([0, 1]), np.array([0.0, 0.0]), np.array([np.nan, np.nan]), now=4)  # first visits say nothing
    # domain 0: (.5 + 1) / (1.8 + 1), two iterations later (.25 + 1) / (.9 + 1); domain 1: (1 + 1) / (.8 + 1) is above 1
    assert domains.factor(np.array([0, 1, 2]), 4) == pytest.approx([1.5 / 2.8, 1.0, 1.0])
    assert domains.factor(np.array([0]), 6) == pytest.approx([1.25 / 1.9])
    domains.note(np.array([0]), np.array([1.0]), np.array([0.9]), now=6)
    assert domains.factor(np.array([0]), 6) == pytest.approx([2.25 / 2.8])


def test_without_a_half_life_nothing_is_noted():
    domains = DomainRecall(half_life=0.0)
    domains.note(np.array([0]), np.array([0.0]), np.array([0.9]), now=1)
    assert domains.factor(np.array([0]), 1).tolist() == [1.0] and domains.get_state() == []


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1), st.floats(0.01, 1), st.integers(0, 3)), max_size=12))
def test_a_state_goes_on_as_the_original(reviews):
    now, original, restored = 0, DomainRecall(3.0), DomainRecall(3.0)
    for domain, observed, predicted, wait in reviews:
        now += wait
        for one in (original, restored):
            one.note(np.array([domain]), np.array([observed]), np.array([predicted]), now)
        restored = DomainRecall(3.0)
        restored.set_state(json.loads(json.dumps(original.get_state())))
    every = np.arange(3)
    assert restored.factor(every, now + 1).tolist() == original.factor(every, now + 1).tolist()
    assert (original.factor(every, now) > 0).all() and (original.factor(every, now) <= 1).all()


def rested(**settings):
    """Return a buffer at iteration 3 of eight items in two domains, all played right at 1 and due at 9."""
    values = {"spacing": "fixed", "spacing_config": {"interval": 8.0}, "load_control": "none", "diversity_coeff": 0.0}
    buffer = a_buffer(**{**values, **settings})
    buffer.add([a_group(a_prompt(i, "ab"[i % 2]), 1, i, RIGHT) for i in range(8)], 1)
    buffer.due(0, 2)  # all enter the schedule
    return buffer


def test_an_item_that_is_not_due_fills_a_slot_or_leaves_it():
    assert len(rested().due(4, 3)) == 4
    buffer = rested(fill_with_not_due=False)
    assert buffer.due(4, 3) == []
    assert len(buffer.due(4, 9)) == 4


def test_a_lapse_makes_its_domain_due_and_no_other():
    for half_life, expected in ((0.0, set()), (4.0, {"a"})):
        buffer = rested(fill_with_not_due=False, domain_half_life=half_life)
        buffer.add([a_group(a_prompt(0, "a"), 3, rewards=WRONG), a_group(a_prompt(1, "b"), 3, 1, RIGHT)], 3)
        asked = buffer.due(8, 4, without=[a_prompt(0, "a").key])
        assert {prompt.domain for prompt in asked} == expected
        assert len(asked) == 3 * len(expected)  # its three siblings
        buffer.check_valid()


def fail_after_a_note(buffer):
    with buffer._transaction(""):
        buffer.recall.domains.note(np.array([1]), np.array([0.0]), np.array([0.9]), 3)
        raise ZeroDivisionError


def test_the_news_survives_a_restart_and_an_error(tmp_path):
    buffer = rested(fill_with_not_due=False, domain_half_life=4.0, directory=tmp_path)
    buffer.add([a_group(a_prompt(0, "a"), 3, rewards=WRONG)], 3)
    told = buffer.recall.domains.get_state()
    assert told != []
    with pytest.raises(ZeroDivisionError):
        fail_after_a_note(buffer)
    assert buffer.recall.domains.get_state() == told
    buffer.close()
    again = a_buffer(directory=tmp_path, fill_with_not_due=False, domain_half_life=4.0)
    assert again.recall.domains.get_state() == told
    again.close()


def test_why_says_that_a_draw_was_for_the_domain(tmp_path):
    buffer = rested(domain_half_life=4.0, directory=tmp_path)
    buffer.add([a_group(a_prompt(0, "a"), 3, rewards=WRONG), a_group(a_prompt(1, "b"), 3, 1, RIGHT)], 3)
    asked = buffer.due(6, 4, "4.due", without=[a_prompt(0, "a").key, a_prompt(1, "b").key])
    buffer.close()
    with reading(tmp_path) as read:
        told = {prompt.domain: why(find(read, prompt.prompt_id), 9)[0] for prompt in asked}
    # One lapse against a prediction near 1, an iteration ago: 1 / (.84 + 1); every domain starts with the 1s.
    assert "due in 5 iterations (drawn for its domain's lapses), predicted recall 0." in told["a"]
    assert "its domain recalls 0.5" in told["a"]
    assert "due in 5 iterations (drawn early)" in told["b"] and "its domain" not in told["b"]

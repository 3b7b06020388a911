"""A sitting of a rater: what is shown, in which order, and what the replies do."""

import pytest

from rllib_srl.cli.rate import NO_MORE, RatingSession, shown
from rllib_srl.people.rating_store import RATINGS, RatingStore
from tests.people.answers import an_answer

ANSWERS = [an_answer(number) for number in range(4)]


@pytest.fixture
def sit(tmp_path, request):
    """Return a function that gives replies to a session and returns what was shown, and the values stored."""
    with RatingStore(tmp_path / RATINGS, getattr(request, "param", "")) as store:

        def of(replies: str, num: int | None = None) -> tuple[list[str], list[str]]:
            lines, told = iter([reply.replace("_", " ") for reply in replies.split()]), []

            def read(prompt: str) -> str:
                told.append(prompt)
                if (line := next(lines, None)) is None:
                    raise EOFError
                return line + "\n"

            session = RatingSession(store, lambda: iter(ANSWERS), read, told.append, rater="ann")
            found = session.run()
            assert num is None or found == num
            return told, [store.value_of(answer) for answer in ANSWERS]

        yield of


def ids(told: list[str]) -> list[str]:
    """Return the answers shown, in order."""
    return [line.split()[1] for text in told for line in text.split("\n") if line.startswith("── ")]


def test_replies_rate_answers_in_order(sit):
    told, values = sit("good b s 5 u q", num=2)
    assert values == ["good", "bad", "none", "none"]
    assert ids(told) == ["12.0/0", "12.1/0", "12.2/0", "12.3/0", "12.3/0"]
    assert "rated 12.0/0 good, reward 1" in told and "undone: 12.3/0 is none" in told


def test_a_session_ends_with_its_answers_or_its_replies(sit):
    told, values = sit("1 2 3 4", num=4)
    assert values == ["1", "2", "3", "4"]
    assert ids(told) == [f"12.{n}/0" for n in (0, 1, 2, 3)]  # what was rated here is not shown again
    told, values = sit("bad", num=1)  # all are rated: they are shown with their ratings
    assert values == ["bad", "2", "3", "4"] and "rated 12.0/0 bad (it was 1), reward 0" in told
    assert "model version 11, rated 1" in told[0] and ids(told) == ["12.0/0", "12.1/0"]
    assert sit("", num=0)[1] == values


def test_unrated_answers_come_first_and_all_end_with_a_note(sit):
    sit("s good")
    told, values = sit("good good good 3", num=4)
    assert ids(told) == ["12.0/0", "12.2/0", "12.3/0", "12.1/0"]
    assert values == ["good", "3", "good", "good"] and told[-2:] == [NO_MORE, "undo, quit: "]


def test_undo_goes_back_one_by_one_and_restores_what_was_before(sit):
    sit("4")
    told, values = sit("u good s undo undo bad", num=1)
    assert told[1:3] == ["good, bad, 1 to 5, skip, undo, quit: ", "nothing to undo"]
    assert ids(told) == [f"12.{n}/0" for n in (1, 1, 2, 3, 2, 1, 2)]
    assert values == ["4", "bad", "none", "none"]


def test_an_unknown_reply_is_asked_again(sit):
    told, values = sit("fine 6 GOOD q", num=1)
    assert "'fine'; expected good, bad, 1 to 5, skip, undo, quit" in told
    assert values[0] == "good" and ids(told) == ["12.0/0", "12.1/0"]


@pytest.mark.parametrize("sit", ["hybrid"], indirect=True)
def test_a_scheme_has_its_own_replies(sit):
    told, values = sit("good g4 bad__2 q", num=2)
    assert values[:2] == ["good 4", "bad 2"]
    asked = "good 1 to good 5, bad 1 to bad 5, skip, undo, quit"
    assert f"'good'; expected {asked}" in told and "rated 12.1/0 bad 2, reward -0.4" in told


def test_an_answer_is_shown_with_prompt_domain_and_version():
    assert shown(an_answer(answer="two\nlines\n"), None).split("\n")[1:] == [
        "── 12.3/0  domain sums, model version 11", " prompt │ What is 3 + 1?", " answer │ two", "        │ lines"
    ]

"""The way of ratings from the file into a memory: once, in time, and again after what a restart has undone."""

import pytest

from rllib_srl.people.rating import Answer
from rllib_srl.people.rating_feed import RatingFeed
from rllib_srl.people.rating_store import RATINGS, RatingsError
from rllib_srl.people.stored_answers import StoredAnswers
from rllib_srl.replay.client import ReplayClient
from rllib_srl.replay.ratings import fingerprint
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import Group, GroupMeta
from scripts.memory_laws import check_valid
from tests.people.test_rating_store import store as store  # a fixture
from tests.small_buffer import a_group

GROUPS = [a_group(number, (0.0, 0.0), 1) for number in range(4)]


def answer_of(group: Group, episode: int = 0) -> Answer:
    return Answer(
        *(group.group_id, episode, group.prompt.key, fingerprint(group, episode), "env", "sums", 0, "prompt", "text")
    )


@pytest.fixture
def memory(tmp_path):
    """Return a memory with `GROUPS`."""
    settings = ReplaySettings(capacity=50, min_buffer_size=1, admit=None, max_uses=9)
    where = {"directory": tmp_path / "replay", "seed": 1, "run": "run", "is_local": True, "timeout_s": 5.0}
    memory = ReplayClient.start(settings, **where)
    memory.add([GroupMeta.of(group, group) for group in GROUPS], 1)
    yield memory
    check_valid(memory.process.actor)
    memory.stop()


def test_a_new_process_feeds_again_what_was_unused(tmp_path, memory, store):
    later = a_group(7, (0.0, 0.0), 2)
    store.rate(answer_of(later), "good")
    RatingFeed(tmp_path / RATINGS).apply(memory, 1)
    memory.add([GroupMeta.of(later, later)], 2)  # the process ends before its next iteration
    assert RatingFeed(tmp_path / RATINGS).apply(memory, 2)["num_applied"] == 1


def test_a_damaged_file_is_found_at_the_start_and_leaves_the_memory_alone(tmp_path, memory):
    (tmp_path / RATINGS).write_bytes(b"damaged" * 1000)
    feed = RatingFeed(tmp_path / RATINGS)
    for call in (feed.check, lambda: feed.apply(memory, 1)):
        with pytest.raises(RatingsError, match="the file is damaged"):
            call()
    assert memory.rated_until("x")[0] == 0


def decode(ids):
    return "".join(f"<{number}>" for number in ids)


def test_answers_of_a_live_memory_and_what_has_become_of_their_ratings(tmp_path, memory, store):
    feed = RatingFeed(tmp_path / RATINGS)
    newer = a_group(7, (0.0, 0.0), 2)
    memory.add([GroupMeta.of(newer, newer)], 2)
    with StoredAnswers.of_run(tmp_path, lambda: decode) as answers:
        listed = list(answers.newest_first())
        assert len(listed) == 10 and [one.group_id for one in listed[:2]] == ["2.7", "2.7"]
        one = answers.find("1.2/1")
        assert one == next(each for each in listed if each.answer_id == "1.2/1")
        assert (one.prompt, one.answer, one.domain, one.version) == ("<1>", "<10>", "sums", 0)
        assert one.fingerprint == fingerprint(GROUPS[2], 1) and one.key == GROUPS[2].prompt.key
        assert [answers.find(name) for name in ("1.2/2", "1.9/0", "1.2", "", "x/y")] == [None] * 5
    store.rate(one, "good")
    gone = answer_of(a_group(9, (0.0, 0.0), 1))
    store.rate(gone, "good")
    assert states(tmp_path, store) == ["waits for the next iteration of the run"] * 2
    feed.apply(memory, 2)
    assert states(tmp_path, store) == ["applied", "unused: the answer is not in the memory"]
    store.rate(one, "bad")
    feed.apply(memory, 3)
    assert states(tmp_path, store)[1] == "applied"
    store.rate(one, "none")
    feed.apply(memory, 3)
    assert states(tmp_path, store)[1] == "taken back"


def states(directory, store) -> list[str]:
    with StoredAnswers.of_run(directory, lambda: decode) as answers:
        return [answers.state_of(one.answer, one.seq) for one in store.all()]


@pytest.mark.parametrize("name", ["", "missing", "file"])
def test_what_is_no_run_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("x")
    with pytest.raises(match="expected the directory of a run"), StoredAnswers.of_run(tmp_path / name, None):
        pass

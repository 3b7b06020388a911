"""The file of ratings: what was acknowledged is there, whoever writes beside, and what is no such file is named."""

import os
import signal
import stat
import sys
from subprocess import PIPE, Popen

import pytest

from rllib_srl.people.rating import TAKEN_BACK
from rllib_srl.people.rating_store import RATINGS, RatingsError, RatingStore
from tests.conftest import ROOT
from tests.people.answers import an_answer


@pytest.fixture
def store(tmp_path):
    with RatingStore(tmp_path / RATINGS) as store:
        yield store


def test_a_rating_is_kept_with_its_answer(store):
    answer = an_answer()
    assert answer.answer_id == "12.3/0" and store.newest_change() == 0
    assert store.rate(answer, "4", rater="ann")
    (one,) = store.all()
    assert (one.answer, one.value, one.rater, one.seq) == (answer, "4", "ann", 1)
    assert one.rated_at.endswith("+00:00") and store.newest_change() == 1
    assert store.of_answer("12.3/0") == one and store.of_answer("12.3/1") is None
    assert store.value_of(answer) == "4" and store.value_of(an_answer(episode=1)) == TAKEN_BACK
    with RatingStore(store.path) as again:
        assert again.all() == [one] and again.source_id == store.source_id


def test_what_a_rating_of_no_scheme_is_follows_from_its_value(store):
    for number, value in enumerate(("good", "bad", "4", TAKEN_BACK)):
        store.rate(an_answer(number), "1")
        store.rate(an_answer(number), value)
    facts = [(one.reward, one.quality, one.pass_reward, one.is_binary) for one in store.all()]
    assert facts == [(1.0, 1.0, 1.0, True), (0.0, 0.0, 1.0, True), (0.75, 0.75, 0.75, False), (None, None, None, False)]


@pytest.mark.parametrize(("scheme", "rewards", "qualities", "mark"), [
    ("binary", {"good": 1.0, "bad": 0.0}, [1.0, 0.0], 1.0),
    ("ordinal", {"2": 0.25, "5": 1.0}, [0.25, 1.0], 0.75),
    ("hybrid", {"good 4": 0.8, "bad 2": -0.4, "good 1": 0.2, "bad 5": -1.0}, [0.9, 0.3, 0.6, 0.0], 0.2),
])  # fmt: skip
def test_rewards_of_a_scheme(tmp_path, scheme, rewards, qualities, mark):
    with RatingStore(tmp_path / RATINGS, scheme) as store:
        for number, value in enumerate(rewards):
            store.rate(an_answer(number), value)
        assert {one.value: one.reward for one in store.all()} == pytest.approx(rewards)
        assert [one.quality for one in store.all()] == pytest.approx(qualities)
        assert {one.pass_reward for one in store.all()} == {mark}
        assert store.all()[0].shown == f"{next(iter(rewards))} (reward {next(iter(rewards.values())):g})"


def test_normalised_rewards_follow_the_stars_of_each_rater(tmp_path):
    with RatingStore(tmp_path / RATINGS, "normalised") as store:
        for number, (rater, stars) in enumerate([("ann", "5"), ("bob", "1"), ("ann", "5"), ("ann", "none")]):
            store.rate(an_answer(number), stars, rater)
        store.rate(an_answer(2), "none", "ann")  # takes back, which moves nothing
    with RatingStore(tmp_path / RATINGS) as store:  # the file has the scheme
        store.rate(an_answer(5), "3", "ann")
        rewards = [one.reward for one in store.changed_since(0)]
    # Mean 3 and variance 2 before the first star; after a 5: 3 + .05 * 2 = 3.1, .95 * (2 + .05 * 4) = 2.09;
    # after another: 3.1 + .05 * 1.9 = 3.195, .95 * (2.09 + .05 * 1.9 ** 2) = 2.156975.
    assert rewards == [2 / 2**0.5, -2 / 2**0.5, None, pytest.approx((3 - 3.195) / 2.156975**0.5)]


def test_a_correction_is_normalised_as_the_first_rating_was_and_moves_no_other_reward(tmp_path):
    rewards = []
    with RatingStore(tmp_path / RATINGS, "normalised") as store:
        for number, stars in [(0, "4"), (0, "1"), (1, "5"), (1, "none"), (0, "4"), (1, "5"), (1, "3")]:
            store.rate(an_answer(number), stars, "ann")
            rewards += [one.reward for one in store.changed_since(store.newest_change() - 1) if one.is_given]
    # Answer 0: mean 3 and variance 2. Answer 1, after a 4: mean 3.05, variance .95 * (2 + .05 * 1) = 1.9475.
    of_0, of_1 = ((4 - 3) / 2**0.5, (1 - 3) / 2**0.5), ((5 - 3.05) / 1.9475**0.5, (3 - 3.05) / 1.9475**0.5)
    assert rewards == pytest.approx([*of_0, of_1[0], of_0[0], *of_1])


def test_a_file_keeps_its_scheme_and_one_with_ratings_gets_no_other(tmp_path):
    path = tmp_path / RATINGS
    RatingStore(path).close()
    with RatingStore(path, "hybrid") as store:
        with pytest.raises(ValueError, match="rating = 'good'; expected good 1 to good 5, bad 1 to bad 5, or none"):
            store.rate(an_answer(), "good")
        assert store.rate(an_answer(), "good 4")
    with RatingStore(path) as store:
        assert store.scheme == "hybrid" and store.all()[0].scheme == "hybrid"
    with pytest.raises(ValueError, match=r"scheme = 'binary': .* has scheme 'hybrid' already"):
        RatingStore(path, "binary")
    with pytest.raises(ValueError, match="scheme = 'likert'; expected one of binary, ordinal, normalised, hybrid"):
        RatingStore(path, "likert")
    with RatingStore(tmp_path / "other.db") as store:
        store.rate(an_answer(), "good")
    with pytest.raises(ValueError, match="has ratings without a scheme"):
        RatingStore(tmp_path / "other.db", "binary")


def test_the_newest_rating_counts_and_repeating_it_writes_nothing(store):
    answer = an_answer()
    assert [store.rate(answer, value) for value in ("good", "good", "bad", "none", "none")] == [
        *(True, False, True, True, False)
    ]
    (one,) = store.all()
    assert (one.value, one.is_given, one.reward, one.seq) == (TAKEN_BACK, False, None, 3)
    assert not store.rate(an_answer(9), "none") and len(store.all()) == 1  # never rated: nothing to take back


def test_changes_come_once_and_a_group_with_all_its_ratings(store):
    for episode in (0, 1):
        store.rate(an_answer(episode=episode), "good")
    store.rate(an_answer(4), "1")
    assert [one.answer.answer_id for one in store.changed_since(1)] == ["12.3/1", "12.4/0"]
    store.rate(an_answer(episode=0), "bad")
    assert [(one.answer.answer_id, one.value) for one in store.changed_since(3)] == [("12.3/0", "bad")]
    assert [one.value for one in store.of_groups(["12.3"])] == ["good", "bad"] and store.changed_since(4) == []
    assert store.group_ids() == {"12.3", "12.4"}


def test_another_answer_under_the_same_id_has_a_rating_of_its_own(store):
    first, other = an_answer(), an_answer(fingerprint="f" * 16, answer="other")
    store.rate(first, "good")
    assert store.value_of(other) == TAKEN_BACK and store.rate(other, "bad")
    assert (store.value_of(first), store.value_of(other)) == ("good", "bad")
    newest = store.of_answer("12.3/0")
    assert newest is not None and newest.answer == other


def test_file_and_copy_are_private_and_the_copy_keeps_the_id(store, tmp_path):
    store.rate(an_answer(), "good")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in store.path.parent.iterdir()}
    assert set(modes.values()) == {0o600} and f"{RATINGS}-wal" in modes
    store.copy_to(tmp_path / "copy.db")
    assert stat.S_IMODE((tmp_path / "copy.db").stat().st_mode) == 0o600
    with RatingStore(tmp_path / "copy.db") as copy:
        assert (copy.source_id, copy.all()) == (store.source_id, store.all())


def test_damage_inside_is_one_clear_error(store):
    for number in range(200):
        store.rate(an_answer(number, answer="x" * 500), "good")
    store.close()
    data = bytearray(store.path.read_bytes())
    data[4096 * 2 : 4096 * 30] = os.urandom(4096 * 28)
    store.path.write_bytes(data)
    with pytest.raises(RatingsError, match="failed: database disk image is malformed: the file is damaged"):
        RatingStore(store.path).all()


WRITER = """
import sys
from pathlib import Path
from rllib_srl.people.rating_store import RatingStore
from tests.people.answers import an_answer
with RatingStore(Path(sys.argv[1])) as store:
    for number in range(int(sys.argv[3])):
        store.rate(an_answer(number, int(sys.argv[2])), "good", rater="rater " + sys.argv[2])
        print(number, flush=True)
"""


def rater(path, episode: int, num: int) -> Popen:
    command = [sys.executable, "-c", WRITER, str(path), str(episode), str(num)]
    return Popen(command, stdout=PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_two_raters_at_once_lose_nothing(tmp_path):
    both = [rater(tmp_path / RATINGS, episode, 50) for episode in (0, 1)]
    outs = [process.communicate(timeout=240)[0] for process in both]
    assert [len(out.split()) for out in outs] == [50, 50]
    with RatingStore(tmp_path / RATINGS) as store:
        found = {(one.answer.group_id, one.answer.episode, one.rater) for one in store.all()}
    assert found == {(f"12.{number}", episode, f"rater {episode}") for number in range(50) for episode in (0, 1)}


def test_what_a_killed_rater_acknowledged_is_there(tmp_path):
    process = rater(tmp_path / RATINGS, 0, 10_000)
    assert process.stdout is not None
    told = [int(process.stdout.readline()) for _ in range(20)]
    process.send_signal(signal.SIGKILL)
    told += [int(line) for line in process.stdout.read().split("\n")[:-1]]
    process.wait(timeout=240)
    with RatingStore(tmp_path / RATINGS) as store:
        numbers = sorted(int(one.answer.group_id.split(".")[1]) for one in store.all())
    assert numbers[: len(told)] == told and len(numbers) <= len(told) + 1

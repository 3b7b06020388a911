"""Ratings: every scheme by hand, files that several read and write, deadlines, changes, and ratings that come late."""

from __future__ import annotations

import json
import threading
import time
from statistics import pvariance

import numpy as np
import pytest

from rllib_srl.engine.protocol import Sampling
from rllib_srl.envs.people.rating import (
    ASKED,
    RATINGS,
    LateRatings,
    Moving,
    Rating,
    RatingFiles,
    RatingQueue,
    append,
    reward_of,
)
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.rollout import EnvCalls, Limits, LiveEpisode, RawTranscript, to_group
from rllib_srl.rollout.player import play
from rllib_srl.types import Prompt, StopReason
from tests.scripted_engine import Bytes, GoldEngine

PROMPT_ID = "17, 93, 40"
QUEUE = RatingQueue()  # a source by import path


def world(source, **settings):
    compare = {"world": "rllib_srl.envs.math.compare:Compare", "world_config": {"num_shots": 0}}
    return Rating({**compare, "source": str(source), "deadline_s": 0.05, **settings})


def rated(directory, *rows, **settings):
    """Answer as soon as a person has rated each answer with `rows`; return the steps."""
    env, steps = world(directory, deadline_s=60.0, **settings), []
    for row in rows:
        env.reset(options={"prompt_id": PROMPT_ID})
        person = threading.Thread(target=rate_next, args=(directory, len(steps), row))
        person.start()
        steps.append(env.step(" 93\n"))
        person.join(60)
    return steps


def rate_next(directory, number, row):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if len(requests := asked(directory)) > number:
            append(directory / RATINGS, {"id": requests[number]["id"], **row})
            return
        time.sleep(0.005)


def rows_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def asked(directory):
    return [row for row in rows_in(directory / ASKED) if "answer" in row]


@pytest.mark.parametrize(("scheme", "rating", "reward"), [
    ("binary", {"up": True}, 1.0), ("binary", {"up": False, "stars": 5}, 0.0), ("ordinal", {"stars": 1}, 0.0),
    ("ordinal", {"stars": 4}, 0.75), ("ordinal", {"stars": 5}, 1.0), ("hybrid", {"up": True, "stars": 4}, 0.8),
    ("hybrid", {"up": False, "stars": 2}, -0.4),
])  # fmt: skip
def test_rewards_by_hand(tmp_path, scheme, rating, reward):
    assert reward_of(rating, scheme) == pytest.approx(reward)
    ((said, paid, terminated, truncated, info),) = rated(tmp_path, rating, scheme=scheme)
    assert (said, terminated, truncated) == ("", True, False) and paid == pytest.approx(reward)
    (request,) = asked(tmp_path)
    assert info == {"rating": request["id"], **{f"rating_{name}": value for name, value in rating.items()}}
    assert {**request, "id": ""} == {
        "id": "", "prompt_id": PROMPT_ID, "answer": "93", "prompt": "Question: Which is largest: 17, 93 or 40?\nAnswer:"
    }  # fmt: skip


def test_a_moving_mean_and_variance_by_hand():
    moving = Moving(momentum=0.5)
    assert moving.normalised(5) == pytest.approx(2 / 2**0.5)  # against mean 3, variance 2
    assert (moving.mean, moving.variance) == (4.0, 0.5 * (2 + 0.5 * 4))  # d = 2
    assert moving.normalised(1) == pytest.approx(-3 / 2**0.5)
    # In the long run both are those of the ratings.
    moving, stars = Moving(0.999), np.random.default_rng(0).integers(1, 6, 20_000).tolist()
    normalised = [moving.normalised(each) for each in stars]
    assert moving.mean == pytest.approx(3, abs=0.15) and moving.variance == pytest.approx(2, abs=0.15)
    assert sum(normalised[-5000:]) / 5000 == pytest.approx(0, abs=0.1)
    assert pvariance(normalised[-5000:]) == pytest.approx(1, abs=0.1)


def test_normalised_ratings_depend_on_the_file_and_not_on_who_reads_it(tmp_path):
    steps = rated(tmp_path, {"stars": 5}, {"stars": 1}, {"stars": 1}, scheme="normalised", momentum=0.5)
    moving = Moving(0.5)
    expected = [moving.normalised(stars) for stars in (5, 1, 1)]
    assert [step[1] for step in steps] == pytest.approx(expected)
    other = RatingFiles(tmp_path, ("stars",), Moving(0.5))  # reads all at once, later
    other.read()
    assert [other.normalised(request["id"]) for request in asked(tmp_path)] == pytest.approx(expected)


def test_without_a_rating_the_episode_says_nothing(tmp_path):
    env = world(tmp_path)
    env.reset(options={"prompt_id": PROMPT_ID})
    started = time.monotonic()
    assert env.step(" 93\n") == ("", 0.0, False, True, {"stop_reason": "env_timeout"})
    assert 0.05 <= time.monotonic() - started < 20
    request, closed = rows_in(tmp_path / ASKED)
    assert closed == {"id": request["id"], "used": None}


def test_the_last_rating_counts_and_may_be_taken_back(tmp_path):
    def person(before, *ratings):
        deadline = time.monotonic() + 60
        while not (new := set(QUEUE.asked) - before) and time.monotonic() < deadline:
            time.sleep(0.002)
        for rating in ratings:
            QUEUE.rate(min(new), **rating)

    for ratings, outcome, deadline_s in (
        ([{"taken_back": True}, {"taken_back": True, "stars": 1}, {"stars": 2}], (0.25, True), 60.0),
        ([{"taken_back": True}], (0.0, False), 3.0),
    ):
        env = world(f"{__name__}:QUEUE", scheme="ordinal", deadline_s=deadline_s)
        env.reset(options={"prompt_id": PROMPT_ID})
        thread = threading.Thread(target=person, args=(set(QUEUE.asked), *ratings))
        thread.start()
        assert env.step(" 93\n")[1:3] == outcome
        thread.join(60)
    files = RatingFiles(tmp_path, ("stars",))
    for row in ({"stars": 4}, {"stars": 2}):
        append(tmp_path / RATINGS, {"id": "a", **row})
    assert files.rating_of("a")["stars"] == 2
    append(tmp_path / RATINGS, {"id": "a", "taken_back": True})
    assert files.rating_of("a")["taken_back"] and files.rating_of("b") is None


def test_broken_lines_are_named_counted_and_left_out(tmp_path, caplog):
    good = {"id": "a", "stars": 3}
    lines = ["not json", "[1]", '{"stars": 3}', '{"id": "b", "stars": 9}', '{"id": "b", "stars": true}',
             '{"id": "b"}', "", "[" * 100_000, json.dumps(good)]  # fmt: skip
    (tmp_path / RATINGS).write_text("\n".join(lines) + '\n{"id": "c", "sta')
    files = RatingFiles(tmp_path, ("stars",))
    assert files.rating_of("a") == good and files.rating_of("b") is None and files.num_broken == 7
    said = "\n".join(record.getMessage() for record in caplog.records)
    for fault in ("ratings.jsonl, line 1: not valid JSON", "line 3: field id is missing",
                  "rating of b: stars = 9; expected a number from 1 to 5", "stars = None; expected"):  # fmt: skip
        assert fault in said
    with (tmp_path / RATINGS).open("a") as stream:  # the last line is whole only now
        stream.write('rs": 5}\n')
    assert files.rating_of("c") == {"id": "c", "stars": 5} and files.num_broken == 7


def test_late_and_changed_ratings_are_handed_out_once(tmp_path):
    late = LateRatings(tmp_path)
    ids = [f"id{number}" for number in range(5)]
    for number, each in enumerate(ids):
        append(tmp_path / ASKED, {"id": each, "prompt_id": f"p{number}", "prompt": "?", "answer": "!"})
    for each, used in zip(ids, [None, {"stars": 5}, {"stars": 5}, None], strict=False):  # the last is under way
        append(tmp_path / ASKED, {"id": each, "used": used})
    for each, stars in zip(ids, [4, 1, 5, 3, 2], strict=True):
        append(tmp_path / RATINGS, {"id": each, "stars": stars})
    append(tmp_path / RATINGS, {"id": "id3", "taken_back": True})
    assert late.new() == {"p0": 0.75, "p1": 0.0}  # unrated in time, and changed from 5 to 1; id2 was used as it is
    assert late.new() == {} == LateRatings(tmp_path).new()
    append(tmp_path / ASKED, {"id": "id4", "used": {"stars": 2}})
    assert late.new() == {}
    append(tmp_path / RATINGS, {"id": "id4", "stars": 3})
    append(tmp_path / RATINGS, {"id": "id0", "stars": 5})
    assert LateRatings(tmp_path).new() == {"p0": 1.0, "p4": 0.5}
    assert late.new() == {}


def test_unrated_episodes_leave_their_group_and_late_ratings_grade_the_item(tmp_path):
    """Through the runner's loop and the memory: two of three episodes are rated, the third rating comes later."""
    prompt, source = Prompt("rating", PROMPT_ID), tmp_path / "ratings"
    env = world(source, deadline_s=3.0)
    tokens = Bytes()
    engine = GoldEngine(tokens, {"g": [" 93\n"]})
    calls = EnvCalls(3, 30.0)

    def person():
        deadline = time.monotonic() + 60
        while len(requests := asked(source)) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        for request, stars in zip(requests[:2], (5, 2), strict=True):
            append(source / RATINGS, {"id": request["id"], "stars": stars})

    thread = threading.Thread(target=person)
    thread.start()
    episodes = list(
        play(
            [LiveEpisode(prompt, "g", index) for index in range(3)],
            engine=engine, worlds={"rating": lambda: world(source, deadline_s=3.0)}, transcript=RawTranscript(tokens),
            sampling=Sampling(max_tokens=1), limits=Limits(1, 4, 200), calls=calls, deadline_s=60.0,
        )
    )  # fmt: skip
    thread.join(60)
    calls.close()
    reasons = sorted(episode.custom_data["stop_reason"].value for episode in episodes)
    assert reasons == [StopReason.ENV_TIMEOUT.value, "terminated", "terminated"]
    group = to_group(prompt, "g", episodes)
    assert sorted(group.rewards_G.tolist()) == [0.25, 1.0] and group.num_dropped == 1

    buffer = SRLReplayBuffer(ReplaySettings.from_dict({"rating_scale": "normalised", "admit": None}).checked())
    buffer.add([group], now=1)
    append(source / RATINGS, {"id": asked(source)[2]["id"], "stars": 4})
    late = LateRatings(source).new()
    assert late == {PROMPT_ID: 0.75}
    assert buffer.rate({Prompt("rating", each).key: rating for each, rating in late.items()}, now=2) == 1
    env.close()

"""Votes where nobody rates: who is good, what is left alone, and that people come first."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial

import pytest

from rllib_srl.cli.serving.self_label import SelfLabels
from rllib_srl.cli.serving.serve import parse, training_of
from rllib_srl.cli.serving.served_directory import ServedDirectory
from rllib_srl.cli.serving.stores import Stores
from rllib_srl.cli.serving.translation import Sampling
from rllib_srl.envs.agents.web import Refusal
from scripts.evening import Served, comparison_of
from tests.cli.serving.small_engine import served_with


def labels_of(parts, num=3, after_s=0.0):
    return SelfLabels(parts.stores, parts.serving, parts.training, Sampling(1.0, 16, ()), num, after_s)


def run(directory, body):
    async def all_of_it():
        async with served_with(directory, after=100) as parts:
            await body(parts)

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


async def ratings(parts):
    return {one.answer.group_id: (one.value, one.rater) for one in await parts.stores.run(parts.stores.ratings.all)}


async def asked(parts, text="A pear."):
    parts.engine.texts = [text]
    return (await parts.ask()).json()["id"]


async def voted(labels):
    """Take turns until nothing is left; return their number."""
    for number in range(20):
        if not await labels.turn():
            return number
    raise AssertionError("there is no end of it")


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["a  PEAR", "An apple.", "a pear"], ["good", "good", "bad", "good"]),
        (["x", "y", "x"], []),  # two of four are no majority
        (["A pear."] * 3, []),  # all agree: nothing to learn
        (["", "", "A pear."], []),
        (["Well. Answer: a pear", "", "A pear"], ["good", "good", "bad", "good"]),
    ],
)
def test_more_than_half_of_the_answers_are_good(tmp_path, texts, values):
    async def body(parts):
        name = await asked(parts)
        parts.engine.texts = list(texts)
        assert await voted(labels_of(parts)) == 4  # three answers and a vote
        names = [name, *(f"{name}-s{number}" for number in range(3))]
        found = await ratings(parts)
        assert found == {one: (value, "majority") for one, value in zip(names, values, strict=False)}
        assert len(await parts.stores.run(parts.stores.free_ratings)) == len(values)
        bodies = parts.engine.bodies
        assert all(one["messages"] == bodies[0]["messages"] and one["temperature"] == 1.0 for one in bodies)
        logged = await parts.stores.run(parts.stores.conversations.find, names[3])
        assert logged.tokens.ids == [5, 6] and logged.finish_reason == "stop"
        assert await voted(labels_of(parts)) == (0 if values else 1)  # after a restart: no more answers

    run(tmp_path, body)


def test_what_a_person_has_rated_or_was_asked_just_now_is_left_alone(tmp_path):
    async def body(parts):
        first, second = await asked(parts), await asked(parts)
        assert await voted(labels_of(parts, after_s=60)) == 0
        await parts.rate(first, rating="bad", rater="ann")
        await parts.rate(second, rating="good", rater="ann")
        await parts.rate(second, rating="none", rater="ann")
        assert await voted(labels_of(parts)) == 0
        third = await asked(parts)
        labels, parts.engine.texts = labels_of(parts), ["A plum.", "A pear.", "A pear."]
        for _ in range(3):
            await labels.turn()
        await parts.rate(third, rating="bad", rater="ann")  # while the vote was prepared
        assert await voted(labels) == 0
        assert (await ratings(parts))[third] == ("bad", "ann") and f"{third}-s0" not in await ratings(parts)

    run(tmp_path, body)


def test_an_answer_to_a_person_comes_first(tmp_path):
    async def body(parts):
        name = await asked(parts)
        parts.engine.texts = ["A pear."] * 9
        labels = labels_of(parts)
        sampling = asyncio.create_task(labels.turn())
        while not parts.serving.num_under_way:
            await asyncio.sleep(0.001)
        with parts.serving.answering():
            assert await sampling is False
        assert await parts.stores.run(parts.stores.conversations.find, f"{name}-s0") is None
        parts.training.pause(True)
        task = asyncio.create_task(labels.run())
        await asyncio.sleep(0.2)
        assert len(parts.engine.bodies) <= 2  # that of the person, and the one that was cut off
        parts.training.pause(False)
        task.cancel()

    run(tmp_path, body)


def test_a_conversation_that_the_engine_refuses_does_not_hold_up_the_others(tmp_path):
    async def body(parts):
        await asked(parts)
        labels, parts.engine.fault = labels_of(parts), "400"
        with pytest.raises(Refusal, match="400: too long"):
            await labels.turn()
        parts.engine.fault = ""
        assert not await labels.turn()

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--self-label", "1"], "--self-label 1; expected 0, or 2 to 64"),
        (["--self-label", "4", "--train-after", "0"], "--self-label is given, and --train-after is 0"),
        (["--self-label", "4", "--self-label-after", "-1"], "--self-label-after -1; expected 0 to 2.592e+06"),
        (["--self-label", "4", "--scheme", "hybrid"], "and --scheme hybrid has neither"),
        (["--self-label", "4", "--self-label-after", "nan"], "--self-label-after nan; expected 0"),
    ],
)
def test_wrong_flags_are_one_clear_error(tmp_path, flags, fault):
    with pytest.raises(ValueError, match="the server cannot start") as error:
        training_of(parse(["tiny", "--out", str(tmp_path), "--keep", "compare", *flags]))
    assert fault in str(error.value)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_server_rates_by_majority_and_trains_on_it(tmp_path):
    flags = ["tiny", "--keep", "compare", "--train-after", 8, "--lr", 1e-4, "--rank", 4, "--passes", 1]
    flags += ["--gate-prompts", 8, "--max-drop", 0.9, "--max-tokens", 8, "--self-label", 4, "--self-label-after", 1]
    rng = random.Random(3)
    with (tmp_path / "log").open("w") as log:
        served = Served(flags, tmp_path / "served", log)
        try:
            answers = dict(served.ask(comparison_of(rng))[:2] for _ in range(24))
            deadline = time.monotonic() + 400
            while served.call("GET", "/versions")["active"] == 0:
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
                time.sleep(0.5)
        finally:
            served.stop()
    stores = Stores(ServedDirectory(tmp_path / "served"))
    rated = {one.answer.group_id: one for one in stores.now(stores.ratings.all)}
    firsts = {name.partition("-s")[0] for name in rated}
    assert len(rated) >= 8 and {one.rater for one in rated.values()} == {"majority"} and firsts <= set(answers)
    for first in firsts:  # an answer is good if it is that of more than half
        names = [first, *(f"{first}-s{number}" for number in range(4))]
        texts = [stores.now(partial(stores.conversations.find, name)).answer.strip() for name in names]
        (top,) = [text for text in set(texts) if texts.count(text) > 2]
        assert texts[0] == answers[first].strip()
        assert [rated[name].value == "good" for name in names] == [text == top for text in texts]
    stores.close()

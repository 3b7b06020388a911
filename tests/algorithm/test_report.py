"""Reports: batches that earn nothing, transcripts without secrets, one event file."""

import io
import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_srl import SRLConfig
from rllib_srl.algorithm.metrics import Report
from rllib_srl.algorithm.srl import SRL, Iteration
from rllib_srl.batch.advantages import AdvantageBatch, AdvantageEstimator
from rllib_srl.cli.shared.display import Progress
from rllib_srl.cli.shared.run_log import PARTS, json_lines
from rllib_srl.cli.shared.runs import METRICS
from rllib_srl.cli.shared.training import train_until
from rllib_srl.curriculum.curriculum import Curriculum
from rllib_srl.losses.settings import LossSettings
from rllib_srl.replay.intake import Visit
from rllib_srl.rollout.batches import RunnerBatch
from rllib_srl.rollout.episodes import MAX_SHOWN_CHARS, is_unparsed, unpaid_answers
from rllib_srl.types import GroupMeta, StopReason
from tests.replay.groups import a_group
from tests.small_envs import small_config


def an_episode(reward=0.0, index=0, group_id="g", reason=StopReason.TERMINATED, said="It is 7\n", **info):
    episode = SingleAgentEpisode(
        observations=[np.zeros(2, np.int32), np.zeros(0, np.int32)], infos=[{}, info], actions=[np.zeros(1, np.int32)],
        rewards=[reward], terminated=True, len_lookback_buffer=0,
    )  # fmt: skip
    text = [("environment", "Question: 3 + 5\nAnswer:"), ("policy", said)]
    episode.custom_data.update(group_id=group_id, index=index, stop_reason=reason, text=text)
    return episode


READ = {"parsed": "7", "expected": "8"}


def test_answers_that_earn_nothing_are_told_one_a_prompt():
    told = {"answer": "It is 7\n", **READ}
    episodes = [an_episode(group_id=f"g{n // 2}", **READ) for n in range(10)]
    assert unpaid_answers(episodes) == [told] * 3
    assert unpaid_answers([*episodes, an_episode(reward=0.1, **READ)]) == []
    assert unpaid_answers([an_episode(), an_episode(parsed="7"), an_episode(parsed=7, expected="8")]) == []
    lost = an_episode(reward=1.0, reason=StopReason.ENV_CRASHED, **READ)
    assert unpaid_answers([lost, an_episode(group_id="h", **READ)]) == [told]
    long = an_episode(said="x" * 10**6, parsed="y" * 10**6, expected="z" * 10**6)
    assert {len(text) for text in unpaid_answers([long])[0].values()} == {MAX_SHOWN_CHARS}


def test_what_could_not_be_parsed_is_counted():
    assert is_unparsed(an_episode(reason=StopReason.UNPARSABLE))
    assert is_unparsed(an_episode(reason=StopReason.OUT_OF_TOKENS, parsed="", expected="8"))
    assert not is_unparsed(an_episode(**READ)) and not is_unparsed(an_episode())
    assert not is_unparsed(an_episode(reason=StopReason.ENV_CRASHED, parsed="", expected="8"))


@pytest.fixture
def report(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "rllib_srl")
    return Report(MetricsLogger(root=True), tmp_path)


def reported(report, *batches, first=1):
    """Report one iteration for each list of rewards."""
    for iteration, rewards in enumerate(batches, first):
        meta = GroupMeta.of(a_group(1, rewards=rewards), None)
        answers = [{"answer": f"so {n}", **READ} for n in range(2)] if max(rewards) <= 0 else []
        runs = [RunnerBatch(0, [meta], 0, {}, 1, [], [], unpaid=answers)] * 2
        report.iteration(iteration, runs, [meta], [np.zeros(len(rewards))])


def test_the_first_losses_of_an_iteration_are_shown_and_the_rest_counted(report, caplog):
    meta = GroupMeta.of(a_group(1), None)
    for num in (4, 7):
        runs = [RunnerBatch(0, [meta], 0, {}, 1, [], [f"loss {n}" for n in own]) for own in ((0,), range(1, num))]
        report.iteration(3, runs, [meta], [np.zeros(len(meta.rewards_G))])
    shown = [f"an episode was lost: loss {n}" for n in range(4)]
    more = "3 more episodes of this iteration were lost; num_episodes_lost counts them"
    assert caplog.messages == [*shown, *shown, more]


@pytest.mark.parametrize(("late", "reuses"), [("drop", True), ("memory", True), ("memory", False)])
def test_late_groups_are_dropped_or_stored_and_what_never_trains_is_counted(report, caplog, late, reuses):
    """At version 5 with `max_lag` 1 a group that began at 3 is late, and one of 4 is not."""
    metas = [GroupMeta.of(a_group(n, place=n, versions_G2=np.full((4, 2), n + 3)), None) for n in (0, 1)]
    config = SimpleNamespace(max_lag=1, late=late, may_draw=lambda kind: reuses)
    algo = SimpleNamespace(version=5, rollouts=SimpleNamespace(ahead=True), config=config, report=report)
    it = Iteration(1, batches=[RunnerBatch(5, metas[::-1], 0, {}, 1, [], [])])
    for _ in range(2):
        it.groups, it.late = groups, names = SRL._kept(algo, it.batches)
    is_lost = late == "drop" or not reuses
    wanted = (["1.1"], set()) if late == "drop" else (["1.0", "1.1"], {"1.0"})
    assert ([one.group_id for one in groups], set(names)) == wanted
    found = report._metrics.reduce(compile=True)
    assert found["rollout"]["late_share"] == 0.5
    assert found["num_tokens_dropped_late"] == 2 * is_lost * metas[0].num_loss_tokens_G.sum()
    config.replay_pass_reward, algo.memory, spent = 0.9, SimpleNamespace(is_on=False), []
    algo.advantage_estimator, algo._shards = AdvantageEstimator(LossSettings.made()), lambda it: None
    algo._kl_in_reward, algo._end_stages, algo.hooks, algo.ratings = lambda groups: None, lambda *_: None, (), None
    source = SimpleNamespace(advance=lambda num: spent.append(num) or ())
    algo.curriculum = Curriculum(source, algo.memory, report._metrics)
    SRL._batch(algo, it), SRL._look_back(algo, it, is_updated=False), SRL._report(algo, it)
    counted = report._metrics.reduce(compile=True)["env_runners"]  # all that was played, whatever becomes of it
    num_tokens = sum(meta.num_loss_tokens_G.sum() for meta in metas)
    assert spent == [num_tokens] == [counted["num_generated_tokens_lifetime"]]
    assert (counted["num_groups"], counted["num_episodes_lifetime"]) == (2, 8)
    warned = [line.startswith("late groups (1 so far) lag more than max_lag") for line in caplog.messages]
    assert warned == [True] * (not reuses)


NOTHING = (0.0, 0.0)


def test_two_first_batches_without_a_reward_are_warned_of_once(report, caplog):
    reported(report, NOTHING, NOTHING, NOTHING)
    (warning,) = caplog.messages
    assert warning.startswith("all rewards of the first 2 iterations are 0, so nothing is learned. 3 sam")
    assert warning.count("answer 'so 0': parsed '7', expected '8'") == 2 and warning.count("answer 'so 1'") == 1


@pytest.mark.parametrize(("batches", "first"), [
    ([NOTHING], 1), ([NOTHING, (0.0, 1.0), NOTHING], 1), ([(0.1, 0.1), NOTHING, NOTHING], 1),
    ([NOTHING, NOTHING, NOTHING], 2),  # a resumed run does not begin again
])  # fmt: skip
def test_batches_that_earn_something_or_come_later_are_not_warned_of(report, caplog, batches, first):
    reported(report, *batches, first=first)
    assert caplog.messages == []


RIGHT, MIXED = (1.0, 1.0), (1.0, 0.0)
LITTLE = "88% of the first 256 groups had equal rewards (75% all right, 12% all wrong). GRPO learns nothing from"


@pytest.mark.parametrize(("parts", "told"), [
    ([(192, RIGHT), (32, MIXED), (32, NOTHING), (500, RIGHT)], [LITTLE, "rewards: use harder prompts. See docs/does-"]),
    ([(255, NOTHING), (1, MIXED)], ["use easier prompts"]),
    ([(191, RIGHT), (65, MIXED)], None),  # 74.6 %
    ([(255, (1.0,)), (255, NOTHING)], None),  # too few yet: groups of one are not counted
])  # fmt: skip
def test_a_pool_with_little_to_learn_is_warned_of_once_with_numbers(report, caplog, parts, told):
    for num, rewards in parts:
        report.pool([GroupMeta.of(a_group(1, rewards=rewards), None)] * num, 0.9, "group")
    assert len(caplog.messages) == (told is not None)
    assert told is None or all(words in caplog.messages[0] for words in told)


def test_surprise_is_of_paid_groups_with_a_visit(report):
    """A group whose environment pays nothing has no reward to predict."""
    paid, unpaid, unseen = (
        GroupMeta.of(a_group(place, place=place, rewards=rewards), None)
        for place, rewards in enumerate([(0.5, 1.0), NOTHING, RIGHT])
    )
    unpaid = replace(unpaid, has_reward_G=np.zeros(2, bool))
    visits = {one.group_id: Visit(one.group_id, one.prompt.key) for one in (paid, unpaid)}
    estimator, batch = AdvantageEstimator(LossSettings.made()), AdvantageBatch([paid], [], [], {})
    report.trained([paid, unpaid, unseen], batch, visits, estimator)
    found = report._metrics.reduce(compile=True)
    assert found["replay"]["surprise_mean"] == 0.25  # 0 and .5 from the .5 that is predicted
    assert found["env_runners"]["live_token_share"] == pytest.approx(1 / 3)
    report.trained([unpaid], batch, visits, estimator)
    assert np.isnan(report._metrics.reduce(compile=True)["replay"]["surprise_mean"])


def test_the_pass_rate_of_revisits_is_that_of_paid_groups(report):
    paid, unpaid = (GroupMeta.of(a_group(place, place=place, origin="revisit"), None) for place in (0, 1))
    unpaid = replace(unpaid, has_reward_G=np.zeros(4, bool))
    visits = {paid.group_id: Visit(paid.group_id, "", pass_rate=0.5), unpaid.group_id: Visit(unpaid.group_id, "")}
    fractions = {"revisit_fraction": 1.0, "reuse_fraction": 0.0, "settings": SimpleNamespace(reads_recall=False)}
    memory = SimpleNamespace(is_on=True, counts=Counter(), stats=lambda now: {}, **fractions)
    report.memory(memory, [paid, unpaid], [], [], visits, 1)
    assert report._metrics.reduce(compile=True)["replay"]["revisit_pass_rate"] == 0.5


def test_a_run_says_what_could_not_be_parsed_and_when_it_did_not_learn(tmp_path):
    played = {"stop_reason/terminated": 4, "stop_reason/unparsable": 4, "num_episodes_lost": 0, "num_unparsed": 4}
    played |= {"episode_return_mean": 0.0, "num_generated_tokens": 8}

    class Algo:
        iteration = 0
        result_logs = ()
        config = SRLConfig()
        metrics = MetricsLogger(root=True)
        report = Report(metrics, tmp_path)

        def train(self):
            self.iteration += 1
            num_empty = 3 + (self.iteration == 2)  # since the start: nothing to train on in the second one
            timers = dict.fromkeys(PARTS, 0.1)
            numbers = {"training_iteration": self.iteration, "time_this_iter_s": 1, "num_empty_batches": num_empty}
            return {"timers": timers, "env_runners": played, **numbers}

    shown = io.StringIO()
    Algo.report.count("num_empty_batches", 3)
    list(train_until(Algo(), 2, tmp_path, Progress(2, shown)))
    assert shown.getvalue().count("could not be parsed") == 1
    assert "iteration 1: 4 of 8 answers could not be parsed (50%)\n" in shown.getvalue()
    assert shown.getvalue().count("no update") == 1
    assert "iteration 2: no update, since no group had anything to learn from\n" in shown.getvalue()


@pytest.mark.slow
def test_an_iteration_is_logged_before_its_checkpoint_is_written(random_llama_dir, tmp_path, build, monkeypatch):
    """So a driver that is killed between the two logs the iteration again, and leaves none out."""
    config = small_config(random_llama_dir, tmp_path).training(num_prompts_per_batch=2, group_size=2)
    algo, found, save = build(config, checkpoint_every=1), [], SRL.save_to_path

    def save_to_path(self, path):
        iterations = list(json_lines(tmp_path / METRICS, lambda line: line["iteration"]))
        found.append((Path(path).name, self.iteration, iterations))
        return save(self, path)

    monkeypatch.setattr(SRL, "save_to_path", save_to_path)
    list(train_until(algo, 2, tmp_path, Progress(2, io.StringIO())))
    assert found == [("checkpoint_000001", 1, [1]), ("checkpoint_000002", 2, [1, 2])]
    assert algo.result_logs == ()


KEY = "AKIA" + "IOSFODNN7EXAMPLE"  # in pieces, so that no scanner takes this file for a leak


def batch_of(*texts: str) -> RunnerBatch:
    """Return a batch without groups, and one episode of these turns written out."""
    turns = [{"role": role, "text": text} for role, text in zip(("environment", "policy"), texts, strict=True)]
    shown = {"group_id": "1.0", "index": 0, "turns": turns, "reward": 0.0}
    return RunnerBatch(0, [], 0, {}, 0, [shown], [])


@pytest.mark.parametrize(("admit", "text", "written"), [
    ("secrets", KEY, "[aws_key]"),  # what the memory refuses is not left in a file either
    (["mine:hook", "credentials"], KEY, "[aws_key]"),
    ("credentials", "ann@b.org", "ann@b.org"),
    (None, KEY, KEY),
])  # fmt: skip
def test_transcripts_and_event_file_hold_no_secret(tmp_path: Path, admit: Any, text: str, written: str) -> None:
    report = Report(MetricsLogger(), tmp_path, admit)
    report.iteration(1, [batch_of("key? ", f"{text}!")], [], [])
    (line,) = map(json.loads, (tmp_path / "transcripts.jsonl").read_text(encoding="utf-8").splitlines())
    assert [turn["text"] for turn in line["turns"]] == ["key? ", f"{written}!"]
    assert [turn["role"] for turn in line["turns"]] == ["environment", "policy"]
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert (text.encode() in events.read_bytes()) == (text == written)

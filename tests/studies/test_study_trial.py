"""A trial of a study: rows at the right moments, a budget it stops at, the same held-out prompts for every arm, exact
resume after a kill, and arms that meet what another one realised."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllib_srl.algorithm.evaluation import summary
from rllib_srl.storage import checkpoints
from rllib_srl.studies.contrasts import curves_of
from rllib_srl.studies.measures import measure
from rllib_srl.studies.recording import write_study
from rllib_srl.studies.results import read_results
from rllib_srl.studies.study import Arm, Domain, Primary, Study
from rllib_srl.studies.trial import Spent, StudyTrial, answer_lengths, rows_of, run_path, with_pool
from rllib_srl.types import GroupMeta, Prompt, StopReason
from tests.small_worlds import Even, small_config, watch

TOKENS = 150  # of a stage; an iteration writes 4 x 4 answers of 1 to 3 tokens, 16 to 48
MEMORY = {"replay_revisit_fraction": 0.25, "replay_reuse_fraction": 0.5, "replay_capacity": 64}
STREAM = [{"world": f"tests.small_worlds:{name}", "domain": name.lower(), "tokens": TOKENS} for name in ("Even", "Odd")]
ARMS = (
    Arm("srl", "SRL", "Old prompts come back.", {**MEMORY, "replay_min_buffer_size": 4}),
    Arm("no_replay", "no replay", "They do not."),
    Arm("extra_epochs", "extra epochs", "They do not, but batches do.", matched={"num_epochs": "srl"}),
    Arm(
        "uniform_reuse",
        "uniform reuse",
        "Stored answers come back.",
        {**MEMORY, "replay_revisit_fraction": 0.0, "replay_min_buffer_size": 4, "replay_selection": "uniform"},
        {"replay_reuse_fraction": "srl"},
    ),
)


class Answered(Even):
    """Pays for an even or an odd code point, by the number of the prompt; numbers from `first`."""

    def __init__(self, env_config: Mapping[str, Any]) -> None:
        """Take `first`."""
        super().__init__()
        self.first = env_config.get("first", 0)

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield numbers from `first`."""
        return (f"even {int(one.split()[1]) + self.first}" for one in super().prompt_ids(split, seed))

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the answer "a" or "b"."""
        return ["a" if int(prompt_id.split()[1]) // 2 % 2 else "b"]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Pay for the parity of the reference answer."""
        right = bool(action) and (ord(action[0]) - ord(self.gold_turns(self.prompt_id)[0])) % 2 == 0
        return "", float(right), True, False, {}


@pytest.fixture
def study() -> Study:
    return Study(
        name="small",
        question="Does it remember?",
        answered_by="If it does.",
        arms=ARMS,
        domains=(Domain("even", 0), Domain("odd", 1)),
        num_stages=2,
        seeds=(1, 2),
        budget=2 * TOKENS,
        primary=Primary("srl", ("no_replay",)),
        settings={"stream": STREAM},
    ).checked()


@pytest.fixture
def make(study, random_llama_dir, tmp_path, ray_here):
    """Return a function that starts a trial, and stop all of them in the end."""
    started = []

    def start(arm: str, seed: int = 1, directory: Path = tmp_path / "results", **told) -> StudyTrial:
        write_study(directory, study)
        config = small_config(random_llama_dir, tmp_path / f"log{len(started)}")
        config.env = None  # the stream says it
        values = study.settings_of(arm, seed)
        config.update_from_dict(values)
        told = {"directory": str(directory), "arm": arm, "seed": seed, "settings": {"lr": 1e-3}, **told}
        started.append(StudyTrial({"trial": config.to_dict() | {"_study": told}}))
        return started[-1]

    yield start
    for trial in started:
        trial.stop()


def finished(trial: StudyTrial) -> list[dict]:
    """Train to the end; return what each iteration told."""
    told = []
    while not (result := trial.train())["done"]:
        told.append(result["study"])
        assert len(told) < 40
    return [*told, result["study"]]


@pytest.mark.slow
def test_rows_are_written_before_training_and_after_each_stage_and_the_budget_ends_the_trial(make, tmp_path):
    told = finished(make("no_replay"))
    (trial,) = read_results(tmp_path / "results").trials
    assert trial.is_finished and [(row.stage, row.domain) for row in trial.rows] == [
        (stage, domain) for stage in (-1, 0, 1) for domain in ("even", "odd")
    ]
    before, _, first, unseen, last, _ = trial.rows
    assert "online_accuracy" not in before.measures and "online_accuracy" not in unseen.measures
    assert first.measures["online_prompts"] % 4 == 0 < first.measures["online_prompts"]  # four prompts an iteration
    assert 0 < first.measures["online_accuracy"] < 1
    assert (before.iteration, before.num_generated_tokens, before.num_trained_tokens, before.seconds) == (0, 0, 0, 0.0)
    assert first.num_generated_tokens - 48 < TOKENS <= first.num_generated_tokens
    assert last.num_generated_tokens - 48 < 2 * TOKENS <= last.num_generated_tokens
    assert [about["stage"] for about in told] == sorted(about["stage"] for about in told)
    assert [about["num_generated_tokens"] for about in told if "accuracy" in about] == [
        first.num_generated_tokens, last.num_generated_tokens
    ]  # fmt: skip
    assert last.num_trained_tokens <= last.num_generated_tokens  # groups without signal train nothing
    assert before.num_probe_tokens > 0 and last.num_probe_tokens > before.num_probe_tokens
    assert before.num_prompts == 4 and before.peak_bytes > 1e8 and last.probe_s > 0 and last.seconds > 0
    assert trial.header.settings == {"lr": 1e-3}
    assert not (tmp_path / "results" / "runs" / "no_replay--1").exists()


@pytest.mark.slow
def test_arms_of_a_seed_answer_the_same_heldout_prompts(make):
    asked = {}
    for arm, seed in (("srl", 1), ("no_replay", 1), ("no_replay", 2)):
        trial = make(arm, seed)
        batches = watch(trial)
        trial.train()
        groups = [group for batch in batches for group in batch.groups]
        asked[arm, seed] = [group.prompt for group in groups if len(group.rewards_G) == 1]
    assert asked["srl", 1] == asked["no_replay", 1] and len(asked["srl", 1]) == 8
    assert asked["no_replay", 1] != asked["no_replay", 2]
    assert {prompt.domain for prompt in asked["srl", 1]} == {"even", "odd"}
    assert all(int(prompt.prompt_id.split()[1]) % 2 for prompt in asked["srl", 1])  # held-out numbers are odd


@pytest.mark.slow
def test_measuring_changes_nothing_that_is_trained(make, monkeypatch):
    rewards = []
    for is_measured in (True, False):
        if not is_measured:
            monkeypatch.setattr(StudyTrial, "_measure", lambda trial, stage, iteration: 0.0)
        trial = make("srl", directory=trial_dir(make, is_measured))
        rewards.append([trial.train()["env_runners"]["episode_return_mean"] for _ in range(5)])
    assert rewards[0] == rewards[1]


def trial_dir(make, is_measured: bool) -> Path:
    """Return a directory of its own for each half of a comparison."""
    return Path(make.__defaults__[1]).parent / f"measured_{is_measured}"


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 2])
def test_a_killed_trial_goes_on_and_ends_as_if_it_had_not_been(make, tmp_path, every):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finished(make("srl", directory=whole))
    killed = make("srl", directory=broken, checkpoint_every=every)
    told = [killed.train()["study"] for _ in range(6)]
    assert sum("accuracy" in about for about in told) == 1  # in the second stage
    path = broken / "trials" / "srl--1.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "row", "stage": 1, "iter')  # as a kill leaves it
    again = make("srl", directory=broken, checkpoint_every=every)
    assert again.iteration > 0 and again.num_generated_tokens <= told[-1]["num_generated_tokens"]
    finished(again)
    timed = ("seconds", "probe_s", "peak_bytes")
    trials = [read_results(of).trials[0] for of in (whole, broken)]
    rows = [[replace(row, **dict.fromkeys(timed, 0)) for row in trial.rows] for trial in trials]
    assert rows[0] == rows[1] and len(rows[0]) == 6


@pytest.mark.slow
def test_a_checkpoint_of_another_key_is_restored_only_where_it_is_trusted(make, tmp_path):
    killed = make("srl", checkpoint_every=2)
    for _ in range(2):
        killed.train()
    (path,) = checkpoints.checkpoints_in(run_path(tmp_path / "results", "srl", 1))
    checkpoints.seal(path, checkpoints.verify_sealed(path), b"another user's key, 32 bytes long")
    with pytest.raises(checkpoints.CheckpointError, match="pass --trust-checkpoint"):
        make("srl", checkpoint_every=2)
    assert make("srl", checkpoint_every=2, trust=True).iteration == 2


@pytest.mark.slow
def test_a_trial_killed_before_its_first_checkpoint_starts_anew(make, tmp_path):
    make("srl").train()
    again = make("srl")
    assert again.iteration == 0
    finished(again)
    assert len(read_results(tmp_path / "results").trials[0].rows) == 6
    with pytest.raises(ValueError, match="is finished; it is not run again"):
        make("srl").train()


@pytest.mark.slow
def test_extra_epochs_keep_up_with_the_trained_tokens_of_the_arm_they_are_matched_to(make, tmp_path):
    with pytest.raises(ValueError, match="srl--1.jsonl: is not finished; expected arm 'srl', which 'extra_epochs'"):
        make("extra_epochs")
    for arm in ("srl", "extra_epochs", "no_replay"):
        finished(make(arm))
    trained = {t.header.arm: t.rows[-1].num_trained_tokens for t in read_results(tmp_path / "results").trials}
    assert trained["no_replay"] < 0.8 * trained["srl"]
    assert abs(trained["extra_epochs"] - trained["srl"]) <= 48  # of an iteration


@pytest.mark.slow
def test_uniform_reuse_takes_the_share_that_was_realised(make, tmp_path):
    finished(make("srl"))
    share = read_results(tmp_path / "results").trials[0].rows[-1].measures["reuse_share"]
    assert 0.2 < share < 0.5  # less than was asked for: nothing is stored at first
    trial = make("uniform_reuse")
    assert trial.config.replay_reuse_fraction == trial.memory.settings.reuse_fraction == share
    finished(trial)
    settings = json.loads((tmp_path / "results/trials/uniform_reuse--1.jsonl").read_text().split("\n")[0])["settings"]
    assert settings["replay_reuse_fraction of srl"] == share


@pytest.mark.slow
def test_a_rehearsal_writes_nothing_and_ends_after_its_iterations(make, tmp_path):
    trial = make("extra_epochs", num_rehearsed=2)
    told = [trial.train() for _ in range(2)]
    assert [result["done"] for result in told] == [False, True]
    assert 16 <= told[0]["study"]["largest_iteration"] <= 48  # 4 x 4 answers of 1 to 3 tokens
    assert not list((tmp_path / "results" / "trials").iterdir()) and not (tmp_path / "results" / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("measures_pool", [True, False])
def test_a_trial_on_a_pool_is_measured_at_equal_marks_and_on_the_pool_itself(
    random_llama_dir, tmp_path, ray_here, measures_pool
):
    even = {"env": "tests.studies.test_study_trial:Answered", "env_config": {}}
    pool = {"environments": {"one": even, "two": {**even, "env_config": {"first": 500}}}, "num_prompts_per_kind": 6}
    study = Study(
        name="pool", question="Does it learn?", answered_by="If it does.",
        arms=(Arm("plain", "plain", "", {}), Arm("other", "other", "", {"lr": 1e-2})),
        domains=(Domain("one", 3), Domain("two", 3)), num_stages=4, seeds=(1,), budget=4 * TOKENS,
        primary=Primary("plain", ("other",), ("accuracy_area",)),
        settings={"env": "pool", "env_config": {**pool, "wrong_answers": 0.25}}, measures_pool=measures_pool,
    ).checked()  # fmt: skip
    write_study(tmp_path / "results", study)
    config = small_config(random_llama_dir, tmp_path / "log")
    config.update_from_dict(study.settings_of("plain", 1))
    told = {"directory": str(tmp_path / "results"), "arm": "plain", "seed": 1, "settings": {}}
    trial = StudyTrial({"trial": config.to_dict() | {"_study": told}})
    batches = watch(trial)
    try:
        finished(trial)
    finally:
        trial.stop()
    (read,) = read_results(tmp_path / "results").trials
    assert [row.stage for row in read.rows] == [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3]
    assert all(("pool_accuracy" in row.measures) == measures_pool for row in read.rows)
    assert all(0 <= row.measures["pool_accuracy"] <= 1 for row in read.rows if measures_pool)
    spent = [row.num_generated_tokens for row in read.rows[2::2]]
    marks = range(TOKENS, 5 * TOKENS, TOKENS)
    assert all(mark <= tokens < mark + 48 for mark, tokens in zip(marks, spent, strict=True))
    last = read.rows[-1]
    assert 0 < last.num_live_tokens == last.num_trained_tokens <= last.num_generated_tokens  # one pass, no reuse
    played = [group.prompt.prompt_id for batch in batches for group in batch.groups if len(group.rewards_G) > 1]
    assert len(set(played)) == 12 and len([one for one in set(played) if "! " in one]) == 3
    measured = {group.prompt.prompt_id for batch in batches for group in batch.groups if len(group.rewards_G) == 1}
    assert not any("! " in one for one in measured) and bool(measured & set(played)) == measures_pool
    curve = curves_of(read_results(tmp_path / "results"))["plain"][1]
    assert len(curve.pool_I) == 5 and measure(curve)["live_share"] == last.num_live_tokens / last.num_generated_tokens


def test_rows_have_the_accuracy_on_the_pool_of_their_domain(study):
    def group(domain: str, reward: float) -> GroupMeta:
        one = np.ones(1, np.int64)
        reasons = (StopReason.TERMINATED,)
        return GroupMeta("1.0", Prompt(domain, "1", domain), np.array([reward]), one, one, one[:, None], reasons, 0,
                         "fresh", None)  # fmt: skip

    rows = rows_of([group("even", 1.0), group("odd", 0.0)], study, 0, 3, 11, Spent(), {"reuse_share": 0.25})
    played = [group("even", 1.0), group("even", 1.0), group("even", 0.0)]
    even, odd = with_pool(rows, summary(played, 3)["by_domain"])
    assert even.measures == {"reuse_share": 0.25, "pool_accuracy": pytest.approx(2 / 3)}
    assert odd == rows[1] and with_pool(rows, {}) == rows


def test_rows_by_hand(study):
    def group(domain: str, reward: float, reason: StopReason) -> GroupMeta:
        one = np.ones(1, np.int64)
        prompt = Prompt(domain, "1", domain)
        return GroupMeta("1.0", prompt, np.array([reward]), one, one, one[:, None], (reason,), 0, "fresh", None)

    played = [
        group("even", 1.0, StopReason.TERMINATED),
        group("even", 0.0, StopReason.TERMINATED),
        group("even", 0.0, StopReason.UNPARSABLE),
        group("even", 0.5, StopReason.OUT_OF_TOKENS),  # earned something, so it was read
        group("odd", 0.0, StopReason.OUT_OF_TOKENS),
    ]
    spent = Spent(num_trained_tokens=5, seconds=1.5, num_probe_tokens=7, probe_s=0.5, peak_bytes=9)
    even, odd = rows_of(played, study, 0, 3, 11, spent, {"reuse_share": 0.25})
    assert (even.accuracy, even.parse_rate, even.num_prompts) == (0.25, 0.75, 4)
    assert (odd.accuracy, odd.parse_rate, odd.num_prompts) == (0.0, 0.0, 1)
    assert (even.num_generated_tokens, even.num_trained_tokens, even.seconds, even.num_probe_tokens) == (11, 5, 1.5, 7)
    assert (odd.probe_s, odd.peak_bytes, odd.iteration, odd.stage) == (0.5, 9, 3, 0)
    assert odd.measures == {"reuse_share": 0.25}
    assert answer_lengths(played) == [1.0, 1.0]
    assert not even.faults(study) and not odd.faults(study)
    marked = [replace(one, pass_reward=0.5) for one in played]  # an environment whose pass is half of the reward
    assert [row.accuracy for row in rows_of(marked, study, 0, 3, 11, spent, {})] == [0.5, 0.0]
    with pytest.raises(ValueError, match=r"answered domains are \['even'\]; expected \['even', 'odd'\]"):
        rows_of(played[:4], study, 0, 3, 11, spent, {})

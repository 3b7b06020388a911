"""A trial of a study: evaluations at the right moments, a budget it stops at, the same held-out prompts for every arm,
exact resume after a kill."""

from dataclasses import replace
from pathlib import Path

import pytest

from rllib_srl.studies.records import read_results, run_path, write_study
from rllib_srl.studies.study import Arm, Domain, Primary, Study
from rllib_srl.studies.trial import StudyTrial
from tests.small_envs import small_config, watch

pytestmark = pytest.mark.slow
TOKENS = 150  # of a stage; an iteration writes 4 x 4 answers of 1 to 3 tokens, 16 to 48
MEMORY = {"replay_revisit_fraction": 0.25, "replay_reuse_fraction": 0.5, "replay_capacity": 64}
STREAM = [{"env": f"tests.small_envs:{name}", "domain": name.lower(), "tokens": TOKENS} for name in ("Even", "Odd")]
HELD = {"replay_revisit_fraction": 0.0, "replay_retain": 1.0, "replay_retain_answers": 3, "replay_retain_window": 1}
ARMS = (
    Arm("srl", "SRL", "Old prompts come back.", {**MEMORY, "replay_min_buffer_size": 4}),
    Arm("no_replay", "no replay", "They do not."),
    Arm("held", "held answers", "Old right answers do.", {**MEMORY, **HELD, "num_epochs": 2}),
)


@pytest.fixture
def study() -> Study:
    return Study(
        name="small", question="Does it remember?", answered_by="If it does.", arms=ARMS,
        domains=(Domain("even", 0), Domain("odd", 1)), num_stages=2, seeds=(1, 2), budget=2 * TOKENS,
        primary=Primary("srl", ("no_replay",)), settings={"stream": STREAM},
    ).checked()  # fmt: skip


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
        told = {"directory": str(directory), "arm": arm, "seed": seed, **told}
        started.append(StudyTrial({"trial": config.to_dict() | {"_study": told}}))
        return started[-1]

    yield start
    for trial in started:
        trial.stop()


def finished(trial: StudyTrial) -> list[dict]:
    told = []
    while not (result := trial.train())["done"]:
        told.append(result["study"])
        assert len(told) < 40
    return [*told, result["study"]]


def test_it_is_evaluated_before_training_and_after_each_stage_and_the_budget_ends_it(make, tmp_path):
    told = finished(make("no_replay"))
    (trial,) = read_results(tmp_path / "results").trials
    assert trial.is_finished and [one.stage for one in trial.evaluations] == [-1, 0, 1]
    before, first, last = trial.evaluations
    assert before.measures == {"even": {}, "odd": {}} and "online_accuracy" not in first.measures["odd"]
    assert first.measures["even"]["online_prompts"] % 4 == 0 < first.measures["even"]["online_prompts"]
    assert 0 < first.measures["even"]["online_accuracy"] < 1
    assert (before.iteration, before.num_generated_tokens, before.num_trained_tokens, before.seconds) == (0, 0, 0, 0.0)
    assert first.num_generated_tokens - 48 < TOKENS <= first.num_generated_tokens
    assert last.num_generated_tokens - 48 < 2 * TOKENS <= last.num_generated_tokens
    assert [about["stage"] for about in told] == sorted(about["stage"] for about in told)
    assert [about["num_generated_tokens"] for about in told if "accuracy" in about] == [
        first.num_generated_tokens, last.num_generated_tokens
    ]  # fmt: skip
    assert last.num_trained_tokens <= last.num_generated_tokens  # zero-variance groups train nothing
    assert before.num_probe_tokens > 0 and last.num_probe_tokens > before.num_probe_tokens
    assert before.peak_bytes > 1e8 and last.probe_s > 0 and last.seconds > 0
    assert not run_path(tmp_path / "results", "no_replay", 1).exists()


def test_trained_tokens_are_played_reused_and_held_ones_in_every_epoch(make):
    trial, before, num_held = make("held"), 0, 0.0
    while not num_held and trial.iteration < 12:
        result = trial.train()
        learner, num_trained = result["learners"]["default_policy"], result["study"]["num_trained_tokens"]
        num_held = result.get("retention", {}).get("num_held_tokens", 0)
        assert num_trained - before == 2 * (learner["num_tokens"] + learner["reuse/num_tokens"] + num_held)
        before = num_trained
    assert num_held > 0


def test_measuring_changes_nothing_that_is_trained(make, tmp_path, monkeypatch):
    rewards = []
    for is_measured in (True, False):
        if not is_measured:
            monkeypatch.setattr(StudyTrial, "_measure", lambda trial, stage, iteration: 0.0)
        trial = make("srl", directory=tmp_path / f"measured_{is_measured}")
        rewards.append([trial.train()["env_runners"]["episode_return_mean"] for _ in range(5)])
    assert rewards[0] == rewards[1]


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


def test_a_killed_trial_goes_on_and_ends_as_if_it_had_not_been(make, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finished(make("srl", directory=whole))
    killed = make("srl", directory=broken, checkpoint_every=2)
    told = [killed.train()["study"] for _ in range(6)]
    assert sum("accuracy" in about for about in told) == 1  # in the second stage
    path = broken / "trials" / "srl--1.jsonl"
    with path.open("a") as file:
        file.write('{"stage": 1, "iter')  # as a kill leaves it
    again = make("srl", directory=broken, checkpoint_every=2)
    assert again.iteration > 0 and again.num_generated_tokens <= told[-1]["num_generated_tokens"]
    finished(again)
    timed = ("seconds", "probe_s", "peak_bytes")
    trials = [read_results(of).trials[0] for of in (whole, broken)]
    found = [[replace(one, **dict.fromkeys(timed, 0)) for one in trial.evaluations] for trial in trials]
    assert found[0] == found[1] and len(found[0]) == 3

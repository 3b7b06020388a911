"""Studies as they are written down: every one can be run, says what differs, and refuses what does not fit."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rllib_srl.cli import tune
from rllib_srl.cli.shared.runs import RunError
from rllib_srl.cli.tuning.plan import config_of, faults_of_trials, planned, shortened
from rllib_srl.studies.contrasts import curves_of, findings_of, verdict_of, warnings_of
from rllib_srl.studies.fields import read_object
from rllib_srl.studies.results import read_results
from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs import Search
from rllib_srl.tune_configs.arms import ARMS, DEV_SEEDS, FRESH_SEEDS
from tests.studies.synthetic import small_study, write_synthetic

FOUND = {name: tune.load(name) for name in tune.studies()}
COMPARISONS = {name: study for name, study in FOUND.items() if isinstance(study, Study)}
ASKED_FOR = {  # every arm that must be there, by study
    "baselines": {"no_replay", "uniform", "fifo", "per", "fresh_per", "learnability", "difficulty_pool", "dapo", "repo",
                  "exgrpo", "exit", "srl", "diversity", "srl_diversity"},
    "equal_tokens": {"srl_diversity", "extra_epochs", "uniform_reuse"},
    "revisit_or_reuse": {"both", "revisit", "reuse", "no_replay"},
    "confirm": {"srl_diversity", "no_replay", "uniform", "extra_epochs", "uniform_reuse", "balanced"},
    "pool_proof": {"memory", "plain", "passes", "memory_group", "dapo", "greso", "spo", "critic"},
    "pool_parts": {"memory", "passes", "memory_group", "reuse"},
    "pool_stream": {"memory", "no_replay", "uniform", "fifo", "balanced"},
    "facts": {"memory", "uniform", "fifo"},
    "pool_pretrained": {"plain", "uniform", "history"},
    "regularisers": {"ewc", "l2", "gere", "lwf", "esr", "srl_diversity", "uniform", "no_replay"},
}  # fmt: skip


def test_the_studies_are_all_there():
    named = {"replay", "baselines", "equal_tokens", "revisit_or_reuse", "spacing", "retention", "fractions"}
    named |= {"buffer_sizes", "confirm", "pretrained", "rehearsal", "replay_rate", "regularisers"}
    named |= {"pool_tuning", "pool_proof", "pool_proof_history", "pool_proof_sizes", "pool_stream"}
    named |= {"pool_stream_heldout", "facts", "reuse_choice", "pool_parts", "reuse_on_streams", "pool_pretrained"}
    named |= {"lag", "lag_quickstart", "quickstart_rate", "pool_proof_mended"}
    assert named == set(COMPARISONS)
    assert {name for name, study in FOUND.items() if isinstance(study, Search)} == {"learning_rate", "population"}
    assert all({arm.name for arm in FOUND[name].arms} >= arms for name, arms in ASKED_FOR.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARISONS)
def test_a_study_asks_one_question_of_arms_at_an_equal_budget(name):
    study = COMPARISONS[name]
    assert study.name == name and study.faults() == [] and study.question.endswith("?") and len(study.answered_by) > 80
    assert study.question == tune.studies()[name]
    assert len({json.dumps([arm.settings, arm.matched], sort_keys=True) for arm in study.arms}) == len(study.arms)
    if "stream" in study.settings:
        assert sum(stage["tokens"] for stage in study.settings["stream"]) == study.budget
    assert not any("stream" in arm.settings or "model" in arm.settings for arm in study.arms)
    assert faults_of_trials(study) == []
    assert read_object(Study, json.loads(json.dumps(asdict(study)))).fingerprint == study.fingerprint


def test_the_confirmation_is_held_out():
    confirm, replay = COMPARISONS["confirm"], COMPARISONS["replay"]
    assert confirm.is_confirmation and len(confirm.seeds) >= 10 and confirm.seeds == FRESH_SEEDS
    assert not set(FRESH_SEEDS) & {*DEV_SEEDS, *COMPARISONS["rehearsal"].seeds}
    assert not {d.name for d in confirm.domains} & {d.name for d in replay.domains}
    confirming = {name for name, study in COMPARISONS.items() if study.is_confirmation}
    proofs = {"pool_proof", "pool_proof_history", "pool_proof_sizes", "pool_proof_mended"}
    assert confirming == {"confirm", "rehearsal", *proofs}
    frozen, tested = ARMS["srl_diversity"].settings, confirm.settings_of("srl_diversity", FRESH_SEEDS[0])
    assert frozen and all(tested[name] == value for name, value in frozen.items())


def test_arms_of_other_methods_share_the_fractions_and_have_no_schedule():
    names = ("replay_revisit_fraction", "replay_reuse_fraction")
    shares = {name: ARMS["srl_diversity"].settings[name] for name in names}
    for name in ("uniform", "fifo", "per", "fresh_per", "learnability", "difficulty_pool", "repo", "exgrpo"):
        settings = ARMS[name].settings
        assert {key: settings[key] for key in shares} == shares
        assert settings["replay_spacing"] == settings["replay_load_control"] == "none"
        assert settings["replay_selection"] == settings["replay_reuse_selection"] == name
        assert settings["replay_diversity"] == 0


def test_a_trial_gets_the_settings_of_study_arm_and_seed(tmp_path):
    plan = planned(COMPARISONS["replay"], {"model": "tiny", "max_turns": 5}, tmp_path)
    config = config_of(plan, "uniform", 3, tmp_path)
    assert (config["max_turns"], config["seed"], config["replay_selection"]) == (5, 3, "uniform")
    assert config["checkpoint_every"] == 0  # Tune writes none
    told = config["_study"]
    assert (told["arm"], told["seed"], told["directory"], told["checkpoint_every"]) == ("uniform", 3, str(tmp_path), 10)
    assert told["settings"]["max_turns"] == 5 and told["settings"]["replay_capacity"] == 65_536
    assert plan.trials()[: len(plan.arms)] == [(arm, 1) for arm in plan.arms] and plan.directory == tmp_path / "replay"
    json.dumps(told["settings"])


def refusal(*args, study="replay", **changes) -> str:
    with pytest.raises(RunError) as caught:
        planned(COMPARISONS[study], changes.pop("given", {}), Path("nowhere"), **changes)
    return str(caught.value)


def test_bad_input_is_one_clear_error():
    assert "arm 'unifrom' is unknown; expected some of srl_diversity, no_replay" in refusal(arms=["unifrom"])
    assert "did you mean uniform?" in refusal(arms=["unifrom"])
    assert "seed 99 is unknown; expected some of 1, 2, 3, 4, 5, 6" in refusal(seeds=[99])
    both = refusal(arms=["a"], seeds=[99])
    assert "arm 'a'" in both and "seed 99" in both
    small = refusal(budget=600)
    assert "budget = 600; expected at least 640: 5 stages of an iteration of 16 x 8 answers of one token" in small
    assert small.count("budget") == 1  # not once an arm
    assert "group_size = 1; expected" in refusal(given={"group_size": 1})
    varied = refusal(given={"replay_selection": "per"})
    assert "replay_selection: set by the arms (srl_diversity, uniform, balanced)" in varied
    assert "seed: fixed by the study; expected --seeds" in refusal(given={"seed": 3})


def test_a_budget_is_divided_to_a_token():
    study = planned(COMPARISONS["replay"], {}, Path("nowhere"), budget=10_001).study
    assert [stage["tokens"] for stage in study.settings["stream"]] == [2000, 2000, 2000, 2000, 2001]
    assert study.budget == 10_001 and study.fingerprint != COMPARISONS["replay"].fingerprint


def test_a_typo_in_the_settings_of_an_arm_names_the_arm_and_the_setting():
    study = COMPARISONS["replay"]
    arms = [replace(arm, settings={**arm.settings, "replay_capasity": 3}) if arm.name == "uniform" else arm
            for arm in study.arms]  # fmt: skip
    (fault,) = faults_of_trials(replace(study, arms=tuple(arms)))
    assert fault == "arm uniform: replay_capasity = 3; expected no setting of that name; did you mean replay_capacity?"


def test_a_short_study_has_two_arms_two_seeds_and_two_stages():
    for study in COMPARISONS.values():
        short = shortened(study).checked()
        assert (len(short.arms), len(short.seeds), short.num_stages, short.budget) == (2, 2, 2, 1200)
        assert short.primary.treatment == study.primary.treatment and not short.is_confirmation
        assert short.fingerprint != study.fingerprint and short.name == f"{study.name}_short"
        assert faults_of_trials(short) == []


def test_a_short_study_of_a_pool_measures_every_kind():
    study = COMPARISONS["pool_tuning"]
    short = shortened(study)
    assert [domain.name for domain in short.domains] == [domain.name for domain in study.domains]
    assert {domain.learned_at for domain in short.domains} == {1}
    assert short.settings["evaluation_duration"] == 32 >= len(short.domains)
    assert shortened(COMPARISONS["pool_stream"]).settings["evaluation_duration"] == 32
    kept = [stage["domain"] for stage in COMPARISONS["pool_stream"].settings["stream"][:2]]
    learned = [(domain.name, domain.learned_at) for domain in shortened(COMPARISONS["pool_stream"]).domains]
    assert learned == [(kept[0], 0), (kept[1], 1)]


def test_faults_of_streams_and_matches():
    study = COMPARISONS["equal_tokens"]
    assert "expected 5 stages in tokens that sum to the budget of 5" in replace(study, budget=5).faults()[0]
    arms = [replace(study.arms[0], matched={"lr": "srl_diversity", "num_epochs": "extra_epochs"}), *study.arms[1:]]
    assert replace(study, arms=tuple(arms)).faults()[:2] == [
        "arm 'srl_diversity' matches 'lr'; expected one of num_epochs, replay_reuse_fraction",
        "arm 'srl_diversity' is matched to 'srl_diversity'; expected an arm that is not matched",
    ]


def test_another_setting_of_an_arm_is_another_study():
    study = COMPARISONS["replay"]
    other = replace(study.arms[0], settings={**study.arms[0].settings, "replay_spacing": {"desired_retention": 0.8}})
    assert replace(study, arms=(other, *study.arms[1:])).fingerprint != study.fingerprint
    assert replace(study, settings={**study.settings, "lr": 1e-3}).fingerprint != study.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize(("reviews", "is_test"), [(5.0, True), (3.0, False)])
def test_too_few_reviews_are_no_test_of_spacing(tmp_path, quick, monkeypatch, reviews, is_test):
    study = small_study(asks_about_spacing=True, primary=Primary("srl", ("no_replay",)), arms=("srl", "no_replay"))
    write_synthetic(tmp_path, study)
    for path in (tmp_path / "trials").glob("*.jsonl"):
        path.write_text(path.read_text().replace('"median_reviews": 5.0', f'"median_reviews": {reviews}'))
    results = read_results(tmp_path)
    findings = findings_of(curves_of(results))
    line = f"These results do not test spacing: the median item was reviewed {reviews:.1f} times; expected at least 4"
    verdict = verdict_of(results, findings)
    assert verdict.holds is (True if is_test else None)
    assert (line in verdict.reasons, line in warnings_of(results, findings)) == (not is_test, not is_test)

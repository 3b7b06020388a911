"""Studies of finite pools: equal token marks, equal tuning of every method, kinds and seeds drawn by lot."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from rllib_srl.cli import report, tune
from rllib_srl.cli.tuning import study as study_run
from rllib_srl.cli.tuning.plan import Plan, planned
from rllib_srl.envs.wrappers.fixed_pool import FixedPool
from rllib_srl.studies.recording import open_trial, write_study
from rllib_srl.studies.results import Row
from rllib_srl.studies.study import Primary, Study
from rllib_srl.tune_configs import kinds
from rllib_srl.tune_configs.arms import DEV_SEEDS, FRESH_SEEDS
from rllib_srl.tune_configs.pools import (
    METHODS,
    NUM_MARKS,
    PASSES,
    RATES,
    SHAPES,
    TOKENS,
    grid,
    method,
    on_pool,
    pool_of,
)
from rllib_srl.tune_configs.stream_arms import FACT_SEEDS, STREAM_SEEDS
from rllib_srl.tune_configs.streams import STREAMS
from scripts import pool_choice

OF_THREE = 0.05 / 3  # significance level of one of three ideas


def test_a_pool_is_measured_at_equal_marks_of_generated_tokens():
    study = tune.load("pool_tuning")
    assert study.num_stages == NUM_MARKS == 8 and study.budget == TOKENS == 120_000
    tokens = (0, 14_999, 15_000, 104_999, 105_000, 120_000, 121_000)
    assert [study.stage_at(num) for num in tokens] == [0, 0, 1, 6, 7, 7, 7]
    assert study.settings["env"] == "pool" and "stream" not in study.settings
    assert study.settings["env_config"] == pool_of(kinds.DEVELOPMENT)
    assert {domain.learned_at for domain in study.domains} == {7} and len(study.domains) >= 25
    assert study.settings["evaluation_duration"] == 16 * len(study.domains)


def test_every_method_gets_the_same_tuning_budget():
    sizes = {name: len(grid(name)) for name in METHODS}
    assert set(sizes.values()) == {len(RATES) * len(PASSES) * len(SHAPES)} == {12}
    assert {arm.name for arm in tune.load("pool_tuning").arms} == {arm.name for name in METHODS for arm in grid(name)}
    shape = {"num_prompts_per_batch": 32, "group_size": 4}
    assert grid("reuse")[4].settings == {**METHODS["reuse"], "lr": 2e-4, "num_epochs": 2, **shape}
    assert {arm.settings["group_size"] for arm in grid("spo")} == {1}
    assert {arm.settings["group_size"] for arm in grid("memory")} == {1, 2, 4}
    assert len({tuple(sorted(map(str, arm.settings.items()))) for arm in grid("spo")}) == 12


def test_the_arms_of_the_primary_differ_in_one_thing_each():
    def difference(one: str, other: str) -> set[str]:
        ours, theirs = METHODS[one], METHODS[other]
        return {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)}

    assert difference("memory", "memory_group") == {"advantage"}
    assert difference("memory", "passes") == {"replay_revisit_fraction", "replay_selection"}
    off = ("replay_revisit_fraction", "replay_reuse_fraction", "replay_capacity")
    assert dict.fromkeys(off, 0) == METHODS["plain"]
    study = tune.load("pool_proof")
    assert study.primary == Primary("memory", ("plain", "passes", "memory_group"), ("accuracy_area",), OF_THREE)
    assert len(study.seeds) == 16 and len(study.domains) >= 25 and study.is_confirmation
    assert [arm.name for arm in study.arms][:4] == ["memory", "plain", "passes", "memory_group"]
    assert {arm.name for arm in study.arms} == set(METHODS)
    # It was tuned at groups of one before these could be reused.
    assert method("memory").settings.items() >= {**METHODS["memory"], "replay_reuse_fraction": 0.0}.items()


def test_the_parts_of_the_memory_are_compared_at_one_setting():
    study, proof = tune.load("pool_parts"), tune.load("pool_proof")
    assert study.primary == Primary("memory", ("passes", "memory_group"), ("accuracy_area",))
    assert not study.is_confirmation  # its kinds, prompts and seeds were looked at before
    assert (study.seeds, study.domains) == (proof.seeds, proof.domains)
    assert study.settings == proof.settings and study.budget == proof.budget
    arms = {arm.name: arm.settings for arm in study.arms}
    parts = {
        "passes": {"replay_revisit_fraction": 0.0, "replay_selection": None},
        "memory_group": {"advantage": None},
    }
    for name, taken_away in parts.items():
        expected = {**arms["memory"], **taken_away}
        assert arms[name] == {key: value for key, value in expected.items() if value is not None}
    assert arms["reuse"] == {name: value for name, value in arms["passes"].items() if name != "advantage"}
    shape = {"num_prompts_per_batch": 32, "group_size": 4, "replay_reuse_fraction": 0.25}
    assert arms["memory"].items() >= shape.items()


def test_each_idea_has_kinds_and_seeds_of_its_own():
    ours, theirs = METHODS["passes"], METHODS["reuse"]
    assert {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)} == {"advantage"}
    first, second = tune.load("pool_proof"), tune.load("pool_proof_history")
    assert second.primary == Primary("passes", ("plain", "memory", "reuse"), ("accuracy_area",), OF_THREE)
    assert not {domain.name for domain in first.domains} & {domain.name for domain in second.domains}
    assert not set(first.seeds) & set(second.seeds) and second.is_confirmation
    third = tune.load("pool_proof_sizes")
    assert third.primary == Primary("sizes", ("plain", "reuse"), ("accuracy_area",), OF_THREE)
    assert third.is_confirmation
    assert set(METHODS["sizes"].items()) - set(METHODS["reuse"].items()) == {("rollout", "knapsack")}
    assert not set(third.seeds) & {*first.seeds, *second.seeds}
    fourth = tune.load("pool_proof_mended")
    assert fourth.primary == Primary("memory", ("plain", "passes", "memory_group"), ("accuracy_area",), 0.05 / 4)
    assert fourth.is_confirmation and not set(fourth.seeds) & {*first.seeds, *second.seeds, *third.seeds}
    memory, plain, passes, group = (arm.settings for arm in fourth.arms)
    assert {name for name in {*memory, *group} if memory.get(name) != group.get(name)} == {"advantage"}
    differing = {name for name in {*memory, *passes} if memory.get(name) != passes.get(name)}
    assert differing == {"replay_revisit_fraction", "replay_selection"}
    assert plain == tune.load("pool_proof").arms[1].settings


def test_kinds_and_seeds_were_drawn_by_lot():
    draw, sets = random.Random(701), ([], [], [])
    ordered = sorted(kinds.KINDS, key=lambda kind: (kinds.UNTRAINED[kind][1], kind))
    while len(ordered) >= 3:
        three, ordered = ordered[:3], ordered[3:]
        draw.shuffle(three)
        for of_set, kind in zip(sets, three, strict=True):
            of_set.append(kind)
    third = [draw.choice(pair) for pair in zip(sets[1], sets[2], strict=True)]
    fourth = [({one, other} - {taken}).pop() for taken, one, other in zip(third, sets[1], sets[2], strict=True)]
    assert tuple(sorted(sets[0])) == kinds.DEVELOPMENT
    for number, mine in enumerate((sets[1], sets[2], third, fourth), 1):
        pool_seed, *seeds = draw.sample(range(1000 * number, 1000 * (number + 1)), 17)
        assert kinds.LOTS[number - 1] == kinds.Lot(tuple(sorted(mine)), tuple(sorted(seeds)), pool_seed)
    seeds = [seed for lot in kinds.LOTS for seed in (*lot.seeds, lot.pool_seed)]
    assert len(set(seeds)) == len(seeds) == 68
    assert not set(seeds) & {*DEV_SEEDS, *FRESH_SEEDS, *STREAM_SEEDS, *FACT_SEEDS}


def test_sets_of_kinds_are_alike_and_share_none_with_development():
    assert set(kinds.UNTRAINED) == set(kinds.CANDIDATES)
    for of_set in (kinds.DEVELOPMENT, *(lot.kinds for lot in kinds.LOTS)):
        figures = np.array([kinds.UNTRAINED[kind] for kind in of_set])
        assert len(set(of_set)) >= 25 and 0.4 <= figures[:, 1].mean() <= 0.45
        assert ((figures[:, 0] > 0.1) & (figures[:, 0] < 0.9)).mean() >= 1 / 3
    assert not set(kinds.LOTS[0].kinds) & set(kinds.LOTS[1].kinds)
    assert not any(set(lot.kinds) & set(kinds.DEVELOPMENT) for lot in kinds.LOTS)


def test_twenty_skills_a_fifth_of_them_not_to_be_learned():
    names = [stage["domain"] for stage in STREAMS["skills"]]
    assert len(set(names)) == 20 and len([name for name in names if name in kinds.DEVELOPMENT]) == 16
    assert {name for name in names if name not in kinds.DEVELOPMENT} == {"chance_2", "chance_3", "gcd", "lcm"}
    study = tune.load("pool_stream")
    memory = next(arm for arm in study.arms if arm.name == "memory")
    assert memory.settings["replay_revisit_fraction"] * study.settings["num_prompts_per_batch"] == 2


def test_a_pool_of_the_development_kinds_can_be_made():
    world = FixedPool(pool_of(kinds.DEVELOPMENT))
    assert world.num_prompts == 10 * len(kinds.DEVELOPMENT)
    assert len(world.wrong_ids) == round(0.1 * world.num_prompts)
    assert {world.domain_of(prompt_id) for prompt_id in world.pool_ids()} == set(kinds.DEVELOPMENT)


# --- results --------------------------------------------------------------------------------------


def small_pool() -> Study:
    arms = [method("reuse"), method("plain")]
    primary = Primary("reuse", ("plain",), ("accuracy_area",))
    doc = "Is it so?\n\nIt is if the difference is above 0, by the exact test of the primary comparison, in all pairs."
    return on_pool(kinds.DEVELOPMENT[:2], module="small", doc=doc, arms=arms, primary=primary, seeds=range(1, 8))


def write_results(directory, study: Study, arms: list[str] | None = None) -> None:
    """Write trials whose accuracy rises in equal steps, with reuse .1 higher from the first mark, on the pool .01."""
    write_study(directory, study)
    for arm in study.arms:
        if arms is not None and arm.name not in arms:
            continue
        for seed in study.seeds:
            with open_trial(directory, study, arm.name, seed, {"lr": 1e-3}) as trial:
                for mark in range(NUM_MARKS + 1):
                    more = 0.1 * (arm.name == "reuse" and mark > 0) + 0.001 * seed
                    tokens = mark * study.budget // NUM_MARKS
                    trial.add([
                        Row(mark - 1, 10 * mark, domain.name, 0.2 + 0.05 * mark + more, tokens, tokens // 2,
                            3.0 * mark, 100, 24, None, mark, 0.0,
                            {"pool_accuracy": 0.5 + 0.1 * more}, tokens // 4)
                        for domain in study.domains
                    ])  # fmt: skip
                trial.finish()


def test_a_pool_study_shows_area_pool_tokens_and_the_verdict(tmp_path, capsys, quick):
    study = small_pool()
    write_results(tmp_path, study)
    study_run.show(Plan(study, ("reuse", "plain"), study.seeds, tmp_path))
    shown = capsys.readouterr().out
    assert "accuracy over training" in shown and "tokens with a gradient" in shown and "retention" not in shown
    # the area of a difference of 0 at the first of nine marks and .1 at the others: .1 (7 + 1 / 2) / 8
    assert "accuracy over training, reuse minus plain: +9.4 points" in shown
    assert "p = 0.016 after correction, 7 pairs" in shown
    assert "primary comparison, reuse against plain: holds" in shown
    assert "accuracy on the pool, reuse minus plain: +1.0 points" in shown
    assert "no worse by a margin of 2.0 points" in shown
    # plain ends at .6 after 8 marks; reuse reaches .6 at mark 6
    assert "tokens to the final accuracy of plain: 0.75 of its own (median)" in shown
    assert report.main([str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "all of them from the start to the end of training" in page and "accuracy on the pool" in page


def test_a_pool_that_got_worse_is_said_to_be(tmp_path, capsys, quick):
    study = replace(small_pool(), primary=Primary("plain", ("reuse",), ("accuracy_area",)))
    write_study(tmp_path, study)
    for arm in study.arms:
        for seed in study.seeds:
            with open_trial(tmp_path, study, arm.name, seed, {}) as trial:
                for mark in range(NUM_MARKS + 1):
                    tokens = mark * study.budget // NUM_MARKS
                    pool = 0.5 + (0.01 * (seed % 2) + 0.03) * (arm.name == "reuse")
                    trial.add([
                        Row(mark - 1, mark, domain.name, 0.5, tokens, tokens, 1.0 * mark, 100,
                            measures={"pool_accuracy": pool})
                        for domain in study.domains
                    ])  # fmt: skip
                trial.finish()
    study_run.show(Plan(study, ("plain", "reuse"), study.seeds, tmp_path))
    shown = capsys.readouterr().out
    assert "not shown to be no worse by a margin of 2.0 points" in shown
    assert "primary comparison, plain against reuse: does not hold" in shown


def test_another_budget_moves_the_marks():
    study = planned(tune.load("pool_tuning"), {}, Path("nowhere"), budget=10_001).study
    assert study.budget == 10_001 and [study.stage_at(n) for n in (1249, 1250, 2499, 8749, 8750)] == [0, 1, 1, 6, 7]


def test_the_settings_of_a_method_are_ranked_over_directories(tmp_path, capsys):
    """Accuracies rise in equal steps from .2 to .6, plus .001 times the seed: the area is .4 and a little."""
    arms = [*grid("plain")[:2], grid("reuse")[0]]
    primary = Primary(arms[0].name, (arms[2].name,), ("accuracy_area",))
    for name, ours, seeds in (("one", arms, [1]), ("two", [arms[1], arms[2]], [2, 3])):
        study = replace(small_pool(), arms=tuple(arms), primary=primary, seeds=tuple(seeds))
        write_results(tmp_path / name, study, [arm.name for arm in ours])
    assert pool_choice.main([str(tmp_path / "one"), str(tmp_path / "two"), "--top", "1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line and line[0].startswith("plain_")] == [
        ["plain_0.0002_x1_32x4", "3", "0.402", "0.602", "0.500", "0.250"],
        ["plain_0.0002_x1_16x8", "1", "0.401", "0.601", "0.500", "0.250"],
    ]
    assert [line for line in lines if line[:1] == ["best:"]] == [
        ["best:", "plain_0.0002_x1_32x4"], ["best:", "reuse_0.0002_x1_16x8"]
    ]  # fmt: skip

"""Retention through `algo.train()`: what is held when, what a run without it is, exact resumes, settings that act."""

import json
import shutil
from copy import deepcopy

import numpy as np
import pytest

from rllib_srl import SRL
from rllib_srl.batch.shard import fetched
from rllib_srl.learner.group import retention
from rllib_srl.tune_configs.kinds import KINDS
from tests.algorithm.test_resume import assert_same, go_on
from tests.learner.test_retention import by_hand
from tests.small_envs import watch
from tests.small_learner import Recording, relative_gap
from tests.small_memory import memory_config, weights_of
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
EVEN, ODD = ({"env": f"tests.small_envs:{name}", "env_config": {"num_prompts": 400}} for name in ("Even", "Odd"))
STAGES = [{**EVEN, "iterations": 2}, {**ODD, "iterations": 30}]
RETAIN = {"retain": 1.0, "retain_answers": 3, "retain_window": 2}

FRESH = {"revisit_fraction": 0.0, "reuse_fraction": 0.0}


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    config = memory_config(random_llama_dir, tmp_path, revisit_fraction=0.25, reuse_fraction=0.25)
    config.env, config.env_config = None, {}
    return config.environment(stream=STAGES).training(lr=1e-3)


def retaining(config, **changes):
    return config.copy(copy_frozen=False).replay(**{**RETAIN, **changes})


def learner_of(result):
    return result["learners"]["default_policy"]


def test_a_domain_is_held_once_its_stage_is_over_and_gradients_are_compared_every_few_iterations(
    config, build, caplog, monkeypatch
):
    monkeypatch.setattr(retention, "CONFLICT", 1.0)  # so that every pair of domains is one
    monkeypatch.setattr(retention, "COMPARED_EVERY", 4)
    algo = build(retaining(config, **FRESH))
    results = [algo.train() for _ in range(8)]
    found = [result["retention"] for result in results]
    assert [one["num_held"] for one in found[:5]] == [0, 0, 0, 3, 3]  # learned in 1 and 2; the window is 2
    assert [learner_of(one)["retention/gradient_share"] > 0 for one in results[:5]] == [False] * 3 + [True] * 2
    assert set(found[4]["by_domain"]) == {"even"} and np.isfinite(found[4]["by_domain"]["even"]["delta"])
    assert learner_of(results[4])["retention_s"] > 0 and found[4]["memory_s"] > 0
    assert found[4]["by_domain"]["even"]["nll"] > 0
    assert [i for i in range(8) if np.isfinite(found[i].get("cosine", np.nan))] == [3, 7]
    for one in (found[3], found[7]):
        assert -1 < one["cosine"] < 1 and one["by_domain"]["even"]["cosine"] == pytest.approx(one["cosine"], abs=1e-4)
    (line,) = [record.getMessage() for record in caplog.records if "undoes" in record.getMessage()]
    assert line.startswith(f"learning 'odd' undoes 'even': the cosine of their gradients is {found[3]['cosine']:.2f}.")


def both_ways(algo, read):
    """Let each update that holds answers run without them first, and again from there.

    Returns a list that each adds to: its part, the weights before, and what `read` returns after the two.
    """
    learner, update, seen = algo.learner_group._learner, algo.learners.update, []

    def twice(shards, *rest):
        if not (part := shards[0].retention).num_held_tokens:
            return update(shards, *rest)
        before = deepcopy(learner.get_state())
        row = [part, deepcopy(learner.model.state_dict())]
        for shards[0].retention in (None, part):
            learner.set_state(before)
            results = update(shards, *rest)
            row.append(deepcopy(read()))
        seen.append(row)
        return results

    algo.learners.update = twice
    return seen


def test_a_weight_of_zero_is_the_run_without_and_a_run_is_the_same_until_it_holds(config, build, monkeypatch):
    held = go_on(build(retaining(config)), 4)
    zero = go_on(build(config.copy(copy_frozen=False).replay(retain=0.0)), 4)
    monkeypatch.setattr(SRL, "make_retention", lambda algo: None)
    without = go_on(build(retaining(config)), 4)
    assert_same(zero, without)
    assert_same(held[:3], without[:3])
    differ = {name for name in held[3] if not np.array_equal(held[3][name], without[3][name])}
    assert differ == {"weights"}  # of the first update that holds


def test_adapters_hold_with_rollouts_ahead(config, build):
    config = retaining(config, **FRESH).env_runners(num_env_runners=1, max_lag=1)
    config.training(lora_rank=4, optimizer_name="sgd", lr=0.1, grad_clip=1e6)
    algo = build(config)
    moved = both_ways(algo, lambda: weights_of(algo))
    while not moved and algo.iteration < 12:
        assert wait_until(lambda: all(one.batch for one in algo.rollouts.ahead.outstanding), 120)
        result = algo.train()
    found, learned = result["retention"], learner_of(result)
    assert (found["num_held"], set(found["by_domain"])) == (3, {"even"}) and result["rollout"]["lag_mean"] == 1
    assert np.isfinite([found["nll"], found["delta"], learned["loss"]]).all()
    norm = learned["retention/gradient_share"] * learned["gradients_default_optimizer_global_norm"]
    _, _, without, held = moved[0]
    assert np.linalg.norm(held - without) == pytest.approx(0.1 * norm, rel=1e-3) and norm > 0  # by the rate


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_the_gradient_of_answers_that_vllm_wrote_is_that_of_the_formula(config, build):
    """Answers of a tool's user, with the tool's words between its own, held while numbers are compared."""
    first, second = "problem_1", "compare_3_largest"
    stages = [{**KINDS[name], "domain": name, "iterations": 2} for name in (first, second)]
    config = retaining(config, **FRESH, retain_answers=5).environment(stream=stages)
    config.rl_module(model_config={"model": "tiny"}).learners(learner_class=Recording)
    config.env_runners(engine="vllm", engine_kv_cache_gib=0.125, num_env_runners=1, num_cpus_per_env_runner=1)
    config.env_runners(max_turns=4, max_turn_tokens=24, max_episode_tokens=256)
    algo = build(config.training(lr=1e-4, num_prompts_per_batch=8))
    seen, found = watch(algo), both_ways(algo, algo.learner_group._learner.gradients)
    while not found and algo.iteration < 8:
        algo.train()
    part, weights, without, both = found[0]
    played = [group for batch in seen for group in fetched([meta.ref for meta in batch.groups], 60)]
    right = {(g.group_id, g.stream(i).tobytes()) for g in played if g.prompt.domain == first
             for i in np.flatnonzero(g.rewards_G == 1)}  # fmt: skip
    held = fetched(part.held, 60)
    assert len(held) == 5 and {(one.group_id, one.token_ids_N.tobytes()) for one in held} <= right
    want, *_ = by_hand(config.model_dir(), held, weight=1.0, state=weights)
    assert relative_gap({name: both[name] - without[name] for name in both}, want) < 3e-5


def test_a_resume_checks_how_answers_were_graded_and_cut(config, build, tmp_path, caplog):
    algo = build(retaining(config, **FRESH))
    go_on(algo, 3)
    algo.save_to_path(tmp_path / "three")
    recut = shutil.copytree(config.model_dir(), tmp_path / "recut")
    content = json.loads((recut / "tokenizer.json").read_text())
    tokens = content["model"]["vocab"]
    one, other = [token for token in tokens if len(token) == 1][:2]
    tokens[one], tokens[other] = tokens[other], tokens[one]
    (recut / "tokenizer.json").write_text(json.dumps(content))
    same = retaining(config, **FRESH).rl_module(model_config={"model": str(recut)})
    with pytest.raises(ValueError, match="differs from that of the checkpoint, whose memory holds"):
        build(same).restore_from_path(tmp_path / "three")
    stages = [{**STAGES[0], "env_config": {"num_prompts": 400, "pay": None}}, STAGES[1]]
    again = build(retaining(config, **FRESH).environment(stream=stages))
    again.restore_from_path(tmp_path / "three")
    num = again.memory.stats(3)["num_answers_outdated"]
    assert num > 0 and again.train()["retention"]["num_held"] == 0
    (line,) = [record.getMessage() for record in caplog.records if "has changed since" in record.getMessage()]
    assert line.startswith(f"{again.source.env_ids[0]}: config or code has changed since the checkpoint, so {num:g} ")
    again.save_to_path(tmp_path / "four")
    last = build(retaining(config, **FRESH).environment(stream=stages))
    last.restore_from_path(tmp_path / "four")
    assert last.memory.stats(4)["num_answers_outdated"] == num  # the new digests are those of the checkpoint


def test_two_learners_and_an_actor_hold_as_one_process_does(config, build):
    """Tokens stay in the object store; the learners' shards are summed."""
    one = build(retaining(config, **FRESH).env_runners(num_env_runners=1))
    two = retaining(config, **FRESH).env_runners(num_env_runners=1).learners(num_learners=2, num_cpus_per_learner=0)
    runs = [[algo.train() for _ in range(4)] for algo in (one, build(two))]
    for first, second in zip(*runs, strict=True):
        a, b = first["retention"], second["retention"]
        assert [a[name] for name in ("num_held", "num_held_tokens")] == [b["num_held"], b["num_held_tokens"]]
        shares = [learner_of(result)["retention/gradient_share"] for result in (first, second)]
        assert shares[0] == pytest.approx(shares[1], rel=1e-3)
    assert runs[1][3]["retention"]["nll"] == pytest.approx(runs[0][3]["retention"]["nll"], rel=1e-3, abs=1e-6)
    assert runs[1][3]["retention"]["num_held"] == 3

"""Training from ratings: advantages and slices by hand, a job through its files, and the trainer's own process."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from rllib_srl.cli.serving import adapter
from rllib_srl.cli.serving.adapter import AdapterError
from rllib_srl.cli.serving.canary import Continuation, ServedContinuation, gap_of
from rllib_srl.cli.serving.job import Job, KeptDomain, RatedTokens, TrainingSettings
from rllib_srl.cli.serving.trainer import trainer
from rllib_srl.cli.serving.trainer.learning import SliceLearner, advantages_of, group_of, slices_of
from rllib_srl.engine.models import local_model
from rllib_srl.engine.sync import WeightSyncError

# "Question: Which is largest: 17, 93 or 40?\nAnswer:" in the tiny model's tokens, and two answers.
PROMPT = [361, 27, 492, 570, 578, 27, 222, 276, 258, 352, 596, 222, 299, 32, 200, 360, 27]
GOOD, BAD = ([222, 352, 200], [-0.0001, -0.25, -0.0001]), ([222, 276, 200], [-0.0001, -3.0, -0.0001])


def job_of(num=8, **settings):
    answers = [
        RatedTokens(f"c{i}", 0, PROMPT, *(GOOD if i % 2 else BAD), reward=float(i % 2)) for i in range(num)
    ]
    usual = {"slice_answers": 4, "passes": 2, "gate_prompts": 8, "max_drop": 0.9, "lr": 1e-3, "rank": 4}
    kept = [KeptDomain("compare", "compare", {"num_shots": 0})]
    return Job(1, str(local_model("tiny")), "", 128, 1.0, 3, TrainingSettings(**{**usual, **settings}), kept, answers)


def test_the_advantage_is_the_surprise_beside_the_other_ratings():
    # b = (1/2 + sum of the others) / 2, with the prior and one other rating
    found = [float(one[0]) for one in advantages_of([1.0, 0.0])]
    surprises = np.array([1 - 0.5 / 2, 0 - 1.5 / 2])
    assert found == pytest.approx(list(surprises / np.sqrt(np.mean(surprises**2))))
    (alone,) = advantages_of([1.0])
    assert alone[0] == pytest.approx(1.0)  # above the prior of 1/2, in units of its own size


def test_every_pass_has_each_answer_once_in_an_order_of_the_seed():
    job = job_of(10)
    slices = slices_of(10, job)
    assert [len(one) for one in slices] == [4, 4, 2, 4, 4, 2]
    for one_pass in (slices[:3], slices[3:]):
        assert sorted(answer for one in one_pass for answer in one) == list(range(10))
    assert slices == slices_of(10, job) != slices_of(10, replace(job, seed=4))


def test_a_rated_answer_is_a_group_of_one_episode():
    group = group_of(RatedTokens("c", 2, [1, 2], [3, 4], [-0.5, 1e-6], 0.75))
    assert group.loss_mask_N.tolist() == [False, False, True, True] and group.rewards_G.tolist() == [0.75]
    assert group.behaviour_logp_N.tolist() == [0, 0, -0.5, 0] and group.versions_G2.tolist() == [[2, 2]]


def test_a_job_is_read_as_it_was_written(tmp_path):
    job_of().write(tmp_path)
    assert Job.read(tmp_path) == job_of()
    (tmp_path / "job.json").write_text("{")
    with pytest.raises(AdapterError, match="job.json cannot be read"):
        Job.read(tmp_path)


def test_changed_files_are_found(tmp_path):
    for name in adapter.FILES:
        (tmp_path / name).write_text(name)
    files = adapter.checksums(tmp_path)
    adapter.verify(tmp_path, files)
    (tmp_path / adapter.CONFIG).write_text("{}")
    with pytest.raises(AdapterError, match="adapter_config.json was changed"):
        adapter.verify(tmp_path, files)
    (tmp_path / adapter.CANARY).unlink()
    with pytest.raises(AdapterError, match="canary.json cannot be read"):
        adapter.verify(tmp_path, files)


def served(ids, logps, top=None):
    return ServedContinuation(ids, logps, top or [{i: p} for i, p in zip(ids, logps, strict=True)])


def test_the_canary_compares_tokens_and_log_probs():
    want = [Continuation([1], list(range(12)), [-0.5] * 12)]
    assert gap_of(want, [served(list(range(12)), [-0.5] * 12)]).max == 0
    assert gap_of(want, [served(list(range(12)), [-0.75] * 12)]).max == pytest.approx(0.25)
    other = served([9, *range(1, 12)], [-0.5] * 12)
    assert gap_of(want, [other]).max == np.inf  # the trainer's token is not among the likeliest
    tie = [{9: -0.5, 0: -0.5}, *({i: -0.5} for i in range(1, 12))]
    with pytest.raises(WeightSyncError, match="only 1 tokens of the canary can be compared"):
        gap_of(want, [served([9, *range(1, 12)], [-0.5] * 12, tie)])


@pytest.mark.parametrize(("num", "is_enough"), [(72, False), (73, True)])
def test_a_gate_that_no_version_can_pass_is_refused_before_the_server_starts(num, is_enough):
    job = job_of(gate_prompts=num, max_drop=0.05)
    if is_enough:
        assert len(trainer.Examiner(job).prompts["compare"]) == num
        return
    with pytest.raises(ValueError, match="72 held-out prompts; expected at least 73, since .* max_drop = 0.05"):
        trainer.Examiner(job)


@pytest.mark.slow
def test_a_trainer_that_is_killed_ends_as_one_that_was_not(tmp_path):
    """One is restarted after its second slice: the same adapter, which prefers the good answer."""
    whole, cut = tmp_path / "a" / "0001", tmp_path / "b" / "0001"
    for directory in (whole, cut):
        directory.mkdir(parents=True)
        job_of().write(directory)
    trainer.train(whole)
    result = json.loads((whole / "result.json").read_text())
    assert result["is_passed"] and result["metrics"]["num_slices"] == 4 and result["metrics"]["num_nonfinite"] == 0
    assert result["changes"]["compare"]["num"] == 8 and (whole.parent / "before.json").exists()
    assert not list(whole.glob("slice_*")) and len(json.loads((whole / "canary.json").read_text())) == 6

    first = SliceLearner(job_of(), cut)
    before = preference(first)
    first.step()
    first.step()  # then the process is gone
    assert [one.name for one in cut.glob("slice_*")] == ["slice_0002"]
    second = SliceLearner(job_of(), cut)
    assert second.num_done == 2
    while second.num_done < second.num_slices:
        second.step()
    second.write(cut)
    assert (cut / adapter.WEIGHTS).read_bytes() == (whole / adapter.WEIGHTS).read_bytes()
    assert preference(second) > before

    assert second.metrics.keys() | {"kl", "num_slices", "num_answers"} == result["metrics"].keys()
    assert second.kl() == pytest.approx(result["metrics"]["kl"]) and second.kl() > 1e-6
    child = SliceLearner(replace(job_of(), version=2, parent=str(whole)), tmp_path)
    assert child.num_done == 0 and preference(child) == preference(second)  # it starts as its parent


@pytest.mark.slow
def test_a_trainer_killed_after_its_only_slice_gates_that_slice_and_a_gate_that_loses_its_episodes_is_no_verdict(
    tmp_path, monkeypatch
):
    directory = tmp_path / "0001"
    directory.mkdir()
    job = job_of(4, passes=1, kl=0.0, max_kl=1e-6)
    job.write(directory)
    SliceLearner(job, directory).step()  # then the process is gone
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "GATE_DEADLINE_S", 0.0)  # as if it had been stopped for all this time
        with pytest.raises(RuntimeError, match="8 of 8 held-out episodes of compare were lost"):
            trainer.train(directory)
    assert not (tmp_path / "before.json").exists() and not (directory / "result.json").exists()
    trainer.train(directory)
    result = json.loads((directory / "result.json").read_text())
    assert result["metrics"]["num_nonfinite"] == 0 and result["metrics"]["num_slices"] == 1
    (reason,) = result["reasons"]  # a KL after the slice, also without a KL in the loss
    assert reason.startswith("drift: KL ") and reason.endswith("limit 1e-06")


def preference(learner):
    """Return how much more the good answer is preferred to the bad one, nats."""
    good, bad = learner.learner.scorer.score([[*PROMPT, *GOOD[0]], [*PROMPT, *BAD[0]]])
    return float(good[-3:].sum() - bad[-3:].sum())

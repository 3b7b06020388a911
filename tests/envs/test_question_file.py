"""Questions from files: layouts and kinds of file by hand, rewards of content and format, and rows that are broken."""

from __future__ import annotations

import csv
import json
import logging

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.envs.math import question_file
from rllib_srl.envs.math.data_files import RowFault
from rllib_srl.envs.math.data_place import local_files
from rllib_srl.envs.math.question_file import QuestionFile
from rllib_srl.envs.math.question_rows import Problem, problem_of
from rllib_srl.rollout.replies import reset
from rllib_srl.rollout.transcript import make_transcript
from rllib_srl.types import Prompt
from tests.rollout.fakes import CHATML, make_tokenizer

GSM8K = {
    "question": "A robe takes 2 bolts of blue fiber and half that much white fiber.  How many bolts does it take?",
    "answer": "It takes 2/2=<<2/2=1>>1 bolt of white\nSo the total is 2+1=<<2+1=3>>3 bolts\n#### 3",
}
MATH = {
    "problem": "Expand $(x+1)^2$.",
    "level": "Level 1",
    "type": "Algebra",
    "solution": r"We have $(x+1)(x+1)$, so $\boxed{x^2+2x+1}$.",
}
AIME = {"ID": "2024-I-1", "Problem": "Find $m+n$.", "Solution": r"It is \boxed{204}.", "Answer": 204}
CHAMP = {
    "identifier": "P_1", "_raw_text": "How many of @@{1, 2, 3}@@?", "_text": "How many of {1, 2, 3}?",
    "category": "Combinatorics",
    "solution": {"steps": [{"_raw_text": "@@a@@", "_text": "a"}, {"_raw_text": "b", "_text": "b"}]},
    "_raw_answer": "@@239@@", "_answer": "239",
}  # fmt: skip


@pytest.mark.parametrize(("row", "expected"), [
    (GSM8K, Problem(GSM8K["question"], "3", "It takes 2/2=1 bolt of white\nSo the total is 2+1=3 bolts")),
    (MATH, Problem(MATH["problem"], "x^2+2x+1", MATH["solution"])),
    (AIME, Problem("Find $m+n$.", "204", r"It is \boxed{204}.")),
    (CHAMP, Problem("How many of {1, 2, 3}?", "239", "a\nb")),
    ({"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}, Problem("2+2?", "4")),
    (
        {
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "The answer is 4."},
            ]
        },
        Problem("2+2?", "4.", "The answer is 4.", system="Be short."),
    ),
    ({"prompt": [{"role": "user", "content": "2+2?"}], "answer": 4.0}, Problem("2+2?", "4")),
    ({"question": "q", "answer": 0.5, "solution": None}, Problem("q", "0.5")),
], ids=str)  # fmt: skip
def test_layouts_by_hand(row, expected):
    assert problem_of(row) == expected


@pytest.mark.parametrize(("row", "message"), [
    ([1], "field '(row)' is of type list; expected an object"),
    ({}, "field 'question' is missing; the row has no fields"),
    ({"q": "x", "answer": "1"}, "field 'question' is missing; the row has q, answer"),
    ({"question": None, "answer": "1"}, "field 'question' is missing"),
    ({"question": "", "answer": "1"}, "field 'question' is empty; expected text"),
    ({"question": 5, "answer": ["1", "2"]}, "field 'answer' = ['1', '2']; expected text or a number, or a list of"),
    ({"question": "q", "answer": {"value": 1}}, "field 'answer' = {'value': 1}; expected text or a number"),
    ({"question": "q"}, "field 'answer' is missing, and there is no solution; the row has question"),
    ({"question": "q", "answer": "so\n####"}, "field 'answer' has nothing after '####'"),
    ({"problem": "q", "solution": "It is hard."}, "field 'solution' states no answer; expected \\boxed{...}"),
    ({"problem": "q", "solution": {"steps": [1]}}, "field 'solution' = {'steps': [1]}; expected text"),
    ({"question": "q", "answer": "\ud800"}, "field 'answer' contains a lone surrogate"),
    ({"question": "q", "choices": ["a"], "answer": 0}, "field 'choices' = ['a']; expected a list of 2 to 10 texts"),
    ({"question": "q", "choices": "ab", "answer": 0}, "field 'choices' = 'ab'; expected a list"),
    ({"question": "q", "choices": ["a", "b"], "answer": 2}, "field 'answer' = 2; expected one of the 2 choices"),
    ({"question": "q", "choices": ["x", "y"], "answer": "C"}, "field 'answer' = 'C'; expected one of the 2"),
    ({"question": "q", "answer": float("nan")}, "field 'answer' = nan; expected a finite number"),
    ({"messages": [{"role": "user"}], "answer": "1"}, "field 'messages' has the message {'role': 'user'}"),
    ({"messages": [], "answer": "1"}, "field 'messages' is empty"),
], ids=str)  # fmt: skip
def test_a_broken_row_names_its_field(row, message):
    with pytest.raises(RowFault) as caught:
        problem_of(row)
    assert message in str(caught.value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["question", "messages", "answer", "solution", "choices", "role", "content", "text", "label"])


HELD = PLAIN | st.dictionaries(NAMES, PLAIN) | st.lists(st.dictionaries(NAMES, PLAIN), max_size=3)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.dictionaries(NAMES, HELD, max_size=5))
def test_any_row_is_a_problem_or_a_fault(row):
    try:
        problem = problem_of(row)
    except RowFault:
        return
    assert problem.question and problem.answer


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def sums(count=60, first=0):
    numbers = range(first, first + count)
    return [{"question": f"{n} + 1?\nSay it.", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in numbers]


def played(world, turn, prompt_id):
    world.reset(options={"prompt_id": prompt_id})
    _, reward, terminated, _, info = world.step(turn)
    assert terminated
    return reward, info


def paid(result):
    """Return reward and info without what the info says of the answer's text."""
    reward, info = result
    return reward, {name: value for name, value in info.items() if name not in ("parsed", "expected")}


def one_question(tmp_path, **config):
    world = QuestionFile({"path": write(tmp_path / "one.jsonl", [MATH]), "num_shots": 0, "deadline_s": 20.0, **config})
    (prompt_id,) = [i for split in ("train", "heldout") for i in world.prompt_ids(split, 0)]
    return world, prompt_id


def test_content_and_format_are_paid_apart(tmp_path):
    world, prompt_id = one_question(tmp_path, answer_format="boxed", format_weight=0.25)
    right, wrong = "x^2+2x+1", "x^2"
    for turn, reward, content, form in [
        (rf" \boxed{{{right}}}", 1.0, 1.0, 1.0), (r" so it is \boxed{(x+1)^2}", 1.0, 1.0, 1.0),
        (f" {right}", 0.75, 1.0, 0.0), (f" #### {right}", 0.75, 1.0, 0.0), (rf" \boxed{{{wrong}}}", 0.25, 0.0, 1.0),
        (f" {wrong}", 0.0, 0.0, 0.0),
    ]:  # fmt: skip
        expected = (reward, {"content_reward": content, "format_reward": form})
        assert paid(played(world, turn, prompt_id)) == expected, turn
    nothing = {"stop_reason": "unparsable", "content_reward": 0.0, "format_reward": 0.0}
    assert paid(played(world, "", prompt_id)) == (0.0, nothing)
    assert paid(played(world, r" \boxed{}", prompt_id)) == (0.0, nothing)
    strict, _ = one_question(tmp_path, answer_format="boxed", needs_format=True)
    assert paid(played(strict, f" {right}", prompt_id)) == (0.0, {"content_reward": 0.0, "format_reward": 0.0})
    assert played(strict, rf" \boxed{{{right}}}", prompt_id)[0] == 1.0
    loose, _ = one_question(tmp_path)
    assert played(loose, f" {right}\nQuestion: 1 + 1?\nAnswer: 2", prompt_id)[0] == 1.0  # the next question is no part


@pytest.mark.parametrize("answer_format", ["any", "boxed", "tags", "hashes", "phrase"])
@pytest.mark.parametrize("style", ["direct", "reasoned"])
@pytest.mark.parametrize("row", [GSM8K, MATH, AIME], ids=["gsm8k", "math", "aime"])
def test_gold_turns_earn_one_in_every_style_and_format(tmp_path, style, answer_format, row):
    config = {"path": write(tmp_path / "one.jsonl", [row]), "style": style, "answer_format": answer_format}
    asked_for = {} if answer_format == "any" else {"format_weight": 0.5, "needs_format": True}
    world = QuestionFile({**config, "num_shots": 0, **asked_for})
    (prompt_id,) = [i for split in ("train", "heldout") for i in world.prompt_ids(split, 0)]
    (gold,) = world.gold_turns(prompt_id)
    assert paid(played(world, gold, prompt_id)) == (1.0, {"content_reward": 1.0, "format_reward": 1.0})
    assert ("\n" in gold.strip()) == (style == "reasoned")
    wrong = f" {world.question(prompt_id).wrong}{world.stop_strings[0]}"
    assert played(world, wrong, prompt_id)[0] < 1.0


def test_a_second_file_is_held_out_and_shares_no_question(tmp_path):
    train, test = write(tmp_path / "train.jsonl", sums(60)), write(tmp_path / "test.jsonl", sums(20, first=50))
    world = QuestionFile({"path": train, "heldout_path": test, "num_shots": 4})
    asked = {split: {world.question(i).text for i in world.prompt_ids(split, 0)} for split in ("train", "heldout")}
    assert asked["heldout"] == {row["question"] for row in sums(20, first=50)}  # shots are never of these
    assert len(asked["train"]) == 50 - 4 and not asked["train"] & asked["heldout"]


def test_repeated_rows_are_counted_and_contradictions_are_faults(tmp_path):
    rows = sums(5) + sums(2)
    world = QuestionFile({"path": write(tmp_path / "r.jsonl", rows), "num_shots": 0})
    assert (world.num_questions, world.num_repeated) == (5, 2)
    rows.append({"question": rows[0]["question"], "answer": "7"})
    with pytest.raises(ValueError, match="row 8, field 'answer' differs from that of an earlier row"):
        QuestionFile({"path": write(tmp_path / "c.jsonl", rows), "num_shots": 0})


def test_broken_rows_are_named_all_at_once_or_left_out_and_counted(tmp_path, caplog):
    path = tmp_path / "broken.jsonl"
    lines = [json.dumps(row) for row in sums(6)]
    lines[1], lines[3], lines[4] = '{"question": "x"}', "{not json", '{"question": "y", "answer": []}'
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError) as caught:
        QuestionFile({"path": str(path), "num_shots": 0})
    said = str(caught.value)
    assert "broken.jsonl" in said and "bad_rows = 'skip'" in said
    assert "row 2, field 'answer' is missing" in said
    assert "row 4, field '(row)' is not JSON" in said
    assert "row 5, field 'answer' = []; expected text or a number" in said
    question_file._problems_in.cache_clear()
    with caplog.at_level(logging.WARNING):
        world = QuestionFile({"path": str(path), "num_shots": 0, "bad_rows": "skip"})
    assert (world.num_questions, world.num_skipped) == (3, 3)
    assert "3 rows cannot be used" in caplog.text and "row 2" in caplog.text


def test_many_broken_rows_are_counted_and_those_that_differ_shown(tmp_path):
    different = write(tmp_path / "broken.jsonl", [{f"a{n}": n} for n in range(50)])
    alike = write(tmp_path / "alike.jsonl", [{"a": n} for n in range(50)])
    for bad_rows in ("refuse", "skip"):  # with no good row there is nothing to use
        with pytest.raises(ValueError, match="row 20, .*; and 30 more rows"):
            QuestionFile({"path": different, "bad_rows": bad_rows})
        with pytest.raises(ValueError, match=r"row 1, .* \(the same in 49 more rows\); fix them"):
            QuestionFile({"path": alike, "bad_rows": bad_rows})


def test_a_column_that_the_user_names_must_be_there(tmp_path):
    """A misspelt name must not fall back on another column: its answers would be paid."""
    rows = [{"prompt": "1 + 4", "truth": "9", "solution": "so \\boxed{5}"}]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match="row 1, field 'truht' is missing; the row has prompt, truth, solution; set"):
        QuestionFile({"path": path, "num_shots": 0, "answer_field": "truht"})
    world = QuestionFile({"path": path, "num_shots": 0, "answer_field": "truth"})
    assert [world.data_question(one) for one in world.prompt_ids("train", 0)] == [("1 + 4", "9")]
    bare = write(tmp_path / "bare.jsonl", [{"prompt": "1 + 4", "solution": "5"}])
    with pytest.raises(ValueError, match="if it is the answer itself, set answer_field = 'solution'"):
        QuestionFile({"path": bare, "num_shots": 0})


@pytest.mark.parametrize(("name", "content", "message"), [
    ("q.txt", b"x", "file 'q.txt'; expected one that ends in .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow"),
    ("q.json", b"{", "is not JSON: .*; expected a list"),
    ("q.json", b"7", "holds no rows; expected a list"),
    ("q.json", b"[]", "has no rows; expected questions"),
    ("q.json", b"[" * 100_000, "is not JSON"),
    ("q.jsonl", b"", "has no rows; expected questions"),
    ("q.jsonl", "\ufeff{}\n".encode("utf-16-le"),
     "q.jsonl', line 1 cannot be read: byte 1 .0xff. is not UTF-8; .* seems to be UTF-16: iconv -f UTF-16"),
    ("q.jsonl", b'{"question": "a", "answer": "1"}\n{"question": "caf\xe9", "answer": "2"}\n',
     "q.jsonl', line 2 cannot be read: byte 18 .0xe9. is not UTF-8; .* perhaps CP1252: iconv -f CP1252 -t UTF-8"),
    ("q.csv", b"question,answer\n1,2\ncaf\xe9,2\n", "q.csv', line 3 cannot be read: byte 4 .0xe9. is not UTF-8"),
    ("q.json", b'[{"question":\n"\xe9"}]', "q.json', line 2 cannot be read: byte 2 .0xe9. is not UTF-8"),
    ("q.jsonl", b'{"question": "a", "answer": "1"}\n' + b"7" * ((4 << 20) + 1),
     "q.jsonl': row 2, field '.row.' .line 2. has more than 4194304 bytes; expected one row a line; fix them"),
    ("q.csv", b"question,answer\n1,2\n" + b"7" * ((4 << 20) + 1) + b",2\n",
     "q.csv': row 2, field '.row.' has 4194306 characters; expected at most 4194304: is a quote not closed?"),
    ("q.csv", b"question,answer\n1,2,3\n", "row 1, field '.row.' has 1 more values than column names"),
    ("q.parquet", b"PAR1 no", "is not a Parquet file"),
])  # fmt: skip
def test_files_that_hold_no_questions_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        QuestionFile({"path": str(tmp_path / name)})


@pytest.mark.parametrize(("config", "message"), [
    ({}, "path is not set; expected a file that ends in .jsonl"),
    ({"path": "nowhere.jsonl"}, "path = 'nowhere.jsonl' does not exist"),
    ({"path": "x", "format_weight": 0.5}, "answer_format = 'any' is always kept; expected boxed, tags, hashes"),
    ({"path": "x", "prompt_template": "Q:"}, r"prompt_template = 'Q:': \{question\} is not in it; expected text"),
    ({"path": "x", "prompt_template": "{question} }"}, "Single '}' encountered.*; write a literal brace twice; .*"),
    ({"path": "x", "prompt_template": "{question"}, "expected '}' before end of string"),
    ({"path": "x", "prompt_template": "{} {question}"}, r"\{\} is not a plain field name"),
    ({"path": "x", "prompt_template": "{question.upper}"}, r"\{question.upper\} is not a plain field name"),
    ({"path": "x", "prompt_template": "{question!r}"}, r"\{question\} is not a plain field name"),
    ({"path": "x", "prompt_template": "{question} {Answer}"}, r"names \{Answer\}, which reveals the answer"),
    ({"path": "x", "prompt_template": "{question} {a}", "answer_field": "a"}, r"names \{a\}, which reveals the answer"),
    ({"path": "x", "instruction": 3, "system_prompt": None}, "instruction = 3; .*system_prompt = None; expected"),
])  # fmt: skip
def test_bad_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        QuestionFile(config)


def test_a_file_of_the_hub_is_fetched_by_name(tmp_path, monkeypatch):
    path = write(tmp_path / "train.jsonl", sums(9))
    asked = []

    def fetched(hub_id, name, repo_type):
        asked.append((hub_id, name, repo_type))
        if name != "main/train.jsonl":
            raise OSError("no network\nand a long story")
        return path

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetched)
    world = QuestionFile({"hub_id": "openai/gsm8k", "path": "main/train.jsonl", "num_shots": 0})
    assert (world.num_questions, world.domain) == (9, "train")
    assert asked == [("openai/gsm8k", "main/train.jsonl", "dataset")]
    with pytest.raises(ValueError, match="cannot be fetched .OSError: no network.; expected .* or download it"):
        QuestionFile({"hub_id": "openai/gsm8k", "path": "main/test.jsonl", "num_shots": 0})


def test_worlds_of_one_file_read_it_once_and_see_that_it_changed(tmp_path, monkeypatch):
    path, count = tmp_path / "s.jsonl", []
    write(path, sums(5))
    rows_of = question_file.rows_of
    monkeypatch.setattr(question_file, "rows_of", lambda file: count.append(file) or rows_of(file))
    worlds = [QuestionFile({"path": str(path), "num_shots": 0}) for _ in range(3)]
    assert len(count) == 1
    assert worlds[0]._problems is not worlds[1]._problems
    write(path, sums(7))
    assert QuestionFile({"path": str(path), "num_shots": 0}).num_questions == 7


def prompt_of(world):
    (prompt_id,) = [i for split in ("train", "heldout") for i in world.prompt_ids(split, 0)]
    return world.reset(options={"prompt_id": prompt_id})[0], prompt_id


TOPICAL = {"question": "1 + 1?", "answer": "2", "Topic": "sums {x}", "level": 3}


@pytest.mark.parametrize(("answer_format", "told"), [
    ("boxed", r"Write the final answer as \boxed{...}."),
    ("tags", "Write the final answer as <answer>...</answer>."),
    ("hashes", "Write #### and then the final answer."),
    ("phrase", 'Write "The answer is" and then the final answer.'),
])  # fmt: skip
def test_the_prompt_says_what_format_is_expected(tmp_path, answer_format, told):
    path = write(tmp_path / "q.jsonl", [TOPICAL])
    config = {"path": path, "num_shots": 0, "answer_format": answer_format, "needs_format": True}
    prompt, prompt_id = prompt_of(QuestionFile(config))
    assert prompt == f"{told}\n\nQuestion: 1 + 1?\nAnswer:"
    instructed = QuestionFile({**config, "instruction": "Think first."})
    assert prompt_of(instructed)[0] == f"Think first.\n{told}\n\nQuestion: 1 + 1?\nAnswer:"
    (gold,) = instructed.gold_turns(prompt_id)
    assert played(instructed, gold, prompt_id)[0] == 1.0 and played(instructed, " 2\n", prompt_id)[0] == 0.0


def test_a_template_shapes_question_and_shots(tmp_path):
    rows = [{**row, "Topic": f"t{n}"} for n, row in enumerate(sums(9))]
    config = {"path": write(tmp_path / "s.jsonl", rows), "prompt_template": "Topic: {topic}\nQ: {question}\nA:\n"}
    world = QuestionFile({**config, "num_shots": 1, "style": "reasoned", "instruction": "Work it out."})
    assert world.stop_strings == ("\nTopic:",)
    observation, info = world.reset(seed=0)
    said, shot, asked = observation.split("\n\n")
    number = int(shot.split("t")[1].split("\n")[0])
    assert said == "Work it out."
    assert shot == f"Topic: t{number}\nQ: {number} + 1?\nSay it.\nA:\nIt is {number + 1}.\n#### {number + 1}"
    question = world.question(info["prompt_id"]).text
    assert asked == f"Topic: t{question.split(' ')[0]}\nQ: {question}\nA:\n"
    assert world.step(world.gold_turns(info["prompt_id"])[0])[1] == 1.0


@pytest.mark.parametrize(
    ("template", "stop"),
    [("Q: {question}\nA:", "\nQ:"), ("{question}", "\nQuestion:"), ("A {level} one: {question}", "\nQuestion:")],
)
def test_a_turn_ends_where_the_next_question_begins(tmp_path, template, stop):
    path = write(tmp_path / "q.jsonl", [TOPICAL])
    world = QuestionFile({"path": path, "num_shots": 0, "style": "reasoned", "prompt_template": template})
    assert world.stop_strings == (stop,)
    assert played(world, f"2{stop} 3 + 4", prompt_of(world)[1])[0] == 1.0


def test_a_field_put_into_a_template_stays_text(tmp_path):
    path = write(tmp_path / "q.jsonl", [TOPICAL])
    world = QuestionFile({"path": path, "num_shots": 0, "prompt_template": "{{{Topic}}} {level}: {question}"})
    assert prompt_of(world)[0] == "{sums {x}} 3: 1 + 1?"


def test_a_template_of_unknown_fields_is_refused_once(tmp_path):
    config = {"path": write(tmp_path / "q.jsonl", [TOPICAL] * 30), "num_shots": 0}
    with pytest.raises(ValueError) as caught:
        QuestionFile({**config, "prompt_template": "{topik}: {question}"})
    said = str(caught.value)
    assert said.startswith("prompt_template names {topik}; expected question, or a field of ")
    assert said.endswith("q.jsonl': answer, level, question, topic") and said.count("topik") == 1
    path = write(tmp_path / "some.jsonl", [TOPICAL, {"question": "2 + 1?", "answer": "3"}])
    config = {"path": path, "num_shots": 0, "prompt_template": "{topic}: {question}"}
    with pytest.raises(ValueError, match="row 2, field 'topic' is missing, which prompt_template names; the row has q"):
        QuestionFile(config)
    assert QuestionFile({**config, "bad_rows": "skip"}).num_questions == 1


def test_a_chat_shows_system_prompt_and_instruction_and_its_whole_turn_is_read(tmp_path):
    config = {"path": write(tmp_path / "q.jsonl", [TOPICAL]), "num_shots": 0, "prompt_template": "{question}"}
    world = QuestionFile({**config, "system_prompt": "Be brief.", "instruction": "Think.", "answer_format": "tags"})
    prompt_id = prompt_of(world)[1]
    tokenizer = make_tokenizer(chat_template=CHATML, with_bos=False)
    said = reset(world, Prompt("question_file", prompt_id))
    ids = make_transcript("chat", tokenizer).first(said.observation, said.tools, said.system)
    asked = "Think.\nWrite the final answer as <answer>...</answer>.\n\n1 + 1?"
    assert tokenizer.decode(ids) == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert played(world, "One and one.\n\n<answer>2</answer>", prompt_id)[0] == 1.0
    assert played(QuestionFile(config), "One and one are:\n2", prompt_id)[0] == 1.0
    assert played(QuestionFile(config), "One and one are:\n3", prompt_id)[0] == 0.0


def test_the_info_says_what_was_parsed_and_expected(tmp_path):
    world = QuestionFile({"path": write(tmp_path / "q.jsonl", [TOPICAL]), "num_shots": 0, "answer_format": "boxed"})
    prompt_id = prompt_of(world)[1]
    for turn, parsed in [(r" so \boxed{3}", "3"), (" 2 or 3", "2 | 3"), (" dunno", ""), (" It is not 2", "")]:
        info = played(world, turn, prompt_id)[1]
        assert (info["parsed"], info["expected"]) == (parsed, r"\boxed{2}"), turn
    assert len(played(world, " 7" * 5_000, prompt_id)[1]["parsed"]) <= 200


def test_a_solution_that_states_two_answers_is_not_shown(tmp_path):
    row = {"problem": "Which is it?", "solution": r"Perhaps \boxed{4}. No, it is \boxed{5}."}
    world = QuestionFile({"path": write(tmp_path / "q.jsonl", [row]), "num_shots": 0, "style": "reasoned"})
    prompt_id = prompt_of(world)[1]
    assert world.gold_turns(prompt_id) == [" #### 5\nQuestion:"]
    assert played(world, f" {row['solution']}", prompt_id)[0] == 0.0
    assert played(world, world.gold_turns(prompt_id)[0], prompt_id)[0] == 1.0


@pytest.mark.parametrize("names", [["test.jsonl"], ["train-00000-of-00002.parquet", "train-00002-of-00002.parquet"]])
def test_a_split_without_all_of_its_files_lists_them(names, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda hub_id, repo_type: names)
    with pytest.raises(ValueError, match=f"files of the split 'train'; expected one of its files as path: {names[0]}"):
        local_files("org/name", "train")

"""Questions from files: prompts, rewards of content and format, splits, and rows and settings that are broken."""

import json
import logging
from decimal import Decimal

import pandas
import pytest

from rllib_srl.algorithm.own_data import data_settings
from rllib_srl.envs.math import question_file
from rllib_srl.envs.math.data_place import local_files
from rllib_srl.envs.math.question_file import QuestionFile
from rllib_srl.rollout.player import first_ids
from rllib_srl.rollout.replies import reset
from rllib_srl.rollout.transcript import ChatTranscript, make_transcript
from rllib_srl.types import Prompt
from tests.envs.questions import asked, env_of, played, write
from tests.envs.test_question_rows import AIME, GSM8K, MATH, SAID
from tests.rollout.fakes import CHATML, make_tokenizer

TOPICAL = {"question": "1 + 1?", "answer": "2", "Topic": "sums {x}", "level": 3}


def sums(count=60, first=0):
    numbers = range(first, first + count)
    return [{"question": f"{n} + 1?\nSay it.", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in numbers]


def prompt_of(env):
    return env.reset(options={"prompt_id": env._ids[0]})[0]


def test_content_and_format_are_paid_apart(tmp_path):
    def paid(env, turn):
        reward, info = played(env, turn)
        return reward, info["content_reward"], info["format_reward"]

    exact = {"deadline_s": 20.0, "answer_format": "boxed"}
    env = env_of(tmp_path, [MATH], **exact, format_weight=0.25)
    for turn, *expected in [
        (r" \boxed{x^2+2x+1}", 1.0, 1.0, 1.0), (r" so it is \boxed{(x+1)^2}", 1.0, 1.0, 1.0),
        (" x^2+2x+1", 0.75, 1.0, 0.0), (" #### x^2+2x+1", 0.75, 1.0, 0.0), (r" \boxed{x^2}", 0.25, 0.0, 1.0),
        (" x^2", 0.0, 0.0, 0.0), ("", 0.0, 0.0, 0.0), (r" \boxed{}", 0.0, 0.0, 0.0),
    ]:  # fmt: skip
        assert paid(env, turn) == tuple(expected), turn
    assert played(env, "")[1]["stop_reason"] == "unparsable"
    strict = env_of(tmp_path, [MATH], **exact, needs_format=True)
    assert paid(strict, " x^2+2x+1") == (0.0, 0.0, 0.0) and paid(strict, r" \boxed{x^2+2x+1}")[0] == 1.0
    loose = env_of(tmp_path, [MATH], deadline_s=20.0)
    assert played(loose, " x^2+2x+1\nQuestion: 1 + 1?\nAnswer: 2")[0] == 1.0  # the next question is no part


@pytest.mark.parametrize("row", [GSM8K, MATH, AIME], ids=["gsm8k", "math", "aime"])
def test_gold_turns_earn_one_in_every_style_and_format(tmp_path, row):
    for answer_format in ("any", "boxed", "tags", "hashes", "phrase"):
        asked_for = {} if answer_format == "any" else {"format_weight": 0.5, "needs_format": True}
        for style in ("direct", "reasoned"):
            env = env_of(tmp_path, [row], style=style, answer_format=answer_format, **asked_for)
            (gold,) = env.gold_turns(env._ids[0])
            reward, info = played(env, gold)
            assert (reward, info["content_reward"], info["format_reward"]) == (1.0, 1.0, 1.0)
            assert ("\n" in gold.strip()) == (style == "reasoned")
            assert played(env, f" {env.question(env._ids[0]).wrong}{env.stop_strings[0]}")[0] < 1.0


def test_the_info_says_what_was_parsed_and_a_note_that_a_solution_has_two_answers(tmp_path):
    env = env_of(tmp_path, [TOPICAL], answer_format="boxed")
    for turn, parsed in [(r" so \boxed{3}", "3"), (" 2 or 3", "2 | 3"), (" dunno", ""), (" It is not 2", "")]:
        info = played(env, turn)[1]
        assert (info["parsed"], info["expected"]) == (parsed, r"\boxed{2}"), turn
    assert len(played(env, " 7" * 5_000)[1]["parsed"]) <= 200
    row = {"problem": "Which is it?", "solution": r"Perhaps \boxed{4}. No, it is \boxed{5}."}
    env = env_of(tmp_path, [row], style="reasoned")
    assert env.row_notes == ["row 1 has 2 boxes in its solution, such as '4' and '5', and the last one counts"]
    assert env.gold_turns(env._ids[0]) == [" #### 5\nQuestion:"]
    assert [played(env, turn)[0] for turn in (f" {row['solution']}", " #### 5\nQuestion:")] == [0.0, 1.0]


def test_a_second_file_is_held_out_and_shares_no_question(tmp_path):
    test = write(tmp_path / "test.jsonl", sums(20, first=50))
    env = env_of(tmp_path, sums(60), heldout_path=test, num_shots=4)
    found = {split: {env.question(i).text for i in env.prompt_ids(split, 0)} for split in ("train", "heldout")}
    assert found["heldout"] == {row["question"] for row in sums(20, first=50)}  # shots are never of these
    assert len(found["train"]) == 50 - 4 and not found["train"] & found["heldout"]


def test_repeated_rows_are_counted_contradictions_are_errors_and_a_named_column_must_be_there(tmp_path):
    rows = sums(5) + sums(2)
    env = env_of(tmp_path, rows)
    assert (env.num_questions, env.num_repeated) == (5, 2)
    with pytest.raises(ValueError, match="row 8, field 'answer' differs from that of an earlier row"):
        env_of(tmp_path, [*rows, {"question": rows[0]["question"], "answer": "7"}])
    rows = [{"prompt": "1 + 4", "truth": "9", "solution": "so \\boxed{5}"}]
    with pytest.raises(ValueError, match="row 1, field 'truht' is missing; the row has prompt, truth, solution; set"):
        env_of(tmp_path, rows, answer_field="truht")
    assert asked(env_of(tmp_path, rows, answer_field="truth")) == {"1 + 4": "9"}
    with pytest.raises(ValueError, match="if it is the answer itself, set answer_field = 'solution'"):
        env_of(tmp_path, [{"prompt": "1 + 4", "solution": "5"}])


def test_broken_rows_are_named_all_at_once_or_left_out_and_counted(tmp_path, caplog):
    path = tmp_path / "broken.jsonl"
    lines = [json.dumps(row) for row in sums(6)]
    lines[1], lines[3], lines[4] = '{"question": "x"}', "{not json", '{"question": "y", "answer": []}'
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError) as caught:
        QuestionFile({"path": str(path), "num_shots": 0})
    for part in ("broken.jsonl", "bad_rows = 'skip'", "row 2, field 'answer' is missing", "JSON at column 2 of line 4",
                 "row 5, field 'answer' = []; expected text or a number"):  # fmt: skip
        assert part in str(caught.value)
    question_file._problems_in.cache_clear()
    with caplog.at_level(logging.WARNING):
        env = QuestionFile({"path": str(path), "num_shots": 0, "bad_rows": "skip"})
    assert (env.num_questions, env.num_skipped) == (3, 3)
    assert "3 rows cannot be used" in caplog.text and "row 2" in caplog.text
    for bad_rows in ("refuse", "skip"):  # with no good row there is nothing to use
        with pytest.raises(ValueError, match="row 20, .*; and 30 more rows"):
            env_of(tmp_path, [{f"a{n}": n} for n in range(50)], bad_rows=bad_rows)
        with pytest.raises(ValueError, match=r"row 1, .* \(the same in 49 more rows\); fix them"):
            env_of(tmp_path, [{"a": n} for n in range(50)], bad_rows=bad_rows)


def test_decimals_of_a_database_arrive_by_file_and_by_object(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RLLIB_SRL_CACHE", str(tmp_path))
    rows = [{"question": f"{n}?", "answer": Decimal(n) / 4} for n in range(1, 5)]
    path = write(tmp_path / "t.parquet", rows)
    for place in ({"path": path}, data_settings(rows), data_settings(pandas.DataFrame(rows))):
        env = QuestionFile({**place, "num_shots": 0})
        assert asked(env) == {"1?": "0.25", "2?": "0.5", "3?": "0.75", "4?": "1"}


@pytest.mark.parametrize(("name", "content", "message"), [
    ("q.txt", b"x", "file 'q.txt'; expected one that ends in .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow"),
    ("q.json", b"{", "is not JSON: .*; expected a list"),
    ("q.json", b"7", "holds no rows; expected a list"),
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
     "q.csv': row 2, field 'question' has 4194305 of the row's 4194306 characters; expected at most 4194304: is"),
    ("q.csv", b"question,answer\n1,2,3\n", "row 1, field '.row.' has 1 more values than column names"),
    ("q.parquet", b"PAR1 no", "is not a Parquet file"),
])  # fmt: skip
def test_files_that_hold_no_questions_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        QuestionFile({"path": str(tmp_path / name)})


def test_a_file_of_the_hub_is_fetched_by_name(tmp_path, monkeypatch):
    path = write(tmp_path / "train.jsonl", sums(9))
    asked = []

    def fetched(hub_id, name, repo_type):
        asked.append((hub_id, name, repo_type))
        if name != "main/train.jsonl":
            raise OSError("no network\nand a long story")
        return path

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetched)
    env = QuestionFile({"hub_id": "openai/gsm8k", "path": "main/train.jsonl", "num_shots": 0})
    assert (env.num_questions, env.domain) == (9, "train")
    assert asked == [("openai/gsm8k", "main/train.jsonl", "dataset")]
    with pytest.raises(ValueError, match="cannot be fetched .OSError: no network.; expected .* or download it"):
        QuestionFile({"hub_id": "openai/gsm8k", "path": "main/test.jsonl", "num_shots": 0})


def test_envs_of_one_file_read_it_once_and_see_that_it_changed(tmp_path, monkeypatch):
    count = []
    rows_of = question_file.rows_of
    monkeypatch.setattr(question_file, "rows_of", lambda file: count.append(file) or rows_of(file))
    path = write(tmp_path / "rows.jsonl", sums(5))
    envs = [QuestionFile({"path": path, "num_shots": 0}) for _ in range(3)]
    assert len(count) == 1
    assert envs[0]._problems is not envs[1]._problems
    assert env_of(tmp_path, sums(7)).num_questions == 7


@pytest.mark.parametrize("names", [["test.jsonl"], ["train-00000-of-00002.parquet", "train-00002-of-00002.parquet"]])
def test_a_split_without_all_of_its_files_lists_them(names, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda hub_id, repo_type: names)
    with pytest.raises(ValueError, match=f"files of the split 'train'; expected one of its files as path: {names[0]}"):
        local_files("org/name", "train")


@pytest.mark.parametrize(("answer_format", "told"), [
    ("boxed", r"Write the final answer as \boxed{...}."),
    ("tags", "Write the final answer as <answer>...</answer>."),
    ("hashes", "Write #### and then the final answer."),
    ("phrase", 'Write "The answer is" and then the final answer.'),
])  # fmt: skip
def test_the_prompt_says_what_format_is_expected(tmp_path, answer_format, told):
    for instruction, before in (("", ""), ("Think first.", "Think first.\n")):
        config = {"answer_format": answer_format, "needs_format": True, "instruction": instruction}
        assert prompt_of(env_of(tmp_path, [TOPICAL], **config)) == f"{before}{told}\n\nQuestion: 1 + 1?\nAnswer:"


def test_templates_shape_questions_and_shots_and_end_turns(tmp_path):
    rows = [{**row, "Topic": f"t{n}"} for n, row in enumerate(sums(9))]
    config = {"path": write(tmp_path / "s.jsonl", rows), "prompt_template": "Topic: {topic}\nQ: {question}\nA:\n"}
    env = QuestionFile({**config, "num_shots": 1, "style": "reasoned", "instruction": "Work it out."})
    assert env.stop_strings == ("\nTopic:",)
    observation, info = env.reset(seed=0)
    said, shot, asked = observation.split("\n\n")
    number = int(shot.split("t")[1].split("\n")[0])
    assert said == "Work it out."
    assert shot == f"Topic: t{number}\nQ: {number} + 1?\nSay it.\nA:\nIt is {number + 1}.\n#### {number + 1}"
    question = env.question(info["prompt_id"]).text
    assert asked == f"Topic: t{question.split(' ')[0]}\nQ: {question}\nA:\n"
    assert env.step(env.gold_turns(info["prompt_id"])[0])[1] == 1.0
    for template, stop in (("Q: {question}\nA:", "\nQ:"), ("A {level} one: {question}", "\nQuestion:")):
        env = env_of(tmp_path, [TOPICAL], style="reasoned", prompt_template=template)
        assert env.stop_strings == (stop,) and played(env, f"2{stop} 3 + 4")[0] == 1.0
    env = env_of(tmp_path, [TOPICAL], prompt_template="{{{Topic}}} {level}: {question}")
    assert prompt_of(env) == "{sums {x}} 3: 1 + 1?"  # a field stays text


def test_a_template_of_unknown_fields_is_refused_once(tmp_path):
    with pytest.raises(ValueError) as caught:
        env_of(tmp_path, [TOPICAL] * 30, prompt_template="{topik}: {question}")
    said = str(caught.value)
    assert said.startswith("prompt_template names {topik}; expected question, or a field of ")
    assert said.endswith("rows.jsonl': answer, level, question, topic") and said.count("topik") == 1
    rows, template = [TOPICAL, {"question": "2 + 1?", "answer": "3"}], "{topic}: {question}"
    with pytest.raises(ValueError, match="row 2, field 'topic' is missing, which prompt_template names; the row has q"):
        env_of(tmp_path, rows, prompt_template=template)
    assert env_of(tmp_path, rows, prompt_template=template, bad_rows="skip").num_questions == 1


def test_a_chat_shows_system_prompt_and_instruction_and_its_whole_turn_is_read(tmp_path):
    config = {"prompt_template": "{question}", "system_prompt": "Be brief.", "instruction": "Think."}
    env = env_of(tmp_path, [TOPICAL], **config, answer_format="tags")
    tokenizer = make_tokenizer(chat_template=CHATML, with_bos=False)
    said = reset(env, Prompt("question_file", env._ids[0]))
    ids = make_transcript("chat", tokenizer).first(said.observation, said.tools, said.system)
    told = "Think.\nWrite the final answer as <answer>...</answer>.\n\n1 + 1?"
    assert tokenizer.decode(ids) == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{told}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert played(env, "One and one.\n\n<answer>2</answer>")[0] == 1.0
    plain = env_of(tmp_path, [TOPICAL], prompt_template="{question}")
    assert [played(plain, f"One and one are:\n{n}")[0] for n in (2, 3)] == [1.0, 0.0]


def test_an_earlier_turn_of_the_assistant_is_history(tmp_path) -> None:
    turns = [*SAID, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And one more?"}]
    env = env_of(tmp_path, [{"messages": [*turns, {"role": "assistant", "content": "It is #### 5"}]}])
    (prompt_id,) = env._ids
    assert env.question(prompt_id).answer == "5"
    said = reset(env, Prompt("question_file", prompt_id))
    assert said.observation == "User: 2 + 2?\nAssistant: 4\nUser: And one more?\nAssistant:"
    assert [dict(one) for one in said.messages] == turns[1:] and said.system == "Be short."
    tokenizer = make_tokenizer(chat_template=CHATML, with_bos=False)
    assert tokenizer.decode(first_ids(ChatTranscript(tokenizer), said)) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nAnd one more?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [played(env, f" {turn}\n")[0] for turn in "54"] == [1.0, 0.0]


def test_instruction_and_templates_of_a_prompt_with_history(tmp_path) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    shape = {"instruction": "Think.", "prompt_template": "Q: {question}"}
    env = env_of(tmp_path, [{"messages": turns, "answer": "5"}], **shape)
    said = reset(env, Prompt("question_file", env._ids[0]))
    assert [one["content"] for one in said.messages] == ["Think.\n\na", "b", "Q: c"]
    strict = "{% if messages[-1]['content'] == 'Q: c' %}{{ raise_exception('by turns') }}{% endif %}" + CHATML
    with pytest.raises(ValueError, match="refuses a prompt with the roles user, assistant, user .*by turns"):
        first_ids(ChatTranscript(make_tokenizer(chat_template=strict, with_bos=False)), said)
    plain = env_of(tmp_path, [{"messages": turns[2:], "answer": "5"}])
    assert reset(plain, Prompt("question_file", plain._ids[0])).messages == ()

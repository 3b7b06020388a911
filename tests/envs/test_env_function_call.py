"""Single-turn calls: the matcher by hand and against BFCL's own, the generator, and files."""

import copy
import importlib
import importlib.util
import json
import random
import sys
import types
from itertools import islice

import pytest

from rllib_srl.envs.functions.call_files import PACKAGED, call_rows, packaged_paths
from rllib_srl.envs.functions.call_questions import NUM_REQUESTS, request
from rllib_srl.envs.functions.function_call import FunctionCall
from rllib_srl.envs.tools.calls import ToolCall
from rllib_srl.envs.tools.matching import do_match

HAS_BFCL = importlib.util.find_spec("bfcl_eval") is not None
needs_bfcl = pytest.mark.skipif(not HAS_BFCL, reason="bfcl-eval is not installed: pip install --no-deps bfcl-eval")

BOOK = {
    "name": "book",
    "parameters": {
        "type": "dict",
        "properties": {
            "city": {"type": "string"}, "nights": {"type": "integer"}, "price": {"type": "float"},
            "quiet": {"type": "boolean"}, "guests": {"type": "array", "items": {"type": "string"}},
            "room": {"type": "dict", "properties": {"floor": {"type": "integer"}, "view": {"type": "string"}}},
        },
        "required": ["city"],
    },
}  # fmt: skip
WANTED = {
    "book": {
        "city": ["Oslo", "Oslo, Norway"], "nights": [2, ""], "price": ["", 80.0], "quiet": ["", True],
        "guests": ["", ["Ann", "Ben"]], "room": ["", {"floor": [3], "view": ["sea", ""]}],
    }
}  # fmt: skip


@pytest.mark.parametrize(("does_match", "given"), [
    (True, [
        {}, {"city": "oslo norway"}, {"nights": 2}, {"price": 80}, {"quiet": True}, {"guests": ["ann", "BEN"]},
        {"room": {"floor": 3}}, {"room": {"floor": 3, "view": "Sea"}},
    ]),
    (False, [
        {"city": "Bergen"}, {"city": ["Oslo"]}, {"nights": 2.0}, {"nights": "2"}, {"nights": 3}, {"nights": True},
        {"price": 80.5}, {"quiet": 1}, {"guests": ["Ben", "Ann"]}, {"room": {"view": "sea"}}, {"pets": 1},
        {"room": {"floor": 3, "bath": 1}},
    ]),
])  # fmt: skip
def test_one_call_by_hand(does_match, given):
    for kwargs in given:
        call = ToolCall("book", (), {"city": "Oslo", **kwargs})
        assert do_match([call], [WANTED], [BOOK]) == does_match, kwargs
    assert not do_match([ToolCall("book")], [WANTED], [BOOK])


def test_calls_match_in_any_order_and_in_the_best_way():
    def one(*cities):
        return {"book": {"city": list(cities)}}

    calls = [ToolCall("book", (), {"city": city}) for city in ("Oslo", "Riga")]
    assert do_match(calls, [one("Riga"), one("Oslo")], [BOOK])
    assert do_match(calls, [one("Oslo", "Riga"), one("Oslo")], [BOOK])  # the first that fits would take Oslo away
    assert not do_match(calls, [one("Oslo"), one("Oslo")], [BOOK])
    assert not do_match(calls, [one("Oslo")], [BOOK])
    assert not do_match(calls[:1], [one("Riga"), one("Oslo")], [BOOK])
    assert not do_match([ToolCall("cook", (), {"city": "Oslo"})], [one("Oslo")], [BOOK])


@pytest.fixture(scope="module", name="bfcl_check")
def _bfcl_check():
    """Return BFCL's own check of calls, without the table of models that it imports for nothing here."""
    name = "bfcl_eval.constants.model_config"
    stub = types.ModuleType(name)
    stub.MODEL_CONFIG_MAPPING = {"any": types.SimpleNamespace(underscore_to_dot=False)}
    before = sys.modules.get(name)
    sys.modules[name] = stub
    try:
        checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
        language = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON
    finally:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before

    def check(row, calls, category):
        output = [{call.name: copy.deepcopy(call.kwargs)} for call in calls]
        answers = copy.deepcopy(list(row.expected))
        return checker.ast_checker(list(row.docs), output, answers, language, category, "any")["valid"]

    return check


def mutated(call, generator):
    """Return the call with one thing changed, sometimes nothing that matters."""
    kwargs = copy.deepcopy(call.kwargs)
    name = generator.choice(sorted(kwargs) or ["x"])
    value = kwargs.get(name)
    kind = generator.randrange(6)
    if kind == 0:
        kwargs.pop(name, None)
    elif kind == 1:
        kwargs["unheard_of"] = 1
    elif kind == 2 and isinstance(value, str):
        kwargs[name] = generator.choice([value.upper(), value + " x", value.replace(" ", "-"), 3])
    elif kind == 3 and isinstance(value, (int, float)) and not isinstance(value, bool):
        kwargs[name] = generator.choice([value + 1, str(value), float(value)])
    elif kind == 4 and isinstance(value, list):
        kwargs[name] = generator.choice([value[::-1], value[:-1], [*value, "x"], tuple(value)])
    elif kind == 5:
        return ToolCall(generator.choice(["other", call.name]), (), kwargs)
    return ToolCall(call.name, (), kwargs)


@needs_bfcl
@pytest.mark.parametrize("category", ["simple_python", "multiple", "parallel", "parallel_multiple"])
def test_verdicts_are_those_of_bfcl(category, bfcl_check):
    rows, _ = call_rows(*packaged_paths(category), True)
    generator, num_right, num_wrong, differing = random.Random(category), 0, 0, []
    for row in rows.values():
        for _ in range(3):
            calls = [mutated(call, generator) for call in row.gold_calls()]
            generator.shuffle(calls) if "parallel" in category else None
            ours, theirs = do_match(calls, row.expected, row.docs), bfcl_check(row, calls, category)
            num_right, num_wrong = num_right + theirs, num_wrong + (not theirs)
            if ours != theirs:
                differing.append((row.row_id, calls, ours))
    assert num_right > 50 and num_wrong > 100
    assert differing == []


@needs_bfcl
@pytest.mark.parametrize("category", PACKAGED)
def test_the_expected_calls_of_bfcl_earn_one(category):
    env = FunctionCall({"bfcl": category, "num_shots": 0, "call_format": "python"})
    ids = list(islice(env.prompt_ids("train", 0), 60)) + list(islice(env.prompt_ids("heldout", 0), 20))
    for prompt_id in ids:
        env.reset(options={"prompt_id": prompt_id})
        assert env.step(env.gold_turns(prompt_id)[0])[1] == 1.0, prompt_id


def test_wrong_turns_by_hand():
    number = next(n for n in range(NUM_REQUESTS) if request(n).text == "Set a timer for 12 minutes called tea.")
    env = FunctionCall({})
    for turn, reward, info in (
        ("Tool: set_timer(label='tea', minutes=12)\n", 1.0, {}),
        ("Tool: set_timer(12, 'Tea')\n", 1.0, {}),
        ("Tool: set_timer(minutes=12)\n", 0.0, {}),
        ("Tool: set_timer(minutes='12', label='tea')\n", 0.0, {}),
        ("Tool: set_timer(minutes=12, label='tea'); set_timer(minutes=12, label='tea')\n", 0.0, {}),
        ("Answer: none\n", 0.0, {}),
        ("hm\n", 0.0, {"stop_reason": "unparsable"}),
        ("Tool: set_timer(minutes=6 + 6, label='tea')\n", 0.0, {"stop_reason": "unparsable"}),
        ("", 0.0, {"stop_reason": "unparsable"}),
    ):
        env.reset(options={"prompt_id": str(number)})
        assert env.step(turn) == ("", reward, True, False, info), turn
    env = FunctionCall({"num_calls": 0})
    _, info = env.reset(seed=3)
    needed = request(int(info["prompt_id"])).function.name
    assert needed not in env._tools
    assert env.step("Answer: none\n")[1] == 1.0
    env.reset(options=info)
    assert env.step(f"Tool: {next(iter(env._tools))}()\n")[1] == 0.0


def test_a_file_is_played_and_its_errors_are_named(tmp_path):
    row = {"id": "a", "question": [[{"role": "user", "content": "Two nights in Oslo"}]], "function": [BOOK]}
    answer = {"id": "a", "ground_truth": [WANTED]}
    questions, answers = tmp_path / "q.json", tmp_path / "a.json"
    questions.write_text("\n".join(map(json.dumps, [row, {**row, "id": "b"}])) + "\n{broken\n")
    answers.write_text(json.dumps(answer))
    settings = {"path": str(questions), "answers_path": str(answers), "num_shots": 0}
    with pytest.raises(ValueError, match=r"q.json, row 2: field ground_truth of its answer.*\(and 1 more\)"):
        FunctionCall(settings)
    env = FunctionCall({**settings, "bad_rows": "skip"})
    assert (env.num_questions, len(env.row_errors)) == (1, 2)
    env.reset(options={"prompt_id": "a"})
    assert env.step("Tool: book('Oslo', nights=2)\n")[1] == 1.0
    unfit = {"id": "a", "ground_truth": [{"book": {"city": [], "nights": [2]}}]}
    answers.write_text(json.dumps(unfit) + "\n")
    (tmp_path / "q2.json").write_text(json.dumps(row))
    with pytest.raises(ValueError, match="expected arguments that field function describes"):
        FunctionCall({**settings, "path": str(tmp_path / "q2.json")})

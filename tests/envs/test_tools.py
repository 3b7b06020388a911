"""Tools, calls and formats: worked by hand, round trips over random calls, hostile text, deadlines."""

import ast
import json
import threading
import time
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.envs.tools.call_format import MAX_TURN_CHARS
from rllib_srl.envs.tools.calls import (
    MAX_CALL_CHARS,
    CallError,
    ToolCall,
    ToolTimeoutError,
    call_from_json,
    parsed_calls,
    written_call,
)
from rllib_srl.envs.tools.deadline import run_within
from rllib_srl.envs.tools.formats import CALL_FORMATS, LineFormat, TagFormat
from rllib_srl.envs.tools.tool import Tool
from rllib_srl.envs.tools.tool_questions import presentable


def book(city: str, nights: int = 1, price: float | None = None, kind: Literal["hotel", "flat"] = "hotel") -> str:
    """Book a room.

    Nothing is paid.

    Args:
        city: where it is,
            by its English name
        nights: how many
    """
    return f"{city} {nights} {price} {kind}"


def search(query: str) -> list[str]:
    """Find documents."""
    return [query]


def mean(values: list[float], weights: dict[str, int] | None = None, is_exact: bool = False) -> float:
    """Average numbers."""
    return sum(values) / len(values)


BOOK = Tool.of(book)
TOOLS = {tool.name: tool for tool in (BOOK, Tool.of(search), Tool.of(mean))}


def test_a_schema_follows_from_hints_and_docstring_or_all_that_is_missing_is_named():
    about = BOOK.schema()["function"]
    assert about["description"] == "Book a room. Nothing is paid."
    assert about["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where it is, by its English name"},
            "nights": {"type": "integer", "description": "how many", "default": 1},
            "price": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
            "kind": {"type": "string", "enum": ["hotel", "flat"], "default": "hotel"},
        },
        "required": ["city"],
    }
    assert BOOK.signature() == (
        "book(city: str, nights: int = 1, price: float | None = None, kind: 'hotel' | 'flat' = 'hotel')"
    )
    def bare(a, *rest: int, **more: str):
        pass

    with pytest.raises(ValueError) as caught:
        Tool.of(bare)
    for part in ("tool 'bare'", "parameter a has no type hint", "rest is variadic", "more is variadic", "no docstring"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("call", "arguments"), [
    (ToolCall("book", ("Oslo",)), {"city": "Oslo"}),
    (ToolCall("book", ("Oslo", 2), {"price": 80}), {"city": "Oslo", "nights": 2, "price": 80.0}),
    (ToolCall("book", (), {"city": "Oslo", "price": None}), {"city": "Oslo", "price": None}),
    (ToolCall("book", ("3",), {"nights": "2", "price": "None"}, True), {"city": "3", "nights": 2, "price": None}),
    (ToolCall("mean", ([1, 2.5],)), {"values": [1.0, 2.5]}),
    (ToolCall("mean", ((1, 2),), {"weights": {"a": 1}}), {"values": [1.0, 2.0], "weights": {"a": 1}}),
    (ToolCall("mean", (), {"values": "[1, 2]", "is_exact": "true"}, True), {"values": [1.0, 2.0], "is_exact": True}),
])  # fmt: skip
def test_arguments_that_fit(call, arguments):
    assert TOOLS[call.name].arguments(call) == arguments


@pytest.mark.parametrize(("call", "parts"), [
    (ToolCall("book"), ["book: city is missing. Expected book(city: str, nights: int = 1,"]),
    (ToolCall("book", (3,), {"nights": "2", "cost": 1}), ["cost is unknown"]),
    (ToolCall("book", (3,), {"nights": "2"}), ["city is '3'; Input should be a valid string", "nights is \"'2'\""]),
    (ToolCall("book", ("a", 1, None, "hotel", 5)), ["5 arguments by position; expected at most 4"]),
    (ToolCall("book", ("a",), {"city": "b"}), ["city is given twice"]),
    (ToolCall("book", ("a", True)), ["nights is 'True'; Input should be a valid integer"]),
    (ToolCall("book", ("a",), {"kind": "boat"}), ["kind is \"'boat'\"; Input should be 'hotel' or 'flat'"]),
    (ToolCall("book", ("\ud800",)), ["Invalid JSON"]),
    (ToolCall("mean", ([float("inf")],)), ["values.0 is 'inf'; Input should be a finite number"]),
    (ToolCall("book", (), {"city": "a", "nights": "two"}, is_text=True), ["nights is \"'two'\""]),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_told_why(call, parts):
    with pytest.raises(CallError) as caught:
        TOOLS[call.name].arguments(call)
    for part in parts:
        assert part in str(caught.value)


HOSTILE = [
    "", "f", "f(", "f(x)", "f(g(1))", "f(1 + 1)", "f(**{'a': 1})", "f(*[1])", "f(a=1, a=2)", "f(lambda: 0)",
    "f(__import__('os').system('true'))", "__import__('os').system('true')", "(lambda: 0)()", "f([x for x in (1,)])",
    "f(f'{1}')", "f({1, 2})", "f({1: 2})", "f(b'x')", "f(1j)", "f(...)", "f({[]: 1})", "f(true)", "x = f(1)",
    "import os", "f(1); import os", "\x00", "f('\x00')" + "(" * 10, "f(" + "9" * 5000 + ")",
    "f(" + "[" * 5000 + "]" * 5000 + ")", "f(" + "-" * 9000 + "1)", "f" + ".a" * 9000 + "(1)", "f" + "()" * 9000,
    "f(1)" + " if x else f(1)" * 1000, "f(" + "1," * (MAX_CALL_CHARS // 2) + ")", "f(" + "not " * 4000 + "1)",
    "f('a' 'b' if 1 else 'c')", "\\", "f(\ud800)", "f(٣)",
]  # fmt: skip


def test_calls_of_anything_but_literals_are_refused():
    for text in HOSTILE:
        with pytest.raises(CallError) as caught:
            parsed_calls(text)
        assert 0 < len(str(caught.value)) < 400, ascii(text[:12])


PIECES = ["\n", "\x1c", " ", "x", "🦊", "[", '{"a": ', "<", "Tool:\n", "Answer:\n", "Tool: f()\n", "<think></think>",
          "<tool_call>", "<tool_call>f()</tool_call>", "<function=", "<function=f></function>", "<answer></answer>",
          "<search>x</search>", "<parameter=a>x</parameter>"]  # fmt: skip


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_no_turn_makes_a_format_raise_or_stall(name):
    form = CALL_FORMATS[name]()
    for turn in (*HOSTILE, *(piece * (MAX_TURN_CHARS // len(piece)) for piece in PIECES)):
        start = time.thread_time()
        for text in (turn, f"Tool: {turn}", f"<tool_call>{turn}</tool_call>", f'{{"name": "f", "arguments": {turn}}}'):
            said = form.read(text[:MAX_TURN_CHARS], TOOLS)
            assert not said.error or not said.calls, ascii(turn[:12])
        assert time.thread_time() - start < 10, ascii(turn[:12])  # of a tenth of a second; its square is an hour
    assert form.read("x" * (MAX_TURN_CHARS + 1), TOOLS).error == (
        f"{MAX_TURN_CHARS + 1} characters; expected at most {MAX_TURN_CHARS}"
    )


WORDS = st.sampled_from(["Tool:", "Answer:", "Tool", " ", "7", "\t", "\xa0", *"\n\r\v\x1c\x85\u2028"])


@settings(max_examples=300)
@given(pieces=st.lists(WORDS, max_size=12))
def test_the_first_line_of_either_kind_counts(pieces):
    turn = "".join(pieces)
    said = LineFormat(bare_tool="search").read(turn, TOOLS)
    for line in turn.splitlines():  # a naive twin
        word, colon, rest = line.strip().partition(":")
        if colon and (word == "Tool" or (word == "Answer" and rest.strip())):
            found = (said.calls[0].args[0] if said.calls else None, said.answer)
            assert found == ((rest.strip(), None) if word == "Tool" else (None, rest.strip()))
            return
    assert said.error and not said.calls


# fmt: off
READINGS = [
    ("line", "I think.\nTool: search('x')\nResult: 3\nAnswer: 3\n", "search('x')", None),
    ("line", "Answer: 12 \nTool: search('x')", "", "12"),
    ("tags", "<search> capital of Chad </search>", "search('capital of Chad')", None),
    ("tags", "<think><search>a</search></think><search>b</search>", "search('b')", None),
    ("tags", "so <answer> Oslo </answer>", "", "Oslo"),
    ("xml", '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>', "search(query='x')", None),
    ("xml", '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call><tool_call>search("y")</tool_call>',
     "search(query='x') search('y')", None),
    ("xml", "<tool_call>\n<function=search>\n<parameter=query>\nx\ny\n</parameter>\n</function>\n</tool_call>",
     "search(query='x\\ny')", None),
    ("xml", "The answer is 3.\n<answer>3</answer>", "", "3"),
    ("xml", '<tool_call>{"name": "search"</tool_call>', "", None),
    ("json", '<|python_tag|>{"name": "search", "parameters": {"query": "x"}}; {"name": "search", "parameters": {}}',
     "search(query='x') search()", None),
    ("json", '{"tool_calls": [{"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}]}',
     "search()", None),
    ("json", '```json\n{"name": "search", "arguments": {"query": "x"}}\n```', "search(query='x')", None),
    ("json", '{"answer": 3}', "", "3"),
    ("json", '{"name": "search", "name": "book"}', "", None),
    ("python", "[search('x'), search(query='y')]", "search('x') search(query='y')", None),
    ("python", "I am done.\nAnswer: 3", "", "3"),
    ("native", "<tool_call>\n<function=search>\n<parameter=query>\nx\n</parameter>\n</function>\n</tool_call>",
     "search(query='x')", None),
    ("native", '{"name": "search", "parameters": {"query": "x"}}', "search(query='x')", None),
    ("native", "Tool: search('x')", "search('x')", None),
]
# fmt: on


@pytest.mark.parametrize(("name", "turn", "calls", "answer"), READINGS)
def test_turns_are_read_by_hand(name, turn, calls, answer):
    said = CALL_FORMATS[name]().read(turn, TOOLS)
    assert (" ".join(map(written_call, said.calls)), said.answer) == (calls, answer)
    assert bool(said.error) == (not calls and answer is None)


@pytest.mark.parametrize("make", CALL_FORMATS.values())
def test_text_without_a_call_is_an_answer_where_models_chat(make):
    assert bool(make().read("I cannot do that.", TOOLS).error) != make.has_plain_answers
    assert make().read("  \n", TOOLS).error


def test_a_bare_argument_is_one_call():
    bare = LineFormat(bare_tool="search")
    assert bare.read("Tool: 86 + 71\n", TOOLS).calls == (ToolCall("search", ("86 + 71",), is_text=True),)
    assert bare.read("Tool: search('x')", TOOLS).calls == (ToolCall("search", ("x",)),)
    assert bare.call(ToolCall("search", ("86 + 71",))) == "Tool: 86 + 71\n"
    assert TagFormat(result_tag="information").results(["a"]) == "<information>a</information>\n"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab_", max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
NAMES = st.sampled_from(["book", "search", "mean"])
CALLS = st.builds(ToolCall, NAMES, st.just(()), st.dictionaries(st.sampled_from("abc"), PLAIN, max_size=3))


@given(calls=st.lists(CALLS, min_size=1, max_size=3), name=st.sampled_from(["line", "xml", "json", "python", "native"]))
@settings(max_examples=150)
def test_what_a_format_writes_it_reads(calls, name):
    form = CALL_FORMATS[name]()
    turn = form.call(*calls)
    if name in ("xml", "native") and "</tool_call>" in turn[: -len("</tool_call>")]:
        return
    assert list(form.read(turn, TOOLS).calls) == calls


@given(value=PLAIN)
@settings(max_examples=150)
def test_literals_are_what_python_says_they_are(value):
    assert parsed_calls(f"f({value!r})") == [ToolCall("f", (ast.literal_eval(repr(value)),))]
    assert call_from_json({"name": "f", "arguments": json.dumps({"a": value})}) == ToolCall("f", (), {"a": value})


def test_a_call_ends_in_time_or_is_left_behind():
    def spin() -> None:
        while True:
            pass

    assert run_within(20.0, pow, {"base": 2, "exp": 3}) == 8
    with pytest.raises(ZeroDivisionError):
        run_within(20.0, lambda: 1 // 0, {})
    start, before = time.monotonic(), set(threading.enumerate())
    with pytest.raises(ToolTimeoutError, match="no result after 0.05 s"):
        run_within(0.05, spin, {})
    assert time.monotonic() - start < 50
    while set(threading.enumerate()) - before and time.monotonic() - start < 120:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()  # the loop was ended


def test_a_result_is_text_and_a_cut_is_stated():
    assert presentable("abc", 3) == "abc"
    assert presentable({"a": [1, None]}, 99) == '{"a": [1, null]}'
    assert presentable({1j}, 99) == "{1j}"
    assert presentable("\ud800", 99) == "\\ud800"
    assert presentable("x" * 50, 20) == "x" * 20 + "\n[cut: the first 20 of 50 characters]"

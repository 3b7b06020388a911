"""Which templates rewrite the past: shown by srl contrib tokens, refused or worked around by the chat transcript."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.contrib import tokens
from rllib_srl.rollout.transcript import ChatTranscript
from tests.rollout.fakes import CHATML, make_tokenizer

BODY = "m['content']"
STRIPS_THINKING = CHATML.replace(
    BODY, "(m['content'].split('</think>')[-1] if m['role'] == 'assistant' and not loop.last else m['content'])"
)
TRIMS = CHATML.replace(BODY, "(m['content'] | trim)")
TRIMS_ANSWERS = CHATML.replace(BODY, "(m['content'] | trim if m['role'] == 'assistant' else m['content'])")
DATES = (  # a system message with a date that moves on with the conversation
    "{{ '<|im_start|>system\nDay ' + (messages | length | string) + '<|im_end|>\n' }}" + CHATML
)
SAME_DATE = "{{ '<|im_start|>system\nToday is 21 Nov 2026<|im_end|>\n' }}" + CHATML
LAST_DIFFERS = CHATML.replace(BODY, "(m['content'] + (' /think' if loop.last else ''))")
REFUSES_SHORT = "{% if messages | length > 3 %}{{ raise_exception('too long') }}{% endif %}" + CHATML

KEEPS = {"chatml": CHATML, "the same date": SAME_DATE}
REWRITES = {  # template -> a conversation of the script that shows it
    "a moving date": (DATES, "plain"),
    "the last message": (LAST_DIFFERS, "plain"),
    "strips thinking": (STRIPS_THINKING, "thinking"),
    "trims all": (TRIMS, "white space"),
    "trims answers": (TRIMS_ANSWERS, "white space"),
}
# They change only what the policy wrote, which the chat transcript never renders: it takes them.
TAKEN = ("strips thinking", "trims all", "trims answers")
TEXTS = st.text(st.sampled_from("ab 1\n\t<>é🦊"), max_size=8)


def tokenizer_of(template):
    return make_tokenizer(chat_template=template, with_bos=False)


def stream(chat, tokenizer, texts):
    """Return what a policy that writes `texts[1::2]` has as its prompt before each of its turns."""
    end, ids = tokenizer.convert_tokens_to_ids("<|im_end|>"), chat.first(texts[0])
    prompts = [list(ids)]
    for answer, question in zip(texts[1::2], texts[2::2], strict=True):
        ids += [*tokenizer(answer, add_special_tokens=False)["input_ids"], end]
        ids += chat.later(question, ids[-1])
        prompts.append(list(ids))
    return prompts


@pytest.mark.parametrize("name", KEEPS)
def test_a_template_that_keeps_the_past_is_said_to(name):
    lines, is_stable = tokens.check(tokenizer_of(KEEPS[name]), tokens.CONVERSATIONS)
    assert is_stable and 'prompt_format "chat": accepted; earlier turns are never rendered again' in lines
    assert all(line.endswith("earlier tokens unchanged") for line in lines[:-1])


def test_a_template_whose_turns_can_be_forged_is_said_to_be():
    plain = "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + '\n' }}{% endfor %}{{ '[assistant] ' }}"
    lines, is_stable = tokens.check(tokenizer_of(plain), tokens.CONVERSATIONS)
    assert is_stable and lines[-1] == "turns are marked by plain text: text of a tool or a user can imitate a turn"


@pytest.mark.parametrize("name", REWRITES)
def test_the_first_token_that_changes_is_shown(name):
    template, conversation = REWRITES[name]
    tokenizer = tokenizer_of(template)
    found = tokens.first_divergence(tokenizer, conversation, tokens.CONVERSATIONS[conversation])
    assert found.is_rewritten and found.before[: found.at] == found.after[: found.at]
    assert found.before[found.at] != found.after[found.at]
    lines, is_stable = tokens.check(tokenizer, tokens.CONVERSATIONS)
    assert not is_stable and ("rejected: the chat template" in lines[-1]) == (name not in TAKEN)
    others = set(tokens.CONVERSATIONS) - {conversation}
    assert name not in TAKEN or any(f"{other}: earlier tokens unchanged" in lines for other in others)


def test_the_report_by_hand():
    tokenizer = tokenizer_of(DATES)
    lines = tokens.lines_of(tokens.first_divergence(tokenizer, "c", ["a", "b", "c"]), tokenizer)
    assert lines[0] == "c: token 12 changes when messages 2 and 3 are added: the template changes the text"
    assert lines[1].endswith(r"[t] [e] [m] [\n] [D] [a] [y] [ ]")
    assert lines[2].startswith("  earlier   [1] [<|im_end|>] [\\n]")
    assert lines[3].startswith("  later     [3] [<|im_end|>] [\\n]")


def test_stripped_thinking_diverges_where_it_began():
    tokenizer = tokenizer_of(STRIPS_THINKING)
    found = tokens.first_divergence(tokenizer, "thinking", ["Why?", "<think>x</think>So.", "Sure?"])
    assert tokenizer.decode(found.before[found.at :]) == "<think>x</think>So."
    assert tokenizer.decode(found.after[found.at :]).startswith("So.<|im_end|>")


def test_tokens_that_only_join_are_told_apart_from_rewritten_text():
    tokenizer = make_tokenizer(chat_template=CHATML, with_bos=False, merges=[("Ċ", "x")])  # newline and x: one token
    found = tokens.first_divergence(tokenizer, "joins", ["a", "x", "b"])
    assert found is not None and not found.is_rewritten
    lines, is_stable = tokens.check(tokenizer, {"joins": ["a", "x", "b"]})
    assert is_stable and lines[0].endswith("the same text is split into other tokens")


@pytest.mark.parametrize("template", [*KEEPS.values(), *(REWRITES[name][0] for name in TAKEN)])
@settings(max_examples=40)
@given(texts=st.lists(TEXTS, min_size=3, max_size=7).filter(lambda texts: len(texts) % 2))
def test_earlier_tokens_never_change_in_an_accepted_template(template, texts):
    tokenizer = tokenizer_of(template)
    chat = ChatTranscript(tokenizer)
    prompts = stream(chat, tokenizer, texts)
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before
    answers = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts[1::2]]
    for answer, (before, after) in zip(answers, pairwise(prompts), strict=True):
        assert after[len(before) : len(before) + len(answer)] == answer  # as sampled, white space and thinking too


@pytest.mark.parametrize("template", KEEPS.values())
@settings(max_examples=40)
@given(texts=st.lists(TEXTS, min_size=3, max_size=7).filter(lambda texts: len(texts) % 2))
def test_with_a_template_that_keeps_the_past_the_stream_is_its_rendering(template, texts):
    tokenizer = tokenizer_of(template)
    assert stream(ChatTranscript(tokenizer), tokenizer, texts)[-1] == tokens.rendered(tokenizer, texts)


@pytest.mark.parametrize("template", [DATES, LAST_DIFFERS])
def test_a_template_that_rewrites_questions_is_refused(template):
    with pytest.raises(ValueError, match="changes earlier tokens|changes the assistant's|expected"):
        ChatTranscript(tokenizer_of(template))


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tokens, "load_tokenizer", lambda model: tokenizer_of(CHATML))
    assert tokens.run(["m"]) == 0
    (tmp_path / "t.jinja").write_text(LAST_DIFFERS)
    (tmp_path / "turns.json").write_text(json.dumps(["a", "b", "c"]))
    argv = ["m", "--template", str(tmp_path / "t.jinja"), "--turns", str(tmp_path / "turns.json")]
    assert tokens.run(argv) == 1
    assert "turns.json: token " in capsys.readouterr().out
    (tmp_path / "turns.json").write_text("[1]")
    with pytest.raises(ValueError, match="is not a conversation; expected a JSON list of at least three texts"):
        tokens.run(argv)
    monkeypatch.setattr(tokens, "load_tokenizer", lambda model: tokenizer_of(REFUSES_SHORT))
    with pytest.raises(ValueError, match="the chat template rejects a conversation of 5 messages: too long"):
        tokens.run(["m"])
    monkeypatch.setattr(tokens, "load_tokenizer", lambda model: make_tokenizer())
    with pytest.raises(ValueError, match="m has no chat template"):
        tokens.run(["m"])

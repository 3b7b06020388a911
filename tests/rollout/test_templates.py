"""Chat templates as models publish them: what ends a turn, thoughts that a prompt opens, prompts that open no role."""

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model
from rllib_srl.rollout.transcript import ChatTranscript, make_transcript
from tests.rollout.fakes import CHATML, make_tokenizer

# Written by hand to the published forms, without what they say of tools that is not tested here.
QWEN = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}" + CHATML
)
R1 = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{% set content = m['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
# Qwen3.5, QwQ, Qwen3-Thinking: answers after the last question show a thought, be it empty, earlier ones show none.
QWEN_THINKING = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' and not "
    "m['content'].startswith('<tool_response>') %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ content + '<|im_end|>\n' }}"
    "{% elif m['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
    "{% else %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + (m['content'] | trim) "
    "+ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) "
    "+ '\n' + (m['content'] | trim) + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Every message opens with its role, none is closed: the next role ends a turn.
GLM = (
    "{{ '[gMASK]' }}{% for m in messages %}{{ ('<|observation|>' if m['role'] == 'tool' else "
    "'<|' + m['role'] + '|>') + '\n' + m['content'] }}{% endfor %}{% if tools %}{{ '' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
GLM_TOOLS = GLM.replace(
    "{{ '[gMASK]' }}", "{{ '[gMASK]' }}{% if tools %}{{ '<|system|>' + (tools | tojson) }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' </s>' }}{% endif %}{% endfor %}"
)
# Messages end, the last one returns; the policy writes its channel.
HARMONY = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] }}{% if m['role'] == 'assistant' %}{{ '<|channel|>final' }}"
    "{% endif %}{{ '<|message|>' + m['content'] }}"
    "{{ '<|return|>' if m['role'] == 'assistant' and loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
TAGS = {  # template -> its tags, those that are special, and the one that ends a turn
    "qwen": (QWEN, ["<|im_start|>", "<|im_end|>"], [], "<|im_end|>"),
    "qwen, special": (QWEN, ["<|im_start|>", "<|im_end|>"], ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "qwen thinking": (QWEN_THINKING, ["<|im_start|>", "<|im_end|>", "<think>", "</think>"], [], "<|im_end|>"),
    "qwen thinking, in words": (QWEN_THINKING, ["<|im_start|>", "<|im_end|>"], [], "<|im_end|>"),
    "r1": (R1, ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"], [], "<eos>"),
    "llama 3": (LLAMA3, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], ["<|eot_id|>"], "<|eot_id|>"),
    "gemma": (GEMMA, ["<start_of_turn>", "<end_of_turn>"], [], "<end_of_turn>"),
    "glm": (GLM, ["<|user|>", "<|assistant|>", "<|observation|>"], [], "<|user|>"),
    "mistral": (MISTRAL, ["[INST]", "[/INST]", "</s>"], ["</s>"], "</s>"),
    "llama 2": (LLAMA2, ["</s>"], ["</s>"], "</s>"),
    "harmony": (HARMONY, ["<|start|>", "<|end|>", "<|return|>", "<|message|>", "<|channel|>"], [], "<|return|>"),
}


@cache
def tokenizer_of(template: str, tags: tuple[str, ...] = (), special: tuple[str, ...] = ()) -> Any:
    """Return a byte-level tokeniser with the tags as added tokens; its eos_token is "<eos>", as of a base model."""
    from tokenizers import AddedToken

    tokenizer = make_tokenizer(with_bos=False, specials=("<bos>", "<eos>"))
    tokenizer.add_tokens([AddedToken(name, special=name in special, normalized=False) for name in tags])
    tokenizer.chat_template, tokenizer.name_or_path = template, "acme/some-model"
    return tokenizer


def of(name: str) -> tuple[Any, str]:
    template, tags, special, end = TAGS[name]
    return tokenizer_of(template, tuple(tags), tuple(special)), end


@pytest.mark.parametrize("name", TAGS)
def test_the_token_that_closes_a_turn_ends_it(name: str) -> None:
    tokenizer, end = of(name)
    assert tokenizer.eos_token == "<eos>"
    chat = ChatTranscript(tokenizer)
    assert chat.end_ids == (tokenizer.convert_tokens_to_ids(end),)


@pytest.mark.parametrize("name", TAGS)
def test_later_turns_are_the_rendering_after_the_policys_tokens(name: str) -> None:
    """Only the openings of earlier answers may differ from the template's rendering of the whole conversation."""
    tokenizer, _ = of(name)
    chat = ChatTranscript(tokenizer)
    questions, messages = ["2+2?", "and?", "why"], [{"role": "user", "content": "2+2?"}]
    stream = chat.first(questions[0])
    assert tokenizer.decode(stream) == shown(tokenizer, messages)
    opening = shown(tokenizer, messages)
    for question in questions[1:]:
        turn = [*tokenizer("I <see>.", add_special_tokens=False)["input_ids"], *chat.end_ids]
        stream += turn
        new = chat.later(question, stream[-1])
        messages += [{"role": "assistant", "content": "I <see>."}, {"role": "user", "content": question}]
        whole = shown(tokenizer, messages)
        after = whole.rpartition("I <see>.")[2]
        written = tokenizer.decode(chat.end_ids)
        closed = after.replace("<|end|>", written, 1) if name == "harmony" else after
        said = f"{written}{tokenizer.decode(new)}"
        assert said.replace(" ", "") == closed.replace(" ", "") and said.split() == closed.split()
        stream += new
        cut = chat.later(question, tokenizer("x", add_special_tokens=False)["input_ids"][0])
        assert tokenizer.decode(cut) == after  # a turn that was cut off is closed by the template
        opening += f"I <see>.{said}"
    assert tokenizer.decode(stream) == opening


def shown(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_tools_answer_follows_whatever_opened_the_turn() -> None:
    tools = json.dumps([{"name": "add"}])
    tokenizer, _ = of("qwen thinking")
    chat, end = ChatTranscript(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.decode(chat.first("2+2?", tools)).endswith("2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n")
    result = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert tokenizer.decode(chat.later("4", end, "tool")) == result
    listed = chat.later("<tool_response>\n4\n</tool_response>", end)  # of an environment that lists tools by itself
    assert tokenizer.decode(listed) == result


def test_a_turn_in_front_of_a_tool_may_end_with_another_token() -> None:
    tokenizer = tokenizer_of(GLM_TOOLS, ("<|user|>", "<|assistant|>", "<|observation|>"))
    chat = ChatTranscript(tokenizer)
    user, seen = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    assert chat.end_ids == (user,)
    chat.first("2+2?", json.dumps([{"name": "add"}]))
    assert chat.end_ids == (user, seen)
    assert tokenizer.decode(chat.later("4", seen, "tool")) == "\n4<|assistant|>"
    assert tokenizer.decode(chat.later("and?", user)) == "\nand?<|assistant|>"


def test_a_template_that_vllm_brings_leaves_its_last_message_open() -> None:
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    path = Path(found.submodule_search_locations[0]) / "transformers_utils/chat_templates/template_chatml.jinja"
    tokenizer = tokenizer_of(path.read_text(), ("<|im_start|>", "<|im_end|>"))
    chat, end = ChatTranscript(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chat.end_ids == (end,)
    assert tokenizer.decode(chat.later("and?", end)) == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
def test_the_packaged_model_as_a_base_model() -> None:
    """SmolLM2's own tokeniser and template, with the end of a text as eos_token."""
    tokenizer = load_tokenizer(local_model("smollm2-135m"))
    tokenizer.eos_token = "<|endoftext|>"
    assert ChatTranscript(tokenizer).end_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


UNOPENED = {
    "no opening": CHATML.partition("{% if add_generation_prompt")[0],
    "half an opening": CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>'"),
    "half an opening, another role": GEMMA.replace("'<start_of_turn>model\n'", "'<start_of_turn>'"),
    "a label": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<eos>\n' }}{% endfor %}",
}


@pytest.mark.parametrize("max_turns", [None, 1])
@pytest.mark.parametrize("name", UNOPENED)
def test_a_prompt_that_does_not_open_the_policys_message_is_refused(name: str, max_turns: int | None) -> None:
    message = r"of 'acme/some-model' ignores add_generation_prompt: a prompt does not end with .*assistant"
    with pytest.raises(ValueError, match=message):
        make_transcript("chat", tokenizer_of(UNOPENED[name], ("<|im_start|>", "<|im_end|>")), max_turns)


@pytest.mark.parametrize("max_turns", [None, 1])
@pytest.mark.parametrize(("content", "message"), [
    ("m['content'] | selectattr('text') | map(attribute='text') | join", "omits the user's message"),
    ("m['content'][0]['text']['value']", r"rejects a user's message \("),
])  # fmt: skip
def test_a_template_that_takes_no_text_is_refused(content: str, message: str, max_turns: int | None) -> None:
    """As those of models that read images do."""
    parts = tokenizer_of(CHATML.replace("m['content']", f"({content})"), ("<|im_end|>",))
    with pytest.raises(
        ValueError, match=f"of 'acme/some-model' {message}.* expected one that takes its content as text"
    ):
        make_transcript("chat", parts, max_turns)


def test_an_episode_of_one_turn_needs_no_template_for_several() -> None:
    numbered = CHATML.replace("m['role']", "(messages | length | string) + m['role']")
    with pytest.raises(ValueError, match="max_turns = 1 for tasks of one turn"):
        make_transcript("chat", tokenizer_of(numbered, ("<|im_end|>",)))
    chat = make_transcript("chat", tokenizer_of(numbered, ("<|im_end|>",)), max_turns=1)
    assert len(chat.end_ids) == 1 and chat.first("2+2?")
    single = CHATML.replace("{% for", "{% if messages | length > 2 %}{{ raise_exception('one') }}{% endif %}{% for", 1)
    with pytest.raises(Exception, match="one"):
        make_transcript("chat", tokenizer_of(single, ("<|im_end|>",)))
    assert make_transcript("chat", tokenizer_of(single, ("<|im_end|>",)), max_turns=1).end_ids == chat.end_ids

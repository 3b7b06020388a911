"""Text to tokens: earlier tokens stay, special tokens stand only where they belong, unfit templates are refused."""

import pytest

from rllib_srl.rollout.transcript import ChatTranscript, RawTranscript, make_transcript
from tests.rollout.fakes import CHATML, make_tokenizer

NUMBERED = (
    "{% for m in messages %}{{ '<|im_start|>' + (messages | length | string) + m['content'] + '<|im_end|>' }}"
    "{% endfor %}{{ '<|im_start|>' }}"
)
FORGETFUL = "{{ 'user:' + messages[-1]['content'] + '<|im_end|>' }}"


def test_raw_text_has_its_special_token_once_and_a_system_prompt_in_front(tokenizer):
    raw = RawTranscript(tokenizer)
    assert tokenizer.convert_ids_to_tokens(raw.first("hi")) == ["<bos>", "h", "i"]
    assert tokenizer.convert_ids_to_tokens(raw.later("hi", 1)) == ["h", "i"]
    assert raw.later("", 1) == []
    assert raw.stop(("\n", "END")) == ("\n", "END")
    assert tokenizer.decode(raw.first("2+2?", system="Be brief.")) == "<bos>Be brief.\n\n2+2?"
    assert raw.first("2+2?", system="") == raw.first("2+2?")


def test_templates_that_change_earlier_tokens_are_refused():
    message = r"changes earlier tokens when a turn is added: token 1 becomes '3' instead of '1'"
    with pytest.raises(ValueError, match=message):
        ChatTranscript(make_tokenizer(chat_template=NUMBERED, with_bos=False))
    with pytest.raises(ValueError, match="changes the assistant's message"):
        ChatTranscript(make_tokenizer(chat_template=FORGETFUL, with_bos=False))
    touchy = CHATML.replace("m['content']", "(m['content'] if messages[-1]['content'] != 'stop' else '')")
    chat = ChatTranscript(make_tokenizer(chat_template=touchy, with_bos=False))
    with pytest.raises(ValueError, match="changes an earlier message when the next one is 'stop'"):
        chat.later("stop", 1)


def test_make_transcript_names_what_is_missing(tokenizer):
    assert isinstance(make_transcript("text", tokenizer), RawTranscript)
    with pytest.raises(ValueError, match=r"has no chat template; expected one .* use prompt_format = 'text'"):
        make_transcript("chat", tokenizer)
    with pytest.raises(ValueError, match="prompt_format = 'xml'; expected 'text' or 'chat'"):
        make_transcript("xml", tokenizer)


def test_a_tokenizer_that_ends_every_text_is_refused():
    from tokenizers import processors

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    with pytest.raises(ValueError, match="appends '<eos>' to every text"):
        RawTranscript(tokenizer)


REFUSING = CHATML.replace("{% for m in messages %}", "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}")  # fmt: skip
IGNORING = CHATML.replace("{{ '<|im_start|>'", "{{ '' if m['role'] == 'system' else '<|im_start|>'", 1)
COUNTING = CHATML + "{% if messages[0]['role'] == 'system' and messages | length > 2 %}{{ 'more' }}{% endif %}"
# As SmolLM2 and Qwen2.5 do: a system message of the template's own where none is given.
DEFAULTING = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe good<|im_end|>\n' }}{% endif %}" + CHATML
)


@pytest.mark.parametrize("template", [CHATML, DEFAULTING])
def test_a_system_prompt_is_the_first_message_of_the_chat(template):
    tokenizer = make_tokenizer(chat_template=template, with_bos=False)
    chat, end = ChatTranscript(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")
    stream = chat.first("2+2?", system="Be brief.")
    stream += [*tokenizer("4", add_special_tokens=False)["input_ids"], end]
    stream += chat.later("and?", end)
    messages = [("system", "Be brief."), ("user", "2+2?"), ("assistant", "4"), ("user", "and?")]
    listed = [{"role": role, "content": content} for role, content in messages]
    assert stream == tokenizer.apply_chat_template(listed, add_generation_prompt=True, return_dict=False)
    assert chat.first("2+2?") != chat.first("2+2?", system="Be brief.")


@pytest.mark.parametrize(("template", "message"), [
    (REFUSING, r"rejects the role 'system' .System role not supported.; .* use `instruction`"),
    (IGNORING, "omits messages of the role 'system'; expected a template that renders them, for a system_prompt"),
    (COUNTING, "changes earlier tokens after a system message; expected earlier tokens unchanged"),
])  # fmt: skip
def test_a_template_without_a_place_for_a_system_prompt_is_refused(template, message):
    chat = ChatTranscript(make_tokenizer(chat_template=template, with_bos=False))
    chat.first("2+2?")  # fine without one
    with pytest.raises(ValueError, match=message):
        chat.first("2+2?", system="Be brief.")

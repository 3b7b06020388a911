"""Earlier tokens of a chat never change, whatever the template does to what the policy wrote."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
# They change only what the policy wrote, which the transcript never renders: it takes them.
TAKEN = (STRIPS_THINKING, TRIMS, TRIMS_ANSWERS)
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


@pytest.mark.parametrize("template", [CHATML, SAME_DATE, *TAKEN])
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


@pytest.mark.parametrize("template", [DATES, LAST_DIFFERS])
def test_a_template_that_rewrites_questions_is_refused(template):
    with pytest.raises(ValueError, match="changes earlier tokens|changes the assistant's|expected"):
        ChatTranscript(tokenizer_of(template))

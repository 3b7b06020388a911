"""Check whether a model's chat template keeps earlier tokens when turns are added to a conversation.

    srl contrib tokens smollm2-135m              the model, a directory or a tokeniser of the hub
    srl contrib tokens DIR --template my.jinja   another template with that tokeniser
    srl contrib tokens MODEL --turns turns.json  on this conversation: ["question", "answer", ...]

Tokens that a policy sampled must not change. A template that strips the thinking of earlier turns, trims white space,
or formats the last message differently changes earlier tokens when a turn is added. Each conversation is rendered turn
by turn. The first token that changes is shown with the tokens around it, and whether the template rewrote text or the
tokeniser only merged tokens across the end of the prompt. The last lines show the effect on training: the transcript
format "chat" builds later prompts without rendering earlier turns again, and refuses a template with which that is not
possible; "text" needs no template.

Exit status: 0 if the template rewrites no text, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_srl.cli.episodes import printable
from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.command_line import add_debug, help_of
from rllib_srl.rollout.transcript import make_transcript

CONVERSATIONS: dict[str, list[str]] = {  # one for each known kind of rewriting by templates
    "plain": ["What is 1 + 1?", "It is 2.", "And 2 + 2?", "It is 4.", "And 4 + 4?"],
    "thinking": ["Why?", "<think>\nLet me see.\n</think>\n\nBecause.", "Sure?", "<think>\n\n</think>\n\nYes.", "Why?"],
    "white space": [" Hello \n", "  leading, trailing  \n\n", "\tTabs\t", " \n ", "More"],
    "a tool call": ["Add.", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "2", "It is 2.", "Ok"],
    "empty": ["Go", "", "Go on", "", "Go on"],
    "one character": ["a", "b", "c", "d", "e"],
}
_SHOWN_TOKENS = 8  # on each side of a divergence


@dataclass(frozen=True)
class Divergence:
    """The first position at which a conversation is not a prefix of its continuation.

    Invariant: `before` and `after` are equal up to `at`, and differ there.
    """

    conversation: str
    num_messages: int  # before the answer
    at: int
    before: list[int]
    after: list[int]
    is_rewritten: bool  # True: the text changes too; False: other tokens, same text


def first_divergence(tokenizer: Any, conversation: str, texts: Sequence[str]) -> Divergence | None:
    """Render a conversation turn by turn; return the first divergence of earlier tokens, or None.

    A rendering up to a question ends with the opening of the policy's message. Followed by the tokens of the answer, it
    is the policy's stream so far; the rendering up to the next question must begin with it.

    Args:
        tokenizer: a Hugging Face tokeniser with a chat template
        conversation: its name
        texts: of user, assistant, user, ...

    Raises:
        ValueError: the template raises an error for the conversation.
    """
    for num in range(1, len(texts) - 1, 2):
        answer = texts[num]
        before = rendered(tokenizer, texts[:num]) + tokenizer(answer, add_special_tokens=False)["input_ids"]
        after = rendered(tokenizer, texts[: num + 2])
        at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
        if at is None and len(after) < len(before):
            at = len(after)
        if at is not None:
            earlier, later = (rendered(tokenizer, texts[:end], as_text=True) for end in (num, num + 2))
            return Divergence(conversation, num, at, before, after, not later.startswith(earlier + answer))
    return None


def rendered(tokenizer: Any, texts: Sequence[str], as_text: bool = False) -> Any:
    """Return the ids, or the text, of a conversation that ends with a question and the opening of the answer."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    try:
        found = tokenizer.apply_chat_template(
            messages, tokenize=not as_text, add_generation_prompt=True, return_dict=False
        )
    except Exception as error:  # templates may raise any exception
        raise ValueError(f"the chat template rejects a conversation of {len(texts)} messages: {error}") from error
    return found if as_text else list(found)


def lines_of(found: Divergence, tokenizer: Any) -> list[str]:
    """Return a readable description of a divergence."""

    def shown(ids: list[int], start: int, end: int) -> str:
        return " ".join(_quoted(tokenizer, token) for token in ids[max(start, 0) : end]) or "nothing"

    at, num = found.at, found.num_messages
    why = "the template changes the text" if found.is_rewritten else "the same text is split into other tokens"
    return [
        f"{found.conversation}: token {at} changes when messages {num + 1} and {num + 2} are added: {why}",
        f"  both      ... {shown(found.before, at - _SHOWN_TOKENS, at)}",
        f"  earlier   {shown(found.before, at, at + _SHOWN_TOKENS)}",
        f"  later     {shown(found.after, at, at + _SHOWN_TOKENS)}",
    ]


def _quoted(tokenizer: Any, token: int) -> str:
    return f"[{printable(tokenizer.decode([token]))}]"


def check(tokenizer: Any, conversations: dict[str, list[str]]) -> tuple[list[str], bool]:
    """Check a tokeniser's template; return the lines to print, and whether all earlier text stays unchanged."""
    lines, is_stable = [], True
    for name, texts in conversations.items():
        found = first_divergence(tokenizer, name, texts)
        is_stable &= found is None or not found.is_rewritten
        lines += [f"{name}: earlier tokens unchanged"] if found is None else lines_of(found, tokenizer)
    try:
        transcript = make_transcript("chat", tokenizer)
        lines.append('prompt_format "chat": accepted; earlier turns are never rendered again')
        if not getattr(transcript, "marks_turns", True):
            lines.append("turns are marked by plain text: text of a tool or a user can imitate a turn")
    except ValueError as error:
        lines.append(f'prompt_format "chat": rejected: {error}')
    return lines, is_stable


def main(argv: Sequence[str] | None = None) -> int:
    """Run `srl contrib tokens`; return the exit status."""
    return run_cleanly(lambda: run(argv), debug="--debug" in (sys.argv if argv is None else argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Check one model."""
    parser = argparse.ArgumentParser(**help_of(__doc__))
    parser.add_argument("model", metavar="MODEL", help="name or directory, as for --model of srl train")
    parser.add_argument("--template", type=Path, metavar="FILE", help="a Jinja template, not the model's own")
    parser.add_argument("--turns", type=Path, metavar="FILE", help="JSON list: question, answer, question, ...")
    add_debug(parser)
    arguments = parser.parse_args(argv)
    tokenizer = load_tokenizer(arguments.model)
    if arguments.template:
        tokenizer.chat_template = arguments.template.read_text(encoding="utf-8")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{arguments.model} has no chat template; expected one, --template, or prompt_format = 'text'")
    lines, is_stable = check(tokenizer, _read_turns(arguments.turns) if arguments.turns else CONVERSATIONS)
    print("\n".join(lines))
    return 0 if is_stable else 1


def load_tokenizer(model: str) -> Any:
    """Return the tokeniser of a model."""
    from transformers import AutoTokenizer

    from rllib_srl.engine.models import local_model

    return AutoTokenizer.from_pretrained(local_model(model))


def _read_turns(path: Path) -> dict[str, list[str]]:
    texts = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(texts, list) or len(texts) < 3 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{path} is not a conversation; expected a JSON list of at least three texts")
    return {path.name: texts}


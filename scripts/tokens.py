#!/usr/bin/env python3
"""Show whether a model's chat template keeps earlier tokens when a conversation goes on.

    python scripts/tokens.py check smollm2-135m              the model, a directory or a tokeniser of the hub
    python scripts/tokens.py check DIR --template my.jinja   another template with that tokeniser
    python scripts/tokens.py check MODEL --turns turns.json  on this conversation: ["question", "answer", ...]

Tokens that a policy sampled must stay as they are. A template that strips the thinking of earlier turns, trims white
space, or shows the last message differently renders another past as soon as a turn is added. Each conversation is
rendered turn by turn; the first token that changes is shown with what surrounds it, and whether the template rewrote
text or the tokeniser only joined tokens across the end of the prompt. At last, what training does with such a model is
named: the transcript format "chat" builds later prompts without rendering the past again, and refuses a template with
which that cannot be done; "text" needs no template.

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

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages
    from scripts.cluster import quiet

    quiet(verbose="--debug" in sys.argv)

from rllib_srl.rollout.transcript import make_transcript
from scripts.cluster import run_cleanly
from scripts.episodes import printable

CONVERSATIONS: dict[str, list[str]] = {  # what templates are known to rewrite, one a conversation
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
    """Where a conversation stops being a prefix of its continuation.

    Invariant: `before` and `after` are equal up to `at`, and differ there.
    """

    conversation: str
    num_messages: int  # before the answer
    at: int
    before: list[int]
    after: list[int]
    is_rewritten: bool  # the text changes too; False: other tokens of the same text


def first_divergence(tokenizer: Any, conversation: str, texts: Sequence[str]) -> Divergence | None:
    """Play a conversation, and return where an earlier token first changes; None if none does.

    A rendering up to a question ends with the opening of the policy's message. With the tokens of the answer behind it,
    it is what the policy has read and written; the rendering up to the next question must begin with that.

    Args:
        tokenizer: a Hugging Face tokeniser with a chat template
        conversation: its name
        texts: user, assistant, user, ... in turn

    Raises:
        ValueError: the template refuses the conversation.
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
    """Return the ids, or the text, of a conversation that ends with a question, with the opening of the answer."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    try:
        found = tokenizer.apply_chat_template(
            messages, tokenize=not as_text, add_generation_prompt=True, return_dict=False
        )
    except Exception as error:  # a template refuses a conversation in whatever way it likes
        raise ValueError(f"the chat template refuses a conversation of {len(texts)} messages: {error}") from error
    return found if as_text else list(found)


def lines_of(found: Divergence, tokenizer: Any) -> list[str]:
    """Return what diverges, as people read it."""

    def shown(ids: list[int], start: int, end: int) -> str:
        return " ".join(_quoted(tokenizer, token) for token in ids[max(start, 0) : end]) or "nothing"

    at, num = found.at, found.num_messages
    why = "the template rewrites text" if found.is_rewritten else "the same text, joined to other tokens"
    return [
        f"{found.conversation}: token {at} changes when messages {num + 1} and {num + 2} are added: {why}",
        f"  both      ... {shown(found.before, at - _SHOWN_TOKENS, at)}",
        f"  earlier   {shown(found.before, at, at + _SHOWN_TOKENS)}",
        f"  later     {shown(found.after, at, at + _SHOWN_TOKENS)}",
    ]


def _quoted(tokenizer: Any, token: int) -> str:
    return f"[{printable(tokenizer.decode([token]))}]"


def check(tokenizer: Any, conversations: dict[str, list[str]]) -> tuple[list[str], bool]:
    """Return what is to be said of a tokeniser's template, and whether it leaves all earlier text as it was."""
    lines, is_stable = [], True
    for name, texts in conversations.items():
        found = first_divergence(tokenizer, name, texts)
        is_stable &= found is None or not found.is_rewritten
        lines += [f"{name}: earlier tokens stay"] if found is None else lines_of(found, tokenizer)
    try:
        transcript = make_transcript("chat", tokenizer)
        lines.append('prompt_format "chat": accepted; what the policy wrote is never rendered again')
        if not getattr(transcript, "marks_turns", True):
            lines.append("turns are marked by plain text: what a tool or a user says can forge one")
    except ValueError as error:
        lines.append(f'prompt_format "chat": refused: {error}')
    return lines, is_stable


def main(argv: Sequence[str] | None = None) -> int:
    """Check one model."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("check", help="show the first token of the past that changes")
    one.add_argument("model", metavar="MODEL", help="a name or a directory, as --model of scripts/train.py")
    one.add_argument("--template", type=Path, metavar="FILE", help="a Jinja template in place of the model's own")
    one.add_argument("--turns", type=Path, metavar="FILE", help="JSON list of texts: question, answer, question, ...")
    one.add_argument("--debug", action="store_true", help="show the traceback of an error")
    arguments = parser.parse_args(argv)
    tokenizer = load_tokenizer(arguments.model)
    if arguments.template:
        tokenizer.chat_template = arguments.template.read_text(encoding="utf-8")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{arguments.model} has no chat template; expected one, or --template: use the format 'text'")
    lines, is_stable = check(tokenizer, _read_turns(arguments.turns) if arguments.turns else CONVERSATIONS)
    print("\n".join(lines))
    return 0 if is_stable else 1


def load_tokenizer(model: str) -> Any:
    """Return the tokeniser of a model."""
    from transformers import AutoTokenizer

    from rllib_srl.models import local_model

    return AutoTokenizer.from_pretrained(local_model(model))


def _read_turns(path: Path) -> dict[str, list[str]]:
    texts = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(texts, list) or len(texts) < 3 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{path} holds no conversation; expected a JSON list of at least three texts")
    return {path.name: texts}


if __name__ == "__main__":
    sys.exit(run_cleanly(main, debug="--debug" in sys.argv))

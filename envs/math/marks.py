r"""Find the text of a turn that is its answer: thoughts are left out, and marks name what is final.

    without_thoughts("<think>Is it \\boxed{4}?</think>\\boxed{5}")      "\\boxed{5}"
    final_answer("So \\boxed{7}.")                                      Stated("7", "boxed")

Thoughts end with the last closing tag; one that is opened behind it and never closed has no answer either.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

MARKERS = ("boxed", "tags", "hashes", "phrase", "bare")  # ways to mark the final answer of a turn
NOT = (  # words that reject what follows them
    r"(?:\b(?:not|never|neither|nor|cannot|isnt|except|unlike)\b|n['’]t\b"
    r"|\b(?:instead\s+of|(?:rather|other)\s+than|(?:anything|all)\s+but)\b)"
)
REJECTED_BEHIND = re.compile(  # what rejects the answer in front of it
    r"[\s*$)]*(?:,\s*which)?\s(?:(?:is|was|are|(?:would|may|might|must|has\s+to)\s+be|seems|looks)"
    r"(?:(?:\s+\w+)?\s+(?:not|wrong|incorrect|false|invalid|impossible|excluded|rejected|ruled\s+out)\b|n['’]t\b)"
    r"|(?:cannot|can\s?not|can['’]t|could\s?n['’]t|won['’]t|fails)\b"
    r"|(?:does|did|do)(?:\s+not|n['’]t)\s+(?:work|fit|hold|satisfy|count)\b)",
    re.IGNORECASE,
)

TAIL_CHARS = 20_000  # length of the end of a turn that is searched for an answer
_MAX_MARKS = 16  # most marks of each kind that are read, the last ones
_TAGS_OF_THOUGHTS = (
    "think", "thinking", "thought", "thoughts", "reasoning", "reflection", "analysis", "scratchpad", "seed:think"
)  # fmt: skip
_OPENED = (
    *(f"<{tag}>" for tag in _TAGS_OF_THOUGHTS),
    "<|begin_of_thought|>",
    "◁think▷",
    "[think]",
    "<|channel|>analysis",
)
_CLOSED = (*(f"</{tag}>" for tag in _TAGS_OF_THOUGHTS), "<|end_of_thought|>", "◁/think▷", "[/think]",
           "<|channel|>final<|message|>")  # fmt: skip
_LOWER = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}  # keeps every position
_REJECTED = re.compile(rf"(?:{NOT}|\b(?:wrong|incorrect)\b)(?:\s+[\w'’]+){{0,3}}[\s*$(:]*$", re.IGNORECASE)
_BRACE = re.compile(r"\\[{}]|\\(?:boxed|fbox)\s{0,3}\{|[{}]")
_BARE_BOX = re.compile(  # without braces: a number, a fraction, a command with its arguments, a letter or a tuple
    r"\\(?:boxed|fbox)(?![A-Za-z])\s{0,3}(?P<held>[+-]?\d+(?:[.,]\d+)*(?:/\d+)?(?:\s?\\?%)?"
    r"|[+-]?\\[dt]?frac\s?(?:\d\s?\d|\{[^{}]*\}\s?\{[^{}]*\})"
    r"|[+-]?\\(?!boxed|fbox)[A-Za-z]+(?:\s?\{[^{}]*\}){0,2}"
    r"|[A-HJ-Zb-z](?!\w)|[(\[][^()\[\]$\n]{1,80}[)\]])"
)
_TAGS = re.compile(r"<answer>(?P<inside>(?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
_PHRASE = re.compile(r"answer[*_]*\s*(?:is\b\s*[:=]?|[:=])(?:[*_]+(?=\s|$))?", re.IGNORECASE)  # bold or not


@dataclass(frozen=True)
class Stated:
    """The final answer of a turn and how it was marked. Invariant: `marker` is one of `MARKERS`."""

    answer: str
    marker: str
    is_rejected: bool = False  # the words in front of the mark reject the answer


def without_thoughts(turn: str) -> str:
    """Return the part of a turn behind its last thought; all of it if it has none."""
    low = turn.lower() if turn.isascii() else turn.translate(_LOWER)
    end = max((at + len(tag) for tag in _CLOSED if (at := low.rfind(tag)) >= 0), default=0)
    begin = min((at for tag in _OPENED if (at := low.find(tag, end)) >= 0), default=len(turn))
    return turn[end:begin]


def final_answer(turn: str, marker: str = "any") -> Stated:
    r"""Return the final answer of a turn.

    It is the last \boxed{...}, else the last <answer>...</answer>, else the text after the last "####", else the text
    after the last "answer:" or "answer is" on its line, else the last line that is not empty. Only the last 20,000
    characters behind the thoughts are read.

    Args:
        turn: the policy's
        marker: of `MARKERS`; looked for before the others
    """
    tail = without_thoughts(turn)[-TAIL_CHARS:]
    for name in dict.fromkeys((marker, *_FINDERS)):
        answer = _FINDERS[name](tail) if name in _FINDERS else None
        if answer is not None:
            return Stated(answer, name)
    return Stated(last_line(tail), "bare")


def marked_answers(text: str, marker: str = "any") -> list[Stated]:
    r"""Return the answers that a text marks as final, in order, those marked by `marker` first.

    These are all \boxed{...} and <answer>...</answer>, the last "####" and earlier ones that hold only a number, and
    the text after "answer is" and "answer:", behind the last of the others if there are any.

    Args:
        text: the end of a turn
        marker: of `MARKERS`, or "any"
    """
    tags = list(_TAGS.finditer(text))[-_MAX_MARKS:]
    places = [(start, end, Stated(held, "boxed")) for start, end, held in boxes_in(text)[-_MAX_MARKS:]]
    places += [(match.start(), match.end(), Stated(match["inside"].strip(), "tags")) for match in tags]
    places += _hash_lines(text)
    last = max((end for _, end, _ in places), default=0)
    spans = [match.span() for match in _PHRASE.finditer(text)][-_MAX_MARKS:]
    ends = [*(start for start, _ in spans[1:]), len(text)]
    places += [
        (start, end, Stated(_phrased(text[end:until]), "phrase"))
        for (start, end), until in zip(spans, ends, strict=False)
        if start >= last or marker == "phrase"
    ]
    places.sort(key=lambda place: (place[2].marker != marker, place[0]))
    return [
        Stated(stated.answer, stated.marker, _is_rejected(text, start, end, stated.marker))
        for start, end, stated in places
    ]


def _is_rejected(text: str, start: int, end: int, marker: str) -> bool:
    """Return whether the words in front of a mark, or behind one that is closed, reject its answer."""
    if marker in ("boxed", "tags") and REJECTED_BEHIND.match(text, end, end + 60):
        return True
    return _REJECTED.search(text, max(0, start - 60), start) is not None


def last_line(text: str) -> str:
    """Return the last line that is not empty, "" without one."""
    lines = text.rstrip().rsplit("\n", 1)
    return lines[-1].strip()


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else ""


def _phrased(text: str) -> str:
    """Return the first line, without the end of a bold text that began in front of it: $18 of "**Answer: $18**"."""
    line = _first_line(text)
    return re.sub(r"(?<=\S)\*\*(?![\w({\\-])", "", line, count=1) if line.count("**") % 2 else line


def boxes_in(text: str) -> list[tuple[int, int, str]]:
    """Return (start, end, content) of the closed boxes, outermost ones only."""
    opened: list[tuple[int, int, bool]] = []
    closed = []
    for match in _BRACE.finditer(text):
        if match[0].endswith("{") and match[0] != r"\{":
            opened.append((match.start(), match.end(), len(match[0]) > 1))
        elif match[0] == "}" and opened:
            start, begin, is_box = opened.pop()
            if is_box:
                closed.append((start, match.end(), text[begin : match.start()].strip()))
    closed += [_bare_box(text, match) for match in list(_BARE_BOX.finditer(text))[-_MAX_MARKS:]]
    outermost: list[tuple[int, int, str]] = []
    for box in sorted(closed):
        if not outermost or box[0] >= outermost[-1][1]:
            outermost.append(box)
    return outermost


def _bare_box(text: str, match: re.Match[str]) -> tuple[int, int, str]:
    """Return a box without braces; in a formula, it reaches to the dollar that closes it, as in MATH."""
    end = match.end()
    if text.count("$", 0, match.start()) % 2 and (dollar := text.find("$", end, end + 200)) >= 0:
        end = dollar
    return match.start(), end, text[match.start("held") : end].strip(" .,;:")


def _last_box(text: str) -> str | None:
    boxes = boxes_in(text)
    return boxes[-1][2] if boxes else None


def _last_tags(text: str) -> str | None:
    tags = [each["inside"].strip() for each in _TAGS.finditer(text)]
    return tags[-1] if tags else None


def _hash_lines(text: str) -> list[tuple[int, int, Stated]]:
    """Return the last "####" and earlier ones that hold only a number; others are headings."""
    hashes = [(each.start(), each.end(), each[1].strip()) for each in re.finditer(r"####([^\n]*)", text)]
    hashes = hashes[-_MAX_MARKS:]
    kept = [(start, end, Stated(line, "hashes")) for start, end, line in hashes[:-1] if _NUMERIC.fullmatch(line)]
    if hashes:
        kept.append((hashes[-1][0], hashes[-1][1], Stated(_after_hashes(text) or "", "hashes")))
    return kept


_NUMERIC = re.compile(r"\$?[+-]?[\d.,/ ]{1,60}%?\.?", re.ASCII)


def _after_hashes(text: str) -> str | None:
    _, mark, after = text.rpartition("####")
    return _first_line(after) if mark else None


def _after_phrase(text: str) -> str | None:
    phrases = list(_PHRASE.finditer(text))
    return _phrased(text[phrases[-1].end() :]) if phrases else None


_FINDERS: dict[str, Callable[[str], str | None]] = {
    "boxed": _last_box,
    "tags": _last_tags,
    "hashes": _after_hashes,
    "phrase": _after_phrase,
}

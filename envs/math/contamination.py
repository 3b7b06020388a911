"""Find training questions that repeat evaluation questions: by hash, by n-grams, and by meaning.

    method      compares                                          score   finds
    hash        the tokens in order                                 1     copies; other case, spacing, punctuation
    reordered   the tokens in any order                             1     numbers or items in another order
    ngram       share of the shorter text's 8-grams in the longer   .8+   a question inside a longer text, in both ways
    embedding   cosine of sentence vectors                          .75+  the same question in other words

Questions made from a template differ from each other in little more than their numbers. So two rules protect distinct
questions, and a pair must pass both to be a hit by any method but `hash`:
- numbers: a paraphrase has the same numbers, those written as words ("over three days") apart if the answers are equal;
  a contained question has all of its numbers in the longer text;
- answers: if both are given they are equal. (A question that is contained as a whole is a hit with any answer: the
  longer text may ask for more.) "12 - 5" and "5 - 12" have the same tokens, but other answers.
Without answers the second rule is void, and a question with its numbers exchanged is reported.

A pair is reported once, by the first method of the table that finds it.

Sources: 13-grams for deduplication, Brown et al. 2020, arXiv 2005.14165, appendix C (questions are shorter than
documents, hence 8); containment, Broder 1997, "On the resemblance and containment of documents", section 2;
paraphrases that evade n-grams, and sentence vectors that find them, Yang et al. 2023, arXiv 2311.04850.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rllib_srl.envs.math.grading import numbers_in, plain
from rllib_srl.envs.math.question_rows import Problem

METHODS = ("hash", "reordered", "ngram", "embedding")
WITHOUT_ENCODER = METHODS[:3]
NGRAM = 8  # tokens
LEAST_TOKENS = 4  # of a text that may be contained in another
CONTAINMENT = 0.8  # lowest share of n-grams
COSINE = 0.75  # lowest, of questions with the same numbers, or the same answer of more than yes or no
COSINE_OF_WORDING = 0.95  # lowest, where nothing but the wording tells questions apart
CLOSED_ANSWERS = frozenset({"yes", "no", "true", "false"})  # equal by chance too often to show that questions are equal
BOILERPLATE = (10, 0.01)  # n-grams in more rows than this, and in more than this share of them, do not count
_MOST_SIMILARITIES = 1 << 22  # held at once: 16 MiB

Encode = Callable[[Sequence[str]], np.ndarray]  # texts to unit vectors, [K, D]

_SYMBOLS = str.maketrans({"²": "^2", "³": "^3", "−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "’": "'"})
_CJK = "\u3040-\u30ff\u3400-\u9fff"  # written without spaces: a token per character
_TOKEN = re.compile(
    r"(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,]*\d)|\d+(?:\.\d+)?|\.\d+)"
    rf"|(?P<word>[{_CJK}]|(?:(?![{_CJK}])[^\W\d_])+(?:'(?:(?![{_CJK}])[^\W\d_])+)*)"
    r"|(?P<operator>[-+*/=^<>%()\[\]{}|√≤≥≠])"
    r"|(?P<other>[^\w\s]|\n)"
)
_HYPHEN = re.compile(r"(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})")
_END = "."  # the token of all punctuation; numbers and operators are tokens of their own
# "one" is a pronoun as often as a number.
_TO_NINETEEN = """
    two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
    nineteen
"""
_TO_NINETY = "twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = {word: value for value, word in enumerate(_TO_NINETEEN.split(), 2)}
_TENS = {word: 10 * value for value, word in enumerate(_TO_NINETY.split(), 2)}


@dataclass(frozen=True)
class Row:
    """A question to compare. Invariant: equal answers are equal texts; "" is an answer that is not known."""

    number: int  # in its file, from 1
    text: str
    answer: str = ""

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """Return the tokens of the text; see `tokens_of`."""
        return tokens_of(self.text)

    @cached_property
    def content(self) -> tuple[str, ...]:
        """Return the tokens without punctuation."""
        return tuple(token for token in self.tokens if token != _END)

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """Return the numbers in the text, in lexical order."""
        return _numbers(self.tokens)

    @cached_property
    def digit_numbers(self) -> tuple[str, ...]:
        """Return the numbers that are written in digits, in lexical order."""
        return _numbers(tokens_of(self.text, has_number_words=False))

    @property
    def is_told_by_answer(self) -> bool:
        """Return whether an equal answer is evidence that another question asks the same."""
        return bool(self.answer) and self.answer not in CLOSED_ANSWERS

    def may_equal(self, other: Row) -> bool:
        """Return whether the answers do not differ."""
        return not self.answer or not other.answer or self.answer == other.answer


@dataclass(frozen=True)
class Hit:
    """A training row that repeats an evaluation row. Invariant: `method` is one of METHODS; `score` is in (0, 1]."""

    train: Row
    evaluation: Row
    method: str
    score: float


def tokens_of(text: str, has_number_words: bool = True) -> tuple[str, ...]:
    """Return words without case, numbers by value, operators, and "." for each run of other punctuation.

    tokens_of("Tom's  2,500 apples, and TWENTY-ONE + 3.50?")    . tom's 2500 apples . and 21 + 3.5 .

    Args:
        text: any text; the tokens begin and end with ".".
        has_number_words: convert words such as "three" and "twenty-one" to numbers.
    """
    text = unicodedata.normalize("NFKC", text.translate(_SYMBOLS)).casefold().translate(_SYMBOLS)
    tokens: list[str] = [_END]
    tens = 0  # value of the token before, if it is a word such as "twenty"
    for found in _TOKEN.finditer(_HYPHEN.sub(" ", text)):
        kind, token = found.lastgroup, found.group()
        if kind == "other":
            # Vowel signs, emoji and rare operators carry meaning; punctuation and currencies do not.
            token = token if unicodedata.category(token) in ("Mn", "Mc", "So", "Sm") else _END
        elif kind == "number":
            token = _plain_number(token)
        unit = 1 if token == "one" else _VALUES.get(token, 0)
        if tens and 1 <= unit <= 9:
            tokens[-1], tens = str(tens + unit), 0
            continue
        tens = _TENS.get(token, 0) if has_number_words else 0
        if tens or (has_number_words and token in _VALUES):
            token = str(tens or unit)
        if token != _END or tokens[-1] != _END:
            tokens.append(token)
    return tuple(tokens if tokens[-1] == _END else [*tokens, _END])


def answer_key(problem: Problem) -> str:
    """Return a text that is equal for equal answers: a choice by its text, others as `key_of`."""
    answer = problem.answer
    if problem.is_choice:
        listed = [line for line in problem.question.splitlines() if line.startswith(f"{answer}. ")]
        answer = listed[-1].partition(". ")[2] if listed else answer
    return key_of(answer)


def key_of(answer: str) -> str:
    """Return a text that is equal for equal answers: "72 clips" and "72.0" by the number."""
    tokens = [token for token in tokens_of(answer) if token != "."]
    numbers = [token for token in tokens if token[0].isdigit()]
    has_unit = len(numbers) == 1 and all(token.isalpha() for token in tokens if token not in numbers)
    values = numbers_in(plain(answer)) or (numbers_in(numbers[0]) if has_unit else ())
    return str(values[0]) if values else " ".join(tokens)


def _numbers(tokens: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(token for token in tokens if token[0].isdigit()))


def _plain_number(token: str) -> str:
    """Return a decimal number without separators and idle zeros; its digits as ASCII."""
    whole, _, part = token.replace(",", "").partition(".")
    part = part.rstrip("0")
    return str(int(whole or "0")) + (f".{part}" if part else "")


def find_contamination(
    train: Sequence[Row],
    evaluation: Sequence[Row],
    methods: Collection[str] = METHODS,
    encode: Encode | None = None,
    containment: float = CONTAINMENT,
    cosine: float = COSINE,
) -> list[Hit]:
    """Return every pair of a training row and an evaluation row that ask the same, ordered by their row numbers.

    Args:
        train: training rows.
        evaluation: evaluation rows.
        methods: some of `METHODS`.
        encode: sentence encoder, needed by the method "embedding".
        containment: lowest share of n-grams, in (0, 1].
        cosine: lowest cosine, in (0, 1]; where the wording alone tells questions apart, at least `COSINE_OF_WORDING`.

    Raises:
        ValueError: naming every argument out of its range.
    """
    unknown = sorted(set(methods) - set(METHODS))
    faults = [f"methods = {unknown}; expected some of {', '.join(METHODS)}"] if unknown or not methods else []
    shares = {"containment": containment, "cosine": cosine}
    wrong = [name for name, value in shares.items() if not 0 < value <= 1]
    faults += [f"{name} = {shares[name]}; expected more than 0, at most 1" for name in wrong]
    if "embedding" in methods and encode is None:
        faults.append("encode = None; expected a sentence encoder for the method 'embedding'")
    if faults:
        raise ValueError("; ".join(faults))
    found: dict[tuple[int, int], Hit] = {}

    def keep(method: str, pairs: Iterator[tuple[int, int, float]]) -> None:
        for one, other, score in pairs:
            found.setdefault((one, other), Hit(train[one], evaluation[other], method, round(score, 4)))

    if "hash" in methods:
        keep("hash", _same(train, evaluation, lambda row: row.content))
    if "reordered" in methods:
        by_bag = _same(train, evaluation, lambda row: tuple(sorted(row.content)))
        keep("reordered", (pair for pair in by_bag if train[pair[0]].may_equal(evaluation[pair[1]])))
    if "ngram" in methods:
        boilerplate = _boilerplate([*train, *evaluation])
        keep("ngram", _contained(evaluation, train, boilerplate, containment, is_swapped=True))
        keep("ngram", _contained(train, evaluation, boilerplate, containment, is_swapped=False))
    if "embedding" in methods and encode is not None:
        keep("embedding", _similar(train, evaluation, encode, cosine))
    return [found[pair] for pair in sorted(found)]


def _same(
    train: Sequence[Row], evaluation: Sequence[Row], key: Callable[[Row], tuple[str, ...]]
) -> Iterator[tuple[int, int, float]]:
    """Yield the pairs of rows with the same key."""
    rows_of = defaultdict(list)
    for other, row in enumerate(evaluation):
        rows_of[key(row)].append(other)
    for one, row in enumerate(train):
        if row.content:
            yield from ((one, other, 1.0) for other in rows_of.get(key(row), ()))


# --- containment ---------------------------------------------------------------------------------


def _grams(tokens: Sequence[str], length: int) -> set[int]:
    """Return the hashes of all runs of `length` tokens: an eighth of the memory of the runs themselves."""
    return {hash(tuple(tokens[start : start + length])) for start in range(len(tokens) - length + 1)}


def _boilerplate(rows: Sequence[Row]) -> set[int]:
    """Return the n-grams that many rows share, such as those of an instruction or of a template's wording."""
    counts = Counter(gram for row in rows for gram in _grams(row.tokens, NGRAM))
    most = max(BOILERPLATE[0], BOILERPLATE[1] * len(rows))
    return {gram for gram, count in counts.items() if count > most}


def _contained(
    short: Sequence[Row], long: Sequence[Row], boilerplate: set[int], least: float, is_swapped: bool
) -> Iterator[tuple[int, int, float]]:
    """Yield the pairs in which the text of a `short` row lies in that of a `long` one, with the share of its n-grams.

    A text of fewer than `NGRAM` tokens is a single n-gram, with the punctuation before and after it: "2 + 5 =" does not
    lie in "1 + 2 + 5 =".
    """
    grams_of: dict[int, set[int]] = {}  # by short row
    rows_with: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # by length and gram
    for one, row in enumerate(short):
        if len(row.content) < LEAST_TOKENS:
            continue
        length = min(NGRAM, len(row.tokens))
        grams_of[one] = _grams(row.tokens, length) - boilerplate
        for gram in grams_of[one]:
            rows_with[length][gram].append(one)
    for other, row in enumerate(long):
        num_shared = Counter(
            one
            for length, by_gram in rows_with.items()
            for gram in _grams(row.tokens, length)
            for one in by_gram.get(gram, ())
        )
        for one, num in num_shared.items():
            share, candidate = num / len(grams_of[one]), short[one]
            if share < least or len(candidate.tokens) > len(row.tokens):
                continue
            if Counter(candidate.numbers) - Counter(row.numbers):
                continue
            length = min(NGRAM, len(candidate.tokens))
            if candidate.may_equal(row) or _grams(candidate.tokens, length) <= _grams(row.tokens, length):
                yield (other, one, share) if is_swapped else (one, other, share)


# --- meaning -------------------------------------------------------------------------------------


def _similar(
    train: Sequence[Row], evaluation: Sequence[Row], encode: Encode, least: float
) -> Iterator[tuple[int, int, float]]:
    """Yield the pairs with the same numbers and no other answer whose sentence vectors are near.

    Only rows that share their numbers with one of the other side are encoded: the encoder takes most of the time.
    """
    blocks = [*_blocks(train, evaluation, lambda row: row.numbers)]
    with_answer = lambda row: (*row.digit_numbers, row.answer) if row.is_told_by_answer else None  # noqa: E731
    blocks += _blocks(train, evaluation, with_answer)
    encoded = []
    for side, rows in enumerate((train, evaluation)):
        indices = np.unique(np.concatenate([np.zeros(0, np.int64), *(block[side] for block in blocks)]))
        vectors_KD = encode([rows[index].text for index in indices]) if len(indices) else np.zeros((0, 1), np.float32)
        encoded.append((indices, vectors_KD))
    (train_K, train_KD), (evaluation_M, evaluation_MD) = encoded
    for block in blocks:
        ours, theirs = np.searchsorted(train_K, block[0]), np.searchsorted(evaluation_M, block[1])
        size = max(1, _MOST_SIMILARITIES // len(theirs))
        for start in range(0, len(ours), size):
            cosine_KM = train_KD[ours[start : start + size]] @ evaluation_MD[theirs].T
            for k, m in zip(*np.nonzero(cosine_KM >= least), strict=True):
                one, other, cosine = int(block[0][start + k]), int(block[1][m]), float(cosine_KM[k, m])
                if cosine >= _floor(train[one], evaluation[other], least):
                    yield one, other, min(1.0, cosine)


def _blocks(
    train: Sequence[Row], evaluation: Sequence[Row], key: Callable[[Row], tuple[str, ...] | None]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the indices of the training and of the evaluation rows with the same key, if there are both."""
    indices_of: dict[tuple[str, ...] | None, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, rows in enumerate((train, evaluation)):
        for index, row in enumerate(rows):
            indices_of[key(row)][side].append(index)
    for held, (ours, theirs) in indices_of.items():
        if held is not None and ours and theirs:
            yield np.array(ours), np.array(theirs)


def _floor(one: Row, other: Row, least: float) -> float:
    """Return the lowest cosine at which two rows of a block ask the same; above 1 if their answers differ."""
    if not one.may_equal(other):
        return np.inf
    has_same_numbers = bool(one.numbers) and one.numbers == other.numbers
    has_same_answer = one.is_told_by_answer and one.answer == other.answer
    is_closed = one.answer in CLOSED_ANSWERS or other.answer in CLOSED_ANSWERS
    return least if has_same_answer or (has_same_numbers and not is_closed) else max(least, COSINE_OF_WORDING)

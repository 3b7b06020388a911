"""Find training questions that repeat evaluation questions; report them, leave them out, or stop.

    config.callbacks("contrib.contamination")        at the start of a run: a warning and contamination.json
    config.callbacks("contrib.contamination:drop")   training leaves the repeats out
    config.callbacks("contrib.contamination:halt")   the run does not start if there is one

A pair is a hit if both have the same tokens (words without case, numbers by value, operators), or if at least 80 % of
the shorter one's 8-grams and all of its numbers lie in the longer one and their answers do not differ. n-grams that
many rows share, such as an instruction's, do not count. Questions that contain each other are told apart by
their answers, so give both files theirs.

In a run, rows of data (`question_file`, tools with rows) are compared with the held-out rows, with the held-out
prompts of other environments, and with the files that a subclass names: `class Mine(Drop): files = ("aime.jsonl",)`.

Sources: n-gram decontamination, Brown et al. 2020, arXiv 2005.14165, appendix C; containment, Broder 1997.
"""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from ray.rllib.callbacks.callbacks import RLlibCallback

from rllib_srl.algorithm.own_data import data_settings
from rllib_srl.envs.math.data_files import RowError, rows_of
from rllib_srl.envs.math.data_place import local_files
from rllib_srl.envs.math.question_rows import problem_of

logger = logging.getLogger(__name__)

AUDIT = "contamination.json"
NGRAM, LEAST_TOKENS = 8, 4  # tokens; the latter of a text that may be contained in another
CONTAINMENT = 0.8  # lowest share of n-grams
BOILERPLATE = (10, 0.01)  # n-grams in more rows than this, and in more than this share of them, do not count
NUM_SHOWN = 5  # pairs
_SYMBOLS = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "’": "'"})
_CJK = "\u3040-\u30ff\u3400-\u9fff"  # written without spaces: a token per character
_TOKEN = re.compile(rf"\d[\d,]*(?:\.\d+)?|\.\d+|[{_CJK}]|(?:(?![{_CJK}])[^\W\d_])+|[-+*/=^<>%|√≤≥≠]")


class ContaminationError(ValueError):
    """Training repeats more of the evaluation questions than is tolerated; the message has examples."""


@dataclass(frozen=True)
class Row:
    """A question of a place, which is a file or an environment; the answer "" is not known."""

    place: str
    name: str  # number of the row from 1, or prompt id
    text: str
    answer: str = ""

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """Return the tokens of the text."""
        return tokens_of(self.text)

    @cached_property
    def key(self) -> str:
        """Return a text that is equal for equal answers: the last number, else the last word."""
        tokens = tokens_of(self.answer)
        numbers = [token for token in tokens if _is_number(token)]
        return (numbers or list(tokens) or [""])[-1]

    @cached_property
    def numbers(self) -> Counter[str]:
        """Return the numbers in the text and how often each occurs."""
        return Counter(token for token in self.tokens if _is_number(token))

    def may_equal(self, other: Row) -> bool:
        """Return whether the answers do not differ."""
        return not self.key or not other.key or self.key == other.key


@dataclass(frozen=True)
class Hit:
    """A training row that repeats an evaluation row."""

    train: Row
    evaluation: Row
    score: float  # 1 for the same tokens, else the share of n-grams


def tokens_of(text: str) -> tuple[str, ...]:
    """Return words without case, numbers by value and operators: "Tom has 2,500 + 3.50" -> tom has 2500 + 3.5."""
    text = unicodedata.normalize("NFKC", text.translate(_SYMBOLS)).casefold()
    return tuple(_plain(token) if _is_number(token) else token for token in _TOKEN.findall(text))


def _is_number(token: str) -> bool:
    return token[-1].isdigit()


def _plain(number: str) -> str:
    whole, _, part = number.replace(",", "").partition(".")
    part = part.rstrip("0")
    return str(int(whole or "0")) + (f".{part}" if part else "")


def find_hits(train: Sequence[Row], evaluation: Sequence[Row]) -> list[Hit]:
    """Return every pair of a training row and an evaluation row that ask the same, in the order of the rows."""
    shares: dict[tuple[int, int], float] = {}
    same = defaultdict(list)
    for number, row in enumerate(evaluation):
        same[row.tokens].append(number)
    for at, row in enumerate(train):
        shares |= {(at, number): 1.0 for number in same.get(row.tokens, ()) if row.tokens}
    counts = Counter(gram for row in (*train, *evaluation) for gram in _grams(row.tokens, NGRAM))
    most = max(BOILERPLATE[0], BOILERPLATE[1] * (len(train) + len(evaluation)))
    common = {gram for gram, count in counts.items() if count > most}
    for at, number, share in _contained(train, evaluation, common):
        shares.setdefault((at, number), share)
    for number, at, share in _contained(evaluation, train, common):
        shares.setdefault((at, number), share)
    return [Hit(train[at], evaluation[number], round(share, 4)) for (at, number), share in sorted(shares.items())]


def _grams(tokens: Sequence[str], length: int) -> set[int]:
    return {hash(tuple(tokens[start : start + length])) for start in range(len(tokens) - length + 1)}


def _contained(short: Sequence[Row], long: Sequence[Row], common: set[int]) -> Iterator[tuple[int, int, float]]:
    """Yield (short, long, share of n-grams) where a text lies in a longer one; a short text is a single n-gram."""
    num_grams: dict[int, int] = {}
    rows_with: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # by length and n-gram
    for index, row in enumerate(short):
        if len(row.tokens) >= LEAST_TOKENS:
            length = min(NGRAM, len(row.tokens))
            grams = _grams(row.tokens, length) - common
            num_grams[index] = len(grams)
            for gram in grams:
                rows_with[length][gram].append(index)
    for other, row in enumerate(long):
        shared = Counter(
            i for length, by in rows_with.items() for gram in _grams(row.tokens, length) for i in by.get(gram, ())
        )
        for index, num in shared.items():
            share, inner = num / num_grams[index], short[index]
            is_inside = share >= CONTAINMENT and len(inner.tokens) <= len(row.tokens)
            if is_inside and not inner.numbers - row.numbers and inner.may_equal(row):
                yield index, other, share


def audit_of(train: Sequence[Row], evaluation: Sequence[Row], hits: Sequence[Hit]) -> dict[str, Any]:
    """Return everything in JSON types; `shares`: place -> share of its evaluation questions that are repeated."""
    asked = Counter(row.place for row in evaluation)
    repeated = Counter(row.place for row in {hit.evaluation for hit in hits})
    return {
        "num_train": len(train),
        "num_eval": len(evaluation),
        "shares": {place: repeated[place] / num for place, num in asked.items()},
        "hits": [{"score": hit.score, "train": _as_dict(hit.train), "eval": _as_dict(hit.evaluation)} for hit in hits],
    }


def _as_dict(row: Row) -> dict[str, str]:
    return {"place": row.place, "name": row.name, "question": row.text, "answer": row.answer}


def read(data: str) -> list[Row]:
    """Return the questions of a file or a data set of the hub.

    Raises:
        ValueError: there is no such data, or rows without a question.
    """
    place = data_settings(data)
    files = local_files(place.get("hub_id", ""), place["path"])
    rows, bad = [], []
    for number, row in enumerate((row for file in files for _, row in rows_of(file)), 1):
        try:
            problem = problem_of(row, "", "", has_reward=True)
            rows.append(Row(data, str(number), problem.question, problem.answer))
        except RowError as error:
            bad.append(f"row {number}, {error}")
    if bad or not rows:
        raise ValueError(f"data {data!r}: {'; '.join(bad[:20]) or 'no questions'}; expected a question in every row")
    return rows


class Contamination(RLlibCallback):
    """Compares at the start of a run, and warns. Invariant: nothing was drawn before."""

    on_hit: ClassVar[str] = "report"  # or "drop" or "halt"
    tolerance: ClassVar[float] = 1.0  # share of the evaluation questions of a place; above it the run ends
    files: ClassVar[Sequence[str]] = ()  # further evaluation questions: files and data sets of the hub

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Compare, write the audit to the run's directory, and leave repeats out of training.

        Raises:
            ContaminationError: more than `tolerance` of the questions of a place are repeated.
            ValueError: there is nothing to compare, nothing to train on is left, or a shown example is a repeat.
        """
        source = algorithm.source
        train = list(_training(source))
        evaluation = list(_evaluation(source, int(algorithm.config.evaluation_duration)))
        evaluation += [row for data in self.files for row in read(data)]
        if not train or not evaluation:
            side = "trains" if not train else "evaluates"
            expected = "expected an environment such as question_file"
            raise ValueError(f"contrib.contamination: the run {side} on no rows of data; {expected}")
        hits = find_hits(train, evaluation)
        audit = {"on_hit": self.on_hit, "tolerance": self.tolerance, **audit_of(train, evaluation, hits)}
        shown = ", ".join(f"{share:.2%} of {place}" for place, share in audit["shares"].items() if share)
        if max(audit["shares"].values()) > self.tolerance:  # the directory of a run that does not start is removed
            pairs = "; ".join(f"{hit.train.text[:100]!r} and {hit.evaluation.text[:100]!r}" for hit in hits[:NUM_SHOWN])
            raise ContaminationError(
                f"contrib.contamination: training repeats {shown}; expected at most {self.tolerance:.2%}; such as "
                f"{pairs}; contrib.contamination:drop leaves them out"
            )
        path = Path(algorithm.logdir) / AUDIT
        path.write_text(json.dumps(audit, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if hits:
            logger.warning("training repeats evaluation questions: %s; %s; see %s", shown, self.on_hit, path)
        if hits and self.on_hit == "drop":
            repeats = defaultdict(set)
            for hit in hits:
                repeats[hit.train.place].add(hit.train.name)
            _check_left(source, train, repeats)
            source.leave_out(repeats)


class Drop(Contamination):
    """Leaves repeats out of training."""

    on_hit: ClassVar[str] = "drop"


class Halt(Contamination):
    """Ends the run if there is a repeat."""

    on_hit: ClassVar[str] = "halt"
    tolerance: ClassVar[float] = 0.0


contamination, drop, halt = Contamination, Drop, Halt


def _training(source: Any) -> Iterator[Row]:
    for env_id, env in source.environments.items():
        plain = env.unwrapped
        if hasattr(plain, "data_question"):
            ids = {*map(str, source.ids(env_id, "train")), *getattr(plain, "shot_ids", ())}
            yield from (Row(env_id, row_id, *plain.data_question(row_id)) for row_id in sorted(ids))


def _evaluation(source: Any, num_evaluated: int) -> Iterator[Row]:
    for env_id, env in source.environments.items():
        if hasattr(env.unwrapped, "data_question"):
            ids = sorted({str(row_id) for row_id in source.ids(env_id, "heldout")})
            yield from (Row(env_id, row_id, *env.unwrapped.data_question(row_id)) for row_id in ids)
    for prompt in source.heldout(num_evaluated):
        plain = source.environments[prompt.env_id].unwrapped
        if hasattr(plain, "question") and not hasattr(plain, "data_question"):
            asked = plain.question(prompt.prompt_id)
            yield Row(prompt.env_id, prompt.prompt_id, asked.text, asked.answer)


def _check_left(source: Any, train: Sequence[Row], repeats: dict[str, set[str]]) -> None:
    for env_id, gone in repeats.items():
        if gone & set(getattr(source.environments[env_id].unwrapped, "shot_ids", ())):
            raise ValueError(f"environment {env_id!r} shows an example that repeats an evaluation question; "
                             "expected another shots_seed, or num_shots = 0")  # fmt: skip
        if gone >= {row.name for row in train if row.place == env_id}:
            raise ValueError(f"environment {env_id!r}: all training questions repeat evaluation questions; "
                             "expected training data without them")  # fmt: skip

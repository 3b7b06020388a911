"""Find training questions that repeat evaluation questions; report them, leave them out, or stop.

    srl contrib contamination --train train.jsonl --eval test.jsonl                    report, all pairs in --audit
    srl contrib contamination --train train.jsonl --eval test.jsonl --drop clean.jsonl the training rows without a hit
    config.callbacks("contrib.contamination")        at the start of a run: a warning and contamination.json
    config.callbacks("contrib.contamination:drop")   training leaves the repeats out
    config.callbacks("contrib.contamination:halt")   the run does not start if there is one

A pair is a hit if both have the same tokens (words without case, numbers by value, operators), or if at least 80 % of
the shorter one's 8-grams and all of its numbers lie in the longer one and their answers do not differ. n-grams that
many rows share, such as an instruction's, do not count. Questions that contain each other are told apart by
their answers, so give both files theirs.

In a run, rows of data (`question_file`, tools with rows) are compared with the held-out rows, with the held-out
prompts of other environments, and with the files that a subclass names: `class Mine(Drop): files = ("aime.jsonl",)`.

Exit status of the command: 1 an error; 2 wrong flags; 3 more than --tolerance of the evaluation questions are hit.

Sources: n-gram decontamination, Brown et al. 2020, arXiv 2005.14165, appendix C; containment, Broder 1997.
"""

from __future__ import annotations

import argparse
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
from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.command_line import add_debug, help_of
from rllib_srl.envs.math.data_files import RowFault, rows_of
from rllib_srl.envs.math.data_place import local_files
from rllib_srl.envs.math.question_rows import problem_of

logger = logging.getLogger(__name__)

AUDIT = "contamination.json"
NGRAM, LEAST_TOKENS = 8, 4  # tokens; the latter of a text that may be contained in another
CONTAINMENT = 0.8  # lowest share of n-grams
BOILERPLATE = (10, 0.01)  # n-grams in more rows than this, and in more than this share of them, do not count
OVER = 3  # exit status
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
    found: dict[tuple[int, int], float] = {}
    same = defaultdict(list)
    for number, row in enumerate(evaluation):
        same[row.tokens].append(number)
    for at, row in enumerate(train):
        found |= {(at, number): 1.0 for number in same.get(row.tokens, ()) if row.tokens}
    counts = Counter(gram for row in (*train, *evaluation) for gram in _grams(row.tokens, NGRAM))
    most = max(BOILERPLATE[0], BOILERPLATE[1] * (len(train) + len(evaluation)))
    common = {gram for gram, count in counts.items() if count > most}
    for at, number, share in _contained(train, evaluation, common):
        found.setdefault((at, number), share)
    for number, at, share in _contained(evaluation, train, common):
        found.setdefault((at, number), share)
    return [Hit(train[at], evaluation[number], round(share, 4)) for (at, number), share in sorted(found.items())]


def _grams(tokens: Sequence[str], length: int) -> set[int]:
    return {hash(tuple(tokens[start : start + length])) for start in range(len(tokens) - length + 1)}


def _contained(short: Sequence[Row], long: Sequence[Row], common: set[int]) -> Iterator[tuple[int, int, float]]:
    """Yield (short, long, share of n-grams) where a text lies in a longer one; a short text is a single n-gram."""
    num_grams: dict[int, int] = {}
    rows_with: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # by length and n-gram
    for one, row in enumerate(short):
        if len(row.tokens) >= LEAST_TOKENS:
            length = min(NGRAM, len(row.tokens))
            grams = _grams(row.tokens, length) - common
            num_grams[one] = len(grams)
            for gram in grams:
                rows_with[length][gram].append(one)
    for other, row in enumerate(long):
        shared = Counter(
            one for length, by in rows_with.items() for gram in _grams(row.tokens, length) for one in by.get(gram, ())
        )
        for one, num in shared.items():
            share, inner = num / num_grams[one], short[one]
            is_inside = share >= CONTAINMENT and len(inner.tokens) <= len(row.tokens)
            if is_inside and not inner.numbers - row.numbers and inner.may_equal(row):
                yield one, other, share


def audit_of(train: Sequence[Row], evaluation: Sequence[Row], hits: Sequence[Hit]) -> dict[str, Any]:
    """Return everything in JSON types; `shares`: place -> share of its evaluation questions that are repeated."""
    asked = Counter(row.place for row in evaluation)
    repeated = Counter(row.place for row in {hit.evaluation for hit in hits})
    return {
        "num_train": len(train),
        "num_eval": len(evaluation),
        "shares": {place: repeated[place] / num for place, num in asked.items()},
        "hits": [{"score": hit.score, "train": _told(hit.train), "eval": _told(hit.evaluation)} for hit in hits],
    }


def _told(row: Row) -> dict[str, str]:
    return {"place": row.place, "name": row.name, "question": row.text, "answer": row.answer}


def read(data: str, split: str = "", skips: bool = False, **columns: str) -> tuple[list[Row], dict[str, Any]]:
    """Return the questions of a file or a data set of the hub, and the raw rows by number.

    Raises:
        ValueError: there is no such data, or rows without a question and `skips` is False.
    """
    place = data_settings(data, split=split)
    files = local_files(place.get("hub_id", ""), place["path"])
    path = files[0] if len(files) == 1 else files[0].parent
    rows, raw, bad = [], {}, []
    for number, row in enumerate((row for file in files for _, row in rows_of(file)), 1):
        try:
            problem = problem_of(row, columns.get("question", ""), columns.get("answer", ""), has_reward=True)
        except RowFault as fault:
            bad.append(f"row {number}, {fault}")
            continue
        rows.append(Row(str(path), str(number), problem.question, problem.answer))
        raw[str(number)] = row
    if bad and not skips:
        raise ValueError(f"file {str(path)!r}: {'; '.join(bad[:20])} ({len(bad)} rows); fix them, or skip them")
    if not rows:
        raise ValueError(f"file {str(path)!r} has no questions to compare")
    return rows, raw


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
        evaluation += [row for data in self.files for row in read(data)[0]]
        if not train or not evaluation:
            side = "trains" if not train else "is measured"
            raise ValueError(f"contrib.contamination: no environment {side} on rows of data, such as question_file")
        hits = find_hits(train, evaluation)
        audit = {"on_hit": self.on_hit, "tolerance": self.tolerance, **audit_of(train, evaluation, hits)}
        shown = ", ".join(f"{share:.2%} of {place}" for place, share in audit["shares"].items() if share)
        if max(audit["shares"].values()) > self.tolerance:  # the directory of a run that does not start is removed
            pairs = "; ".join(f"{hit.train.text[:100]!r} and {hit.evaluation.text[:100]!r}" for hit in hits[:NUM_SHOWN])
            raise ContaminationError(
                f"contrib.contamination: training repeats {shown}; expected at most {self.tolerance:.2%}; such as "
                f"{pairs}; `srl contrib contamination` lists all pairs of two files"
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
            yield from (Row(env_id, one, *plain.data_question(one)) for one in sorted(ids))


def _evaluation(source: Any, num_evaluated: int) -> Iterator[Row]:
    for env_id, env in source.environments.items():
        if hasattr(env.unwrapped, "data_question"):
            ids = sorted({str(one) for one in source.ids(env_id, "heldout")})
            yield from (Row(env_id, one, *env.unwrapped.data_question(one)) for one in ids)
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
            raise ValueError(f"environment {env_id!r}: all training questions repeat evaluation questions")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `srl contrib contamination`; return the exit status."""
    parser = argparse.ArgumentParser(prog="srl contrib contamination", **help_of(__doc__))
    for side in ("train", "eval"):
        text = "file (.jsonl, .json, .csv, .parquet) or id of a data set of the Hugging Face hub"
        parser.add_argument(f"--{side}", required=True, metavar="DATA", help=text)
        parser.add_argument(f"--{side}-split", default="", metavar="SPLIT", help=f"split of --{side} of the hub")
        for column in ("question", "answer"):
            text = f"column of the {column}, if it has none of the known names"
            parser.add_argument(f"--{side}-{column}", default="", metavar="COLUMN", help=text)
    parser.add_argument("--drop", type=Path, metavar="FILE", help="write the training rows without a hit (.jsonl)")
    text = "share of the evaluation questions that may be hit (default: 1)"
    parser.add_argument("--tolerance", type=float, default=1.0, metavar="SHARE", help=text)
    parser.add_argument("--audit", type=Path, default=Path(AUDIT), metavar="FILE", help=f"all pairs (default: {AUDIT})")
    parser.add_argument("--skip-bad-rows", action="store_true", help="leave out rows without a question")
    add_debug(parser)
    args = parser.parse_args(argv)
    if not 0 <= args.tolerance <= 1:
        parser.error(f"--tolerance {args.tolerance:g}; expected a share from 0 to 1")
    return run_cleanly(lambda: _run(args), args.debug)


def _run(args: argparse.Namespace) -> int:
    sides = ("train", "eval")
    columns = [{name: getattr(args, f"{side}_{name}") for name in ("split", "question", "answer")} for side in sides]
    (train, raw), (evaluation, _) = (
        read(getattr(args, side), skips=args.skip_bad_rows, **given) for side, given in zip(sides, columns, strict=True)
    )
    for path in filter(None, (args.drop, args.audit)):
        if str(path.resolve()) in {str(Path(side[0].place).resolve()) for side in (train, evaluation)}:
            raise ValueError(f"{path} is one of the files that are compared; expected another file")
    hits = find_hits(train, evaluation)
    audit = audit_of(train, evaluation, hits)
    args.audit.write_text(json.dumps(audit, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (share,), repeats = audit["shares"].values(), {hit.train.name for hit in hits}
    print(f"train      {len(train)} questions, {len(repeats)} repeat an evaluation question")
    print(f"eval       {len(evaluation)} questions, {share:.2%} are repeated; all pairs: {args.audit}")
    for hit in hits[:NUM_SHOWN]:
        print(f"  {hit.score:.2f}  {hit.train.text[:100]!a}\n        {hit.evaluation.text[:100]!a}")
    if share > args.tolerance:
        print(f"halted     more than --tolerance {args.tolerance:g}")
        return OVER
    if args.drop:
        left = [json.dumps(raw[row.name], ensure_ascii=False) for row in train if row.name not in repeats]
        if not left:
            raise ValueError("every training row is hit, so --drop is not written; expected rows that are left")
        args.drop.write_text("\n".join(left) + "\n", encoding="utf-8")
        print(f"written    {args.drop}: {len(left)} rows, {len(repeats)} dropped")
    return 0

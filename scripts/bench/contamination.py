#!/usr/bin/env python3
"""Measure the contamination gate: the share of seeded duplicates that it finds, and its false alarms.

    python -m scripts.bench.contamination                    1,000 duplicates of each kind
    python -m scripts.bench.contamination --num 200 --seed 3 --json FILE

Evaluation questions come from 12 templates, each with two wordings, and from gsm_symbolic of reasoning-gym. Training
rows are made from them:

    duplicates     verbatim      the same text
                   spacing       other case, spacing and final punctuation
                   reordered     the numbers of a commutative question in another order
                   paraphrase    the template's other wording; same numbers, names and things
                   embedded      between other sentences, in a longer text
    near misses    numbers       same wording, other numbers
                   exchanged     same numbers, exchanged in a question that is not commutative
                   operation     same story and numbers, other question, other answer
                   gsm numbers   two questions of one template of gsm_symbolic
                   others        questions of all templates with numbers, names and things of their own

A duplicate counts as found if its pair is found; a distinct row is a false alarm if it is in any pair. Neither counts:
    isomorphic     same wording, numbers and answer, other names and things: reported apart, there is no right verdict

Exit status 1: a kind is found in less than 95 %, or more than 1 % of a kind of distinct rows are false alarms.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when the libraries are loaded

from rllib_srl.envs.math.contamination import COSINE, METHODS, Encode, Row, find_contamination
from scripts.bench.common import add_output, write

LEAST_FOUND, MOST_FALSE = 0.95, 0.01
DUPLICATES = ("verbatim", "spacing", "reordered", "paraphrase", "embedded")
DISTINCT = ("numbers", "exchanged", "operation", "gsm numbers", "others")
ISOMORPHIC, GSM = "isomorphic", "gsm numbers"
_NAMES = ("Ada", "Ben", "Carla", "Dev", "Emil", "Fatima", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam", "Mona")
_THINGS = ("apples", "marbles", "stickers", "books", "pencils", "shells", "coins", "cookies", "stamps", "cards")
_BEFORE = (
    "This sheet was handed out in the second week of the course. Read every line before you begin.",
    "Welcome back to the evening class! Last time we spoke about strategies for word problems.",
    "Below is an exercise that a reader sent to the magazine. We print it with her permission.",
    "You are a careful assistant. Think step by step and do not guess.",
)
_AFTER = (
    "Write your answer on the line below and hand the sheet in by Friday.",
    "Explain your reasoning in complete sentences. A drawing may help.",
    "Solutions are discussed next week; please do not share them before.",
    "Reply with the final result only, without units.",
)


@dataclass(frozen=True)
class Template:
    """A family of questions. `asked` and `reworded` ask the same; `otherwise` asks something else of the same story."""

    asked: str
    reworded: str
    answer: Callable[..., int]
    otherwise: str
    other_answer: Callable[..., int]
    is_commutative: bool = False


TEMPLATES = (
    Template(
        "{name} has {a} {thing} and finds {b} more. How many {thing} does {name} have now?",
        "If {name} finds {b} {thing} after starting with {a}, what is the total number of {thing} that {name} owns?",
        lambda a, b, c: a + b,
        "{name} has {a} {thing} and finds {b} more. How many more {thing} did {name} find than there were before?",
        lambda a, b, c: b - a,
        is_commutative=True,
    ),
    Template(
        "{name} has {c} {thing} and gives {a} of them to a friend. How many {thing} are left?",
        "After giving a friend {a} of the {c} {thing} in the bag, how many {thing} does {name} still have?",
        lambda a, b, c: c - a,
        "{name} has {c} {thing} and gives {a} of them to each of two friends. How many {thing} are left?",
        lambda a, b, c: c - 2 * a,
    ),
    Template(
        "What is {a} + {b} + {c}?",
        "Compute the sum {a} + {b} + {c}.",
        lambda a, b, c: a + b + c,
        "What is {a} + {b} - {c}?",
        lambda a, b, c: a + b - c,
        is_commutative=True,
    ),
    Template(
        "Which is largest: {a}, {b} or {c}?",
        "Of the numbers {a}, {b} and {c}, name the largest one.",
        lambda a, b, c: max(a, b, c),
        "Which is smallest: {a}, {b} or {c}?",
        lambda a, b, c: min(a, b, c),
        is_commutative=True,
    ),
    Template(
        "A shop sells {thing} in boxes of {a}. {name} buys {b} boxes. How many {thing} is that?",
        "{name} buys {b} boxes of {thing} in a shop, and each box holds {a}. How many {thing} are there altogether?",
        lambda a, b, c: a * b,
        "A shop sells {thing} in boxes of {a}. {name} buys a box and {b} single ones. How many {thing} is that?",
        lambda a, b, c: a + b,
        is_commutative=True,
    ),
    Template(
        "{name} reads {a} pages on Monday, {b} on Tuesday and {c} on Wednesday. How many pages is that in all?",
        "Over three days {name} reads {a}, {b} and {c} pages. What is the total number of pages read?",
        lambda a, b, c: a + b + c,
        "{name} reads {a} pages on Monday, {b} on Tuesday and {c} on Wednesday. How many pages more is the last day "
        "than the first?",
        lambda a, b, c: c - a,
        is_commutative=True,
    ),
    Template(
        "A train leaves with {c} passengers. At the first stop {a} get off and {b} get on. How many are on board?",
        "There are {c} passengers on a departing train; {a} leave it and {b} board it at the first stop. How many "
        "passengers does it carry then?",
        lambda a, b, c: c - a + b,
        "A train leaves with {c} passengers. At the first stop {a} get off and {b} get on. How many of the first "
        "passengers are still on board?",
        lambda a, b, c: c - a,
    ),
    Template(
        "A rectangle is {a} cm long and {b} cm wide. What is its area in square centimetres?",
        "Find the area, in square centimetres, of a rectangle with length {a} cm and width {b} cm.",
        lambda a, b, c: a * b,
        "A rectangle is {a} cm long and {b} cm wide. What is its perimeter in centimetres?",
        lambda a, b, c: 2 * (a + b),
        is_commutative=True,
    ),
    Template(
        "{name} earns {a} dollars an hour and works {b} hours. After spending {c} dollars, how much is left?",
        "Working {b} hours at {a} dollars per hour, {name} then spends {c} dollars. How many dollars remain?",
        lambda a, b, c: a * b - c,
        "{name} earns {a} dollars an hour and works {b} hours. After a tip of {c} dollars, how much is there?",
        lambda a, b, c: a * b + c,
    ),
    Template(
        "Find the greatest common divisor of {a} and {b}, and add {c} to it.",
        "To the greatest common divisor of {a} and {b} add {c}. What do you get?",
        lambda a, b, c: math.gcd(a, b) + c,
        "Find the product of {a} and {b}, and add {c} to it.",
        lambda a, b, c: a * b + c,
    ),
    Template(
        "Solve for x: {a}x + {b} = {c}. Give the value of {a}x.",
        "Given the equation {a}x + {b} = {c}, what is the value of {a}x?",
        lambda a, b, c: c - b,
        "Solve for x: {a}x - {b} = {c}. Give the value of {a}x.",
        lambda a, b, c: c + b,
    ),
    Template(
        "{name} is {a} years old and has a brother who is {b} years older. How old will the brother be in {c} years?",
        "The brother of {name}, who is {a}, is older by {b} years. What will be the brother's age {c} years from now?",
        lambda a, b, c: a + b + c,
        "{name} is {a} years old and has a brother who is {b} years older. How old was the brother {c} years ago?",
        lambda a, b, c: a + b - c,
    ),
)


@dataclass(frozen=True)
class Asked:
    """The values of a question."""

    template: Template
    a: int
    b: int
    c: int
    name: str
    thing: str

    def row(self, wording: str = "", answer: Callable[..., int] | None = None) -> Row:
        """Return the question as the template asks it, or in another wording with another answer."""
        slots = {"a": self.a, "b": self.b, "c": self.c, "name": self.name, "thing": self.thing}
        right = (answer or self.template.answer)(self.a, self.b, self.c)
        return Row(0, (wording or self.template.asked).format(**slots), str(right))


class Generator:
    """Makes questions and their duplicates. Invariant: two questions of `fresh` differ in template or in numbers."""

    def __init__(self, seed: int) -> None:
        self._random, self._seen = random.Random(seed), set[tuple[int, tuple[str, ...]]]()

    def fresh(self, template: Template | None = None) -> Asked:
        """Return a question with numbers that its template has not had, a < b < c."""
        while True:
            chosen = template or self._random.choice(TEMPLATES)
            a, b, c = sorted(self._random.sample(range(2, 1000), 3))
            asked = Asked(chosen, a, b, c, self._random.choice(_NAMES), self._random.choice(_THINGS))
            key = (TEMPLATES.index(chosen), asked.row().numbers)
            if key not in self._seen:
                self._seen.add(key)
                return asked

    def embedded(self, text: str) -> str:
        """Return a text between other sentences."""
        return f"{self._random.choice(_BEFORE)}\n\n{text} {self._random.choice(_AFTER)}"

    def respaced(self, text: str) -> str:
        """Return a text with other case, spacing and final punctuation."""
        changed = self._random.choice((str.upper, str.lower, str.title))(text)
        space = self._random.choice(("  ", "\n", "\t ", "\u00a0"))
        return f" {space.join(changed.split())[: -1]} {self._random.choice(('?', '.', ' ?!', ''))}\n"

    def pair(self, kind: str) -> tuple[Row, Row]:
        """Return an evaluation row and a training row that relates to it as `kind` says."""
        if kind == "reordered":
            return self._reordered()
        if kind == "exchanged":
            return self._exchanged()
        if kind == ISOMORPHIC:
            return self._isomorphic()
        asked = self.fresh()
        template, row = asked.template, asked.row()
        if kind == "numbers":
            return row, replace(self.fresh(template), name=asked.name, thing=asked.thing).row()
        made: dict[str, Callable[[], Row]] = {
            "verbatim": lambda: row,
            "spacing": lambda: replace(row, text=self.respaced(row.text)),
            "paraphrase": lambda: asked.row(template.reworded),
            "embedded": lambda: replace(row, text=self.embedded(row.text)),
            "operation": lambda: asked.row(template.otherwise, template.other_answer),
            "others": lambda: self.fresh().row(),
        }
        return row, made[kind]()

    def _isomorphic(self) -> tuple[Row, Row]:
        asked = self.fresh(self._random.choice([each for each in TEMPLATES if "{thing}" in each.asked]))
        name = self._random.choice([each for each in _NAMES if each != asked.name])
        thing = self._random.choice([each for each in _THINGS if each != asked.thing])
        return asked.row(), replace(asked, name=name, thing=thing).row()

    def _reordered(self) -> tuple[Row, Row]:
        asked = self.fresh(self._random.choice([each for each in TEMPLATES if each.is_commutative]))
        a, b, c = asked.a, asked.b, asked.c
        other = replace(asked, a=b, b=c, c=a) if "{c}" in asked.template.asked else replace(asked, a=b, b=a)
        return asked.row(), other.row()

    def _exchanged(self) -> tuple[Row, Row]:
        """Return a question and the one with two of its numbers exchanged, whose answer differs."""
        while True:
            asked = self.fresh(self._random.choice([each for each in TEMPLATES if not each.is_commutative]))
            row, other = asked.row(), replace(asked, a=asked.c, c=asked.a).row()
            if row.answer != other.answer:
                return row, other


def gsm_pairs(num: int, seed: int) -> list[tuple[Row, Row]]:
    """Return pairs of questions of one template of gsm_symbolic, all with numbers of their own."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("gsm_symbolic", size=8 * num + 200, seed=seed)
    seen: set[tuple[int, tuple[str, ...]]] = set()
    waiting: dict[int, Row] = {}
    pairs: list[tuple[Row, Row]] = []
    for task, question in zip(dataset.task_indices, dataset, strict=True):
        row = Row(0, question["question"], question["answer"])
        if len(pairs) == num:
            break
        if (task, row.numbers) not in seen:
            seen.add((task, row.numbers))
            if task in waiting:
                pairs.append((waiting.pop(task), row))
            else:
                waiting[task] = row
    return pairs


@dataclass(frozen=True)
class Figures:
    """What the gate did. Invariant: shares by kind of row, in [0, 1]; `found` by the first method as well."""

    found: dict[str, float]
    false_alarms: dict[str, float]
    isomorphic: float  # share of pairs of the same wording and numbers with other names and things that are hits
    methods: dict[str, dict[str, float]]  # share of the duplicates of a kind that each method is the first to find
    num: int  # rows of each kind
    seconds: float

    def faults(self) -> list[str]:
        """Return one line for each kind that misses its bound."""
        low = [f"{kind}: {share:.3f} found" for kind, share in self.found.items() if share < LEAST_FOUND]
        return low + [f"{kind}: {share:.3f} false" for kind, share in self.false_alarms.items() if share > MOST_FALSE]


def measure(
    num: int, seed: int, methods: Sequence[str], encode: Encode | None, has_answers: bool = True, cosine: float = COSINE
) -> Figures:
    """Make `num` pairs of each kind, run the gate once on all of them, and count."""
    generator = Generator(seed)
    made = [kind for kind in (*DUPLICATES, *DISTINCT, ISOMORPHIC) if kind != GSM]
    pairs = {kind: [generator.pair(kind) for _ in range(num)] for kind in made} | {GSM: gsm_pairs(num, seed)}
    train: list[Row] = []
    evaluation: list[Row] = []
    kinds: list[str] = []
    for kind, of_kind in pairs.items():
        for row, other in of_kind:
            number = len(kinds) + 1  # the same for both rows of a pair
            for rows, one in ((evaluation, row), (train, other)):
                rows.append(replace(one, number=number, answer=one.answer if has_answers else ""))
            kinds.append(kind)
    began = time.process_time()
    hits = find_contamination(train, evaluation, methods, encode, cosine=cosine)
    seconds = time.process_time() - began
    first = {hit.train.number: hit.method for hit in hits if hit.train.number == hit.evaluation.number}
    in_any = {hit.train.number for hit in hits}
    rows_of = {kind: [n for n, each in enumerate(kinds, 1) if each == kind] for kind in pairs}
    methods_of = {kind: Counter(first[n] for n in rows_of[kind] if n in first) for kind in DUPLICATES}
    return Figures(
        found={kind: sum(n in first for n in rows_of[kind]) / len(rows_of[kind]) for kind in DUPLICATES},
        false_alarms={kind: sum(n in in_any for n in rows_of[kind]) / len(rows_of[kind]) for kind in DISTINCT},
        isomorphic=sum(n in first for n in rows_of[ISOMORPHIC]) / num,
        methods={kind: {name: count / num for name, count in of.items()} for kind, of in methods_of.items()},
        num=num,
        seconds=round(seconds, 2),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num", type=int, default=1000, metavar="N", help="rows of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--no-answers", action="store_true", help="as if the rows had no answers")
    parser.add_argument("--cosine", type=float, default=COSINE)
    add_output(parser)
    arguments = parser.parse_args(argv)
    if arguments.num < 1:
        parser.error(f"--num {arguments.num}; expected at least 1")
    encode = None
    if "embedding" in arguments.methods:
        from rllib_srl.replay.diversity.embedders import SentenceEncoder

        encode = SentenceEncoder().encode
    with_answers = not arguments.no_answers
    figures = measure(arguments.num, arguments.seed, arguments.methods, encode, with_answers, arguments.cosine)
    print(f"{arguments.num} rows of each kind, seed {arguments.seed}, {figures.seconds:.1f} s of processor time\n")
    for kind, share in figures.found.items():
        by = ", ".join(f"{name} {part:.3f}" for name, part in sorted(figures.methods[kind].items()))
        print(f"found        {kind:<12} {share:.4f}   {by}")
    for kind, share in figures.false_alarms.items():
        print(f"false alarm  {kind:<12} {share:.4f}")
    print(f"hit          {ISOMORPHIC:<12} {figures.isomorphic:.4f}   (no right verdict)")
    for line in figures.faults():
        print(f"missed: {line}")
    write(arguments, "contamination", asdict(figures))
    return int(bool(figures.faults()))


if __name__ == "__main__":
    sys.exit(main())

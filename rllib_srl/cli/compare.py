"""Compare two checkpoints, runs or models on the same held-out prompts.

    srl compare results/first results/second --evaluation_duration 500
    srl compare smollm2-135m results/first                       before and after
    srl compare results/first results/second --json compared.json

Both answer each prompt once, greedily. Prints the paired difference of their accuracy, B - A, with its 95 % interval
(Tango's score interval), by domain if there are several, and the prompts that only one of them got right. Where rewards
are other than 0 and 1 it also prints their mean and its difference, with a bootstrap interval. Each side keeps the
settings of its run. Those that define the prompts must be equal, or be given; seed and evaluation_duration are A's
unless given. A model without a run takes the other side's settings. Intervals of domains are not corrected for their
number: of 20 of them, one excludes 0 by chance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.cli.evaluate import TRUST, WITHOUT, report, started
from rllib_srl.cli.shared import runs
from rllib_srl.cli.shared.display import Progress, printable, showing_progress, table
from rllib_srl.cli.shared.flags import LIBRARIES, Program, add_trust
from rllib_srl.cli.shared.settings import SettingsError, all_settings, build_config, check, given_settings
from rllib_srl.people.gates import Change, paired_change
from rllib_srl.storage.checkpoints import verify_sealed
from rllib_srl.studies.seeds import bootstrap_interval

# Settings that both sides share: which prompts there are, and how long an episode may be.
EQUAL = ("env", "env_config", "envs", "stream", "max_turns", "max_turn_tokens", "max_episode_tokens")
FIRSTS = ("seed", "evaluation_duration")  # A's, unless they are given
SEED = 0  # of two models without a run
CONFIDENCE = 0.95
LONGEST, NUM_SHOWN = 60, 5  # characters of a text in the list of flipped prompts; prompts of a domain and direction


class Side(NamedTuple):
    """One of the two models with its settings. Invariant: those in `EQUAL` and `FIRSTS` are the other side's, too."""

    what: str
    checkpoint: Path | None  # None: `what` is a model
    values: Mapping[str, Any]


class Answer(NamedTuple):
    """A greedy episode of one held-out prompt."""

    env_id: str
    prompt_id: str
    domain: str
    is_right: bool
    reward: float
    turns: Sequence[Mapping[str, str]]  # of its transcript

    def texts_of(self, role: str) -> list[str]:
        """Return the turns of "environment" or "policy", each on one line."""
        return [printable(" ".join(turn["text"].split())) for turn in self.turns if turn["role"] == role] or [""]


Answers = Mapping[str, Answer]  # by the key of the prompt, without those that infrastructure ended


class Comparison:
    """Both sides' answers to the prompts that both have answered, at least one."""

    def __init__(self, first: Answers, second: Answers, num_asked: int) -> None:
        both = sorted(first.keys() & second.keys(), key=lambda key: (first[key].prompt_id, key))
        if not both:
            raise ValueError(f"none of {num_asked} held-out prompts was answered by both sides; see the warnings")
        self.pairs = [(first[key], second[key]) for key in both]
        self.num_failed = num_asked - len(both)
        self.domains = sorted({answer.domain for answer, _ in self.pairs})

    def change(self, domain: str | None = None) -> Change:
        """Return the paired change from A to B over all prompts, or over those of a domain."""
        pairs = [pair for pair in self.pairs if domain in (None, pair[0].domain)]
        first, second = ({str(at): pair[side].is_right for at, pair in enumerate(pairs)} for side in (0, 1))
        return paired_change(first, second, CONFIDENCE)

    @property
    def rewards(self) -> np.ndarray | None:
        """Return the rewards of A and B [2, prompts]; None if each is 0 or 1, so that accuracy says as much."""
        rewards = np.array([[answer.reward for answer in side] for side in zip(*self.pairs, strict=True)])
        return None if np.isin(rewards, (0.0, 1.0)).all() else rewards

    def flipped(self, domain: str, right: str) -> list[tuple[Answer, Answer]]:
        """Return the pairs of a domain that only "A" or "B" got right."""
        wanted = (right == "A", right == "B")
        return [(a, b) for a, b in self.pairs if a.domain == domain and (a.is_right, b.is_right) == wanted]


def add_flags(parser: argparse.ArgumentParser) -> None:
    for name in ("A", "B"):
        parser.add_argument(name.lower(), metavar=name, help="a checkpoint, a run's directory, or a model")
    text = 'write everything to FILE as JSON, all flipped prompts included; "-": print only the JSON'
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)
    add_trust(parser, TRUST)


def compare(arguments: argparse.Namespace) -> int:
    flags = given_settings(arguments, WITHOUT)
    sides = sides_of((arguments.a, arguments.b), flags, arguments.trust_checkpoint)
    is_quiet = arguments.json == Path("-")
    with showing_progress(1, sys.stderr if is_quiet else None) as progress:
        (first, num_asked), (second, _) = (played_by(side, arguments.verbose, progress) for side in sides)
    comparison, names = Comparison(first, second, num_asked), [str(side.checkpoint or side.what) for side in sides]
    lines = [f"A  {names[0]}", f"B  {names[1]}", *lines_of(comparison)]
    report({"a": names[0], "b": names[1], **as_json(comparison)}, lines, arguments.json)
    return 0


def sides_of(names: Sequence[str], flags: Mapping[str, Any], trust: bool) -> list[Side]:
    """Return both sides with their settings, validated; SettingsError: they are invalid or differ."""
    sources = [runs.source_of(name, trust, flags.get("seal_key_file")) for name in names]
    side_settings = []
    for (checkpoint, settings), (_, others) in zip(sources, reversed(sources), strict=True):
        if checkpoint:
            verify_sealed(checkpoint)
        else:  # it was not trained in the other one's adapters
            settings = {name: value for name, value in others.items() if not name.startswith("lora_")} | settings
        side_settings.append(settings)
    refuse_different(side_settings, flags)
    common = {"seed": SEED, **{name: side_settings[0][name] for name in FIRSTS if name in side_settings[0]}}
    sides = [
        Side(name, source.checkpoint, {**settings, **common, **flags})
        for name, source, settings in zip(names, sources, side_settings, strict=True)
    ]
    for side in sides:
        check(build_config(side.values))
    return sides


def refuse_different(sides: Sequence[Mapping[str, Any]], flags: Mapping[str, Any]) -> None:
    """Refuse settings of `EQUAL` that differ and are not given, all at once: both sides get the same prompts."""
    defaults = {name: all_settings()[name].initial for name in EQUAL}
    pairs = {name: [values.get(name, defaults[name]) for values in sides] for name in EQUAL if name not in flags}
    lines = [f"  {name} = {a!r} in A, {b!r} in B" for name, (a, b) in pairs.items() if a != b]
    if lines:
        raise SettingsError("A and B differ in settings that must be equal; give each as a flag:\n" + "\n".join(lines))


def played_by(side: Side, verbose: bool, progress: Progress) -> tuple[Answers, int]:
    """Play the held-out prompts greedily; return the answers, and the number of prompts."""
    from rllib_srl.algorithm.evaluation import GREEDY

    with started(side.values, side.checkpoint, verbose, progress) as algo:
        prompts = algo.source.heldout(algo.config.evaluation_duration)
        progress.begin(f"{side.what}: playing {len(prompts)} held-out prompts ...")
        batches = list(algo.play(prompts, "greedy", **{**GREEDY, "num_transcripts": len(prompts)}))
    turns = {(line["env_id"], line["prompt_id"]): line["turns"] for batch in batches for line in batch.transcripts}
    answers = {}
    for group in (group for batch in batches for group in batch.groups):
        prompt = group.prompt
        name = (prompt.env_id, prompt.prompt_id)
        grade = (bool(group.is_right_G()[0]), float(group.rewards_G[0]))
        answers[prompt.key] = Answer(*name, prompt.domain, *grade, turns.get(name, ()))
    return answers, len(prompts)


def lines_of(comparison: Comparison) -> Iterator[str]:
    """Yield the table, what the interval shows, and a few prompts per domain and direction."""
    total = comparison.change()
    domains = comparison.domains if len(comparison.domains) > 1 else ()
    by_domain = {f"  {name}": comparison.change(name) for name in domains}
    rows = [["", "A", "B", "B - A, 95 % interval", "only A right", "only B right", "prompts"]]
    for name, change in {"all": total, **by_domain}.items():
        difference = f"{change.change:+.3f}  [{change.low:+.3f}, {change.high:+.3f}]"
        counts = (str(num) for num in (change.num_lost, change.num_gained, change.num))
        rows.append([name, f"{change.before:.3f}", f"{change.after:.3f}", difference, *counts])
    yield table(rows)
    if comparison.num_failed:
        yield f"{comparison.num_failed} prompts failed on one side or both, not counted"
    is_shown = total.low > 0 or total.high < 0
    better = f"{'B' if total.change > 0 else 'A'} is better: the interval excludes 0"
    yield better if is_shown else "no difference is shown: the interval contains 0"
    if (rewards := comparison.rewards) is not None:
        first, second = rewards.mean(axis=1)
        low, high = bootstrap_interval(rewards[1] - rewards[0], CONFIDENCE)
        yield f"mean reward: A {first:.3f}, B {second:.3f}, B - A {second - first:+.3f}  [{low:+.3f}, {high:+.3f}]"
    for domain in comparison.domains:
        for right in "AB":
            if pairs := comparison.flipped(domain, right):
                yield f"{domain}: only {right} is right ({len(pairs)})"
            for first, second in pairs[:NUM_SHOWN]:
                yield f"  {first.texts_of('environment')[0][-LONGEST:]}"
                yield f"    A  {first.texts_of('policy')[-1][:LONGEST]}"
                yield f"    B  {second.texts_of('policy')[-1][:LONGEST]}"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return everything as JSON types, with the transcripts of all flipped prompts."""
    changes = {name: comparison.change(name) for name in comparison.domains}
    rewards = comparison.rewards
    return {
        "confidence": CONFIDENCE,
        "num_failed": comparison.num_failed,
        "total": {"change": comparison.change().change, **asdict(comparison.change())},
        "mean_rewards": None if rewards is None else dict(zip("ab", rewards.mean(axis=1).tolist(), strict=True)),
        "by_domain": {name: {"change": change.change, **asdict(change)} for name, change in changes.items()},
        "flipped": [
            {"domain": domain, "right": right, "prompt_id": a.prompt_id, "a": list(a.turns), "b": list(b.turns)}
            for domain in comparison.domains
            for right in "AB"
            for a, b in comparison.flipped(domain, right)
        ],
    }


USAGE = "%(prog)s A B [--json FILE] [--SETTING VALUE ...]"
main = Program(__doc__, add_flags, compare, usage=USAGE, without=WITHOUT, verbose=LIBRARIES)

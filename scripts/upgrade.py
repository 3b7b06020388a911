#!/usr/bin/env python3
"""Teach a trained model a new domain without losing the old ones.

    python scripts/upgrade.py smollm2-135m --on lookup --keep compare chain_sum --lr 3e-5 --iterations 40
    python scripts/upgrade.py results/first --on 'compare#large={lowest: 100, highest: 999}' --keep compare
    python scripts/upgrade.py DIR --on lookup --keep compare --max_drop 0.01 --confirm_prompts 5000 --out results/better
    python scripts/upgrade.py --resume results/better

The model is measured on held-out prompts of all domains. Then SRL trains on the new one, held by a KL to the starting
model, while its memory rehearses the old ones, which the starting model has played into it: none of the data it was
trained on is needed. Every few iterations gates look whether an old domain is being lost. After bad checks the weights
go back to the last good checkpoint and the ladder is climbed: rehearsals weigh more, the KL weighs more, more is
rehearsed, training halts. At the end other held-out prompts decide: DIR/model is the upgraded model if the new domain
is shown to be better and every old one is shown not to be worse, else the starting model, unchanged. DIR/ledger.jsonl
tells every step. Exit status: 0 upgraded, 3 unchanged, 1 an error, 130 Ctrl-C (no model is written). What was stopped
or killed goes on at its last good checkpoint with --resume DIR.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages
    from scripts.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

from rllib_srl.continual import gates
from rllib_srl.continual.gates import Change, Health, Verdict
from rllib_srl.continual.ladder import Action, Rehearsal, Step
from rllib_srl.statistics import wilson_interval
from rllib_srl.types import Prompt
from scripts.attempts import CHECKPOINTS, Answers, Attempt, starting_model
from scripts.cluster import StopRequest, run_cleanly, start_ray, stop_at_ctrl_c
from scripts.display import Progress, show_warnings, table, with_interval
from scripts.settings import add_settings, with_underscores
from scripts.upgrade_ledger import (
    LEDGER,
    MODEL,
    Ledger,
    Past,
    earlier,
    facts_of,
    first_checkpoint,
    read_before,
    write_before,
)
from scripts.upgrade_order import OURS, HeldOut, Order, add_order, held_out, read_order

START = "start"
BESIDE = ("resume", "verbose", "debug")  # what may be given beside --resume
UNFINISHED = "model.unfinished"  # what is killed while it is written never has the model's name
UNCHANGED = 3  # exit status


class Upgrade:
    """One upgrade. Invariant: `good` is the newest checkpoint whose checks all passed, the start's at first."""

    def __init__(
        self,
        order: Order,
        past: Past,
        prompts: Mapping[str, HeldOut],
        ledger: Ledger,
        progress: Progress,
        verbose: bool,
    ) -> None:
        """Carry out what `past` has left of `order`, measured on `prompts` of each domain."""
        self._order, self._past, self._prompts, self._ledger = order, past, prompts, ledger
        self._progress, self._verbose = progress, verbose
        self._start = starting_model(order, order.out / START, progress, verbose)
        self._good, self._first = past.good, first_checkpoint(order)
        # By domain, checks and last gates together.
        self._before: dict[str, Answers] = {} if self._good is None else read_before(order.out)

    def run(self, request: StopRequest) -> int:
        """Climb the ladder as far as it must be, and deliver; return the exit status."""
        rehearsal = self._past.rehearsal
        for number in () if self._past.is_halted else count(self._past.num_attempts + 1):
            self._ledger.write("attempt", number=number, goes_on_from=self._good, settings=rehearsal.settings())
            with self._attempt(f"attempt_{number}", rehearsal) as attempt:
                if self._good is None:
                    self._begin(attempt)
                else:
                    attempt.back_to(self._good)
                step = self._train(attempt, request)
            if step.action is not Action.CLIMB:
                break
            rehearsal = rehearsal.after(step.rung, step.fallen)
        return self._deliver(rehearsal)

    def _attempt(self, name: str, rehearsal: Rehearsal) -> Attempt:
        directory = self._order.out / name
        config = self._order.config(self._start, rehearsal, directory)
        config.validate()
        self._progress.begin(f"{name}: starting engine and learner ...")
        return Attempt(config, directory, self._order.out / CHECKPOINTS, self._progress, self._verbose)

    def _begin(self, attempt: Attempt) -> None:
        """Measure the starting model, let it fill the memory, and keep that as the first good checkpoint."""
        for domain, prompts in self._prompts.items():
            self._before[domain] = found = attempt.answers([*prompts.check, *prompts.confirm])
            if not found:
                raise ValueError(f"{domain}: not one of its held-out prompts could be played; the warnings say why")
            right = sum(found.values())
            share, (low, high) = right / len(found), wilson_interval(right, len(found))
            self._ledger.write("before", domain=domain, num=len(found), accuracy=share, low=low, high=high)
            self._progress.note(f"before: {domain} {with_interval(share, low, high)} on {len(found)} prompts")
        write_before(self._order.out, self._before)
        names = [world.domain for world in self._order.old]
        num = attempt.fill_memory(names, self._order.limits["seed_prompts"])
        self._good = attempt.save()
        self._ledger.write("memory", num_groups=num, checkpoint=self._good)

    def _train(self, attempt: Attempt, request: StopRequest) -> Step:
        """Train, with a check every few iterations, until all are done or the ladder says otherwise."""
        limits, step = self._order.limits, Step(Action.ACCEPT)
        while attempt.algo.iteration < self._order.iterations:
            last = min(attempt.algo.iteration + limits["check_every"], self._order.iterations)
            kls, num_bad, broken = attempt.train(last, request)
            if request.is_made:
                self._ledger.write("stopped", iteration=attempt.algo.iteration, last_good=self._good)
                raise KeyboardInterrupt
            verdicts, changes = self._check(attempt, kls, num_bad, broken)
            step = self._past.ladder.after(verdicts)
            if step.action is Action.ACCEPT:
                self._good = attempt.save()
            facts = {"iteration": attempt.algo.iteration, "last_good": self._good, "step": asdict(step)}
            self._ledger.write("check", **facts, verdicts=verdicts_of(verdicts), changes=changes_of(changes))
            self._progress.note(f"check at iteration {attempt.algo.iteration}: {step.action} {step.rung}".rstrip())
            for line in lines_of(verdicts):
                self._progress.note(f"  {line}")
            if step.action in (Action.CLIMB, Action.HALT):
                break
        return step

    def _check(
        self, attempt: Attempt, kls: Sequence[float], num_bad: int, broken: str
    ) -> tuple[list[Verdict], dict[str, Change]]:
        """Judge a stretch; the new domain, too, must not fall below where it began."""
        limits = self._order.limits
        kl = kls[-1] if kls else float("nan")
        prompts = {domain: held.check for domain, held in self._prompts.items()}
        if broken:  # there is no engine to ask
            return [gates.sanity(Health(num_bad, kl, 0, 1, broken), limits["max_lost"])], {}
        after = {domain: attempt.answers(asked) for domain, asked in prompts.items()}
        health = Health(num_bad, kl, *most_lost(prompts, after))
        verdicts = [gates.sanity(health, limits["max_lost"]), gates.drift(health, limits["max_kl"])]
        if not verdicts[0].is_passed:
            return verdicts, {}
        changes = self._changes(after)
        verdicts += [gates.retention(name, change, limits["max_drop"]) for name, change in changes.items()]
        return verdicts, changes

    def _changes(self, after: Mapping[str, Answers]) -> dict[str, Change]:
        confidence = self._order.limits["confidence"]
        return {name: gates.paired_change(self._before[name], found, confidence) for name, found in after.items()}

    # --- the end ----------------------------------------------------------------------------------

    def _deliver(self, rehearsal: Rehearsal) -> int:
        """Let the last gates judge the last good checkpoint, as it lies on the disk, and write the model."""
        if self._good == self._first or self._good is None:
            return self._unchanged(["no stretch of training passed its check"])
        with self._attempt("last_gates", rehearsal) as attempt:
            attempt.back_to(self._good)
            verdicts, changes = self._confirm(attempt)
            facts = {"verdicts": verdicts_of(verdicts), "changes": changes_of(changes)}
            self._ledger.write("confirm", checkpoint=self._good, **facts)
            self._progress.end()
            print(table([[v.outcome, v.gate, v.domain, v.reason] for v in verdicts]))
            shut = lines_of(verdicts)
            if not shut:
                model = attempt.algo.export_to_huggingface(self._unfinished()).rename(self._order.out / MODEL)
                self._ledger.write("result", is_upgraded=True, model=model, checkpoint=self._good, reasons=[])
                print(f"UPGRADED   {model}: better on {self._order.new.domain}, and no old domain is worse")
                return 0
        return self._unchanged(shut)

    def _confirm(self, attempt: Attempt) -> tuple[list[Verdict], dict[str, Change]]:
        limits = self._order.limits
        asked = {domain: held.confirm for domain, held in self._prompts.items()}
        after = {domain: attempt.answers(prompts) for domain, prompts in asked.items()}
        verdicts = [gates.sanity(Health(0, float("nan"), *most_lost(asked, after)), limits["max_lost"])]
        if not verdicts[0].is_passed:
            return verdicts, {}
        changes, new = self._changes(after), self._order.new.domain
        verdicts += [gates.kept(w.domain, changes[w.domain], limits["max_drop"]) for w in self._order.old]
        return [*verdicts, gates.gained(new, changes[new], limits["min_gain"])], changes

    def _unchanged(self, reasons: Sequence[str]) -> int:
        model = shutil.copytree(self._start, self._unfinished()).rename(self._order.out / MODEL)
        self._ledger.write("result", is_upgraded=False, model=model, checkpoint=self._good, reasons=reasons)
        self._progress.end()
        print(f"UNCHANGED  {model} is the starting model, byte for byte:\n  " + "\n  ".join(reasons))
        if self._good != self._first:
            print(f"  what was trained lies in {self._good}")
        return UNCHANGED


    def _unfinished(self) -> Path:
        """Return where the model is written before it gets its name; what a kill left there goes."""
        place = self._order.out / UNFINISHED
        shutil.rmtree(place, ignore_errors=True)
        return place


def most_lost(asked: Mapping[str, Sequence[Prompt]], answered: Mapping[str, Answers]) -> tuple[int, int]:
    """Return how many held-out episodes were lost, of how many, in the domain that lost the largest share."""
    counts = [(len(prompts) - len(answered[domain]), len(prompts)) for domain, prompts in asked.items()]
    return max(counts, key=lambda pair: pair[0] / pair[1])


def verdicts_of(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return verdicts as JSON has them."""
    return [asdict(verdict) for verdict in verdicts]


def lines_of(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line for each gate that stays shut."""
    return [f"{v.gate} {v.domain}".rstrip() + f": {v.reason}" for v in verdicts if not v.is_passed]


def changes_of(changes: Mapping[str, Change]) -> dict[str, dict[str, Any]]:
    """Return changes by domain as JSON has them."""
    return {domain: {"change": change.change, **asdict(change)} for domain, change in changes.items()}


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        usage="%(prog)s MODEL|CHECKPOINT|DIR --on WORLD --keep WORLD [WORLD ...] [--out DIR] [--SETTING VALUE ...]\n"
        "       %(prog)s --resume DIR",
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_order(parser)
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with an upgrade that was stopped or killed")
    parser.add_argument("--verbose", action="store_true", help="show what Ray, RLlib, vLLM and transformers say")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add_settings(parser, without=tuple(OURS))
    arguments = parser.parse_args(with_underscores(argv))
    changed = [name for name, value in vars(arguments).items() if value != parser.get_default(name)]
    given = [name for name in changed if name not in BESIDE]
    if arguments.resume is None and arguments.what is None:
        parser.error("expected a model, a checkpoint or a run's directory, or --resume DIR")
    if arguments.resume is not None and given:
        parser.error(f"--resume DIR goes on as it was begun; expected nothing beside it, not {', '.join(given)}")
    return arguments


def upgrade(arguments: argparse.Namespace) -> int:
    """Check everything, then start."""
    order, past = _asked(arguments)
    config = order.config(order.model, order.rehearsal, order.out)
    config.validate()
    prompts = held_out(order, config)
    progress = Progress(order.iterations)
    show_warnings(progress)
    progress.begin("starting Ray ...")
    start_ray(arguments.verbose)
    order.out.mkdir(parents=True, exist_ok=arguments.resume is not None)
    ledger = Ledger(order.out / LEDGER)
    try:
        ledger.write("start" if arguments.resume is None else "resumed", **facts_of(order))
        with stop_at_ctrl_c(progress.note) as request:
            return Upgrade(order, past, prompts, ledger, progress, arguments.verbose).run(request)
    except BaseException as error:
        ledger.write("ended", why=f"{type(error).__name__}: {error}")
        error.add_note(f"go on with: python scripts/upgrade.py --resume {order.out}")
        raise
    finally:
        progress.end()
        ledger.close()


def _asked(arguments: argparse.Namespace) -> tuple[Order, Past]:
    """Return a new order, or that of the directory to go on in."""
    if arguments.resume is None:
        order = read_order(arguments)
        return order, Past.none(order)
    return earlier(arguments.resume)


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: upgrade(arguments), arguments.debug)


if __name__ == "__main__":
    sys.exit(main())

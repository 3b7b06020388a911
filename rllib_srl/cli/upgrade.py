"""Teach a trained model a new domain without losing the old ones.

    srl upgrade smollm2-135m --on lookup --keep compare chain_sum --lr 3e-5 --iterations 40
    srl upgrade results/first --on 'compare#large={lowest: 100, highest: 999}' --keep compare
    srl upgrade DIR --on lookup --keep compare --max_drop 0.01 --confirm_prompts 5000 --out results/better
    srl upgrade --resume results/better

First, the model is evaluated on held-out prompts of all domains. Then SRL trains on the new domain, with a KL penalty
to the starting model. Its memory rehearses the old domains; the starting model fills the memory, so none of its
training data is needed. Every few iterations, gates check whether an old domain is being forgotten. After bad checks
the weights return to the last good checkpoint and the ladder is climbed: a higher weight of rehearsals, a higher weight
of the KL, more rehearsals, end of training. At the end other held-out prompts decide: DIR/model is the upgraded model
if the confidence intervals show a gain on the new domain and exclude a loss of max_drop on every old one, else the
unchanged starting model. With --health, general tasks and the way the model writes are gates, too (srl health).
Rows of training data are compared with all prompts that the gates measure, of old domains, too: DIR/contamination.json;
--contamination drop leaves repeats out of training, halt does not start (docs/own-data.md).
DIR/ledger.jsonl logs every step. Exit status: 0 upgraded, 3 unchanged, 1 an error, 130
Ctrl-C and 143 SIGTERM (no model is written). An upgrade that was stopped or killed continues from its last good
checkpoint with --resume DIR.
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

from rllib_srl.cli.continual.health import compared
from rllib_srl.cli.continual.health import lines_of as health_lines
from rllib_srl.cli.shared.cluster import command, run_cleanly, start_ray
from rllib_srl.cli.shared.command_line import add_debug, add_verbose, help_of
from rllib_srl.cli.shared.display import Progress, showing_progress, table, with_interval
from rllib_srl.cli.shared.paths import local_directory
from rllib_srl.cli.shared.settings import (
    Parser,
    add_settings,
    add_trust,
    check,
    grace_of,
    refuse_stub,
    with_underscores,
)
from rllib_srl.cli.shared.stopping import WATCH, StopRequest, stop_between_iterations
from rllib_srl.cli.upgrading.attempts import CHECKPOINTS, Answers, Attempt, starting_model
from rllib_srl.cli.upgrading.ledger import (
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
from rllib_srl.cli.upgrading.order import OURS, HeldOut, Order, add_order, guarded, held_out, read_order
from rllib_srl.common.statistics import wilson_interval
from rllib_srl.studies import gates
from rllib_srl.studies.gates import Change, Health, Verdict
from rllib_srl.studies.health.battery import Battery
from rllib_srl.studies.ladder import Action, Rehearsal, Step
from rllib_srl.types import Prompt

START = "start"
BESIDE = ("resume", "trust_checkpoint", "verbose", "debug")  # flags allowed with --resume
UNFINISHED = "model.unfinished"  # written under this name, then renamed, so that a kill leaves no partial model
UNCHANGED = 3  # exit status


class Upgrade:
    """One upgrade. Invariant: `_good` is the newest checkpoint that passed all checks, initially the starting one."""

    def __init__(
        self,
        order: Order,
        past: Past,
        prompts: Mapping[str, HeldOut],
        ledger: Ledger,
        progress: Progress,
        verbose: bool,
        trust: bool = False,
    ) -> None:
        """Prepare the upgrade of `order`, continued after `past` and evaluated on `prompts` of each domain.

        With `trust`, checkpoints in the order's directory are accepted with any seal key.
        """
        self._order, self._past, self._prompts, self._ledger = order, past, prompts, ledger
        self._progress, self._verbose, self._trust = progress, verbose, trust
        self._start = starting_model(order, order.out / START, progress)
        self._good, self._first = past.good, first_checkpoint(order)
        # Answers of the starting model by domain, on the prompts of the checks and of the last gates.
        self._before: dict[str, Answers] = {} if self._good is None else read_before(order.out)

    def run(self, request: StopRequest) -> int:
        """Run attempts, climbing the ladder when checks fail; write the model and return the exit status."""
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
        check(config)
        self._progress.begin(f"{name}: starting engine and learner ...")
        checkpoints = self._order.out / CHECKPOINTS
        return Attempt(config, directory, checkpoints, self._progress, self._verbose, self._trust)

    def _begin(self, attempt: Attempt) -> None:
        """Evaluate the starting model, fill the memory with it, and save the first good checkpoint."""
        for domain, prompts in self._prompts.items():
            self._before[domain] = found = attempt.answers([*prompts.check, *prompts.confirm])
            if not found:
                raise ValueError(f"{domain}: none of its held-out prompts could be played; see the warnings")
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
        """Train, with a check every few iterations, until the last iteration or the ladder's next step."""
        limits, step = self._order.limits, Step(Action.ACCEPT)
        while attempt.algo.iteration < self._order.iterations:
            last = min(attempt.algo.iteration + limits["check_every"], self._order.iterations)
            kls, num_bad, broken = attempt.train(last, request)
            if request.is_made:
                self._ledger.write("stopped", iteration=attempt.algo.iteration, last_good=self._good)
                raise request.interruption()
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
        """Check the iterations since the last check; the new domain, too, must not fall below its start."""
        limits = self._order.limits
        kl = kls[-1] if kls else float("nan")
        prompts = {domain: held.check for domain, held in self._prompts.items()}
        if broken:  # no engine can evaluate
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
        """Restore the last good checkpoint, apply the last gates to it, write the model; return the exit status."""
        if self._good == self._first or self._good is None:
            return self._unchanged(["no checkpoint passed its check"])
        with self._attempt("last_gates", rehearsal) as attempt:
            attempt.back_to(self._good)
            verdicts, changes = self._confirm(attempt)
            facts = {"verdicts": verdicts_of(verdicts), "changes": changes_of(changes)}
            self._ledger.write("confirm", checkpoint=self._good, **facts)
            self._progress.end()
            print(table([[v.outcome, v.gate, v.domain, v.reason] for v in verdicts]))
            shut = lines_of(verdicts)
            place = attempt.algo.export_to_huggingface(self._unfinished()) if not shut else None
        if place is not None and self._order.health:
            shut = self._unhealthy(place)
        if place is None or shut:
            return self._unchanged(shut)
        model = place.rename(self._order.out / MODEL)
        self._ledger.write("result", is_upgraded=True, model=model, checkpoint=self._good, reasons=[])
        print(f"UPGRADED   {model}: better on {self._order.new.domain}, not worse on the old domains")
        return 0

    def _unhealthy(self, model: Path) -> list[str]:
        """Compare the health of the upgraded model with that of the starting model; return the gates that fail."""
        values = {"model": str(model), **self._order.values, "stream": self._order.stream()}
        sides = ((self._start, model), ("starting model", "upgraded model"))
        found = compared(Battery(self._order.health), values, *sides, self._progress.begin)
        verdicts = found.verdicts()
        self._ledger.write("health", verdicts=verdicts_of(verdicts), **found.as_json())
        self._progress.end()
        print(*health_lines(found, verdicts), sep="\n")
        return lines_of(verdicts)

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
            print(f"  the last good checkpoint is {self._good}")
        return UNCHANGED

    def _unfinished(self) -> Path:
        """Return the path under which the model is written before it is renamed; delete leftovers there."""
        place = self._order.out / UNFINISHED
        shutil.rmtree(place, ignore_errors=True)
        return place


def most_lost(asked: Mapping[str, Sequence[Prompt]], answered: Mapping[str, Answers]) -> tuple[int, int]:
    """Return (lost, played) held-out episodes of the domain with the largest share of lost episodes."""
    counts = [(len(prompts) - len(answered[domain]), len(prompts)) for domain, prompts in asked.items()]
    return max(counts, key=lambda pair: pair[0] / pair[1])


def verdicts_of(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return verdicts as JSON types."""
    return [asdict(verdict) for verdict in verdicts]


def lines_of(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line for each gate that did not pass."""
    return [f"{v.gate} {v.domain}".rstrip() + f": {v.reason}" for v in verdicts if not v.is_passed]


def changes_of(changes: Mapping[str, Change]) -> dict[str, dict[str, Any]]:
    """Return changes by domain as JSON types."""
    return {domain: {"change": change.change, **asdict(change)} for domain, change in changes.items()}


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(
        usage="%(prog)s MODEL|CHECKPOINT|DIR --on ENV --keep ENV [ENV ...] [--out DIR] [--SETTING VALUE ...]\n"
        "       %(prog)s --resume DIR",
        **help_of(__doc__),
    )
    add_order(parser)
    add_trust(parser)
    text = "resume an upgrade that was stopped or killed"
    parser.add_argument("--resume", type=local_directory, metavar="DIR", help=text)
    add_verbose(parser)
    add_debug(parser)
    add_settings(parser, without=tuple(OURS))
    arguments: argparse.Namespace = parser.parse_args(with_underscores(argv))
    changed = [name for name, value in vars(arguments).items() if value != parser.get_default(name)]
    given = [name for name in changed if name not in BESIDE]
    if arguments.resume is None and arguments.what is None:
        parser.error("expected a model, a checkpoint or a run's directory, or --resume DIR")
    if arguments.resume is not None and given:
        parser.error(f"--resume DIR keeps all settings; expected no others, not {', '.join(given)}")
    return arguments


def upgrade(arguments: argparse.Namespace) -> int:
    """Validate everything, then run the upgrade; return the exit status."""
    order, past = _asked(arguments)
    WATCH.grace_s = grace_of(order.values)
    config = order.config(order.model, order.rehearsal, order.out)
    refuse_stub(config, "srl upgrade trains a model")
    if order.health:
        Battery(order.health).check()  # again: packages may have gone before a resume
    check(config)
    prompts = held_out(order, config)
    comparison = guarded(order, config)
    with showing_progress(order.iterations) as progress:
        progress.begin("starting Ray ...")
        start_ray(arguments.verbose)
        order.out.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(order.out / LEDGER)
        how = f"resume with: {command('upgrade', '--resume', order.out)}"
        WATCH.last_words = lambda: how
        try:
            ledger.write("start" if arguments.resume is None else "resumed", **facts_of(order))
            if comparison is not None:
                num_dropped = sum(map(len, comparison.left_out.values()))
                ledger.write("contamination", shares=comparison.shares, num_dropped=num_dropped)
            with stop_between_iterations(progress.note) as request:
                trust = arguments.trust_checkpoint
                return Upgrade(order, past, prompts, ledger, progress, arguments.verbose, trust).run(request)
        except BaseException as error:
            ledger.write("ended", why=f"{type(error).__name__}: {error}")
            error.add_note(how)
            raise
        finally:
            ledger.close()


def _asked(arguments: argparse.Namespace) -> tuple[Order, Past]:
    """Return a new order, or the order and the past of the directory given with --resume."""
    if arguments.resume is None:
        order = read_order(arguments)
        return order, Past.none(order)
    return earlier(arguments.resume)


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: upgrade(arguments), arguments.debug)


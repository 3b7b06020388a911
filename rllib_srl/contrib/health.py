"""Compare the health of two models on held-out prompts and free texts: before and after training.

    srl contrib health results/first                       the start of a run and its newest checkpoint
    srl contrib health smollm2-135m results/first          a model and a checkpoint
    srl contrib health tiny results/first --domains compare 'lookup={num_pairs: 3}' --json health.json

    domains        held-out prompts of environments, greedy        right or wrong, and readable or not ("format")
    degeneration   forty openings, sampled at temperature 1        repetition, length, entropy

Both models get the same prompts, so changes are paired: Tango's score interval for shares, a bootstrap over the texts
for the rest, 95 %, not corrected for their number. A gate fails only if the harm is significant: a share may drop by
--max_drop, repetition may rise by .1, length and entropy may halve or double. A pass is not a proof of health.

    repetition   1 - distinct 4-grams / 4-grams of a text's tokens (seq-rep-4)
    length       tokens, the end-of-sequence token included
    entropy      - mean log-prob of the sampled tokens, nats per token: an unbiased estimate of the entropy of the
                 distributions they were sampled from

Exit status: 0 all gates pass; 1 an error; 3 a gate fails.

Source of repetition: Welleck et al. 2020, arXiv 1908.04319, section 6.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.algorithm.checkpointing import export_checkpoint
from rllib_srl.cli.evaluate import checkpoint_named
from rllib_srl.cli.shared import runs
from rllib_srl.cli.shared.cluster import hushed_stderr, run_cleanly
from rllib_srl.cli.shared.command_line import help_of
from rllib_srl.cli.shared.display import table
from rllib_srl.cli.shared.flags import Parser, add_flags_of_played_runs, with_underscores
from rllib_srl.cli.shared.settings import SettingsError, build_config, check, given_settings, model_config_of
from rllib_srl.cli.tuning.tasks import world_named
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.engine.models import check_model_name, local_model
from rllib_srl.engine.protocol import Sampling
from rllib_srl.people.gates import Change, Outcome, Verdict, paired_change
from rllib_srl.rollout.env_runner import LLMEnvRunner
from rllib_srl.studies.recording import write_whole
from rllib_srl.studies.seeds import bootstrap_interval
from rllib_srl.types import StopReason

UNHEALTHY = 3  # exit status
FORMAT = "format"  # the share of answers that the environments could read, beside the domains
CONFIDENCE = 0.95
MAX_TOKENS, SEED = 64, 2105  # of a text; of sampling, the same for both models
OWN_DOMAINS = ("compare", "lookup", "copy_words")  # without a run and --domains
PLACES = ("env", "env_config", "worlds", "mixture", "stream")  # settings that name environments
OF_PLAYING = (  # those of training do not act here
    *PLACES, "model", "seed", "compute_dtype", "engine", "prompt_format", "max_turns", "max_turn_tokens",
    "max_episode_tokens", "env_timeout_s", "num_env_threads", "max_concurrent_episodes", "sample_timeout_s",
    "num_gpus_per_env_runner",
)  # fmt: skip
# Measure -> (lowest, highest) healthy value after training, given the one before: (factor, added) of each bound.
LIMITS = {
    "repetition": ((0.0, 0.0), (1.0, 0.1)),
    "length": ((0.5, 0.0), (2.0, 0.0)),
    "entropy": ((0.5, 0.0), (2.0, 0.0)),
}
OPENINGS = """
Once upon a time there was
The weather today is
My favourite food is
In the year 2050, people will
The best way to learn a language is
Yesterday I went to the market and
Dear friend, I am writing to you because
The city was quiet when
To make a cup of tea, first
The three most important things in life are
A good teacher should
The old man looked at the sea and
When I was a child, I
The recipe begins with
Scientists have discovered that
The train arrived at the station, and
If I could travel anywhere, I would
The history of the bridge goes back to
She opened the letter and read:
Here is a list of animals:
The moon is
Trees are important because
The team won the game after
On the first day of school,
The computer was invented
A healthy breakfast contains
The garden behind the house
My plan for the weekend is
The story ends with
Music makes people
The main difference between cats and dogs is
In winter, the mountains
The king said to his daughter:
Reading books is useful because
The ship sailed for many days until
At night the streets
The most surprising thing about birds is
To solve a hard problem, you should
Our neighbours have
Finally, it is important to remember that
""".strip().splitlines()


@dataclass(frozen=True)
class Shift:
    """A measure of the same texts before and after. Invariant: low <= after - before <= high, or both NaN."""

    num: int  # texts
    before: float  # means
    after: float
    low: float  # confidence interval of the mean difference
    high: float

    @property
    def change(self) -> float:
        """Return the mean difference, after minus before."""
        return self.after - self.before


@dataclass(frozen=True)
class Measured:
    """Results of one model, by what was asked."""

    is_right: dict[str, dict[str, bool]] = field(default_factory=dict)  # domain or "format" -> prompt -> yes or no
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # measure -> opening -> value
    num_lost: int = 0  # held-out episodes that infrastructure ended


@dataclass(frozen=True)
class Side:
    """One of the two models. Invariant: validated; nothing was started."""

    what: str
    checkpoint: Path | None  # None: `what` is a model
    settings: Mapping[str, Any]  # of the checkpoint's run, {} without one


# --- measures and gates ---------------------------------------------------------------------------


def measures_of(token_ids: Sequence[int], logp: np.ndarray) -> dict[str, float]:
    """Return the measures of a sampled text of at least one token; `logp` in nats, of the sampling distribution."""
    grams = [tuple(token_ids[at : at + 4]) for at in range(len(token_ids) - 3)]
    repetition = 1.0 - len(set(grams)) / len(grams) if grams else 0.0
    return {"repetition": repetition, "length": float(len(token_ids)), "entropy": -float(np.mean(logp))}


def paired_shift(before: Mapping[str, float], after: Mapping[str, float]) -> Shift:
    """Compare a measure of the texts written both before and after, by a bootstrap over the texts."""
    both = sorted(before.keys() & after.keys())
    before_E, after_E = (np.array([side[key] for key in both], np.float64) for side in (before, after))
    interval = bootstrap_interval(after_E - before_E, level=CONFIDENCE)
    return Shift(len(both), float(before_E.mean()), float(after_E.mean()), interval.low, interval.high)


def gate_of_share(name: str, change: Change, max_drop: float) -> Verdict:
    """Test for a drop of a share; an inconclusive result passes.

    harmful: the whole interval lies below -max_drop; bad: the estimate does, and the interval lies below 0.
    """
    is_bad = change.change < -max_drop and change.high < 0
    outcome = Outcome.HARMFUL if change.high < -max_drop else Outcome.BAD if is_bad else Outcome.PASSED
    return Verdict("retention", outcome, f"{change}; limit -{100 * max_drop:g}", name)


def gate_of_measure(name: str, shift: Shift) -> Verdict:
    """Test for a measure that left its healthy range; an inconclusive result passes.

    harmful: the whole interval after training lies outside; bad: the estimate does, and the change excludes 0.
    """
    low, high = (factor * shift.before + added for factor, added in LIMITS[name])
    is_harmful = shift.before + shift.high < low or shift.before + shift.low > high
    is_bad = not low <= shift.after <= high and not shift.low <= 0 <= shift.high
    outcome = Outcome.HARMFUL if is_harmful else Outcome.BAD if is_bad else Outcome.PASSED
    return Verdict("degeneration", outcome, f"{shift.before:.3g} -> {shift.after:.3g}; healthy {low:.3g} to {high:.3g}",
                   name)  # fmt: skip


def judged(before: Measured, after: Measured, max_drop: float) -> tuple[dict[str, Change | Shift], list[Verdict]]:
    """Return the change of each measure from one model to the other, and the verdict of each.

    Raises:
        ValueError: the two have no prompt in common.
    """
    pairs = {name: (one, after.is_right.get(name, {})) for name, one in before.is_right.items()}
    shares = {name: paired_change(*pair, CONFIDENCE) for name, pair in pairs.items()}
    shifts = {name: paired_shift(before.numbers[name], after.numbers[name]) for name in before.numbers}
    verdicts = [gate_of_share(name, change, max_drop) for name, change in shares.items()]
    return {**shares, **shifts}, verdicts + [gate_of_measure(name, shift) for name, shift in shifts.items()]


# --- measuring ------------------------------------------------------------------------------------


def measure(config: Any, num_prompts: int) -> Measured:
    """Return the results of a model, played in this process without Ray.

    Args:
        config: validated settings of playing: model, environments, engine, prompt format.
        num_prompts: held-out prompts of each environment.

    Raises:
        ValueError: an environment has no held-out prompts, or none could be played.
    """
    worlds = (config.world_creators(), config.world_configs(), config.mixture_weights())
    source = PromptSource(*worlds, config.seed or 0, config.task_stream())
    prompts = source.heldout(num_prompts * len(source.world_ids))
    if missing := set(source.world_ids) - {prompt.env_id for prompt in prompts}:
        raise ValueError(f"environment {', '.join(sorted(missing))} has no held-out prompts; expected some")
    runner = LLMEnvRunner(config=config, worker_index=0)
    try:
        runner.check_started()
        asked = {str(number): prompt for number, prompt in enumerate(prompts)}
        batch = runner.play_groups(asked, 1, SEED, as_groups=False, temperature=0.0)
        if not batch.groups:
            raise ValueError("none of the held-out prompts could be played: " + "; ".join(batch.errors[:1]))
        numbers = _written(runner, config)
    finally:
        runner.stop()
    is_right: dict[str, dict[str, bool]] = defaultdict(dict)
    for group in batch.groups:
        key = group.prompt.key
        is_right[group.prompt.domain][key] = bool(group.is_right_G()[0])
        is_readable = group.rewards_G[0] > 0 or group.stop_reasons[0] is StopReason.TERMINATED
        is_right[FORMAT][key] = bool(is_readable)
    return Measured(dict(is_right), numbers, len(prompts) - len(batch.groups))


def _written(runner: LLMEnvRunner, config: Any) -> dict[str, dict[str, float]]:
    """Continue each opening once, sampled; return each measure by opening."""
    runner.engine.reseed(SEED)
    ids = [runner.transcript.first(text) for text in OPENINGS]
    room = (config.max_episode_tokens or runner.engine.context_length) - max(map(len, ids))
    if room < 1:
        raise ValueError(f"max_episode_tokens = {config.max_episode_tokens}; expected room for the openings of texts")
    found: dict[str, dict[str, float]] = defaultdict(dict)
    turns = runner.engine.generate(ids, Sampling(min(MAX_TOKENS, room), end_ids=runner.transcript.end_ids))
    for text, turn in zip(OPENINGS, turns, strict=True):
        for name, value in measures_of(turn.token_ids.tolist(), turn.logp).items():
            found[name][text] = value
    return dict(found)


# --- command --------------------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        usage="%(prog)s RUN | BEFORE AFTER [--domains ENV ...] [--prompts N] [--json FILE] [--SETTING VALUE ...]",
        **help_of(__doc__),
    )
    text = "a model, a checkpoint, or a run's directory; a run alone is compared with the model it started from"
    parser.add_argument("what", nargs="+", metavar="RUN|MODEL|CHECKPOINT", help=text)
    text = "environments: ENV, or ENV#NAME={settings} (default: the run's, else " + ", ".join(OWN_DOMAINS) + ")"
    parser.add_argument("--domains", nargs="+", default=[], metavar="ENV", help=text)
    text = "held-out prompts of each environment (default: 100)"
    parser.add_argument("--prompts", type=int, default=100, metavar="N", help=text)
    text = "share of right or readable answers that may be lost (default: 0.05)"
    parser.add_argument("--max_drop", "--max-drop", type=float, default=0.05, metavar="SHARE", help=text)
    text = 'write all results to FILE as JSON; "-": print only the JSON'
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)
    add_flags_of_played_runs(parser)
    arguments: argparse.Namespace = parser.parse_args(with_underscores(sys.argv[1:] if argv is None else argv))
    if len(arguments.what) > 2:
        parser.error(f"{len(arguments.what)} models; expected a run, or two models")
    if not 0 <= arguments.max_drop < 1 or arguments.prompts < 1:
        parser.error("expected --max_drop from 0, below 1, and --prompts of at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run `srl contrib health`; return the exit status."""
    arguments = _parse(argv)
    return run_cleanly(lambda: _run(arguments), arguments.debug)


def _run(arguments: argparse.Namespace) -> int:
    given = given_settings(arguments)
    sides = [_side(one, arguments.trust_checkpoint, given.get("seal_key_file")) for one in arguments.what]
    if len(sides) == 1:
        if not sides[0].checkpoint:
            raise SettingsError(f"{sides[0].what} is a model; expected a second one, or a run's directory")
        sides.insert(0, _side(str(sides[0].settings["model"]), False, None))
    values = _values_of(sides, given, arguments.domains)
    measured, names = [], [str(side.checkpoint or side.what) for side in sides]
    with tempfile.TemporaryDirectory(prefix="rllib_srl-") as scratch:
        check(_config_for(values, local_model(values["model"])))
        for number, side in enumerate(sides):
            model = Path(scratch) / str(number) if side.checkpoint else local_model(side.what)
            if side.checkpoint:
                export_checkpoint(side.checkpoint, model_config_of(side.settings), model)
            config = _config_for(values, model)
            check(config)
            print(f"playing {names[number]} ...", file=sys.stderr)
            with hushed_stderr(arguments.verbose):
                measured.append(measure(config, arguments.prompts))
    changes, verdicts = judged(measured[0], measured[1], arguments.max_drop)
    num_lost = [one.num_lost for one in measured]
    figures: dict[str, Any] = {"before": names[0], "after": names[1], "num_lost": num_lost}
    figures |= {"changes": {name: {"change": one.change, **asdict(one)} for name, one in changes.items()}}
    figures |= {"max_drop": arguments.max_drop, "verdicts": [asdict(verdict) for verdict in verdicts]}
    text = json.dumps(figures, indent=1)
    if arguments.json == Path("-"):
        print(text)
    else:
        _print(names, changes, verdicts, num_lost)
        if arguments.json:
            write_whole(arguments.json, text + "\n")
    return 0 if all(verdict.is_passed for verdict in verdicts) else UNHEALTHY


def _side(what: str, trust: bool, key_file: str | None) -> Side:
    checkpoint = checkpoint_named(what)
    if checkpoint is None:
        check_model_name(what)
        return Side(what, None, {})
    settings = runs.settings_of(checkpoint, trust, key_file, trains=False)
    if not settings:
        raise SettingsError(f"{checkpoint.parent} has no {runs.SETTINGS_FILE}; expected a run of srl train")
    return Side(what, checkpoint, settings)


def _values_of(sides: Sequence[Side], given: Mapping[str, Any], domains: Sequence[str]) -> dict[str, Any]:
    """Return the settings of playing: the run's (the last side's that has one), then those given."""
    run = next((side.settings for side in reversed(sides) if side.settings), {})
    if idle := [name for name in given if name not in OF_PLAYING and name != "seal_key_file"]:
        raise SettingsError(f"{', '.join(idle)}: not a setting of playing; expected some of {', '.join(OF_PLAYING)}")
    named = [name for name in PLACES if given.get(name)]
    if domains and named:
        raise SettingsError(f"--domains and {named[0]} = {given[named[0]]!r}; expected one of the two")
    values = {**run, **given}
    values.setdefault("model", sides[0].what)
    if domains or not (run or named):
        values = {name: value for name, value in values.items() if name not in PLACES}
        worlds = [world_named(text) for text in domains or OWN_DOMAINS]
        schedule = [[0, {world.domain: 1.0 for world in worlds}]]
        values["stream"] = {"domains": [world.entry() for world in worlds], "schedule": schedule}
    return values


def _config_for(values: Mapping[str, Any], model_dir: Path) -> Any:
    played = {name: value for name, value in values.items() if name in OF_PLAYING}
    return build_config({"seed": 0, **played, "model": str(model_dir), "num_env_runners": 0, "checkpoint_every": 0})


def _print(
    names: Sequence[str], changes: Mapping[str, Change | Shift], verdicts: Sequence[Verdict], num_lost: Sequence[int]
) -> None:
    outcomes = {verdict.domain: verdict.outcome for verdict in verdicts}
    rows = [["", "before", "after", "change, 95 % interval", "prompts", "gate"]]
    for name, one in changes.items():
        span = f"{one.change:+.3f}  [{one.low:+.3f}, {one.high:+.3f}]"
        rows.append([name, f"{one.before:.3f}", f"{one.after:.3f}", span, str(one.num), outcomes[name]])
    print(f"before  {names[0]}\nafter   {names[1]}\n{table(rows)}")
    if any(num_lost):
        print(f"{num_lost[0]} held-out episodes failed before and {num_lost[1]} after, not counted")
    failed = [verdict for verdict in verdicts if not verdict.is_passed]
    for verdict in failed:
        print(f"{verdict.outcome}: {verdict.domain}: {verdict.reason}")
    if not failed:
        print("healthy: no significant harm is seen")

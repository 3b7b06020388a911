"""Read the order of an upgrade from the command line, and validate it before anything starts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.algorithm.contamination.gate import AUDIT, GateSettings, Guarded, guard
from rllib_srl.algorithm.settings import GROUPS, folded
from rllib_srl.cli.evaluate import checkpoint_named
from rllib_srl.cli.shared import runs
from rllib_srl.cli.shared.paths import local_directory
from rllib_srl.cli.shared.settings import ITERATIONS, SettingsError, build_config, given_settings, plain
from rllib_srl.common.environments import environment_id, resolve
from rllib_srl.common.setting_checks import is_number
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.engine.models import check_model_name
from rllib_srl.envs.math.contamination import WITHOUT_ENCODER
from rllib_srl.storage.checkpoints import verify_sealed
from rllib_srl.studies.health.battery import DOMAINS, Battery
from rllib_srl.studies.ladder import Rehearsal
from rllib_srl.types import Prompt

# Settings that the upgrade sets itself: name -> what to use instead.
OURS = {
    **dict.fromkeys(("env", "env_config", "worlds", "mixture", "stream"), "--on and --keep"),
    **dict.fromkeys(("replay_revisit_fraction", "replay_reuse_fraction"), "--prior_share"),
    **dict.fromkeys(("replay_domains", "replay_domain_quotas"), "--keep"),
    **dict.fromkeys(("evaluation_duration", "evaluation_interval", "evaluation_pass_k"), "--check_prompts"),
    "evaluation_iterations": "--check_prompts",
    **dict.fromkeys(("checkpoint_every", "checkpoints_kept"), "--check_every"),
    "replay_min_buffer_size": "--seed_prompts",
    "model": "the first argument",
    "seal_key_file": "the environment variable RLLIB_SRL_SEAL_KEY_FILE",
    "kl_reference": "the first argument, which is the reference model",
}
KL_COEFF = 0.1
COMPARISON = {"on_hit": "report", "methods": list(WITHOUT_ENCODER)}  # default of `contamination`, where rows are read
# name: (minimum, maximum, default, meaning); flags in addition to SRL's own settings.
COUNTS = {
    "check_every": (1, 10**6, 5, "iterations between two checks of all domains"),
    "check_prompts": (8, 10**6, 256, "held-out prompts of each domain in a check"),
    "confirm_prompts": (8, 10**6, 2000, "further held-out prompts of each domain, for the final gates"),
    "seed_prompts": (1, 10**6, 64, "prompts of each old domain that the starting model plays to fill the memory"),
    "patience": (1, 100, 2, "bad checks in a row before the next rung of the ladder; after a harmful check at once"),
}
SHARES = {
    "prior_share": (0.01, 0.9, 0.3, "share of the trained groups that rehearse old domains"),
    "max_drop": (0.0, 0.99, 0.02, "largest allowed drop of an old domain's accuracy"),
    "min_gain": (0.0, 0.99, 0.05, "smallest gain of the new domain's accuracy"),
    "confidence": (0.5, 0.9999, 0.95, "confidence level of the gates' two-sided intervals"),
    "max_kl": (1e-6, 1e6, 1.0, "largest KL to the starting model in a good check, nats per token"),
    "max_lost": (0.0, 0.99, 0.1, "largest share of a check's held-out episodes that may fail"),
}
LIMITS: dict[str, tuple[float, float, float, str]] = {**COUNTS, **SHARES}


@dataclass(frozen=True)
class World:
    """An environment with settings. Invariant: all its prompts are of `domain`."""

    world: str
    domain: str
    env_config: Mapping[str, Any]

    @property
    def env_id(self) -> str:
        """Return the environment id of its prompts."""
        return environment_id(self.world, self.domain)

    def entry(self) -> dict[str, Any]:
        """Return the environment as an entry of a stream."""
        return {"world": self.world, "domain": self.domain, "env_config": dict(self.env_config)}


@dataclass(frozen=True)
class HeldOut:
    """Held-out prompts of one domain. Invariant: the two lists are disjoint."""

    check: list[Prompt]
    confirm: list[Prompt]


@dataclass(frozen=True)
class Order:
    """The order of an upgrade. Invariant: validated as far as possible without starting anything."""

    what: str
    checkpoint: Path | None  # None: `what` is a model
    model: str  # `what`, or the initial model of the checkpoint's run
    new: World
    old: tuple[World, ...]
    out: Path
    iterations: int
    values: Mapping[str, Any]  # SRL's settings without those in `OURS`; includes the seed
    limits: Mapping[str, Any]  # by the names of `LIMITS`
    health: tuple[str, ...] = ()  # parts of the health battery that the upgraded model must pass before delivery

    @property
    def worlds(self) -> tuple[World, ...]:
        """Return the new environment and the old ones."""
        return (self.new, *self.old)

    @property
    def rehearsal(self) -> Rehearsal:
        """Return the rehearsal settings of the lowest rung of the ladder."""
        quotas = {world.domain: 1.0 for world in self.old}
        weight, kl_coeff = (float(_coeff(self.values, name)) for name in ("replay_reuse_coeff", "kl"))
        return Rehearsal(self.limits["prior_share"], kl_coeff, weight, quotas)

    @property
    def num_measured(self) -> int:
        """Return the number of held-out prompts of all domains in the checks and the last gates, at most."""
        return len(self.worlds) * (int(self.limits["check_prompts"]) + int(self.limits["confirm_prompts"]))

    def stream(self) -> dict[str, Any]:
        """Return the stream of the new environment and the old ones."""
        # Before iteration 1 only old environments are drawn, to fill the memory; afterwards only the new one.
        knots = [[0, {w.domain: 1.0 for w in self.old}], [1, {self.new.domain: 1.0}]]
        return {"domains": [world.entry() for world in self.worlds], "schedule": knots}

    def config(self, model: str | Path, rehearsal: Rehearsal, directory: Path) -> Any:
        """Return the config of one attempt, not yet validated."""
        ours = {"stream": self.stream(), "model": str(model), "checkpoint_every": 0}
        ours["seal_key_file"] = None  # never from a ledger: a directory must not choose the key that verifies it
        ours |= {"log_directory": str(directory), "kl_reference": "base", "replay_min_buffer_size": 1}
        ours["evaluation_duration"] = self.num_measured  # `contamination` compares with what the gates measure
        ours |= rehearsal.settings()
        reuse = GROUPS["replay_reuse_coeff"].given(self.values["replay_reuse_coeff"])
        ours["replay_reuse_coeff"] = {**reuse, "coeff": rehearsal.reuse_coeff}
        return build_config(folded(ours, self.values))


def add_order(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of an order, without SRL's settings."""
    what = "a model, a checkpoint, or a run's directory"
    parser.add_argument("what", nargs="?", metavar="MODEL|CHECKPOINT|DIR", help=what)
    parser.add_argument("--on", metavar="ENV", default="", help="new domain: ENV, or ENV#NAME={settings}")
    parser.add_argument("--keep", metavar="ENV", nargs="*", default=[], help="old domains, at least one")
    parser.add_argument("--out", type=local_directory, metavar="DIR", help="new directory (default: under results/)")
    group = parser.add_argument_group("gates")
    text = "parts of the health battery as a gate before delivery (srl health): tasks, degeneration"
    group.add_argument("--health", nargs="+", default=[], metavar="PART", help=text)
    for name, (least, most, default, meaning) in LIMITS.items():
        text = f"{meaning}; {least:g} to {most:g} (default: {default})"
        flags = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        group.add_argument(*flags, dest=name, default=default, metavar="VALUE", help=text.replace("%", "%%"))


def read_order(arguments: argparse.Namespace) -> Order:
    """Return the order given by the arguments.

    Raises:
        SettingsError: all errors, one per line.
        CheckpointError: the checkpoint is damaged.
    """
    given = given_settings(arguments)
    checkpoint, earlier, faults = _start(arguments.what)
    model = str(earlier.get("model", arguments.what))
    faults += [f"{name} cannot be set here; use {OURS[name]}" for name in given if name in OURS]
    worlds, more = _worlds(arguments.on, arguments.keep)
    limits, wrong = _limits(arguments)
    out = arguments.out or runs.new_directory(f"upgrade-{arguments.on}")
    faults += more + wrong + _faults_of_health(arguments.health)
    if out.exists() and not (out.is_dir() and {path.name for path in out.iterdir()} == {AUDIT}):
        faults.append(f"--out {out} exists; expected a new directory")
    iterations = given.pop(ITERATIONS.name, ITERATIONS.default)
    kept = {name: value for name, value in earlier.items() if name not in (*OURS, ITERATIONS.name)}
    if kept.get("contamination") is None and any(map(_reads_data, worlds)):
        kept["contamination"] = COMPARISON
    values = folded(given, {**kept, "kl": KL_COEFF, "replay_reuse_coeff": 1.0})
    if not isinstance(iterations, int) or iterations < 1:
        faults.append(f"iterations = {iterations!r}; expected an integer of at least 1")
    kl_coeff, name = _coeff(values, "kl"), "kl_coeff" if "kl_coeff" in given else "kl"
    if not is_number(kl_coeff) or kl_coeff <= 0:
        faults.append(f"{name} = {kl_coeff!r}; expected a number above 0: the ladder increases it")
    if values.get("replay_capacity") == 0:
        faults.append("replay_capacity = 0; expected more: the memory rehearses the old domains")
    if faults:
        raise SettingsError("the upgrade cannot start:\n" + "\n".join(f"  {fault}" for fault in faults))
    if values.get("seed") is None:  # every attempt must use the same held-out prompts
        values["seed"] = int(np.random.SeedSequence().entropy % 2**31)  # type: ignore[operator]
    start = (arguments.what, checkpoint, model)
    where = (worlds[0], tuple(worlds[1:]), out.absolute())
    return Order(*start, *where, iterations, values, limits, tuple(arguments.health))


def held_out(order: Order, config: Any) -> dict[str, HeldOut]:
    """Return the held-out prompts of each domain: the first ones for checks, the next ones for the last gates.

    Raises:
        SettingsError: an environment has too few.
    """
    creators, configs, weights = config.world_creators(), config.world_configs(), config.mixture_weights()
    found, faults = {}, []
    num = order.limits["check_prompts"]
    for world in order.worlds:
        one = world.env_id
        source = PromptSource({one: creators[one]}, {one: configs[one]}, {one: weights[one]}, config.seed)
        prompts = source.heldout(num + order.limits["confirm_prompts"])
        found[world.domain] = HeldOut(prompts[:num], prompts[num:])
        if len(prompts) < 2 * num and len(prompts) < num + order.limits["confirm_prompts"]:
            has = f"{world.domain} has {len(prompts)} held-out prompts, half of them for the final gates"
            faults.append(f"check_prompts = {num}; expected at most {len(prompts) // 2}: {has}")
    if faults:
        raise SettingsError("\n".join(faults))
    return found


def guarded(order: Order, config: Any) -> Guarded | None:
    """Compare what the upgrade trains on with what its gates measure; return None if that is switched off.

    Raises:
        ContaminationError: too many questions are repeated; the audit is in the order's directory.
    """
    settings = GateSettings.of(config.flat())
    if settings is None:
        return None
    worlds = (config.world_creators(), config.world_configs(), config.mixture_weights())
    source = PromptSource(*worlds, config.seed, config.task_stream())
    return guard(source, settings, order.num_measured, order.out)


def _start(what: str) -> tuple[Path | None, dict[str, Any], list[str]]:
    try:
        checkpoint = checkpoint_named(what)
        if checkpoint is None:
            check_model_name(what)
            return None, {}, []
        verify_sealed(checkpoint)
        if earlier := runs.settings_of(checkpoint):
            return checkpoint, earlier, []
        return checkpoint, {}, [f"{checkpoint.parent} has no {runs.SETTINGS_FILE}; expected a run of srl train"]
    except ValueError as error:
        return None, {}, [str(error)]


def _worlds(on: str, keep: Sequence[str]) -> tuple[list[World], list[str]]:
    faults = [] if on else ["--on is missing; expected the environment of the new domain"]
    faults += [] if keep else ["--keep is empty; expected the environment of at least one old domain"]
    worlds = []
    for text in filter(None, (on, *keep)):
        try:
            worlds.append(world_named(text))
        except ValueError as error:
            faults.append(str(error))
    domains = [world.domain for world in worlds]
    for domain in sorted({name for name in domains if domains.count(name) > 1}):
        is_new = on and worlds and worlds[0].domain == domain
        where = "both --on and --keep" if is_new else "--keep twice"
        faults.append(f"domain {domain!r} is in {where}; expected each once (ENV#NAME={{...}} names another)")
    return worlds, faults


def world_named(text: str) -> World:
    """Parse "compare", "compare#large" or "compare#large={lowest: 100, highest: 999}"; construct it once as a check."""
    name, equals, settings = text.partition("=")
    world, _, domain = name.partition("#")
    env_config = plain(settings) if equals else {}
    if not isinstance(env_config, dict):
        raise ValueError(f"environment {text!r}; expected its settings as ENV={{name: value, ...}}")
    env = resolve(world)(env_config)
    env.close()
    return World(world, domain or world, env_config)


def _reads_data(world: World) -> bool:
    """Return whether an environment asks questions of a file or data set."""
    env = resolve(world.world)(world.env_config)
    env.close()
    return hasattr(env.unwrapped, "data_question")


def _faults_of_health(parts: Sequence[str]) -> list[str]:
    """Return the errors of --health; the domains are gated by the upgrade itself, on more prompts."""
    if DOMAINS in parts:
        return [f"--health {DOMAINS}: the gates test the domains of --on and --keep already; expected other parts"]
    try:
        if parts:
            Battery(tuple(parts)).check()
    except ValueError as error:
        return [f"--health {' '.join(parts)}: {error}"]
    return []


def _limits(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    read: dict[str, Any] = {}
    faults: list[str] = []
    for name, (least, most, _, _) in LIMITS.items():
        given = getattr(arguments, name)
        value = plain(given) if isinstance(given, str) else given
        kind = int if name in COUNTS else float
        if not is_number(value) or (kind is int and not isinstance(value, int)) or not least <= value <= most:
            what = "an integer" if kind is int else "a number"
            faults.append(f"{name} = {given}; expected {what} from {least:g} to {most:g}")
        else:
            read[name] = kind(value)
    return read, faults


def _coeff(values: Mapping[str, Any], name: str) -> Any:
    """Return the coefficient of a setting that is given alone or with parameters."""
    return GROUPS[name].given(values[name]).get("coeff", GROUPS[name].default("coeff"))

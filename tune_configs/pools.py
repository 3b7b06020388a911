"""Shared parts of the studies on finite pools: the pool, its arms, and a study that measures at equal token marks.

    on_pool(DEVELOPMENT, module=__name__, doc=__doc__, arms=[...], primary=...)     a whole `Study`
    proof("memory", ("plain", ...), LOTS[0], module=__name__, doc=__doc__)          a confirmation on fresh kinds

Methods at one episode a prompt have no reuse here: it needs today's baseline, which came after the tuning. Both proofs
that ran with `passes` and `memory` at 128 x 1 asked for reuse and had none (docs/LOG.md).

A pool is `PROMPTS_PER_KIND` fixed prompts of each kind, a tenth of them with a wrong reference answer. A trial
generates `TOKENS` tokens, about ten visits a prompt, and is measured before training and at `NUM_MARKS` equal marks:
on unseen prompts of the same kinds, and on the pool itself, graded by right answers. A study without a stream has its
marks as stages.

Methods are dictionaries on top of `COMMON`; a method's best learning rate, number of passes and shape of a batch are
found on the development pool with the same grid for each (`grid`), at equal generated tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllib_srl.studies.seeds import ALPHA
from rllib_srl.studies.study import Arm, Domain, Primary, Study
from rllib_srl.tune_configs.arms import COMMON, changed, described_by
from rllib_srl.tune_configs.kinds import KINDS, Lot

TOKENS = 120_000  # generated in a trial: about ten visits of 250 prompts, 8 answers of 5 to 6 tokens
NUM_MARKS = 8
PROMPTS_PER_KIND = 10
WRONG_ANSWERS = 0.1
MEASURES = ("accuracy_area",)
DEV_SEEDS = (1, 2, 3)
RATES = (2e-4, 4e-4)  # 8e-4 was too high for every method, in trials of half this length (docs/LOG.md)
PASSES = (1, 2)
SHAPES = ((16, 8), (32, 4), (64, 2))  # prompts of a batch, episodes of each
OF_HISTORY = ((32, 4), (64, 2), (128, 1))  # a baseline from history needs no group
OF_SIZES = ((8, 16), (16, 8), (32, 4))  # groups of two have no episodes to give away
SINGLE = ((16, 1), (32, 1), (64, 1))  # of methods with one episode
NUM_IDEAS = 3  # that were put to a proof first; each was tested at .05 / 3

# Plain GRPO: shuffled epochs over the pool, no memory.
PLAIN = {"replay_revisit_fraction": 0.0, "replay_reuse_fraction": 0.0, "replay_capacity": 0}
# A memory without a schedule: shuffled epochs, and stored groups of the last iterations are trained on again.
YOUNG_REUSE: dict[str, Any] = {
    "replay_revisit_fraction": 0.0,
    "replay_reuse_fraction": 0.25,
    "replay_max_age": 6,
    "replay_spacing": "none",
    "replay_load_control": "none",
    "replay_diversity": 0.0,
    "replay_leeches": 0,
    "replay_reuse_selection": "uniform",
}
NO_REUSE = {"replay_reuse_fraction": 0.0}
HISTORY = {"advantage": "posterior"}  # the baseline from history
CHOICE = {"replay_revisit_fraction": "auto", "replay_selection": "signal"}  # unseen and stored prompts compete
# The published method as far as the settings allow; what differs is in docs/losses.md.
SPO: dict[str, Any] = {
    "advantage": {"name": "posterior", "scale": "centred", "min_surprise": 0.0},
    "group_size": 1,
    "replay_history": {"by": "kl"},
    "replay_selection": "spo",
}
METHODS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "reuse": YOUNG_REUSE,
    "passes": {**YOUNG_REUSE, **HISTORY},
    "memory": {**YOUNG_REUSE, **HISTORY, **CHOICE},
    "memory_group": {**YOUNG_REUSE, **CHOICE},
    "sizes": {**YOUNG_REUSE, "rollout": "knapsack"},
    "rescue": {**YOUNG_REUSE, "rescue": "arpo"},
    "dapo": {**PLAIN, "dynamic_sampling_tries": 3},
    "greso": {**YOUNG_REUSE, "replay_reuse_fraction": 0.0, **CHOICE, "replay_selection": "greso"},
    "spo": {**YOUNG_REUSE, **NO_REUSE, **CHOICE, **SPO},
    "critic": {**PLAIN, "advantage": {"name": "gae", "use_critic": True}},
}  # fmt: skip
ABOUT = {  # method -> title, description
    "plain": ("plain GRPO", "Shuffled epochs over the pool, nothing stored."),
    "reuse": ("young reuse", "Shuffled epochs, and groups of the last six iterations are trained on again."),
    "passes": ("shuffled passes", "Shuffled epochs with the baseline from history; young groups of two or more again."),
    "memory": ("memory", "The rule `signal` chooses; baseline from history; young groups of two or more again."),
    "memory_group": ("memory, GRPO's baseline", "As the memory, with each group's own mean as the baseline."),
    "sizes": ("episodes by history", "Shuffled epochs; prompts get episodes by their history, and young groups again."),
    "rescue": ("stored successes", "Shuffled epochs; a stored success enters each failed group; young groups again."),
    "dapo": ("dynamic sampling", "Shuffled epochs; groups without signal are replaced by further prompts (DAPO)."),
    "greso": ("GRESO", "Prompts that were silent before are skipped at random."),
    "spo": ("SPO", "One answer per prompt, a tracked baseline, prompts drawn by their uncertainty."),
    "critic": ("critic", "Shuffled epochs; a value head in place of the group's mean."),
}
# Where each method did best on the development pool, by `pool_tuning` (docs/LOG.md); a method without an entry has not
# been tuned yet. `memory` was tuned before its rule was mended; `pool_proof_mended` has the setting found since.
TUNED: dict[str, dict[str, Any]] = {
    "plain": {"lr": 4e-4, "num_epochs": 2, "num_prompts_per_batch": 64, "group_size": 2},
    "passes": {"lr": 4e-4, "num_epochs": 1, "num_prompts_per_batch": 128, "group_size": 1, **NO_REUSE},
    "memory": {"lr": 4e-4, "num_epochs": 1, "num_prompts_per_batch": 128, "group_size": 1, **NO_REUSE},
    "sizes": {"lr": 4e-4, "num_epochs": 1, "num_prompts_per_batch": 16, "group_size": 8},
    "dapo": {"lr": 4e-4, "num_epochs": 2, "num_prompts_per_batch": 32, "group_size": 4},
    "greso": {"lr": 4e-4, "num_epochs": 2, "num_prompts_per_batch": 16, "group_size": 8},
    "critic": {"lr": 4e-4, "num_epochs": 1, "num_prompts_per_batch": 32, "group_size": 4},
    "spo": {"lr": 2e-4, "num_epochs": 1, "num_prompts_per_batch": 32, "group_size": 1},
}


def method(name: str, **settings: Any) -> Arm:
    """Return a method at its tuned learning rate, passes and shape as an arm, with some settings changed."""
    title, description = ABOUT[name]
    return Arm(name, title, description, changed({**METHODS[name], **TUNED.get(name, {})}, settings))


def grid(name: str) -> list[Arm]:
    """Return a method at each learning rate, number of passes and shape of a batch: every method's tuning budget."""
    title, description = ABOUT[name]
    own = METHODS[name]
    if own.get("group_size") == 1:
        shapes = SINGLE
    elif own.get("advantage") == "posterior":
        shapes = OF_HISTORY
    else:
        shapes = OF_SIZES if own.get("rollout") == "knapsack" else SHAPES
    return [
        Arm(
            f"{name}_{rate:g}_x{passes}_{prompts}x{size}",
            f"{title}, lr {rate:g}, {passes} passes, {prompts} x {size}",
            f"{description} Learning rate {rate:g}, {passes} passes over {prompts} prompts with {size} episodes each.",
            {**own, "lr": rate, "num_epochs": passes, "num_prompts_per_batch": prompts, "group_size": size,
             **(NO_REUSE if size == 1 else {})},
        )
        for rate in RATES
        for passes in PASSES
        for prompts, size in shapes
    ]


def pool_of(kinds: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """Return the env_config of a pool of these kinds."""
    return {
        "environments": {kind: KINDS[kind] for kind in kinds},
        "num_prompts_per_kind": PROMPTS_PER_KIND,
        "wrong_answers": WRONG_ANSWERS,
        "seed": seed,
    }


def on_pool(
    kinds: Sequence[str],
    *,
    module: str,
    doc: str | None,
    arms: Sequence[Arm],
    primary: Primary,
    seeds: Sequence[int] = DEV_SEEDS,
    tokens: int = TOKENS,
    pool_seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    **others: Any,
) -> Study:
    """Return a study on a pool, measured at `NUM_MARKS` equal marks of generated tokens.

    Args:
        kinds: of the pool, keys of `rllib_srl.tune_configs.kinds.KINDS`.
        module: of the study; its last part names the study and its directory.
        doc: docstring of the module: the question in the first line, then which result answers it.
        arms: to compare.
        primary: the comparison that decides.
        seeds: of the trials of each arm.
        tokens: generated by the policy in a trial.
        pool_seed: of the choice of prompts and of wrong answers.
        settings: of all arms, on top of `COMMON`.
        others: further fields of `Study`.

    Raises:
        ValueError: the study is not valid.
    """
    pool = {"env": "pool", "env_config": pool_of(kinds, pool_seed), "evaluation_duration": 16 * len(kinds)}
    return Study(
        *described_by(module, doc),
        arms=tuple(arms),
        domains=tuple(Domain(kind, NUM_MARKS - 1) for kind in kinds),
        num_stages=NUM_MARKS,
        seeds=tuple(seeds),
        budget=tokens,
        primary=primary,
        settings={**COMMON, **pool, **(settings or {})},
        **others,
    ).checked()


def proof(idea: str, controls: Sequence[str], lot: Lot, *, module: str, doc: str | None) -> Study:
    """Return the study that compares a method with its controls on the kinds and seeds of a lot.

    Args:
        idea: a key of `METHODS`, like the controls; each runs at its tuned setting.
        controls: plain GRPO, and methods that differ from the idea in one thing; the other methods are arms as well.
        lot: drawn by lot; used for one idea only.
        module: as in `on_pool`.
        doc: as in `on_pool`.
    """
    arms = [method(name) for name in dict.fromkeys((idea, *controls, *METHODS))]
    primary = Primary(idea, tuple(controls), MEASURES, alpha=ALPHA / NUM_IDEAS)
    return on_pool(lot.kinds, module=module, doc=doc, arms=arms, primary=primary, seeds=lot.seeds,
                   pool_seed=lot.pool_seed, is_confirmation=True)  # fmt: skip

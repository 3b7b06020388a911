"""Shared parts of the studies: the setting under test, the compared arms, and the stream and size of a trial.

    on_stream("cpu", module=__name__, doc=__doc__, arms=[...], primary=...)     a whole `Study`

An arm is a short dictionary on top of `COMMON`. The arms of other methods keep SRL's shares of revisits and reuses
and change *which* items and groups are drawn. Those of `NOT_SRL` have no schedule, load control or leeches, which are
parts of SRL. Settings are named as in docs/settings.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rllib_srl.common.environments import resolve
from rllib_srl.curriculum.streams import make_stream
from rllib_srl.studies.study import Arm, Domain, Primary, Study
from rllib_srl.tune_configs.streams import scaled

STAGE_TOKENS = 40_000  # generated tokens of a stage: 26 to 105 iterations, depending on the length of the answers
DEV_SEEDS = tuple(range(1, 7))  # six pairs are the fewest with which an exact test can reach .05
FRESH_SEEDS = tuple(range(501, 511))  # of the confirmation; used for nothing else, like those of earlier confirmations

# One process per trial: with short answers this gives the most runs per hour on two cores (docs/design/0007).
COMMON: dict[str, Any] = {
    "model": "tiny",
    "engine": "transformers",
    "num_env_runners": 0,
    "compute_dtype": "float32",
    "lr": 2e-4,  # at 3e-4 single runs of every replaying arm unlearn the answer format permanently (docs/LOG.md)
    "num_prompts_per_batch": 16,
    "group_size": 8,
    "max_turns": 4,
    "max_turn_tokens": 24,
    "max_episode_tokens": 512,
    "num_transcripts": 0,
    "evaluation_duration": 768,
}
FRACTIONS = {"replay_revisit_fraction": 0.4, "replay_reuse_fraction": 0.25}
SHARED = {**FRACTIONS, "replay_max_age": 6}  # of all arms that replay: only young answers are reused
# A domain is drawn more often the more it fails, the newest one included, which may be the failing one. Every item
# is scheduled: admitting items only when their reviews fit repeats the same few prompts, which then
# represent the skill poorly (docs/LOG.md).
CONSTANT_SRL = {
    **SHARED,
    "replay_spacing": {"name": "fsrs", "desired_retention": 0.9, "domain_half_life": 4.0},
    "replay_selection": "srl",
    "replay_reuse_selection": "srl",
    "replay_diversity": {"coeff": 0.5},
    "replay_domains": "all",
    "replay_load_control": "none",
    "replay_leeches": 0,
    "planner_mode": {"name": "softmax", "sharpness": 8.0, "floor": 0.02, "single_every": 0, "item_bands": None},
    "planner_ema_rate": 0.1,
}
# The setting that is tuned on the development streams, then frozen: `confirm` runs it once on other domains and seeds.
# The share of prompts from the memory grows with forgetting.
SRL = {
    **CONSTANT_SRL,
    "planner_adapt": {"name": "revisit", "bounds": [0.1, 0.6], "forgetting_threshold": 0.05},
}
BEST_BASELINE = "balanced"  # on one development stream; on the other it is "uniform", a control anyway (docs/LOG.md)
# At the rate of the others plain GRPO forgets far more: it gets the one at which it does best (docs/LOG.md).
NO_REPLAY = {"lr": 5e-5, "replay_revisit_fraction": 0.0, "replay_reuse_fraction": 0.0, "replay_capacity": 0}
NOT_SRL = {
    **SHARED,
    "replay_spacing": "none",
    "replay_load_control": "none",
    "replay_diversity": 0.0,
    "replay_leeches": 0,
}


def changed(base: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with other settings; of a setting with parameters, those that are not given stay."""
    merged = {
        name: {**base[name], **value} if isinstance(value, Mapping) and isinstance(base.get(name), Mapping) else value
        for name, value in settings.items()
    }
    return {**base, **merged}


def _drawn_by(rule: str, **settings: Any) -> dict[str, Any]:
    return {**NOT_SRL, "replay_selection": rule, "replay_reuse_selection": rule, **settings}


_ARMS = [
    Arm("srl_diversity", "SRL + diversity", "Old prompts come back when they are due, dissimilar ones first.", SRL),
    Arm("srl", "SRL without diversity", "Old prompts come back when they are due.",
        changed(SRL, {"replay_diversity": {"coeff": 0.0}})),
    Arm("diversity", "diversity without spacing", "Old prompts come back at any time, dissimilar ones first.",
        changed(SRL, {"replay_spacing": {"name": "none"}, "replay_diversity": {"on": ["draw"]}})),
    Arm("no_replay", "no replay", "Old prompts never come back: plain GRPO.", NO_REPLAY),
    Arm("uniform", "uniform replay", "Old prompts come back at random.", _drawn_by("uniform")),
    Arm("uniform_less", "less uniform replay", "Old prompts come back at random, and fewer of them.",
        _drawn_by("uniform", replay_revisit_fraction=0.15)),
    Arm("balanced", "balanced replay", "Old prompts come back at random, equally many of each domain.",
        _drawn_by("uniform", replay_domain_quotas="equal")),
    Arm("fifo", "oldest first", "Old prompts come back in turn, those not played for longest first.",
        _drawn_by("fifo")),
    Arm("per", "prioritised replay", "Old prompts come back the more often the larger their advantages were.",
        _drawn_by("per")),
    Arm("fresh_per", "prioritised, fading", "Prioritised replay whose priorities fade with age (FreshPER).",
        _drawn_by("fresh_per")),
    Arm("learnability", "learnability", "Old prompts come back by p(1 - p), p being how often they were solved.",
        _drawn_by("learnability")),
    Arm("difficulty_pool", "difficulty pools", "Prompts of medium difficulty come back most often.",
        _drawn_by("difficulty_pool")),
    Arm("dapo", "dynamic sampling", "No replay; prompts that all answers solve or fail are replaced (DAPO).",
        {**NO_REPLAY, "dynamic_sampling_tries": 3}),
    Arm("speed", "SPEED", "As dynamic sampling; prompts are screened by three answers first (SPEED-RL).",
        {**NO_REPLAY, "dynamic_sampling_tries": 3, "rollout": {"name": "screening", "screen_size": 3}}),
    Arm("knapsack", "Knapsack RL", "As uniform replay; prompts get more answers the more signal is expected.",
        _drawn_by("uniform", rollout="knapsack")),
    Arm("zvp", "RL-ZVP", "No replay; prompts that all answers solve or fail are trained on by token entropy.",
        {**NO_REPLAY, "silent_groups": "zvp"}),
    Arm("repo", "RePO", "The best rewarded old answers are trained on again.", _drawn_by("repo")),
    Arm("exgrpo", "ExGRPO", "Half-solved prompts come back; the weight of old answers is shaped.",
        _drawn_by("exgrpo", replay_reuse_correction="shape")),
    Arm("exit", "pure ExIt", "Partial answers become new prompts, those with varying rewards first.",
        _drawn_by("exit", replay_revisit_fraction=0.5, replay_reuse_fraction=0.0, replay_task_growth=True)),
    Arm("extra_epochs", "no replay, equal trained tokens", "Plain GRPO that passes over its batches more often, until "
        "it has trained on as many tokens as SRL + diversity.", NO_REPLAY, {"num_epochs": "srl_diversity"}),
    Arm("uniform_reuse", "uniform reuse, equal share", "Stored answers are trained on again at random, as large a "
        "share of the training as SRL + diversity reused; no old prompt is asked again.",
        _drawn_by("uniform", replay_revisit_fraction=0.0), {"replay_reuse_fraction": "srl_diversity"}),
]  # fmt: skip
ARMS = {arm.name: arm for arm in _ARMS}


def varied(name: str, title: str, description: str, base: Mapping[str, Any] = SRL, **settings: Any) -> Arm:
    """Return SRL + diversity, or `base`, with some settings changed (see `changed`), as an arm of its own."""
    return Arm(name, title, description, changed(base, settings))


def described_by(module: str, doc: str | None) -> tuple[str, str, str]:
    """Return name, question and `answered_by` of a `Study`: last part of the module, first line and rest of the doc."""
    question, _, answer = (doc or "").partition("\n")
    return module.rpartition(".")[2], question, " ".join(answer.split())


def on_stream(
    stream: str,
    *,
    module: str,
    doc: str | None,
    arms: Sequence[str | Arm],
    primary: Primary,
    seeds: Sequence[int] = DEV_SEEDS,
    tokens: int = STAGE_TOKENS,
    settings: Mapping[str, Any] | None = None,
    **others: Any,
) -> Study:
    """Return a study on a stream of stages of equal length in generated tokens.

    Args:
        stream: a key of `rllib_srl.tune_configs.streams.STREAMS`.
        module: of the study; its last part names the study and its directory.
        doc: docstring of the module: the question in the first line, then which result answers it.
        arms: keys of `ARMS`, or arms of the study's own.
        primary: the comparison that decides.
        seeds: of the trials of each arm.
        tokens: generated by the policy in a stage.
        settings: of all arms, on top of `COMMON`.
        others: further fields of `Study`.

    Raises:
        ValueError: the study is not valid.
    """
    stages = list(scaled(stream, tokens=tokens))
    return Study(
        *described_by(module, doc),
        arms=tuple(ARMS[arm] if isinstance(arm, str) else arm for arm in arms),
        domains=domains_of(stages),
        num_stages=len(stages),
        seeds=tuple(seeds),
        budget=tokens * len(stages),
        primary=primary,
        settings={**COMMON, **(settings or {}), "stream": stages},
        **others,
    ).checked()


def domains_of(stages: Sequence[Mapping[str, Any]]) -> tuple[Domain, ...]:
    """Return the domains of a stream of stages; one that comes back counts as learned after its last stage."""
    learned_at: dict[str, int] = {}
    for stage, values in enumerate(stages):
        entry = next(iter(make_stream([values]).entries.values()))
        own = getattr(getattr(resolve(entry.world), "unwrapped", resolve(entry.world)), "domain", entry.world)
        learned_at[entry.domain or str(own)] = stage
    return tuple(Domain(domain, stage) for domain, stage in learned_at.items())

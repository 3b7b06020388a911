"""Validates settings of the loss against each other and other parts; yields messages "name = value; expected ...".

`LossSettings` has the range of each alone; the names of rules are checked here, because `batch` has one of the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rllib_srl.batch.estimators import ADVANTAGES, GROUP_NORMALISED
from rllib_srl.common.rules import Rules
from rllib_srl.common.setting_model import PRESET
from rllib_srl.losses.clip import CLIP_RULES
from rllib_srl.losses.corrections import CORRECTIONS
from rllib_srl.losses.kl import KL_REWARDS
from rllib_srl.losses.settings import LossSettings

WITHOUT_CLIP_BOUNDS = ("cispo", "sapo", "bapo", "none")  # clip rules that do not read clip_low and clip_high
_TOKEN_CORRECTIONS = ("tis", "mis", "geometric_mask", "mis_po")


def faults_of_loss(config: Any) -> Iterator[str]:
    """Yield all errors of the loss settings of an `SRLConfig`; contradictions only if all rules are known."""
    faults = list(_rules(config))
    yield from faults
    if not faults:
        yield from _contradictions(LossSettings.of(config), config)


def _is_preset(value: Any) -> bool:
    return isinstance(value, str) and value == PRESET


def _rules(config: Any) -> Iterator[str]:
    tables: dict[str, Rules[Any]] = {"advantage": ADVANTAGES, "clip_rule": CLIP_RULES, "correction": CORRECTIONS}
    for name, rules in tables.items():
        value = getattr(config, name)
        if _is_preset(value):
            continue
        if fault := rules.fault(value):
            yield f"{name} = {value!r}; {fault}"
        elif name != "advantage" and rules.is_users(value) and config.num_learners:
            yield (
                f"{name} = {value!r}, registered in this process, with num_learners = {config.num_learners}; expected "
                "its import path 'module:rule': the learners are other processes"
            )


def _contradictions(settings: LossSettings, config: Any) -> Iterator[str]:
    is_clip_high_set = not _is_preset(config.clip_high)
    for name in ("clip_low", "clip_high"):
        value = getattr(config, name)
        if settings.clip_rule in WITHOUT_CLIP_BOUNDS and not _is_preset(value):
            rule = settings.clip_rule
            yield f"{name} = {value!r} with clip_rule = {rule!r}; expected no {name}: the rule does not read it"
    if settings.clip_rule == "symmetric" and is_clip_high_set and settings.clip_high != settings.clip_low:
        yield (
            f"clip_high = {settings.clip_high!r} with clip_rule = 'symmetric'; expected clip_low = "
            f"{settings.clip_low!r}, or clip_rule = 'higher'"
        )
    if settings.clip_rule == "two_sided" and settings.clip_delta <= 1 + settings.clip_high:
        yield f"clip_delta = {settings.clip_delta!r}; expected more than 1 + clip_high = {1 + settings.clip_high!r}"
    if settings.ratio_level != "token" and settings.correction in _TOKEN_CORRECTIONS:
        yield (
            f"correction = {settings.correction!r} with ratio_level = {settings.ratio_level!r}; expected 'none', "
            "'sequence_tis' or 'sequence_mask': the ratio is per episode, so its correction is too"
        )
    if settings.ratio_anchor == "bypass" and settings.correction not in ("none", "mis_po"):
        yield (
            f"correction = {settings.correction!r} with ratio_anchor = 'bypass'; expected 'none' or 'mis_po': the "
            "ratio to the engine's log-probs already contains the correction"
        )
    if settings.tis_clip_max is None and not _is_preset(config.correction) and "tis" in settings.correction:
        yield f"tis_clip_max = None with correction = {settings.correction!r}; expected a number above 0"
    if settings.kl_estimator == "k1" and settings.kl_on_reused == "weighted":
        estimators = "'k2', 'k3' or 'k3_k2'"
        yield f"kl_on_reused = 'weighted' with kl_estimator = 'k1'; expected {estimators}: k1's gradient has mean 0"
    if settings.kl_in_reward and settings.kl_estimator not in KL_REWARDS:
        yield (
            f"kl_in_reward = True with kl_estimator = {settings.kl_estimator!r}; expected one of "
            f"{', '.join(map(repr, KL_REWARDS))}: it differs from k3 by its gradient, which a reward has none of"
        )
    elif settings.kl_in_reward and settings.kl_on_reused == "weighted" and settings.kl_estimator != "k1":
        yield "kl_in_reward = True with kl_on_reused = 'weighted'; expected a KL in the loss: it has no reward"
    if not settings.kl_in_reward and settings.kl_estimator == "k1":
        yield "kl_in_reward = False with kl_estimator = 'k1'; expected another estimator: k1's gradient has mean 0"
    if config.kl_in_reward and not settings.kl_coeff:
        yield "kl_in_reward = True with kl_coeff = 0; expected kl_coeff above 0"
    yield from _together(settings, config)


def _together(settings: LossSettings, config: Any) -> Iterator[str]:
    if settings.use_critic and settings.advantage in GROUP_NORMALISED:
        yield (
            f"use_critic = True with advantage = {settings.advantage!r}; expected advantage = 'gae': with other "
            "estimators the group is the baseline, and advantages have no value per token"
        )
    elif settings.use_critic and settings.advantage != "gae":
        yield f"use_critic = True with advantage = {settings.advantage!r}; expected advantage = 'gae'"
    if settings.advantage == "gae" and settings.dynamic_sampling_tries:
        yield (
            f"dynamic_sampling_tries = {settings.dynamic_sampling_tries} with advantage = 'gae'; expected 0: with "
            "it, groups of equal rewards have a signal"
        )
    yield from _posterior(settings, config)
    if settings.advantage == "none":
        yield from _without_rewards(config)
    if settings.kl_reference != "base" and config.lora_rank:
        yield (
            f"kl_reference = {settings.kl_reference!r} with lora_rank = {config.lora_rank}; expected 'base': the "
            "reference is the model without its adapters, which is never updated"
        )
    if settings.kl_reference != "base" and not settings.kl_coeff:
        yield f"kl_reference = {settings.kl_reference!r} with kl_coeff = 0; expected kl_coeff above 0"
    if settings.kl_on_reused == "weighted" and not settings.kl_coeff:
        yield "kl_on_reused = 'weighted' with kl_coeff = 0; expected kl_coeff above 0"


def _without_rewards(config: Any) -> Iterator[str]:
    if not (isinstance(config.regularisers, Mapping) and "distill" in config.regularisers):
        yield "advantage = 'none' without a teacher; expected .distill(teacher=...): nothing else is learned"
    if config.flat().may_draw("reuse"):
        yield "advantage = 'none' with replay_reuse_fraction above 0; expected 0: stored groups train by their rewards"


def _posterior(settings: LossSettings, config: Any) -> Iterator[str]:
    if settings.advantage != "posterior":
        return
    if not config.replay_capacity:
        yield "advantage = 'posterior' with replay_capacity = 0; expected a memory, which keeps the history"
    if settings.prior_weight == 0 and config.group_size == 1:
        yield "prior_weight = 0 with group_size = 1; expected more than 0: a first visit has no other baseline"
    if settings.dynamic_sampling_tries:
        yield (
            f"dynamic_sampling_tries = {settings.dynamic_sampling_tries} with advantage = 'posterior'; expected 0: "
            "with it, groups of equal rewards can have a signal"
        )

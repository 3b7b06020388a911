"""Validates the settings of the loss; returns error messages "name = value; expected ..."."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rllib_srl.batch.estimators import ADVANTAGES, GROUP_NORMALISED
from rllib_srl.batch.posterior import SCALES
from rllib_srl.common.rules import Rules
from rllib_srl.common.setting_checks import are_numbers, is_integer, is_number
from rllib_srl.losses.bapo import BAPO_MODES
from rllib_srl.losses.clip import CLIP_RULES
from rllib_srl.losses.corrections import CORRECTIONS
from rllib_srl.losses.kl import KL_ESTIMATORS, KL_REWARDS
from rllib_srl.losses.presets import DEFAULTS, PRESET, PRESETS
from rllib_srl.losses.ratio import RATIO_LEVELS
from rllib_srl.losses.settings import LossSettings

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
OLD_POLICIES = ("decoupled", "bypass")
REFERENCES = ("base", "last_good", "ema")
TURN_MASKS = ("all", "first", "last")
_TOKEN_CORRECTIONS = ("tis", "mis", "geometric_mask", "mis_po")


_NUMBERS: dict[str, tuple[Any, str]] = {  # name: (condition, its text in the message)
    "clip_low": (lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "clip_high": (lambda x: x > 0, "a number above 0"),
    "dual_clip": (lambda x: x > 1, "a number above 1"),
    "clip_delta": (lambda x: x > 1, "a number above 1"),
    "bapo_target": (lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "entropy_coeff": (lambda x: x >= 0, "a number of at least 0"),
    "kl_coeff": (lambda x: x >= 0, "a number of at least 0"),
    "reference_rate": (lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "prior_weight": (lambda x: x >= 0, "a number of at least 0"),
    "min_surprise": (lambda x: x >= 0, "a number of at least 0"),
    "gae_lambda": (lambda x: 0 <= x <= 1, "a number in [0, 1]"),
    "critic_lr": (lambda x: x > 0, "a number above 0"),
    "overlong_penalty": (lambda x: x >= 0, "a number of at least 0"),
    "overlong_share": (lambda x: 0 < x <= 1, "a number in (0, 1]"),
}
_OR_NONE = ("tis_clip_max", "off_policy_mask")
_INTEGERS = {
    "reference_every": 1,
    "dynamic_sampling_tries": 0,
}
_PAIRS = {"cispo_bounds": 0.0, "sapo_taus": None, "correction_window": 0.0, "sequence_window": 0.0}


def faults_of_loss(config: Any) -> Iterator[str]:
    """Yield all errors of the loss settings of an `SRLConfig`; contradictions only if each setting alone is valid."""
    faults = [line for check in (_choices, _numbers, _bounds) for line in check(config)]
    yield from faults
    limits = (config.max_turns, config.max_turn_tokens, config.max_episode_tokens)
    if not faults and all(isinstance(limit, int) for limit in limits):  # `validation.py` reports invalid limits
        yield from _contradictions(LossSettings.of(config), config)


def _given(config: Any, name: str) -> Any:
    """Return the user's value, or the default if the value is left to the preset."""
    value = getattr(config, name)
    return DEFAULTS[name] if name in DEFAULTS and _is_preset(value) else value


def _is_preset(value: Any) -> bool:
    return isinstance(value, str) and value == PRESET


def _choices(config: Any) -> Iterator[str]:
    choices: dict[str, tuple[Any, ...]] = {
        "loss": (None, *PRESETS),
        "ratio_level": tuple(RATIO_LEVELS),
        "bapo_mode": BAPO_MODES,
        "aggregation": AGGREGATIONS,
        "surprise_scale": SCALES,
        "turn_mask": TURN_MASKS,
        "ratio_anchor": OLD_POLICIES,
        "kl_estimator": tuple(KL_ESTIMATORS),
        "kl_in_reward": (None, False, True),
        "kl_reference": REFERENCES,
        "kl_on_reused": ("off", "weighted"),
        "use_critic": (False, True),
    }
    for name, allowed in choices.items():
        value = _given(config, name)
        is_allowed = any(value == one and type(value) is type(one) for one in allowed)
        if not is_allowed:
            yield f"{name} = {value!r}; expected one of {', '.join(map(repr, allowed))}"
    tables: dict[str, Rules[Any]] = {"advantage": ADVANTAGES, "clip_rule": CLIP_RULES, "correction": CORRECTIONS}
    for name, rules in tables.items():
        value = _given(config, name)
        if fault := rules.fault(value):
            yield f"{name} = {value!r}; {fault}"
        elif name != "advantage" and rules.is_users(value) and config.num_learners:
            yield (
                f"{name} = {value!r}, registered in this process, with num_learners = {config.num_learners}; expected "
                "its import path 'module:rule': the learners are other processes"
            )


def _numbers(config: Any) -> Iterator[str]:
    for name, (is_right, expected) in _NUMBERS.items():
        value = _given(config, name)
        if not is_number(value) or not is_right(value):
            yield f"{name} = {value!r}; expected {expected}"
    for name in _OR_NONE:
        value = _given(config, name)
        if value is not None and (not is_number(value) or value <= 0):
            yield f"{name} = {value!r}; expected a number above 0, or None"
    for name, least in _INTEGERS.items():
        value = _given(config, name)
        if not is_integer(value, least):
            yield f"{name} = {value!r}; expected an integer of at least {least}"
    longest = config.longest_answer
    if longest is not None and not is_integer(longest, 1):
        yield f"longest_answer = {longest!r}; expected an integer of at least 1, or None"


def _bounds(config: Any) -> Iterator[str]:
    for name in ("cispo_bounds", "correction_window", "sequence_window"):
        value = _given(config, name)
        if not are_numbers(value, 2) or not 0 <= value[0] < value[1]:
            yield f"{name} = {value!r}; expected two numbers, 0 <= lower < upper"
    if not are_numbers(config.sapo_taus, 2) or min(config.sapo_taus) <= 0:
        yield f"sapo_taus = {config.sapo_taus!r}; expected two numbers above 0"
    for name, (low, high) in {"bapo_low": (0, 1), "bapo_high": (1, math.inf)}.items():
        value = getattr(config, name)
        if not are_numbers(value, 3) or not low <= value[0] <= value[1] <= high or value[2] <= 0:
            yield f"{name} = {value!r}; expected first <= last in [{low}, {high}] and a step above 0"


def _contradictions(settings: LossSettings, config: Any) -> Iterator[str]:
    is_clip_high_set = not _is_preset(config.clip_high)
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
    if settings.kl_reference != "base" and config.lora_rank:
        yield (
            f"kl_reference = {settings.kl_reference!r} with lora_rank = {config.lora_rank}; expected 'base': the "
            "reference is the model without its adapters, which is never updated"
        )
    if settings.kl_reference != "base" and not settings.kl_coeff:
        yield f"kl_reference = {settings.kl_reference!r} with kl_coeff = 0; expected kl_coeff above 0"
    if settings.kl_on_reused == "weighted" and not settings.kl_coeff:
        yield "kl_on_reused = 'weighted' with kl_coeff = 0; expected kl_coeff above 0"


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

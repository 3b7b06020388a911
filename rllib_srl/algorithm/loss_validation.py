"""Validates settings of the loss against each other and other parts; yields messages "name = value; expected ...".

`LossSettings` has the range of each alone; the names of rules are checked here, because `batch` has one of the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rllib_srl.batch.advantages import ADVANTAGES
from rllib_srl.common.rules import Rules
from rllib_srl.common.setting_model import PRESET, Clash, clashes, unread
from rllib_srl.losses.kl import KL_REWARDS
from rllib_srl.losses.policy import CLIP_RULES, CORRECTIONS
from rllib_srl.losses.settings import LossSettings

WITHOUT_CLIP_BOUNDS = ("cispo", "sapo", "none")  # clip rules that do not read clip_low and clip_high
_TOKEN_CORRECTIONS = ("tis", "mis", "geometric_mask", "mis_po")


def errors_of_loss(config: Any) -> Iterator[str]:
    """Yield all errors of the loss settings of an `SRLConfig`; contradictions only if all rules are known."""
    errors = list(_rules(config))
    yield from errors
    if not errors:
        loss = LossSettings.of(config)
        yield from clashes(unread(LossSettings, config, loss), loss)
        for check in (_of_ratios, _of_kl, _of_advantages):
            yield from clashes(check(loss, config), loss, config)


def _is_preset(value: Any) -> bool:
    return isinstance(value, str) and value == PRESET


def _rules(config: Any) -> Iterator[str]:
    tables: dict[str, Rules[Any]] = {"advantage": ADVANTAGES, "clip_rule": CLIP_RULES, "correction": CORRECTIONS}
    for name, rules in tables.items():
        value = getattr(config, name)
        if _is_preset(value):
            continue
        if error := rules.error(value):
            yield f"{name} = {value!r}; {error}"
        elif name != "advantage" and rules.is_users(value) and config.num_learners:
            yield (
                f"{name} = {value!r}, registered in this process, with num_learners = {config.num_learners}; expected "
                "its import path 'module:rule': the learners are other processes"
            )


def _of_ratios(loss: LossSettings, config: Any) -> Iterator[Clash]:
    for name in ("clip_low", "clip_high"):
        is_unread = loss.clip_rule in WITHOUT_CLIP_BOUNDS and not _is_preset(getattr(config, name))
        yield is_unread, f"{name} clip_rule", f"no {name}: the rule does not read it"
    is_split = loss.clip_rule == "symmetric" and not _is_preset(config.clip_high) and loss.clip_high != loss.clip_low
    yield is_split, "clip_high clip_rule", f"clip_low = {loss.clip_low!r}, or clip_rule = 'higher'"
    highest = 1 + loss.clip_high
    is_low = loss.clip_rule == "two_sided" and loss.clip_delta <= highest
    yield is_low, "clip_delta", f"more than 1 + clip_high = {highest!r}"
    is_mixed = loss.ratio_level != "token" and loss.correction in _TOKEN_CORRECTIONS
    expected = "'none', 'sequence_tis' or 'sequence_mask': the ratio is per episode, so its correction is too"
    yield is_mixed, "correction ratio_level", expected
    is_double = loss.ratio_anchor == "bypass" and loss.correction not in ("none", "mis_po")
    contained = "'none' or 'mis_po': the ratio to the engine's log-probs already contains the correction"
    yield is_double, "correction ratio_anchor", contained


def _of_kl(loss: LossSettings, config: Any) -> Iterator[Clash]:
    is_k1, is_weighted = loss.kl_estimator == "k1", loss.kl_on_reused == "weighted"
    yield is_k1 and is_weighted, "kl_on_reused kl_estimator", "'k2', 'k3' or 'k3_k2': k1's gradient has mean 0"
    has_no_reward = loss.kl_in_reward and loss.kl_estimator not in KL_REWARDS
    known = f"one of {', '.join(map(repr, KL_REWARDS))}: it differs from k3 in its gradient alone"
    yield has_no_reward, "kl_in_reward kl_estimator", known
    is_unrewarded = loss.kl_in_reward and is_weighted and not is_k1 and not has_no_reward
    yield is_unrewarded, "kl_in_reward kl_on_reused", "kl_in_reward = False: 'weighted' acts in the loss"
    is_flat = not loss.kl_in_reward and is_k1
    yield is_flat, "kl_in_reward kl_estimator", "another estimator: k1's gradient has mean 0"


def _of_advantages(loss: LossSettings, config: Any) -> Iterator[Clash]:
    is_sampled = loss.dynamic_sampling_tries and loss.advantage == "posterior"
    yield is_sampled, "dynamic_sampling_tries advantage", "0: with 'posterior', groups of equal rewards also teach"
    has_no_reward = loss.advantage == "none"
    is_taught = isinstance(config.regularisers, Mapping) and "distill" in config.regularisers
    yield has_no_reward and not is_taught, "advantage", "a teacher, .distill(teacher=...): nothing else is learned"
    may_reuse = has_no_reward and config.may_draw("reuse")
    yield may_reuse, "advantage replay_reuse_fraction", "no reuse: stored groups train by their rewards"
    is_posterior = loss.advantage == "posterior"
    memory = "a memory, which keeps the history"
    yield is_posterior and not config.replay_capacity, "advantage replay_capacity", memory
    is_bare = is_posterior and loss.prior_weight == 0 and config.group_size == 1
    yield is_bare, "prior_weight group_size", "more than 0: a first visit has no other baseline"

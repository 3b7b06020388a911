"""Define every setting of the loss, its default and its meaning; `SRLConfig.training` takes them by these names.

    TABLE                               name -> (default, unit and meaning); "preset" leaves the value to `loss`
    LossSettings.of(config)             every setting with its final value
    LossSettings.of(config).clip_low    one of them
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rllib_srl.common.setting_tables import Setting
from rllib_srl.losses.presets import PRESET, filled

TABLE: dict[str, Setting] = {
    "loss": Setting(None, "preset: grpo dr_grpo dapo gspo cispo rloo bapo mis_po, see docs/losses.md; None: no preset"),
    # ratio and clip rule
    "ratio_level": Setting(
        PRESET, '"token", "sequence" (product over an episode), "geometric" (mean) (token if no preset)'
    ),
    "clip_rule": Setting(
        PRESET,
        "symmetric higher dual two_sided cispo sapo bapo none, docs/losses.md (higher if no preset)",
        "clip_rule.name", is_head=True,
    ),
    "clip_low": Setting(PRESET, "lower clip bound of the ratio is 1 - clip_low (0.2 if no preset)"),
    "clip_high": Setting(PRESET, "upper clip bound of the ratio is 1 + clip_high (0.28 if no preset)"),
    "dual_clip": Setting(
        3.0,
        "cap on the loss of a token with a negative advantage, in units of |A|, > 1",
        "clip_rule.loss_cap", ("dual",),
    ),
    "clip_delta": Setting(4.0, "cap on the ratio itself, > 1 + clip_high", "clip_rule.ratio_cap", ("two_sided",)),
    "cispo_bounds": Setting(
        PRESET,
        "bounds of the ratio itself, not distances from 1 (0 and 5 if no preset)",
        "clip_rule.bounds", ("cispo",),
    ),
    "sapo_taus": Setting(
        (1.0, 1.05), "temperatures for a positive and for a negative advantage", "clip_rule.taus", ("sapo",)
    ),
    "bapo_mode": Setting(
        "active",
        '"active", "paper" or "released", the measure that sets the bounds (docs/losses.md)',
        "clip_rule.mode", ("bapo",),
    ),
    "bapo_target": Setting(
        0.4,
        "target share of tokens with a positive advantage, by the measure of mode",
        "clip_rule.target", ("bapo",),
    ),
    "bapo_low": Setting(
        (0.6, 0.9, 0.02), "search range of the lower bound: first, last, step", "clip_rule.low", ("bapo",)
    ),
    "bapo_high": Setting(
        (1.2, 3.0, 0.05), "search range of the upper bound: first, last, step", "clip_rule.high", ("bapo",)
    ),
    # weight of a token
    "aggregation": Setting(
        PRESET, 'loss of a batch: "token_mean", "sequence_mean" or "constant" (token_mean if no preset)'
    ),
    "longest_answer": Setting(
        None, "tokens an episode may write, for constant and overlong; None: max_turns*max_turn_tokens"
    ),
    "turn_mask": Setting("all", 'turns of an episode that are trained on: "all", "first" or "last"'),
    # off-policy correction and masks
    "ratio_anchor": Setting(
        PRESET, 'ratio to "decoupled" (learner at the start) or "bypass" (engine) (decoupled if no preset)'
    ),
    "correction": Setting(
        PRESET,
        "rule: none tis sequence_tis mis sequence_mask geometric_mask mis_po (tis if no preset)",
        "rollout_is_correction.name", is_head=True,
    ),
    "tis_clip_max": Setting(
        PRESET,
        "cap on weights of tis, sequence_tis and geometric_mask; None: no tis (2 if no preset)",
        "rollout_is_correction.tis_clip_max", ("tis", "sequence_tis", "geometric_mask"),
    ),
    "correction_window": Setting(
        PRESET,
        "range of ratios kept by mis, sequence_mask and mis_po (0.5 to 5 if no preset)",
        "rollout_is_correction.window", ("mis", "sequence_mask", "mis_po"),
    ),
    "sequence_window": Setting(
        PRESET,
        "range of mean ratios kept by geometric_mask and mis_po (0.999 to 1.002 if no preset)",
        "rollout_is_correction.sequence_window", ("geometric_mask", "mis_po"),
    ),
    "off_policy_mask": Setting(
        None, "maximum mean log-ratio of episodes with advantage < 0, nats per token; None: no mask"
    ),
    # entropy and KL terms
    "entropy_coeff": Setting(0.0, "weight of the entropy bonus; 0: none"),
    "kl_coeff": Setting(
        PRESET,
        "weight of the KL to the reference policy; 0 loads no reference (0 if no preset)",
        "kl.coeff", is_head=True,
    ),
    "kl_estimator": Setting(
        PRESET, '"k1" (in the reward), "k2", "k3" or "k3_k2" (in the loss) (k3 if no preset)', "kl.estimator"
    ),
    "kl_in_reward": Setting(
        None, "True: coeff * KL of an episode is subtracted from its reward, also of k2 and k3; None: of k1 only",
        "kl.in_reward",
    ),
    "kl_reference": Setting(
        "base", 'reference policy of the KL: "base" (the starting model), "last_good" or "ema"', "kl.reference"
    ),
    "kl_on_reused": Setting("off", 'KL on reused tokens: "off", or "weighted" by the importance ratio', "kl.on_reused"),
    "reference_every": Setting(
        100, "iterations between updates (ema) or checks (last_good) of the reference policy", "kl.reference_every"
    ),
    "reference_rate": Setting(
        1.0, "ema: share of the policy in the new reference, in (0, 1]; 1 copies the policy", "kl.reference_rate"
    ),
    # advantage estimation and reward shaping
    "prior_weight": Setting(
        2.0, "episodes that the mean reward of the domain counts as in the baseline", "advantage.prior_weight",
        ("posterior",),
    ),
    "min_surprise": Setting(
        0.1, "largest |advantage| of a group below which it is not trained on", "advantage.min_surprise", ("posterior",)
    ),
    "surprise_scale": Setting(
        "rms",
        'r - baseline is divided by its "rms" over the batch, "centred" first, or "none"',
        "advantage.scale", ("posterior",),
    ),
    "gae_lambda": Setting(1.0, "lambda, in [0, 1]", "advantage.gae_lambda", ("gae",)),
    "use_critic": Setting(False, "train a value head, for gae", "advantage.use_critic"),
    "critic_lr": Setting(1e-3, "learning rate of the value head", "advantage.critic_lr", ("gae",)),
    "overlong_penalty": Setting(
        PRESET,
        "maximum length penalty, reached at longest_answer tokens; 0: none (0 if no preset)",
        "overlong_penalty.most", is_head=True,
    ),
    "overlong_share": Setting(
        0.2, "share of longest_answer over which the length penalty rises, in (0, 1]", "overlong_penalty.share"
    ),
    "dynamic_sampling_tries": Setting(
        PRESET, "rounds of fresh prompts in place of groups without signal (0 if no preset)"
    ),
}
REPLAY_NAMES = ("reuse_correction", "mask_window", "max_logp_gap")  # of the replay table, prefixed `replay_` there


@dataclass(frozen=True)
class LossSettings:
    """Final values of all loss settings. Invariant: no value is `PRESET`."""

    advantage: str
    ratio_level: str
    clip_rule: str
    clip_low: float
    clip_high: float
    dual_clip: float
    clip_delta: float
    cispo_bounds: tuple[float, float]
    sapo_taus: tuple[float, float]
    bapo_mode: str
    bapo_target: float
    bapo_low: tuple[float, float, float]
    bapo_high: tuple[float, float, float]
    aggregation: str
    longest_answer: int
    turn_mask: str
    ratio_anchor: str
    correction: str
    tis_clip_max: float | None
    correction_window: tuple[float, float]
    sequence_window: tuple[float, float]
    off_policy_mask: float | None
    entropy_coeff: float
    kl_coeff: float
    kl_estimator: str
    kl_in_reward: bool
    kl_reference: str
    kl_on_reused: str
    reference_every: int
    reference_rate: float
    prior_weight: float
    min_surprise: float
    surprise_scale: str
    gae_lambda: float
    use_critic: bool
    critic_lr: float
    overlong_penalty: float
    overlong_share: float
    dynamic_sampling_tries: int
    reuse_correction: str
    mask_window: tuple[float, float]
    max_logp_gap: float | None
    loss: str | None = None

    @classmethod
    def of(cls, config: Any) -> LossSettings:
        """Return the settings of an `SRLConfig` with every "preset" filled in, without validation."""
        given = {name: getattr(config, name) for name in (*TABLE, "advantage")}
        values = filled(given, given["loss"])
        values |= {name: getattr(config, f"replay_{name}") for name in REPLAY_NAMES}
        if values["tis_clip_max"] is None and given["correction"] == PRESET and values["correction"] == "tis":
            values["correction"] = "none"
        values["kl_in_reward"] = _is_in_reward(values)
        if values["longest_answer"] is None:
            values["longest_answer"] = min(config.max_turns * config.max_turn_tokens, config.max_episode_tokens)
        return cls(**values)

    @classmethod
    def made(cls, **given: Any) -> LossSettings:
        """Return the defaults with some settings changed, for use without an `SRLConfig`."""
        rest = {"reuse_correction": "clip", "mask_window": (0.5, 2.0), "max_logp_gap": 1.0, "longest_answer": 512}
        table = {name: row.default for name, row in TABLE.items()} | {"advantage": PRESET} | rest
        values = filled({**table, **given}, given.get("loss"))
        return cls(**{**values, "kl_in_reward": _is_in_reward(values)})

    @property
    def truncation(self) -> float:
        """Upper bound of the correction; infinity if there is none."""
        return math.inf if self.tis_clip_max is None else self.tis_clip_max

    @property
    def needs_reference(self) -> bool:
        """Return whether a KL term needs the reference model."""
        return bool(self.kl_coeff)

    @property
    def needs_batch_statistics(self) -> bool:
        """Return whether each step needs statistics of the whole batch before its gradient."""
        return self.clip_rule == "bapo"

    def changed(self, **values: Any) -> LossSettings:
        """Return these settings with some changed."""
        return dataclasses.replace(self, **values)


def _is_in_reward(values: Mapping[str, Any]) -> bool:
    given = values["kl_in_reward"]
    return values["kl_estimator"] == "k1" if given is None else bool(given)

"""Every setting of the loss, its default and its meaning; `SRLConfig.training` takes them by these names.

    TABLE                               name -> (default, unit and meaning); "preset" leaves the value to `loss`
    LossSettings.of(config)             every value as it is used
    LossSettings.of(config).reuse_ramp  ...
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from rllib_srl.losses.presets import PRESET, filled

TABLE: dict[str, tuple[Any, str]] = {
    "loss": (None, "a key of `PRESETS` that fills what is left at \"preset\"; None: the values in brackets below"),
    # what the ratio is, and how it is held
    "ratio_level": (PRESET, '"token", "sequence" (product over the episode) or "geometric" (its mean) (token)'),
    "clip_rule": (PRESET, "a key of `CLIP_RULES`: symmetric higher dual two_sided cispo sapo bapo none (higher)"),
    "clip_low": (PRESET, "the ratio may fall to 1 - clip_low (0.2)"),
    "clip_high": (PRESET, "the ratio may rise to 1 + clip_high (0.28)"),
    "dual_clip": (3.0, "dual: the loss of a bad token is at most this times -A, > 1"),
    "clip_delta": (4.0, "two_sided: the ratio itself is at most this, > 1 + clip_high"),
    "cispo_bounds": (PRESET, "cispo: bounds of the ratio themselves, not distances from 1 (0 and 5)"),
    "sapo_taus": ((1.0, 1.05), "sapo: temperature with a positive and a negative advantage"),
    "bapo_mode": ("active", '"active", "paper" or "released": what the search for bounds counts'),
    "bapo_target": (0.4, "bapo: share of positive tokens the search is after, by the measure of its mode"),
    "bapo_low": ((0.6, 0.9, 0.02), "bapo: lower bound: first, last, step"),
    "bapo_high": ((1.2, 3.0, 0.05), "bapo: upper bound: first, last, step"),
    # what a token counts
    "aggregation": (PRESET, '"token_mean", "sequence_mean" or "constant" (Dr.GRPO), over the batch (token_mean)'),
    "longest_answer": (None, "tokens an episode may write, for constant and overlong; None: max_turns*max_turn_tokens"),
    "turn_mask": ("all", '"all", "first" or "last": turns of an episode that are trained on'),
    # who wrote it
    "old_policy": (PRESET, 'ratio to "decoupled" (the learner before the update) or "bypass" (the engine) (decoupled)'),
    "correction": (PRESET, "of `CORRECTIONS`: none tis sequence_tis mis sequence_mask geometric_mask mis_po (tis)"),
    "is_truncation": (PRESET, "upper bound of the engine-mismatch correction; None switches tis off (2)"),
    "correction_window": (PRESET, "ratios that mis, sequence_mask and mis_po keep (0.5 and 5)"),
    "sequence_window": (PRESET, "geometric mean ratios that geometric_mask and mis_po keep (0.999 and 1.002)"),
    "off_policy_mask": (None, "nats a token from which an episode with negative advantage is left out; None keeps all"),
    "cov_clip_ratio": (0.0, "share of tokens left out at random among those of high covariance; 0: none"),
    "cov_clip_window": ((1.0, 40.0), "covariances of advantage and log-prob among which they are drawn"),
    # what is added to it
    "entropy_coeff": (0.0, "weight of the entropy bonus"),
    "kl_coeff": (PRESET, "weight of the KL to the reference; 0 loads none (0)"),
    "kl_estimator": (PRESET, '"k1" (in the reward), "k2", "k3" or "k3_k2" (in the loss) (k3)'),
    "kl_reference": ("base", '"base" (the starting model), "last_good" or "ema": what the KL is taken against'),
    "kl_on_reused": ("off", '"off" or "weighted" (by the ratio): KL on reused tokens'),
    "reference_every": (100, "iterations between two looks at, or updates of, the reference"),
    "reference_rate": (1.0, "ema: share of the policy in the new reference; 1 copies it"),
    # whom an episode is compared with
    "recalibration_window": (10_240, "group means whose median \"recalibrated\" subtracts"),
    "gae_lambda": (1.0, 'of advantage "gae", in [0, 1]'),
    "use_critic": (False, 'a value head, for advantage "gae"'),
    "critic_lr": (1e-3, "learning rate of the value head"),
    "overlong_penalty": (PRESET, "taken off the reward of an episode that fills longest_answer; 0: none (0)"),
    "overlong_share": (0.2, "share of longest_answer over which the penalty rises"),
    "tool_reward": (0.0, "reward of each tool call, up to 1 together; 0: none"),
    "tool_reward_iterations": (200, "iterations over which tool_reward decays to nothing"),
    "dynamic_sampling_tries": (PRESET, "rounds of fresh prompts in place of groups without signal; 0: none (0)"),
    # stored groups
    "reuse_shaping": (0.1, 'beta of w / (w + beta), for replay_reuse_correction "shape"'),
    "reuse_normalisation": ("split", '"split" (played and reused tokens each by their own number) or "joint"'),
    "reuse_advantage": (None, "rule of reused groups, None: that of played ones"),
    "reuse_positive_only": (False, "train on stored episodes with a positive advantage only"),
    "reuse_ramp": (0, "iterations over which the weight of reused tokens rises from 0 along a cosine; 0: none"),
    "rescue": ("none", '"none", "arpo" (a stored success in a dead group) or "rlep" (some in every group)'),
    "rescue_episodes": (2, "rlep: stored successes of a group, at most"),
}
REPLAY_NAMES = ("reuse_correction", "mask_window", "max_drift")  # of the memory's table, with the prefix `replay_`


@dataclass(frozen=True)
class LossSettings:
    """Every setting of the loss as it is used. Invariant: none is left to a preset."""

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
    old_policy: str
    correction: str
    is_truncation: float | None
    correction_window: tuple[float, float]
    sequence_window: tuple[float, float]
    off_policy_mask: float | None
    cov_clip_ratio: float
    cov_clip_window: tuple[float, float]
    entropy_coeff: float
    kl_coeff: float
    kl_estimator: str
    kl_reference: str
    kl_on_reused: str
    reference_every: int
    reference_rate: float
    recalibration_window: int
    gae_lambda: float
    use_critic: bool
    critic_lr: float
    overlong_penalty: float
    overlong_share: float
    tool_reward: float
    tool_reward_iterations: int
    dynamic_sampling_tries: int
    reuse_shaping: float
    reuse_normalisation: str
    reuse_advantage: str | None
    reuse_positive_only: bool
    reuse_ramp: int
    rescue: str
    rescue_episodes: int
    reuse_correction: str
    mask_window: tuple[float, float]
    max_drift: float | None
    loss: str | None = None

    @classmethod
    def of(cls, config: Any) -> LossSettings:
        """Return the settings of an `SRLConfig`, each "preset" filled in; not checked."""
        given = {name: getattr(config, name) for name in (*TABLE, "advantage")}
        values = filled(given, given["loss"])
        values |= {name: getattr(config, f"replay_{name}") for name in REPLAY_NAMES}
        if values["is_truncation"] is None and given["correction"] == PRESET and values["correction"] == "tis":
            values["correction"] = "none"
        if values["longest_answer"] is None:
            values["longest_answer"] = min(config.max_turns * config.max_turn_tokens, config.max_episode_tokens)
        return cls(**values)

    @classmethod
    def made(cls, **given: Any) -> LossSettings:
        """Return the defaults with some settings changed, for use without an `SRLConfig`."""
        rest = {"reuse_correction": "clip", "mask_window": (0.5, 2.0), "max_drift": 1.0, "longest_answer": 512}
        table = {name: default for name, (default, _) in TABLE.items()} | {"advantage": PRESET} | rest
        return cls(**filled({**table, **given}, given.get("loss")))

    @property
    def truncation(self) -> float:
        """Upper bound of a correction; infinity where there is none."""
        return math.inf if self.is_truncation is None else self.is_truncation

    @property
    def needs_reference(self) -> bool:
        """Say whether a KL term asks for a reference model."""
        return bool(self.kl_coeff)

    @property
    def needs_survey(self) -> bool:
        """Say whether a step looks at the whole batch before its gradient (`survey`)."""
        return self.clip_rule == "bapo" or self.cov_clip_ratio > 0

    def changed(self, **values: Any) -> LossSettings:
        """Return these settings with some changed."""
        return dataclasses.replace(self, **values)

"""Every setting of the loss: default, range and meaning; `SRLConfig.training` takes them by these names.

    LossSettings.of(config)             every setting with its final value
    LossSettings.of(config).clip_low    one of them

A setting marked `is_preset` is left to the preset that `loss` names, unless the user gives it:

    setting given by the user  >  preset named by `loss`  >  default

    SRLConfig().training(loss="gspo", clip_high=1e-3).loss_settings().clip_low   ->  3e-4

`loss = None` is DAPO's token mean and clip-higher with a truncated correction for the engine's log-probs, without
DAPO's resampling and length penalty. To add a preset, register a row: `PRESETS["mine"] = {...}`.
Only mis_po loads a reference model for a KL. The papers of the others use KL weights from 0 to 0.04; set `kl_coeff`.

Differences from the papers:
1. A preset that sets no correction uses the default: truncated importance sampling of learner against engine (`tis`).
2. mis_po's trajectory window [0.996, 1.001] and KL weight are our reading of the report.
3. rloo divides the sum over an episode's tokens by the constant `longest_answer`; the learning rate absorbs the factor.

Sources: Shao et al. 2024 (GRPO), arXiv 2402.03300; Liu et al. 2025 (Dr.GRPO), arXiv 2503.20783;
Yu et al. 2025 (DAPO), arXiv 2503.14476; Zheng et al. 2025 (GSPO), arXiv 2507.18071;
MiniMax 2025 (CISPO), arXiv 2506.13585, with the bound of Khatri et al. 2025 (ScaleRL), arXiv 2510.13786;
Ahmadian et al. 2024 (RLOO), arXiv 2402.14740;
StepFun 2026 (MIS-PO), arXiv 2602.10604.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from rllib_srl.common.setting_model import PRESET, Pair, Settings, setting, where

Bounds = Annotated[Pair, where(lambda low, high: 0 <= low < high)]
_BOUNDS = "two numbers, 0 <= lower < upper"
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"clip_rule": "symmetric", "clip_high": 0.2, "aggregation": "sequence_mean"},
    "dr_grpo": {"advantage": "mean_only", "clip_rule": "symmetric", "clip_high": 0.2, "aggregation": "constant"},
    "dapo": {"overlong_penalty": 1.0, "dynamic_sampling_tries": 10},
    "gspo": {
        "ratio_level": "geometric",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence_mean",
        "correction": "none",
    },
    "cispo": {"clip_rule": "cispo"},
    "rloo": {"advantage": "leave_one_out", "clip_rule": "none", "aggregation": "constant"},
    "mis_po": {
        "clip_rule": "none",
        "correction": "mis_po",
        "correction_window": (0.5, 2.0),
        "sequence_window": (0.996, 1.001),
        "kl_coeff": 1e-3,
        "kl_estimator": "k3",
    },
}


class LossSettings(Settings):
    """Final values of all loss settings. Invariant: no value is `PRESET`."""

    # `loss_validation.py` checks `advantage`, `clip_rule` and `correction`, whose tables this module must not import.
    advantage: Any = setting(
        "group", "group mean_only batch leave_one_out posterior none, or my_file.py:function, docs/losses.md",
        is_preset=True,
    )
    loss: Literal[tuple(PRESETS)] | None = setting(  # type: ignore[valid-type]
        None, f"preset of the loss alone: {' '.join(PRESETS)} (docs/losses.md); None: no preset"
    )
    # ratio and clip rule
    ratio_level: Literal["token", "sequence", "geometric"] = setting(
        "token", '"token", "sequence" (product over an episode), "geometric" (mean)', is_preset=True
    )
    clip_rule: Any = setting(
        "higher", "symmetric higher dual two_sided cispo sapo none, or my_file.py:function, docs/losses.md",
        is_preset=True,
    )
    clip_low: float = setting(0.2, "lower clip bound of the ratio is 1 - clip_low", gt=0, le=1, is_preset=True)
    clip_high: float = setting(0.28, "upper clip bound of the ratio is 1 + clip_high", gt=0, is_preset=True)
    dual_clip: float = setting(
        3.0, "cap on the loss of a token with a negative advantage, in units of |A|", needs="clip_rule dual", gt=1
    )
    clip_delta: float = setting(4.0, "cap on the ratio itself, > 1 + clip_high", needs="clip_rule two_sided", gt=1)
    cispo_bounds: Bounds = setting(
        (0.0, 5.0), "bounds of the ratio itself, not distances from 1", _BOUNDS, needs="clip_rule cispo",
        is_preset=True
    )
    # weight of a token
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = setting(
        "token_mean", 'loss of a batch: "token_mean", "sequence_mean" or "constant"', is_preset=True
    )
    longest_answer: int = setting(
        None, "tokens an episode may write, for constant and overlong; None: max_turns*max_turn_tokens", ge=1
    )
    # off-policy correction
    ratio_anchor: Literal["decoupled", "bypass"] = setting(
        "decoupled", 'ratio to "decoupled" (learner at the start) or "bypass" (engine)', is_preset=True
    )
    correction: Any = setting(
        "tis", "rule: none tis sequence_tis mis sequence_mask geometric_mask mis_po", is_preset=True
    )
    tis_clip_max: float = setting(
        2.0, "cap on the weights", needs="correction tis sequence_tis geometric_mask", gt=0, is_preset=True
    )
    correction_window: Bounds = setting(
        (0.5, 5.0), "range of ratios that are kept", _BOUNDS, needs="correction mis sequence_mask mis_po",
        is_preset=True
    )
    sequence_window: Bounds = setting(
        (0.999, 1.002), "range of mean ratios that are kept", _BOUNDS, needs="correction geometric_mask mis_po",
        is_preset=True
    )
    # entropy and KL terms
    entropy_coeff: float = setting(0.0, "weight of the entropy bonus; 0: none", ge=0)
    kl_coeff: float = setting(
        0.0, "weight of the KL to the reference policy; 0 loads no reference", ge=0, is_preset=True
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3_k2"] = setting(
        "k3", '"k1" (in the reward), "k2", "k3" or "k3_k2" (in the loss)', is_preset=True
    )
    kl_in_reward: bool | None = setting(
        None, "True: kl_coeff * KL of an episode is subtracted from its reward; None: with estimator k1 only",
        needs="kl_coeff"
    )
    kl_on_reused: Literal["off", "weighted"] = setting(
        "off", 'KL on reused tokens: "off", or "weighted" by the importance ratio', needs="kl_coeff"
    )
    # advantage estimation and reward shaping
    prior_weight: float = setting(
        2.0, "episodes that the mean reward of the domain counts as", needs="advantage posterior", ge=0
    )
    min_surprise: float = setting(
        0.1, "largest |advantage| of a group below which it is left out", needs="advantage posterior", ge=0
    )
    surprise_scale: Literal["rms", "centred", "none"] = setting(
        "rms", 'r - baseline is divided by its "rms" over the batch, "centred" first, or "none"',
        needs="advantage posterior"
    )
    overlong_penalty: float = setting(
        0.0, "maximum length penalty, reached at longest_answer tokens; 0: none", ge=0, is_preset=True
    )
    dynamic_sampling_tries: int = setting(
        0, "rounds of fresh prompts in place of zero-variance groups", ge=0, is_preset=True
    )
    # settings of the memory, which have the prefix `replay_` there
    max_logp_gap: float | None = 1.0

    @classmethod
    def of(cls, config: Any) -> LossSettings:
        """Return the settings of an `SRLConfig` with every "preset" filled in, without validation."""
        settings = {name: getattr(config, name) for name in cls.table()}
        values = filled(settings, settings["loss"])
        of_memory = cls.model_fields.keys() - cls.table().keys()
        values |= {name: getattr(config, f"replay_{name}") for name in of_memory}
        values["kl_in_reward"] = _is_in_reward(values)
        if values["longest_answer"] is None:
            values["longest_answer"] = min(config.max_turns * config.max_turn_tokens, config.longest_episode)
        return cls.model_construct(**values)

    @classmethod
    def made(cls, **changes: Any) -> LossSettings:
        """Return the defaults with some settings changed, for use without an `SRLConfig`."""
        values = {"longest_answer": 512, **PRESETS.get(changes.get("loss", ""), {}), **changes}
        plain = cls(**values)
        return plain.model_copy(update={"kl_in_reward": _is_in_reward(vars(plain))})

    @property
    def needs_reference(self) -> bool:
        """Return whether a KL term needs the reference model."""
        return bool(self.kl_coeff)

    def contradictions(self) -> tuple[str, ...]:
        """Return nothing: `loss_validation.py` knows which values a preset has set."""
        return ()


def filled(entries: Mapping[str, Any], preset: Any) -> dict[str, Any]:
    """Return `entries` with each `PRESET` replaced by the preset's value, else by the default.

    Args:
        entries: settings by name.
        preset: a key of `PRESETS`; None means the defaults, as does an unknown name (validation reports it separately).
    """
    values = {name: row.default for name, row in LossSettings.table().items() if row.is_preset}
    values |= PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    is_left = {name for name, value in entries.items() if name in values and isinstance(value, str) and value == PRESET}
    return {name: values[name] if name in is_left else value for name, value in entries.items()}


def _is_in_reward(values: Mapping[str, Any]) -> bool:
    kl_in_reward = values["kl_in_reward"]
    return bool(values["kl_estimator"] == "k1" if kl_in_reward is None else kl_in_reward)

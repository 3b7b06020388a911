"""Losses by name: what each preset fills in where the user has set nothing.

    setting given by the user  >  preset named by `loss`  >  default

    SRLConfig().training(loss="gspo", clip_high=1e-3).loss_settings().clip_low   ->  3e-4

`loss = None` is DAPO's token mean and clip-higher with a truncated correction for the engine's log-probs, without
DAPO's resampling and length penalty. A user's own preset is one registered row: `PRESETS["mine"] = {...}`.
No preset loads a reference for a KL, but mis_po: the others' papers give weights from 0 to 0.04, set `kl_coeff`.

Where presets differ from the papers:
1. Every one without a correction of its own keeps the truncated one for engine against learner (`tis`).
2. bapo's `active` mode counts only tokens that still have a gradient; `paper` and `released` are the originals.
3. mis_po's trajectory window [0.996, 1.001] and KL weight are our reading of the report.
4. rloo sums over an episode's tokens up to the constant `longest_answer`, which the learning rate absorbs.

Sources: Shao et al. 2024 (GRPO), arXiv 2402.03300; Liu et al. 2025 (Dr.GRPO), arXiv 2503.20783;
Yu et al. 2025 (DAPO), arXiv 2503.14476; Zheng et al. 2025 (GSPO), arXiv 2507.18071;
MiniMax 2025 (CISPO), arXiv 2506.13585, with the bound of Khatri et al. 2025 (ScaleRL), arXiv 2510.13786;
Ahmadian et al. 2024 (RLOO), arXiv 2402.14740; Xi et al. 2025 (BAPO), arXiv 2510.18927;
StepFun 2026 (MIS-PO), arXiv 2602.10604.
"""

from __future__ import annotations

from typing import Any

PRESET = "preset"  # the value of a setting that the user has left to the preset

DEFAULTS: dict[str, Any] = {
    "advantage": "group",
    "ratio_level": "token",
    "clip_rule": "higher",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "cispo_bounds": (0.0, 5.0),
    "aggregation": "token_mean",
    "old_policy": "decoupled",
    "correction": "tis",
    "is_truncation": 2.0,
    "correction_window": (0.5, 5.0),
    "sequence_window": (0.999, 1.002),
    "kl_coeff": 0.0,
    "kl_estimator": "k3",
    "overlong_penalty": 0.0,
    "dynamic_sampling_tries": 0,
}

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
    "bapo": {"clip_rule": "bapo", "old_policy": "bypass", "correction": "none"},
    "mis_po": {
        "clip_rule": "none",
        "correction": "mis_po",
        "correction_window": (0.5, 2.0),
        "sequence_window": (0.996, 1.001),
        "kl_coeff": 1e-3,
        "kl_estimator": "k3",
    },
}


def filled(given: dict[str, Any], preset: str | None) -> dict[str, Any]:
    """Return `given` with a value in place of each `PRESET`: the preset's, else the default.

    Args:
        given: settings by name.
        preset: a key of `PRESETS`; None, or one that is unknown (a fault of its own), stands for the defaults.
    """
    values = {**DEFAULTS, **PRESETS.get(preset or "", {})}
    return {name: values[name] if name in values and value == PRESET else value for name, value in given.items()}

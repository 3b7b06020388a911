"""Named losses: each preset fills in the settings that the user has not set.

    setting given by the user  >  preset named by `loss`  >  default

    SRLConfig().training(loss="gspo", clip_high=1e-3).loss_settings().clip_low   ->  3e-4

`loss = None` is DAPO's token mean and clip-higher with a truncated correction for the engine's log-probs, without
DAPO's resampling and length penalty. To add a preset, register a row: `PRESETS["mine"] = {...}`.
Only mis_po loads a reference model for a KL. The papers of the others use KL weights from 0 to 0.04; set `kl_coeff`.

Differences from the papers:
1. A preset that sets no correction uses the default: truncated importance sampling of learner against engine (`tis`).
2. bapo's `active` mode counts only tokens that still have a gradient; `paper` and `released` are the originals.
3. mis_po's trajectory window [0.996, 1.001] and KL weight are our reading of the report.
4. rloo divides the sum over an episode's tokens by the constant `longest_answer`; the learning rate absorbs the factor.

Sources: Shao et al. 2024 (GRPO), arXiv 2402.03300; Liu et al. 2025 (Dr.GRPO), arXiv 2503.20783;
Yu et al. 2025 (DAPO), arXiv 2503.14476; Zheng et al. 2025 (GSPO), arXiv 2507.18071;
MiniMax 2025 (CISPO), arXiv 2506.13585, with the bound of Khatri et al. 2025 (ScaleRL), arXiv 2510.13786;
Ahmadian et al. 2024 (RLOO), arXiv 2402.14740; Xi et al. 2025 (BAPO), arXiv 2510.18927;
StepFun 2026 (MIS-PO), arXiv 2602.10604.
"""

from __future__ import annotations

from typing import Any

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
    "bapo": {"clip_rule": "bapo", "ratio_anchor": "bypass", "correction": "none"},
    "mis_po": {
        "clip_rule": "none",
        "correction": "mis_po",
        "correction_window": (0.5, 2.0),
        "sequence_window": (0.996, 1.001),
        "kl_coeff": 1e-3,
        "kl_estimator": "k3",
    },
}


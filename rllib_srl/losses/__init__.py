"""Compute the policy loss from parts chosen by name: pure torch functions in fp32 log space.

    ratio      = level(logp - anchor_logp)                         `ratio`        token, sequence, geometric
    surrogate  = rule(ratio, A)                                    `clip`         symmetric, higher, dual, ...
    correction = rule(prox_logp - behaviour_logp)                  `corrections`  none, tis, mis, ...
    loss       = sum_N scale * (correction * surrogate + kl_coeff * kl - entropy_coeff * entropy)
                                                                   `kl`           k1, k2, k3, k3_k2

                 anchor_logp
    decoupled    prox_logp           prox = the learner at the start of the update
    bypass       behaviour_logp      behaviour = the engine that wrote the token
    reused       set by replay_reuse_correction, see `corrections`

`scale` is fixed before any sharding (`batch/loss_weights.py`), so any number of learners and any micro-batches give the
same gradient. `presets` holds named combinations, `settings` every setting; docs/losses.md lists sources and tests.

Source: Schulman et al. 2017, arXiv 1707.06347 eq. 7; each module lists the sources of its part.
"""

from __future__ import annotations

from rllib_srl.losses.clip import CLIP_RULES, Tokens
from rllib_srl.losses.corrections import (
    CORRECTIONS,
    REUSE_CORRECTIONS,
    correction_of,
    importance_correction,
    is_on_policy,
)
from rllib_srl.losses.episodes import episode_mean, episode_sum
from rllib_srl.losses.kl import KL_ESTIMATORS, KL_LOSSES, KL_REWARDS, k1, k2, k3, k3_k2
from rllib_srl.losses.presets import PRESET, PRESETS
from rllib_srl.losses.ratio import MAX_LOG_RATIO, RATIO_LEVELS, ratio_of
from rllib_srl.losses.settings import LossSettings

__all__ = [
    "CLIP_RULES",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "KL_LOSSES",
    "KL_REWARDS",
    "MAX_LOG_RATIO",
    "PRESET",
    "PRESETS",
    "RATIO_LEVELS",
    "REUSE_CORRECTIONS",
    "LossSettings",
    "Tokens",
    "correction_of",
    "episode_mean",
    "episode_sum",
    "importance_correction",
    "is_on_policy",
    "k1",
    "k2",
    "k3",
    "k3_k2",
    "ratio_of",
]

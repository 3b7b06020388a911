"""Estimates the pass rates of prompts from the memory, as Beta distributions.

    reviewed item     its own posterior, see `schedule/grading.py`
    other prompt      Beta(2 m, 2 (1 - m)), m = (1/2 + sum of the posterior means) / (1 + number of reviewed items)
                      over the reviewed items of its domain: 1/2 and the uniform distribution in a new domain

The estimate of an item is that of its last visit, however long ago that was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rllib_srl.replay.store.items import ItemStore
from rllib_srl.types import Prompt

DOMAIN_WEIGHT = 2.0  # episodes that the mean of a domain counts for


class PassRates(NamedTuple):
    """What one shard has recorded."""

    items: dict[str, tuple[float, float]]  # prompt key -> alpha and beta, for the reviewed items among the prompts
    domains: dict[str, tuple[float, int]]  # domain -> sum of the posterior means and number of reviewed items


def pass_rates_of(store: ItemStore, keys: Iterable[str]) -> PassRates:
    """Return the posteriors of some prompts, and the sums of all domains."""
    slots = {key: store.slot_of(int(key, 16)) for key in keys}
    rows = {key: store.items[slot] for key, slot in slots.items() if slot is not None}
    items = {key: (float(row["alpha"]), float(row["beta"])) for key, row in rows.items() if row["reps"] > 0}
    all_slots = store.slots()
    reviewed = all_slots[store.items["reps"][all_slots] > 0]
    alpha_N, beta_N, domain_N = (store.items[name][reviewed] for name in ("alpha", "beta", "domain"))
    num_domains = len(store.domains)
    mean_N = alpha_N.astype(np.float64) / (alpha_N + beta_N)
    sum_K = np.bincount(domain_N, mean_N, num_domains)
    num_K = np.bincount(domain_N, minlength=num_domains)
    return PassRates(items, dict(zip(store.domains, zip(sum_K.tolist(), num_K.tolist(), strict=True), strict=True)))


def estimates(prompts: Sequence[Prompt], parts: Sequence[PassRates]) -> np.ndarray:
    """Return alpha and beta of each prompt's pass rate, float64 [P, 2].

    Args:
        prompts: the prompts.
        parts: from all shards; () for no memory.
    """
    known = {key: posterior for part in parts for key, posterior in part.items.items()}
    sums: dict[str, tuple[float, int]] = {}
    for part in parts:
        for domain, (total, num) in part.domains.items():
            before = sums.get(domain, (0.0, 0))
            sums[domain] = (before[0] + total, before[1] + num)
    found = [known.get(prompt.key) or _of_domain(*sums.get(prompt.domain, (0.0, 0))) for prompt in prompts]
    return np.array(found, np.float64).reshape(len(prompts), 2)


def _of_domain(total: float, num: int) -> tuple[float, float]:
    mean = (0.5 + total) / (1 + num)
    return DOMAIN_WEIGHT * mean, DOMAIN_WEIGHT * (1 - mean)

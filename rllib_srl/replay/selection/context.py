"""What the rule `signal` reads beside the columns of its candidates: its parameters, and statistics of each domain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from rllib_srl.common.setting_checks import is_number
from rllib_srl.common.setting_tables import setting

FIRST_SOLVED = 4.0  # U before anything was solved, and its least value


@dataclass(frozen=True)
class SignalSettings:
    """Parameters of the rule `signal`, under the names that users give. Invariant: each is within its limits."""

    kappa: float | None = setting(
        1.0, "how alike the items of a domain are, in [0, 10]; 0: not at all; None: estimated from the visits"
    )
    phi: float | None = setting(
        0.5, "domains: 1: each counts once, 0: in proportion to their items, in [0, 1]; None: estimated"
    )
    noise: float = setting(0.1, "priorities are multiplied by exp(noise * Gumbel) to break ties, in [0, 10]")
    weights: Mapping[str, float] = setting({}, "domain -> factor of its items' priority, above 0; 1 if not given")

    def __post_init__(self) -> None:
        """Check the invariant.

        Raises:
            ValueError: naming every parameter out of its limits.
        """
        if faults := signal_faults({name: getattr(self, name) for name in SIGNAL_NAMES}):
            raise ValueError("; ".join(faults))


SIGNAL_NAMES = tuple(one.name for one in fields(SignalSettings))
_UPPER = {"kappa": 10.0, "phi": 1.0, "noise": 10.0}


def signal_faults(values: Mapping[str, Any]) -> list[str]:
    """Validate parameters of `signal`; return error messages, each as "name = value; expected ..."."""
    faults = []
    for name, value in values.items():
        if name == "weights":
            if not isinstance(value, Mapping) or not all(is_number(w) and w > 0 for w in value.values()):
                faults.append(f"weights = {value!r}; expected weights above 0 by domain")
        elif not (value is None and name != "noise") and not (is_number(value) and 0 <= value <= _UPPER[name]):
            other = "" if name == "noise" else ", or None"
            faults.append(f"{name} = {value!r}; expected a number in [0, {_UPPER[name]:g}]{other}")
    return faults


def _none() -> np.ndarray:
    return np.zeros(0)


@dataclass(frozen=True)
class Context:
    """Statistics that a rule reads beside the columns of its candidates; arrays are indexed by domain number.

    A domain beyond the end of an array has no groups yet, and gets the default of that array (`of_domains`).
    """

    live_D: np.ndarray = field(default_factory=_none)  # pi_d, share of its groups with signal, in (0, 1)
    mean_D: np.ndarray = field(default_factory=_none)  # faded mean reward, in [0, 1]
    expected_D: np.ndarray = field(default_factory=_none)  # m_d = (R + 1) / (T + 2), R the rewards of T groups
    unsolved_D: np.ndarray = field(default_factory=_none)  # u_d, groups that vary before anything was solved
    solved_after_D: np.ndarray = field(default_factory=_none)  # U, groups that vary before an item is first solved
    icc_D: np.ndarray = field(default_factory=_none)  # correlation of successive pass rates of an item; nan: unknown
    wait_D: np.ndarray = field(default_factory=_none)  # slots drawn since the last one of this domain, at least 1
    first_wait: float = 1.0  # `wait_D` of a domain that never had a slot
    group_size: int = 0  # above 0: S is the expected squared advantage of groups of this size
    prior_weight: float = 0.0  # w0 of the posterior baseline, with `group_size`

    def of_domains(self, num: int) -> Context:
        """Return the context with arrays of length `num`."""
        defaults = dict.fromkeys(("live_D", "mean_D", "expected_D"), 0.5)
        defaults |= {"unsolved_D": 0.0, "solved_after_D": FIRST_SOLVED, "icc_D": np.nan, "wait_D": self.first_wait}

        def padded(name: str) -> np.ndarray:
            known_D = getattr(self, name)[:num]
            return np.concatenate([known_D, np.full(num - len(known_D), defaults[name])])

        arrays: dict[str, Any] = {name: padded(name) for name in defaults}
        return replace(self, **arrays)

    def divided(self, num_domains: int, num_parts: int) -> Context:
        """Return the context of candidates whose `num_domains` domains are split into `num_parts` classes each."""
        whole = self.of_domains(num_domains)
        names = ("live_D", "mean_D", "expected_D", "unsolved_D", "solved_after_D", "icc_D", "wait_D")
        arrays: dict[str, Any] = {name: np.repeat(getattr(whole, name), num_parts) for name in names}
        return replace(whole, **arrays)

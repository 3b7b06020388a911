"""Define the setting `regularisers`: its parameters, their defaults and their ranges.

    {"ewc": {"coeff": 10.0, "decay": 0.9}, "l2": 0.1}      a number alone is the coefficient
    RegulariserSettings.of(value).ewc                       EWC(coeff=10.0, decay=0.9, episodes=64)
    parameter_faults(value)                                  error messages "regularisers = ...; expected ..."
    size_faults(settings, 30, 49152)                         those of a model with 30 layers and 49,152 tokens

A regulariser that is not named, or whose coefficient is 0, is None: the run is that without it, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rllib_srl.common.setting_checks import is_integer, is_number
from rllib_srl.losses.kl import KL_LOSSES


class _Range(NamedTuple):
    is_right: Callable[[Any], bool]
    expected: str


_COEFF = _Range(lambda x: is_number(x) and x >= 0, "a number of at least 0")
_AT_LEAST_1 = _Range(lambda x: is_integer(x, 1), "an integer of at least 1")


def _parameter(default: Any, valid: _Range) -> Any:
    return dataclasses.field(default=default, metadata={"range": valid})


@dataclass(frozen=True)
class L2:
    """Pulls every trained weight towards its value in the starting model."""

    coeff: float = _parameter(0.1, _COEFF)


@dataclass(frozen=True)
class EWC:
    """Pulls weights that mattered for the domains so far towards their values at the end of the last stage."""

    coeff: float = _parameter(100.0, _COEFF)
    decay: float = _parameter(1.0, _Range(lambda x: is_number(x) and 0 <= x <= 1, "a number in [0, 1]"))
    episodes: int = _parameter(64, _AT_LEAST_1)  # of the domain that ended; whole groups, so there may be a few more


@dataclass(frozen=True)
class LwF:
    """Keeps the policy, on revisited prompts of domains that ended, near the policy at the end of the last stage."""

    coeff: float = _parameter(0.1, _COEFF)
    estimator: str = _parameter(
        "k3_k2", _Range(lambda x: x in tuple(KL_LOSSES), f"one of {', '.join(map(repr, KL_LOSSES))}")
    )


@dataclass(frozen=True)
class ESR:
    """Keeps the policy, on reused groups, near the policy that first trained on them."""

    coeff: float = _parameter(0.1, _COEFF)
    top_k: int = _parameter(16, _AT_LEAST_1)  # likeliest tokens whose log-probs are stored, at each written token
    episodes: int = _parameter(4096, _AT_LEAST_1)  # that are stored, the newest ones; whole groups


PACKAGED = "packaged"  # stands for the package's own texts


@dataclass(frozen=True)
class GeRe:
    """Keeps activations on general texts on the side of their thresholds that the starting model had them on."""

    coeff: float = _parameter(0.01, _COEFF)
    path: str = _parameter(PACKAGED, _Range(lambda x: isinstance(x, str) and bool(x), "the path of a file of texts"))
    layer: int = _parameter(-1, _Range(lambda x: is_integer(x, -(2**31)), "an integer, the number of a decoder layer"))
    num_texts: int = _parameter(64, _AT_LEAST_1)  # of the file, the first ones
    texts_per_step: int = _parameter(8, _AT_LEAST_1)
    max_tokens: int = _parameter(128, _Range(lambda x: is_integer(x, 2), "an integer of at least 2"))  # of a text


REGULARISERS: dict[str, Any] = {"ewc": EWC, "l2": L2, "lwf": LwF, "esr": ESR, "gere": GeRe}


@dataclass(frozen=True)
class RegulariserSettings:
    """The regularisers of a run. Invariant: those that are not None have a coefficient above 0."""

    ewc: EWC | None = None
    l2: L2 | None = None
    lwf: LwF | None = None
    esr: ESR | None = None
    gere: GeRe | None = None

    @classmethod
    def of(cls, value: Any) -> RegulariserSettings:
        """Return the settings of a valid value of `regularisers`."""
        made = {name: REGULARISERS[name](**_given(one)) for name, one in (value or {}).items()}
        return cls(**{name: one for name, one in made.items() if one.coeff})

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of those that act."""
        return tuple(name for name in REGULARISERS if getattr(self, name) is not None)

    @property
    def num_copies(self) -> int:
        """Return how many copies of the trained weights a learner keeps for them, fp32."""
        return sum({"l2": 1, "ewc": 2, "lwf": 1}.get(name, 0) for name in self.names)

    @property
    def needs_stages(self) -> bool:
        """Return whether one of them acts at the end of a stage."""
        return self.ewc is not None or self.lwf is not None


def parameter_faults(value: Any) -> Iterator[str]:
    """Yield an error message for each name, parameter and value that `RegulariserSettings.of` does not take."""
    if value is None:
        return
    listed = ", ".join(map(repr, REGULARISERS))
    if not isinstance(value, Mapping):
        yield f"regularisers = {value!r}; expected a mapping from some of {listed} to their parameters, or None"
        return
    for name, one in value.items():
        if name not in REGULARISERS:
            yield f"regularisers.{name} = {one!r}; expected some of {listed}"
            continue
        ranges = {field.name: field.metadata["range"] for field in dataclasses.fields(REGULARISERS[name])}
        for key, number in _given(one).items():
            shown = f"regularisers.{name}.{key} = {number!r}"
            if key not in ranges:
                yield f"{shown}; expected some of {', '.join(ranges)}"
            elif not ranges[key].is_right(number):
                yield f"{shown}; expected {ranges[key].expected}"


def size_faults(settings: RegulariserSettings, num_layers: int | None, num_tokens: int | None) -> Iterator[str]:
    """Yield an error message for each parameter that the model's size rules out.

    Args:
        settings: of the regularisers.
        num_layers: of the model; None: unknown, and not checked.
        num_tokens: in the model's vocabulary; None: unknown, and not checked.
    """
    gere, esr = settings.gere, settings.esr
    if gere and num_layers is not None and not -num_layers <= gere.layer < num_layers:
        expected = f"{-num_layers} to {num_layers - 1}, a layer of the model"
        yield f"regularisers.gere.layer = {gere.layer}; expected {expected}"
    if esr and num_tokens is not None and esr.top_k > num_tokens:
        yield f"regularisers.esr.top_k = {esr.top_k}; expected at most {num_tokens}, the vocabulary of the model"


def _given(one: Any) -> dict[str, Any]:
    return dict(one) if isinstance(one, Mapping) else {"coeff": one}

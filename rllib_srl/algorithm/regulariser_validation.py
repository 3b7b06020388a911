"""Validates the setting `regularisers`; returns error messages "name = value; expected ..."."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rllib_srl.learner.regularisers.regularisers import made, parameter_faults


def faults_of_regularisers(config: Any) -> Iterator[str]:
    """Yield all errors; contradictions with other settings only if the parameters alone are valid."""
    faults = list(parameter_faults(config.regularisers))
    yield from faults
    for name, one in made(config.regularisers).items() if not faults else ():
        yield from one.faults(f"regularisers.{name}", config)

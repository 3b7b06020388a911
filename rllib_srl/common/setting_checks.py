"""Checks values that belong to no model of settings: is it a number, is it an integer of at least some number?"""

from __future__ import annotations

import math
from typing import Any


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: Any, least: int) -> bool:
    """Return whether a value is an integer of at least `least`, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least

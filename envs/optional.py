"""Import packages that only some environments need."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def imported(package: str, environment: str, extra: str = "envs") -> Any:
    """Return the package that an environment needs.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        return import_module(package)
    except ImportError as error:
        message = f"environment {environment!r} needs {package} ({error}); pip install 'rllib_srl[{extra}]'"
        raise ImportError(message) from error

"""Sandbox for a policy's code: a process without network, files and privileges, with limits on time and memory.

    from rllib_srl.envs.sandbox import Call, Limits, Sandbox, SandboxResult, probe

    run.py       Sandbox.run: the entry point
    calls.py     the data types: Limits, Call, SandboxResult and its `stop`
    guarantees.py what this machine can guarantee, found by attacking it
    exchange.py  one call, in the parent             pool.py             the parent's workers
    zygote.py    the process that forks workers      worker.py one call, in the worker
    kernel.py, seccomp.py, rooms.py                  isolation

Names are imported lazily: the zygote imports this package too, and must stay small.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllib_srl.envs.sandbox.calls import Call, Limits, Returned, SandboxError, SandboxResult, WeakSandboxError
    from rllib_srl.envs.sandbox.guarantees import Guarantee, Guarantees, probe
    from rllib_srl.envs.sandbox.run import Sandbox

_HOME = {
    "Call": "calls",
    "Limits": "calls",
    "Returned": "calls",
    "SandboxError": "calls",
    "SandboxResult": "calls",
    "WeakSandboxError": "calls",
    "Guarantee": "guarantees",
    "Guarantees": "guarantees",
    "probe": "guarantees",
    "Sandbox": "run",
}
__all__ = ["Call", "Guarantee", "Guarantees", "Limits", "Returned", "Sandbox", "SandboxError", "SandboxResult",
           "WeakSandboxError", "probe"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"rllib_srl.envs.sandbox.{_HOME[name]}"), name)

"""rllib_srl: an RLlib plugin with which language models improve themselves and remember.

    from rllib_srl import SRLConfig
    algo = SRLConfig().environment("compare").build_algo()

Importing the package loads neither Ray nor torch; the names below load on first use.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Threads that wait for one another must sleep: where cores are shared, waiting ones that spin take the time from
# those that work (measured: an update on 2 threads 6 times slower). Read by OpenMP when torch loads, here and in
# Ray's workers.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from rllib_srl.config import SRLConfig, register
    from rllib_srl.srl import SRL
    from rllib_srl.types import Group, Prompt, StopReason

_HOMES = {
    "SRL": "rllib_srl.srl",
    "SRLConfig": "rllib_srl.config",
    "register": "rllib_srl.config",
    "Group": "rllib_srl.types",
    "Prompt": "rllib_srl.types",
    "StopReason": "rllib_srl.types",
}
__all__ = ["SRL", "Group", "Prompt", "SRLConfig", "StopReason", "register"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load a public name on first use; loading `SRLConfig` or `SRL` registers the algorithm with Tune."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rllib_srl' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    if name in ("SRL", "SRLConfig"):
        import_module("rllib_srl.config").register()
    return getattr(import_module(_HOMES[name]), name)

"""rllib_srl: GRPO with experience replay for language models, as an RLlib plugin.

    from rllib_srl import SRLConfig
    algo = SRLConfig().environment("compare").build_algo()

Importing the package loads neither Ray nor torch; the names below load on first use.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Waiting OpenMP threads must sleep instead of spinning: on shared cores, spinning threads take time from the working
# ones (measured: an update on 2 threads 6 times slower). OpenMP reads this when torch loads, here and in Ray's workers.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from rllib_srl.algorithm.config import SRLConfig, register
    from rllib_srl.algorithm.srl import SRL
    from rllib_srl.envs.tools.environment import ToolEnvironment
    from rllib_srl.types import Group, Prompt, StopReason

_HOMES = {
    "SRL": "rllib_srl.algorithm.srl",
    "SRLConfig": "rllib_srl.algorithm.config",
    "register": "rllib_srl.algorithm.config",
    "Group": "rllib_srl.types",
    "Prompt": "rllib_srl.types",
    "StopReason": "rllib_srl.types",
    "ToolEnvironment": "rllib_srl.envs.tools.environment",
}
__all__ = ["SRL", "Group", "Prompt", "SRLConfig", "StopReason", "ToolEnvironment", "register"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Load a public name on first use; loading `SRLConfig` or `SRL` registers the algorithm with Tune."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rllib_srl' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    if name in ("SRL", "SRLConfig"):
        import_module("rllib_srl.algorithm.config").register()
    return getattr(import_module(_HOMES[name]), name)

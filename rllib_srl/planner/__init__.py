"""What continual learning decides each iteration: which domains, how much of the memory, which weights, what to probe.

    results by domain ──> Planner.observe ──> state of each domain ──> Planner.plan ──> Plan

No Ray: numbers in, a plan out, the state a plain dictionary.
"""

from rllib_srl.planner.planner import Plan, Planner
from rllib_srl.planner.settings import TABLE, PlannerSettings

__all__ = ["TABLE", "Plan", "Planner", "PlannerSettings"]

"""Plan each iteration of continual learning: replay fractions and loss weights of domains.

    results by domain ──> Planner.observe ──> state of each domain ──> Planner.plan ──> Plan

The planner does not use Ray; its state is a plain dictionary.
"""

from rllib_srl.curriculum.planner import Plan, Planner
from rllib_srl.curriculum.settings import TABLE, PlannerSettings

__all__ = ["TABLE", "Plan", "Planner", "PlannerSettings"]

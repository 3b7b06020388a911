"""Plan each iteration of continual learning: replay fractions and loss weights of domains.

    results by domain ──> Planner.observe ──> state of each domain ──> Planner.plan ──> Plan

The planner does not use Ray; its state is a plain dictionary.
"""

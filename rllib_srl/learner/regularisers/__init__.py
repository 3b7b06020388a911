"""Regularisers of the learner: terms that keep the policy near what it has learned."""

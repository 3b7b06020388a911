"""The GRPO Learner, its model and optimiser, and reference policy."""

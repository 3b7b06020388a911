"""The GRPO Learner, its model and optimiser, critic and reference policy."""

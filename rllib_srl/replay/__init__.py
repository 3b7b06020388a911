"""Replay memory: schedules stored prompts for revisits and stored groups for reuse."""

"""Environments whose answers are graded by people or judge models."""

"""Environments that wrap another environment."""

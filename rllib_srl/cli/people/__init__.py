"""Subcommands for the people in the loop."""

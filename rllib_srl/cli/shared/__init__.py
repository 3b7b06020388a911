"""Shared parts of the subcommands: settings from files and flags, directories of runs, progress, stopping, Ray."""

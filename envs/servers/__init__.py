"""Environments that run behind a server."""

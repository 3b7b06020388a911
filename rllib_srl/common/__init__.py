"""Shared parts: environments by name, tables of settings and rules, callbacks, remote calls, statistics."""

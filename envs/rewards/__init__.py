"""Rewards of a user's own: plain functions, batch functions of TRL and verl, and servers over HTTP."""

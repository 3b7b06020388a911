"""A user's rewards: plain functions, batch functions of TRL and verl, and servers over HTTP."""

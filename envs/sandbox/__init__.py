"""Sandbox for a policy's code: a process without network, files and privileges, with limits on time and memory.

    run.py       Sandbox.run: the entry point
    calls.py     the data types: Limits, Call, SandboxResult and its `stop`
    guarantees.py what this machine can guarantee, found by attacking it
    exchange.py  one call, in the parent             pool.py             the parent's workers
    zygote.py    the process that forks workers      worker.py one call, in the worker
    kernel.py, seccomp.py, rooms.py                  isolation

The zygote imports this package and must stay small, so no name is imported here.
"""

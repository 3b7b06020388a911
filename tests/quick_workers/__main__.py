"""Run a program whose Ray forks its workers: `python -m tests.quick_workers SCRIPT ...` or `... -m MODULE ...`."""

import os
import runpy
import sys

from tests.quick_workers import quick_workers

if __name__ == "__main__":
    del sys.argv[0]
    with quick_workers():
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")

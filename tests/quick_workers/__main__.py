"""Run a script whose Ray forks its workers: `python -m tests.quick_workers SCRIPT ARGUMENTS`."""

import runpy
import sys

from tests.quick_workers import quick_workers

if __name__ == "__main__":
    del sys.argv[0]
    with quick_workers():
        runpy.run_path(sys.argv[0], run_name="__main__")

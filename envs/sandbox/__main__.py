"""Print what the sandbox isolates on this machine: `python -m envs.sandbox [--without namespaces landlock seccomp]`.

The exit status is 1 where a guarantee is missing.
"""

from __future__ import annotations

import argparse
import sys

from envs.sandbox.guarantees import probe
from envs.sandbox.run import MECHANISMS


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m envs.sandbox", description="What the sandbox isolates here.")
    parser.add_argument("--without", nargs="*", default=[], choices=MECHANISMS, help="do without these, to see")
    guarantees = probe(tuple(parser.parse_args().without))
    print(guarantees)
    if guarantees.missing:
        print(f"\nWorlds that run code refuse to start here unless allow_weak_sandbox = True: {guarantees.missing}")
    return 1 if guarantees.missing else 0


if __name__ == "__main__":
    sys.exit(main())

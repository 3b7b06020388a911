"""Print what the sandbox isolates here: `python -m rllib_srl.envs.sandbox [--without namespaces landlock seccomp uid]`.

The exit status is 1 if a guarantee is missing.
"""

from __future__ import annotations

import argparse
import sys

from rllib_srl.envs.sandbox.guarantees import probe
from rllib_srl.envs.sandbox.run import MECHANISMS


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m rllib_srl.envs.sandbox", description="What is isolated here.")
    parser.add_argument("--without", nargs="*", default=[], choices=MECHANISMS, help="do without these, to see")
    guarantees = probe(tuple(parser.parse_args().without))
    print(guarantees)
    if guarantees.missing:
        print(f"\nWorlds that run code refuse to start here unless allow_weak_sandbox = True: {guarantees.missing}")
    return 1 if guarantees.missing else 0


if __name__ == "__main__":
    sys.exit(main())

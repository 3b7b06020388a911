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
    what = "Show what the sandbox isolates on this machine."
    parser = argparse.ArgumentParser(prog="python -m rllib_srl.envs.sandbox", description=what)
    text = "disable these mechanisms, as a test"
    parser.add_argument("--without", nargs="*", default=[], choices=MECHANISMS, help=text)
    guarantees = probe(tuple(parser.parse_args().without))
    print(guarantees)
    if guarantees.missing:
        print(f"\nEnvironments that run code do not start here unless allow_weak_sandbox = True: {guarantees.missing}")
    return 1 if guarantees.missing else 0


if __name__ == "__main__":
    sys.exit(main())

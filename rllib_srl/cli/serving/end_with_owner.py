"""Run a program and end it, with all that it has started, when the owner of this process is gone.

    python -m rllib_srl.cli.serving.end_with_owner OWNER PROGRAM ...       in a process group of its own

vLLM's server starts processes that outlive it when it is killed. This one stays beside it: the kernel sends it a signal
when its owner ends, however that ends, and it ends the whole group. SIGTERM is left to the program.

Source: man page prctl(2), PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from rllib_srl.envs.sandbox import kernel


def main(argv: list[str]) -> int:
    """Run the program; return its exit status."""
    owner, command = int(argv[0]), argv[1:]

    def end_group(*_: Any) -> None:
        os.killpg(0, signal.SIGKILL)

    def wait(*_: Any) -> None:
        """Let the program end first."""

    signal.signal(signal.SIGUSR1, end_group)
    signal.signal(signal.SIGTERM, wait)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != owner:
        return 1
    return subprocess.Popen(command).wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

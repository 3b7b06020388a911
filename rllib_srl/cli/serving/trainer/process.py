"""Start the trainer's process: tie it to its owner and lower its priority before anything slow is imported.

    python -m rllib_srl.cli.serving.trainer.process DIRECTORY OWNER READY

The owner, the gateway, waits until the file descriptor READY is closed before it stops this process (SIGSTOP): one that
is stopped earlier would outlive a killed owner for ever. Exit status 0: result.json is complete.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllib_srl.envs.kept_process import end_with, start_kept

NICENESS = 19
PRESTARTS = "RAY_prestart_worker_first_driver"
_READY_S = 60.0  # until the process is tied to its owner


def start_trainer(directory: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start the trainer of a version; return once it is tied to this process, and may be stopped at any instant.

    Args:
        directory: of the version.
        options: of `subprocess.Popen`.

    Raises:
        OSError: the process cannot be started.
        TimeoutError: the machine does not start it in time.
    """
    ready, of_trainer = os.pipe()
    try:
        command = [sys.executable, "-m", __name__, str(directory.absolute()), str(os.getpid()), str(of_trainer)]
        try:
            process = start_kept(command, pass_fds=(of_trainer,), process_group=0, **options)
        finally:
            os.close(of_trainer)
        if not select.select([ready], [], [], _READY_S)[0]:  # readable once all its writers have closed it
            signal_trainer(process, signal.SIGKILL)
            raise TimeoutError(f"the trainer did not start within {_READY_S:g} s")
    finally:
        os.close(ready)
    return process


def signal_trainer(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a trainer that has not ended, and to the processes of its Ray, which are in its process group.

    If the owner is killed while they are stopped, the kernel kills the trainer, and continues and ends the others, as
    their process group is orphaned; in a container only if its first process belongs to another session.
    """
    os.killpg(process.pid, number)


def main(argv: Sequence[str]) -> int:
    """Run the trainer; return its exit status."""
    directory, owner, ready = Path(argv[0]), int(argv[1]), int(argv[2])
    end_with(owner)
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    os.umask(0o077)
    os.close(ready)
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose=False)  # before Ray is imported
    os.environ[PRESTARTS] = "0"  # no worker is needed
    from rllib_srl.cli.serving.trainer.trainer import run

    return run(directory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Start the trainer's process: tie it to its owner and lower its priority before anything slow is imported.

    python -m rllib_srl.cli.serving.trainer_process DIRECTORY OWNER

The owner, the gateway, lets this process wait while an answer is under way (`TrainerProcess.hold`):

    on a CPU    it is stopped (SIGSTOP), with the processes of its Ray, once these run: Ray waits 30 s for its start
    on a card   it waits for a lock before its next forward pass: a process with a CUDA context is never stopped

Exit status 0: result.json is complete.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from rllib_srl.envs.kept_process import end_with, start_kept

NICENESS = 19
UP, TURN = "ray_is_up", "turn"  # files of the version's directory: a mark of the trainer, and the lock
PRESTARTS = "RAY_prestart_worker_first_driver"


def start_trainer(directory: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the trainer of a version, whose output goes to a log, as `start_kept`."""
    command = [sys.executable, "-m", __name__, str(directory.absolute()), str(os.getpid())]
    return start_kept(command, process_group=0, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


class TrainerProcess:
    """A trainer that runs. Invariant: after `hold(True)` returned True it computes no further forward pass.

    Signals go to its process group, in which are also the processes of its Ray. If the owner is killed while they are
    stopped, the kernel kills the trainer, and continues and ends the others, as their process group is orphaned; in a
    container only if its first process belongs to another session.
    """

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, on_card: bool) -> None:
        """Hold a trainer that was just started in the directory of its version."""
        self.process, self._up, self._is_held = process, directory / UP, False
        self._lock = open(directory / TURN, "w") if on_card else None  # noqa: SIM115  (until `kill`)

    def hold(self, is_held: bool) -> bool:
        """Let it wait, or go on; return False if that has to be tried again."""
        if is_held == self._is_held or self.process.poll() is not None:
            return True
        if self._lock is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB if is_held else fcntl.LOCK_UN)
            except BlockingIOError:  # the trainer looks at this moment
                return False
        elif self._up.exists():
            os.killpg(self.process.pid, signal.SIGSTOP if is_held else signal.SIGCONT)
        else:
            return False
        self._is_held = is_held
        return True

    def kill(self) -> None:
        """End it, and give the lock back; its newest slice stays."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        if self._lock is not None:
            self._lock.close()


def take_turns(directory: Path) -> None:
    """Let each forward pass of a model in this process wait until `TrainerProcess.hold` lets it go on."""
    from torch.nn.modules.module import register_module_forward_pre_hook
    from transformers import PreTrainedModel

    lock = (directory / TURN).open("w")

    def wait(module: Any, _: Any) -> None:
        if isinstance(module, PreTrainedModel):
            fcntl.flock(lock, fcntl.LOCK_SH)
            fcntl.flock(lock, fcntl.LOCK_UN)

    register_module_forward_pre_hook(wait)


def main(argv: Sequence[str]) -> int:
    directory, owner = Path(argv[0]), int(argv[1])
    end_with(owner)
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    os.umask(0o077)
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose=False)  # before Ray is imported
    os.environ[PRESTARTS] = "0"  # no worker is needed
    from rllib_srl.cli.serving.trainer import run

    return run(directory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Stop a script on Ctrl-C, and on the SIGTERM of Kubernetes, Slurm, `docker stop` and `ray job stop`.

    SIGTERM   during start-up           `Terminated` is raised, which ends the script
              during training           the iteration is finished, a checkpoint is written
              neither within grace_s    a thread ends the process, and the last checkpoint remains
    exit status 143 in each case; 130 after Ctrl-C

Python runs signal handlers in the main thread, between two bytecodes, so a call into native code that does not
return would delay them without limit. Therefore the watch is a thread, which the signal wakes through a pipe. And if
a handler raises while a finalizer runs, Python ignores the exception: the thread then sends the signal again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

import psutil

GRACE_S = 25.0  # Kubernetes and Slurm send SIGKILL 30 seconds after SIGTERM
SWALLOWED_S = 1.0  # between two attempts to deliver a SIGTERM whose handler had no effect
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived outside of training, so the script ends at once."""


class Watch:
    """Ends this process after SIGTERM. Invariant: `is_terminated` is True once its handler has seen one."""

    def __init__(self) -> None:
        """Create an inactive watch; `kept` activates it."""
        self._reset()

    def _reset(self) -> None:
        self.is_terminated = False
        self._is_ignored = False  # `Terminated` was raised where Python ignores exceptions
        self.grace_s = GRACE_S
        self.last_words: Callable[[], str] = str  # returns a line to print when the grace period is over
        self.clean_up: Callable[[], object] = bool  # called before the process ends

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Raise `Terminated` on SIGTERM, and end the process `grace_s` later; do nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._reset()
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        errors, over = os.dup(2), threading.Event()
        usual_wakeup = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        usual = signal.signal(signal.SIGTERM, self._raise)
        usual_hook = sys.unraisablehook
        sys.unraisablehook = partial(self._note_ignored, usual_hook)
        thread = threading.Thread(target=self._watch, args=(reads, errors, over), daemon=True, name="watch")
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(usual_wakeup)
            over.set()
            os.close(writes)
            thread.join()  # it sends no signal from here on
            signal.signal(signal.SIGTERM, usual)
            sys.unraisablehook = usual_hook
            os.close(reads)
            os.close(errors)

    def note_signal(self) -> bool:
        """Note a SIGTERM; return whether it is the first one, or the first since one that had no effect."""
        is_new, self.is_terminated, self._is_ignored = not self.is_terminated or self._is_ignored, True, False
        return is_new

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.note_signal():  # a second one is ignored
            raise Terminated

    def _note_ignored(self, usual: Callable[[sys.UnraisableHookArgs], object], ignored: sys.UnraisableHookArgs) -> None:
        """Print no traceback of an ignored exception that the handler here, or the one of `ray.init`, has raised."""
        if isinstance(ignored.exc_value, Terminated):
            self._is_ignored = True
        elif not (isinstance(ignored.exc_value, SystemExit) and ignored.exc_value.code == signal.SIGTERM):
            usual(ignored)

    def _watch(self, reads: int, errors: int, over: threading.Event) -> None:
        while (number := os.read(reads, 1)) != bytes([signal.SIGTERM]):
            if not number:  # the pipe was closed: `kept` has ended
                return
        deadline = time.monotonic() + self.grace_s
        while (left_s := deadline - time.monotonic()) > 0:
            if over.wait(min(SWALLOWED_S, left_s)):
                return
            if not self.is_terminated or self._is_ignored:
                os.kill(os.getpid(), signal.SIGTERM)
        lines = [f"stopped by SIGTERM: the iteration did not finish within {self.grace_s:g} s (grace_s) and is lost"]
        with suppress(Exception):  # any: the process must end now
            lines.append(self.last_words())
        os.write(errors, ("\n" + "\n".join(filter(None, lines)) + "\n").encode())
        leave(STATUS[signal.SIGTERM], self.clean_up)


WATCH = Watch()


def leave(status: int, clean_up: Callable[[], object] = bool) -> None:
    """End this process and all its descendants at once: a local Ray, engines, environments."""
    kill_descendants()
    with suppress(Exception):
        clean_up()
    os._exit(status)


def kill_descendants() -> int:
    """Kill all processes below this one; return their number."""
    found = psutil.Process().children(recursive=True)
    for process in found:
        with suppress(psutil.Error):
            process.kill()
    return len(found)


class StopRequest:
    """Whether a stop was requested. Invariant: once `is_made`, the next Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        """Create a request that is not made yet."""
        self.is_made = False
        self.status = 0  # exit status of a script that stopped on request

    def interruption(self) -> KeyboardInterrupt:
        """Return the exception for a script that stops by raising."""
        return Terminated() if self.status == STATUS[signal.SIGTERM] else KeyboardInterrupt()


@contextmanager
def stop_between_iterations(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a request: a run stops between iterations and can resume exactly."""
    request = StopRequest()
    usual = {number: signal.getsignal(number) for number in STATUS}

    def ask(number: int, frame: FrameType | None) -> None:
        request.is_made, request.status = True, STATUS[signal.Signals(number)]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if number == signal.SIGINT:
            text = "stopping after this iteration; press Ctrl-C again to stop now"
        elif not WATCH.note_signal():
            return
        else:
            text = f"SIGTERM: stopping after this iteration if it finishes within {WATCH.grace_s:g} s (grace_s)"
        with suppress(RuntimeError):  # reentrant write: the signal arrived while a line was being written
            say(text)

    for number in STATUS:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@contextmanager
def spared_from_sigterm() -> Iterator[None]:
    """Block SIGTERM for processes started in the block (they inherit the mask), and restore our signal handlers.

    Kubernetes signals one process; Slurm, systemd and `timeout` signal a whole group. Ray's processes and the actors
    must survive the signal, or the iteration cannot be finished; they end with the process that started them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {number: signal.getsignal(number) for number in STATUS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    except SystemExit as error:  # another thread received the signal and ran the handler that Ray had installed
        WATCH.note_signal()
        raise Terminated from error
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def stopped(error: KeyboardInterrupt) -> int:
    """Print that a script was stopped, with the notes of `error`; return the exit status."""
    # Ray converts an exception that a handler raises within its own calls to a plain KeyboardInterrupt.
    is_terminated = WATCH.is_terminated or isinstance(error, Terminated)
    why = "stopped by SIGTERM" if is_terminated else "stopped"
    print("\n".join([f"\n{why}", *getattr(error, "__notes__", ())]), file=sys.stderr)
    return STATUS[signal.SIGTERM if is_terminated else signal.SIGINT]

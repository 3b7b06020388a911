"""Ray for a script: a quiet one of its own, or the cluster that RAY_ADDRESS names; and errors as one clear message.

`quiet` must run before transformers, vLLM and the package are imported, since they read the environment only then.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
HUSHED = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",  # processes are forked after the tokenizer was used
    "PYTHONWARNINGS": "ignore",
}


def quiet(verbose: bool) -> None:
    """Keep the chatter of Ray, RLlib, vLLM and transformers off the screen, in child processes too.

    Args:
        verbose: leave it on.
    """
    if verbose:
        return
    for name, value in HUSHED.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    _lower_ray_loggers()


def start_ray(verbose: bool) -> None:
    """Start a Ray of our own on this machine, or join the cluster that RAY_ADDRESS names (`ray job submit` sets it)."""
    import ray

    if ray.is_initialized():
        return
    level = logging.INFO if verbose else logging.ERROR
    said = {"logging_level": level, "log_to_driver": verbose}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address="auto", **said)
    else:
        # Workers inherit it: a checkout that is not installed works too.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        ray.init(address="local", include_dashboard=False, **said)
    if not verbose:
        _lower_ray_loggers()  # ray.init sets some of them back


def _lower_ray_loggers() -> None:
    import ray  # noqa: F401  (importing it sets levels, which would undo ours)

    for name in ("ray", "ray.rllib", "ray.tune"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run_cleanly(action: Callable[[], int], debug: bool) -> int:
    """Run a script's work; print what a user can mend as one message, without a traceback.

    Args:
        action: returns the exit status.
        debug: raise instead.

    Returns:
        The exit status: 1 after an error, 130 after Ctrl-C.
    """
    try:
        return action()
    except KeyboardInterrupt as error:
        print("\n".join(["\nstopped", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 130
    except Exception as error:  # whatever it is, a user wants one message first, and --debug for the rest
        if debug:
            raise
        where = "" if is_expected(error) else f"{type(error).__name__}: "
        hint = "" if is_expected(error) else "\n(--debug shows where it comes from)"
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        print(f"error: {where}{message_of(error)}{notes}{hint}", file=sys.stderr)
        return 1


def is_expected(error: BaseException) -> bool:
    """Say whether an error is one whose message tells all: bad input, or a process that is gone."""
    from rllib_srl.deadlines import ActorFailure
    from rllib_srl.engine.sync import WeightSyncError

    return isinstance(cause_of(error), ValueError | OSError | ActorFailure | WeightSyncError)


def cause_of(error: BaseException) -> BaseException:
    """Return what a process raised itself, without Ray's layers around it."""
    from ray.exceptions import RayTaskError

    while isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    return error


def message_of(error: BaseException) -> str:
    """Return the message of an error; of one that carries a remote traceback, its last line."""
    text = str(cause_of(error)).strip() or type(error).__name__
    if "Traceback (most recent call last)" in text:
        lines = [line for line in text.splitlines() if line.strip() and not line[0].isspace()]
        return lines[-1]
    return text


@contextmanager
def hushed_stderr(verbose: bool) -> Iterator[None]:
    """Drop what native code writes to standard error meanwhile: Ray's core warns of how RLlib starts its actors.

    Args:
        verbose: leave it on.
    """
    if verbose:
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class StopRequest:
    """Whether Ctrl-C was pressed. Invariant: once `is_made`, the next Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        """Nothing was asked for yet."""
        self.is_made = False


@contextmanager
def stop_at_ctrl_c(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Turn the first Ctrl-C into a request, so that a run stops between iterations, where it can be resumed exactly."""
    request = StopRequest()
    usual = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: FrameType | None) -> None:
        request.is_made = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        say("stopping after this iteration; Ctrl-C again stops at once")

    signal.signal(signal.SIGINT, ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, usual)

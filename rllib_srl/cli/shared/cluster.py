"""Start Ray for a script (local and quiet, or the cluster of RAY_ADDRESS), and print errors as one clear message.

`quiet` must run before transformers, vLLM and the package are imported: they read the environment at import.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rllib_srl.cli.shared.stopping import STATUS, WATCH, Terminated, leave, spared_from_sigterm, stopped

ROOT = Path(__file__).resolve().parents[3]  # the directory that holds the package
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
# Ray reads this variable at import. With "0" its address is 127.0.0.1, so that all its sockets listen there.
HAS_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
PRIVATE = 0o077  # umask: only the user can read the files of a run


def quiet(verbose: bool) -> None:
    """Suppress the output of Ray, RLlib, vLLM and transformers; make a local Ray listen on 127.0.0.1 only.

    Args:
        verbose: keep the output.
    """
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault(HAS_CLUSTERS, "0")
    if verbose:
        return
    for name, value in HUSHED.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    _lower_ray_loggers()


def start_ray(verbose: bool) -> None:
    """Start a local Ray on this machine, or join the cluster of RAY_ADDRESS (`ray job submit` sets it)."""
    import ray

    if ray.is_initialized():
        return
    level = logging.INFO if verbose else logging.ERROR
    said = {"logging_level": level, "log_to_driver": verbose}
    if os.environ.get("RAY_ADDRESS"):
        with spared_from_sigterm():
            ray.init(address="auto", **said)
    else:
        # Inherited by workers, so that a checkout that is not installed works too.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with spared_from_sigterm():
            ray.init(address="local", include_dashboard=False, **said)
    if not verbose:
        _lower_ray_loggers()  # ray.init sets some of them back


def end_with_local_ray(status: int) -> None:
    """End this process and the local Ray that it started; return if there is none.

    Ray's own shutdown and Python's take seconds, in which nothing is saved.
    """
    if "ray" not in sys.modules or os.environ.get("RAY_ADDRESS"):
        return
    import ray

    if not ray.is_initialized():
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    leave(status)


def command(name: str, *words: object) -> str:
    """Return the shell command that runs a subcommand of `srl`, from any directory."""
    installed = Path(sys.executable).with_name("srl")
    program = [str(installed)] if installed.exists() else [sys.executable, "-m", "rllib_srl.cli"]
    return shlex.join([*program, name, *map(str, words)])


def tensorboard(directory: Path) -> str:
    """Return the shell command that shows a run's metrics in TensorBoard, from any directory."""
    return shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(directory)])


def _lower_ray_loggers() -> None:
    import ray  # noqa: F401  (importing it sets levels, which would undo ours)

    for name in ("ray", "ray.rllib", "ray.tune"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run_cleanly(action: Callable[[], int], debug: bool) -> int:
    """Run `action`; print errors as one message, without a traceback.

    Files it writes are private to the user. SIGTERM ends this process and all processes that it started.

    Args:
        action: returns the exit status.
        debug: raise errors instead.

    Returns:
        The exit status: 1 after an error, 130 after Ctrl-C.
    """
    usual = os.umask(PRIVATE)
    try:
        with WATCH.kept():
            status = _status_of(action, debug)
            if WATCH.is_terminated:  # faster than Ray's own shutdown: the grace period is limited
                sys.stdout.flush()
                leave(STATUS[signal.SIGTERM], WATCH.clean_up)
            return status
    finally:
        os.umask(usual)


def _status_of(action: Callable[[], int], debug: bool) -> int:
    try:
        return action()
    except KeyboardInterrupt as error:
        return stopped(error)
    except Exception as error:  # any: users get one message first, and the traceback with --debug
        if WATCH.is_terminated:  # the signal may have reached the actors, too
            return stopped(_with_notes(Terminated(), [message_of(error), *getattr(error, "__notes__", ())]))
        if debug:
            raise
        where = "" if is_expected(error) else f"{type(error).__name__}: "
        hint = "" if is_expected(error) else "\n(--debug shows where it comes from)"
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        print(f"error: {where}{message_of(error)}{notes}{hint}", file=sys.stderr)
        return 1


def _with_notes(error: Terminated, notes: Iterable[str]) -> Terminated:
    for note in notes:
        error.add_note(note)
    return error


def is_expected(error: BaseException) -> bool:
    """Return whether the message of an error is sufficient: invalid input, or a lost process."""
    from rllib_srl.common.remote_calls import ActorFailure, cause_of
    from rllib_srl.engine.sync import WeightSyncError

    return isinstance(cause_of(error), ValueError | OSError | ActorFailure | WeightSyncError)


def message_of(error: BaseException) -> str:
    """Return the message of an error; if it contains a remote traceback, its last line."""
    from rllib_srl.common.remote_calls import ProcessLost, cause_of

    cause = cause_of(error)
    if isinstance(cause, ProcessLost):
        return cause.reason  # commands say how to resume in their own words
    text = str(cause).strip() or type(error).__name__
    if "Traceback (most recent call last)" in text:
        lines = [line for line in text.splitlines() if line.strip() and not line[0].isspace()]
        return lines[-1]
    return text


@contextmanager
def hushed_stderr(verbose: bool) -> Iterator[None]:
    """Drop output of native code to standard error: Ray's core warns about how RLlib starts its actors.

    Args:
        verbose: keep the output.
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

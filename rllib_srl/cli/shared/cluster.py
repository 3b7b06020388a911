"""Start Ray for a script (local and quiet, or the cluster of RAY_ADDRESS), and print errors as one clear message.

`quiet` must run before transformers, vLLM and the package are imported: they read the environment at import.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from rllib_srl.cli import supervisor
from rllib_srl.cli.shared.display import printable_lines
from rllib_srl.cli.shared.stopping import STATUS, ended_by_sigterm, leave, spared_from_sigterm
from rllib_srl.storage.database import DatabaseError

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
# Ray reads this at import, too. Under `uv run` it would build an environment anew for every worker, for minutes.
UV_RUN_HOOK = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
CONNECT_TIMEOUT_S = 10.0  # of a look whether a cluster answers
LONGEST_TMPDIR = 40  # characters: Ray adds up to 66 for its sockets, whose paths may have 107
PRIVATE = 0o077  # umask: only the user can read the files of a run


def quiet(verbose: bool) -> None:
    """Unless verbose, hide the output of Ray, RLlib, vLLM and transformers; a local Ray listens on 127.0.0.1 only."""
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault(HAS_CLUSTERS, "0")
        os.environ.setdefault(UV_RUN_HOOK, "0")
    if verbose:
        return
    for name, value in HUSHED.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    _lower_ray_loggers()


def start_ray(verbose: bool) -> None:
    """Start a local Ray on this machine, or join the cluster of RAY_ADDRESS (`ray job submit` sets it)."""
    where: dict[str, Any] = {"address": "auto"}
    if address := os.environ.get("RAY_ADDRESS"):
        check_address(address)
    else:
        check_home()
        use_short_tmpdir()
        where = {"address": "local", "include_dashboard": False}
    import ray

    if ray.is_initialized():
        return
    if not address and not is_installed():  # for workers; last, since a user may have packages named as ours beside it
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(ROOT)]))
    with spared_from_sigterm():
        ray.init(**where, logging_level=logging.INFO if verbose else logging.ERROR, log_to_driver=verbose)
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


def check_address(address: str) -> None:
    """Check that a cluster listens at an address, unless that is "auto", "local" or a URL; Ray looks for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(
            f"RAY_ADDRESS = {address!r}: no cluster answers there ({error}); start it, correct the variable, or unset "
            "it for a Ray on this machine"
        ) from error


def check_home() -> None:
    """Check that the home directory can be written, where Ray and this package keep files."""
    home = Path.home()
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        raise OSError(f"HOME = {str(home)!r} is not writable; set HOME to a directory that you can write to")


def use_short_tmpdir() -> None:
    """Let Ray keep its sockets in /tmp if TMPDIR is too long for their paths."""
    if len(os.environ.get("TMPDIR", "")) > LONGEST_TMPDIR and os.access("/tmp", os.W_OK | os.X_OK):
        os.environ.setdefault("RAY_TMPDIR", "/tmp")


def is_installed() -> bool:
    """Return whether every Python process here imports this package without PYTHONPATH."""
    try:
        package = distribution("rllib_srl")
    except PackageNotFoundError:
        return False
    origin = json.loads(package.read_text("direct_url.json") or "{}").get("url")
    return origin == ROOT.as_uri() or Path(str(package.locate_file(""))).resolve() == ROOT


def command(name: str, *words: object) -> str:
    """Return the shell command that runs a subcommand of `srl`, from any directory."""
    installed, on_path = Path(sys.executable).with_name("srl"), shutil.which("srl")
    program = [str(installed)] if installed.exists() else [sys.executable, "-m", "rllib_srl.cli"]
    if on_path and installed.exists() and installed.samefile(on_path):
        program = ["srl"]
    return shlex.join([*program, name, *map(str, words)])


def tensorboard(directory: Path) -> str:
    """Return the shell command that shows a run's metrics in TensorBoard, from any directory."""
    return shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(directory)])


def _lower_ray_loggers() -> None:
    import ray  # noqa: F401  (importing it sets levels, which would undo ours)

    for name in ("ray", "ray.rllib", "ray.tune"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run_cleanly(action: Callable[[], int], debug: bool) -> int:
    """Return the exit status of `action`, 1 after an error, 130 after Ctrl-C; print an error as one message.

    Files it writes are private to the user. SIGTERM ends this process and all processes that it started. With `debug`
    errors are raised; a terminal shows them with rich's traceback.
    """
    usual = os.umask(PRIVATE)
    try:
        with ended_by_sigterm():
            return action()
    except KeyboardInterrupt as error:
        print("\n".join(["\nstopped", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return STATUS[signal.SIGINT]
    except Exception as error:  # any: users get one message first, and the traceback with --debug
        if debug:
            if sys.stderr.isatty():
                from rich.traceback import install

                install()
            raise
        where = "" if is_expected(error) else f"{type(error).__name__}: "
        hint = "" if is_expected(error) else "\n(--debug shows where it comes from)"
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        message = printable_lines(f"{message_of(error)}{notes}")  # it may quote what a model or a client wrote
        print(f"error: {where}{message}{hint}", file=sys.stderr)
        return supervisor.LOST if supervisor.starts_again(error) else 1
    finally:
        os.umask(usual)


def is_expected(error: BaseException) -> bool:
    """Return whether the message of an error is sufficient: invalid input, a file of no use, or a lost process."""
    if isinstance(error, ValueError | OSError | DatabaseError):
        return True
    if "ray" not in sys.modules:  # importing it takes seconds
        return False
    from rllib_srl.common.remote_calls import cause_of, is_loss
    from rllib_srl.engine.sync import WeightSyncError

    return is_loss(error) or isinstance(cause_of(error), ValueError | OSError | DatabaseError | WeightSyncError)


def message_of(error: BaseException) -> str:
    """Return the message of an error; if it contains a remote traceback, its last line."""
    cause = error
    if "ray" in sys.modules:
        from rllib_srl.common.remote_calls import ProcessLost, cause_of

        if isinstance(cause := cause_of(error), ProcessLost):
            return cause.reason  # commands say how to resume in their own words
    text = str(cause).strip() or type(error).__name__
    if "Traceback (most recent call last)" in text:
        lines = [line for line in text.splitlines() if line.strip() and not line[0].isspace()]
        return lines[-1]
    return text


@contextmanager
def hushed_stderr(verbose: bool) -> Iterator[None]:
    """Drop output of native code to standard error: Ray's core warns about how RLlib starts its actors."""
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

"""Run untrusted Python code and return its result.

    sandbox = Sandbox(Limits(timeout_s=2.0))
    sandbox.run("print(6 * 7)").stdout                                         "42\\n"
    sandbox.run("6 * 7").value                                                 "42"
    sandbox.run("while True: pass").stop                                       "timeout"
    sandbox.run("def f(x): return x + 1", calls=[Call("f", [1])]).returned     (Returned(value=2),)

Each run is a new process; no state is kept between runs. A call that is lost together with the process that forks
workers is repeated in its own zygote; if that is lost as well, the code caused it, and the call has "crashed". So
code cannot pass for a failure of the sandbox. The data types are in `rllib_srl.envs.sandbox.calls`;
`python -m rllib_srl.envs.sandbox` prints what is isolated on this machine.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any

from rllib_srl.envs.sandbox.calls import Call, Limits, LostWorkerError, SandboxResult, WeakSandboxError
from rllib_srl.envs.sandbox.exchange import Exchange, packed
from rllib_srl.envs.sandbox.pool import Pool, pool_of

MECHANISMS = ("namespaces", "landlock", "seccomp", "uid")  # without "uid", root's code stays root
_MOST_FILES = 256
_RETRY_S, _PAUSE_S = 8.0, 0.2  # total time of retries, and the increment of the pause between them


class Sandbox:
    """Runs code within limits, from any thread; all sandboxes of a process share its workers.

    Invariant: it can be pickled, and holds only settings.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        allow_weak_sandbox: bool = False,
        without: tuple[str, ...] = (),
        is_probed: bool = True,
    ):
        """Check the limits and, on the first use in a process, the guarantees of the machine, which are then printed.

        Args:
            limits: of every run
            allow_weak_sandbox: run even if a guarantee is missing
            without: mechanisms of `MECHANISMS` to disable, as on a machine that lacks them
            is_probed: False only for the probe itself

        Raises:
            ValueError: limits out of range, a package that is not installed, or an unknown mechanism.
            WeakSandboxError: a guarantee is missing; the message lists all that are.
            SandboxError: no worker starts.
        """
        self.limits = limits or Limits()
        errors = self.limits.errors()
        errors += [f"without names {name!r}; expected {', '.join(MECHANISMS)}" for name in {*without} - {*MECHANISMS}]
        errors += [
            f"packages names {name!r}, which is not installed"
            for name in self.limits.packages
            if find_spec(name.partition(".")[0]) is None
        ]
        if errors:
            raise ValueError("; ".join(errors))
        self.without = tuple(sorted(without))
        if is_probed:
            from rllib_srl.envs.sandbox.guarantees import reported

            missing = reported(self.without).missing
            if missing and not allow_weak_sandbox:
                raise WeakSandboxError(
                    f"this machine's sandbox does not isolate {', '.join(missing)} "
                    "(python -m rllib_srl.envs.sandbox shows why); "
                    "set allow_weak_sandbox = True to run untrusted code anyway"
                )

    def run(
        self,
        code: str,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        calls: Sequence[Call] = (),
    ) -> SandboxResult:
        """Run `code` in its own process, then `calls`, and wait until all its processes have ended.

        Args:
            code: Python; the value of its last statement is reported if that is an expression
            stdin: standard input of the code
            files: text by name, written to the current directory, as in {"data/table.csv": "a,b"}
            timeout_s: replaces the time limit of the limits
            calls: functions that the code defines, called in order in the same process

        Raises:
            ValueError: a file name outside the current directory, or a time limit out of range.
            SandboxError: no worker became free in time, or none starts; the code is not the cause.
        """
        limits = self.limits if timeout_s is None else dataclasses.replace(self.limits, timeout_s=timeout_s)
        if errors := [*limits.errors(), *_errors_of_files(files or {})]:
            raise ValueError("; ".join(errors))
        request = packed(
            {
                "code": code,
                "stdin": stdin,
                "files": dict(files or {}),
                "calls": [[call.function, list(call.args)] for call in calls],
                "limits": dataclasses.asdict(limits),
            }
        )
        if len(request) > limits.code_bytes:
            error = f"the request has {len(request)} bytes; at most {limits.code_bytes} are run"
            return SandboxResult("too_long", error=error)
        pool = pool_of(limits.packages, self.without)
        last, num_tries = time.monotonic() + _RETRY_S, 0
        while True:
            generation, num_tries = pool.generation, num_tries + 1
            try:
                return self._run(pool, limits, request, len(calls))
            except LostWorkerError as error:  # calls leave no state, so they can be repeated
                pool.mend(generation)
                if pool.is_closed or (num_tries > 1 and time.monotonic() > last):
                    raise
                if error.has_begun:
                    return self._run_alone(limits, request, len(calls))
                time.sleep(_PAUSE_S * (num_tries - 1))  # other code may hold the needed resources up to its time limit

    def _run_alone(self, limits: Limits, request: memoryview, num_calls: int) -> SandboxResult:
        """Make a call with its own zygote: if that is lost too, the code caused it."""
        pool = Pool(limits.packages, self.without, num_warm=0)
        try:
            return self._run(pool, limits, request, num_calls)
        except LostWorkerError as error:
            if not error.has_begun:
                raise
            reason = "the code ended the process that runs the sandbox, in a call and again alone"
            return SandboxResult("crashed", error=reason, exit_code=-signal.SIGKILL)
        finally:
            pool.close()

    @staticmethod
    def _run(pool: Pool, limits: Limits, request: memoryview, num_calls: int) -> SandboxResult:
        with pool.worker() as worker:
            return Exchange(pool, worker, limits, request, num_calls=num_calls).run()


def _errors_of_files(files: Mapping[str, Any]) -> list[str]:
    errors = [f"files are {len(files)}; expected at most {_MOST_FILES}"] if len(files) > _MOST_FILES else []
    for name, content in files.items():
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name or len(os.fsencode(name)) > 200:
            errors.append(f"files name {name!r}; expected a relative path inside the current directory")
        elif not isinstance(content, str):
            errors.append(f"file {name!r} holds a {type(content).__name__}; expected text")
    return errors

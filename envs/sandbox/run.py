"""Run a piece of Python that nobody trusts, and say what came of it.

    sandbox = Sandbox(Limits(timeout_s=2.0))
    sandbox.run("print(6 * 7)").stdout                                         "42\\n"
    sandbox.run("6 * 7").value                                                 "42"
    sandbox.run("while True: pass").stop                                       "timeout"
    sandbox.run("def f(x): return x + 1", calls=[Call("f", [1])]).returned     (Returned(value=2),)

Each run is a new process; nothing stays from one to the next. See `envs.sandbox.calls` for the nouns and
`python -m envs.sandbox` for what is isolated on this machine.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any

from envs.sandbox.calls import Call, Limits, LostWorkerError, SandboxResult, WeakSandboxError
from envs.sandbox.exchange import Exchange, packed
from envs.sandbox.pool import Pool, pool_of

MECHANISMS = ("namespaces", "landlock", "seccomp")
_MOST_FILES = 256


class Sandbox:
    """Runs code within limits, from any thread; all sandboxes of a process share its workers.

    Invariant: it can be pickled, and holds nothing but settings.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        allow_weak_sandbox: bool = False,
        without: tuple[str, ...] = (),
        is_probed: bool = True,
    ):
        """Check the limits, and on the first use in a process what the machine can guarantee, which is then printed.

        Args:
            limits: of every run
            allow_weak_sandbox: run even where a guarantee is missing
            without: of `MECHANISMS`; those to do without, as on a machine that lacks them
            is_probed: False only for the probe itself

        Raises:
            ValueError: limits out of range, a package that is not installed, or an unknown mechanism.
            WeakSandboxError: a guarantee is missing; the message lists all that are.
            SandboxError: no worker starts.
        """
        self.limits = limits or Limits()
        faults = self.limits.faults()
        faults += [f"without names {name!r}; expected {', '.join(MECHANISMS)}" for name in {*without} - {*MECHANISMS}]
        faults += [
            f"packages names {name!r}, which is not installed"
            for name in self.limits.packages
            if find_spec(name.partition(".")[0]) is None
        ]
        if faults:
            raise ValueError("; ".join(faults))
        self.without = tuple(sorted(without))
        if is_probed:
            from envs.sandbox.guarantees import told

            missing = told(self.without).missing
            if missing and not allow_weak_sandbox:
                raise WeakSandboxError(
                    f"this machine's sandbox does not isolate {', '.join(missing)} (python -m envs.sandbox says why); "
                    "set allow_weak_sandbox = True to run untrusted code all the same"
                )

    def run(
        self,
        code: str,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        calls: Sequence[Call] = (),
    ) -> SandboxResult:
        """Run `code` in a process of its own, then `calls`, and wait until nothing of it is left.

        Args:
            code: Python; the value of its last statement is reported if that is an expression
            stdin: what the code reads from standard input
            files: text by name, put into the current directory, as in {"data/table.csv": "a,b"}
            timeout_s: shorter or longer than that of the limits
            calls: functions that the code defines, called in turn in the same process

        Raises:
            ValueError: a file name that leads outside, or a time limit out of range.
            SandboxError: no worker was free for long, or two were lost; the code is not to blame.
        """
        limits = self.limits if timeout_s is None else dataclasses.replace(self.limits, timeout_s=timeout_s)
        if faults := [*limits.faults(), *_faults_of_files(files or {})]:
            raise ValueError("; ".join(faults))
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
        generation = pool.generation
        try:
            return self._run(pool, limits, request, len(calls))
        except LostWorkerError:  # a call leaves nothing behind, so it can be made again
            pool.mend(generation)
            return self._run(pool, limits, request, len(calls))

    @staticmethod
    def _run(pool: Pool, limits: Limits, request: memoryview, num_calls: int) -> SandboxResult:
        with pool.worker() as worker:
            return Exchange(pool, worker, limits, request, num_calls=num_calls).run()


def _faults_of_files(files: Mapping[str, Any]) -> list[str]:
    faults = [f"files are {len(files)}; expected at most {_MOST_FILES}"] if len(files) > _MOST_FILES else []
    for name, content in files.items():
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name or len(os.fsencode(name)) > 200:
            faults.append(f"files name {name!r}; expected a relative path inside the current directory")
        elif not isinstance(content, str):
            faults.append(f"file {name!r} holds a {type(content).__name__}; expected text")
    return faults

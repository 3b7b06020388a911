"""The worker process of symbolic grading: one line of JSON in, one line out, killed when late.

    -> {"gold": "\\\\frac{1}{2}", "answer": "0.5", "deadline_s": 2.0, "wall_s": 8.0}
    <- {"is_right": true}                           false: it means something else; null: it cannot be read
    <- {"is_late": true}                            it takes longer than the deadline, or broke the process

The first line out is {"ready": true}. A process that has done all imports, which takes a second, forks the process
that answers. The fork is ended by its own alarm after the processor time of a deadline, and another is forked at once,
so an endless formula costs its deadline and no start. Both end with the input, and with their owner, whose process
id is the one argument. Text is read by math-verify's LaTeX parser only: its plain-expression parser runs Python's
`eval`.

Source: Kydlicek 2025, math-verify 0.9 (github.com/huggingface/Math-Verify).
"""

from __future__ import annotations

import gc
import json
import logging
import mmap
import os
import resource
import signal
import sys
from typing import Any, TextIO

from rllib_srl.envs.kept_process import end_with

_MAX_MEMORY_BYTES = 2 << 30  # of address space
_WORK_SHARE = 0.9  # of the deadline; in the rest the late process ends and the next one is forked


def main() -> None:
    """Answer requests until the input ends."""
    end_with(int(sys.argv[1]))
    replies = _private_stdout()
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    _is_right("1", "x^2")  # imports and compiles everything before the first deadline runs
    is_asked = mmap.mmap(-1, 1)  # shared with the forks: 1 from a question to its reply
    gc.freeze()  # garbage collection in a fork would copy shared pages
    _write(replies, {"ready": True})
    while True:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with(parent)
            _answer(replies, is_asked)
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            return
        if is_asked[0]:
            is_asked[0] = 0
            _write(replies, {"is_late": True})


def _answer(replies: TextIO, is_asked: mmap.mmap) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        is_asked[0] = 1
        # The default action of the alarm ends the process even inside a long computation in C. It counts the work of
        # this process, so that a busy machine gives the same grades as an idle one; a second one bounds the wait.
        signal.setitimer(signal.ITIMER_REAL, request["wall_s"])
        signal.setitimer(signal.ITIMER_PROF, _WORK_SHARE * request["deadline_s"])
        reply = {"is_right": _is_right(request["gold"], request["answer"])}
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_asked[0] = 0
        _write(replies, reply)


def _is_right(gold: str, answer: str) -> bool | None:
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=-1)]
    read = [parse(f"${text}$", config, "no_fallback", parsing_timeout=None) for text in (gold, answer)]
    if not read[1]:
        return None
    if not read[0]:
        return False
    # math-verify rounds numbers to six places, which makes all small ones equal.
    is_same = _is_same_number(read[0][0], read[1][0])
    return bool(verify(read[0], read[1], timeout_seconds=None)) if is_same is None else is_same


def _is_same_number(gold: Any, answer: Any) -> bool | None:
    """Return whether two numbers agree within a relative tolerance, None for what are not two numbers."""
    if not all(getattr(each, "is_number", False) for each in (gold, answer)):
        return None
    try:
        a, b = (complex(each.doit().evalf(30)) for each in (gold, answer))
    except (TypeError, ValueError, OverflowError):
        return None
    is_rounded = any(atom.is_Float for each in (gold, answer) for atom in each.atoms())
    return abs(a - b) <= (1e-6 if is_rounded else 1e-9) * abs(a)


def _private_stdout() -> TextIO:
    """Return the original stdout, and redirect the output of libraries to /dev/null."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return replies


def _write(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()

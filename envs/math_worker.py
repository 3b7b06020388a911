"""The process that does symbolic work for `envs.math_grading`: one line of JSON in, one line out, killed when late.

    -> {"gold": "\\\\frac{1}{2}", "answer": "0.5", "deadline_s": 2.0}
    <- {"is_right": true}                           false: it means something else; null: it cannot be read

The first line out is {"ready": true}. The process ends with its input, with its owner (whose process id is its one
argument), and by its own alarm after as much work as a deadline allows, so that it outlives neither its owner nor a
formula without end. Text is read by math-verify's LaTeX parser only: its plain-expression parser runs Python's `eval`.

Source: Kydlicek 2025, math-verify 0.9 (github.com/huggingface/Math-Verify).
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any, TextIO

from envs.kept_process import end_with

_MAX_MEMORY_BYTES = 2 << 30  # of address space


def main() -> None:
    """Answer requests until the input ends."""
    end_with(int(sys.argv[1]))
    replies = _private_stdout()
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    _is_right("1", "x^2")  # imports and compiles everything before the first deadline runs
    _write(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        # The default action of the alarm ends the process even inside a long computation in C. It counts the work of
        # this process, so that a busy machine gives the same grades as an idle one.
        signal.setitimer(signal.ITIMER_PROF, request["deadline_s"])
        reply = {"is_right": _is_right(request["gold"], request["answer"])}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(replies, reply)


def _is_right(gold: str, answer: str) -> bool | None:
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=-1)]
    read = [parse(f"${text}$", config, "no_fallback", parsing_timeout=None) for text in (gold, answer)]
    if not read[1]:
        return None
    return bool(read[0]) and bool(verify(read[0], read[1], timeout_seconds=None))


def _private_stdout() -> TextIO:
    """Return what stdout was, and send what libraries print to nowhere."""
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

"""`srl train` that writes down what it has acknowledged, and can die: python -m tests.algorithm.lagging_driver ...

    LOG          JSON lines: groups that the memory has stored, checkpoints written and restored, what is still in play
    METHOD:N     the driver kills itself with SIGKILL when it begins METHOD of iteration N, while runners play a slice
    ARGUMENTS    of `srl train`
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import wraps
from typing import Any

from rllib_srl.cli.shared.cluster import quiet
from tests.quick_workers import quick_workers

if __name__ == "__main__":
    quiet(verbose=False)
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: on a busy machine workers would wait for minutes

SLICE_S = 60.0  # until runners play a slice


def main() -> int:
    """Run `srl train`; return its exit status."""
    from rllib_srl.algorithm.srl import SRL
    from rllib_srl.cli.main import main as srl
    from rllib_srl.replay.client import ReplayClient

    log, death, *arguments = sys.argv[1:]
    method, _, iteration = death.partition(":")

    def note(what: str, **about: Any) -> None:
        with open(log, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"what": what, **about}) + "\n")

    def after(owner: Any, name: str, told: Any) -> None:
        usual = getattr(owner, name)

        @wraps(usual)
        def noted(self: Any, *given: Any, **named: Any) -> Any:
            answer = usual(self, *given, **named)
            note(name, **told(self, answer, *given))
            return answer

        setattr(owner, name, noted)

    def in_play(algo: Any) -> list[str]:
        return [one.prompt.key for one in algo.ahead.outstanding]

    def stored(memory: Any, visits: Any, groups: Any, now: int, policy_kl: float) -> dict[str, Any]:
        return {"iteration": now, "groups": {one.group_id: one.prompt.key for one in groups if one.group_id in visits}}

    after(ReplayClient, "add", stored)
    after(SRL, "save_to_path", lambda algo, answer, *given: {"iteration": algo.iteration, "in_play": in_play(algo)})
    after(SRL, "restore_from_path", lambda algo, answer, *given: {"iteration": algo.iteration})

    if method:
        usual = getattr(SRL, method)

        def dying(self: Any, *given: Any, **named: Any) -> Any:
            if self.iteration + 1 == int(iteration):
                deadline = time.monotonic() + SLICE_S
                while not self.ahead._in_slice and time.monotonic() < deadline:
                    time.sleep(0.001)
                note("dies", in_slice=len(self.ahead._in_slice), in_play=in_play(self))
                os.kill(os.getpid(), signal.SIGKILL)
            return usual(self, *given, **named)

        setattr(SRL, method, dying)
    return srl(["train", *arguments])


if __name__ == "__main__":
    with quick_workers():
        sys.exit(main())

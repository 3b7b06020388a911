"""`srl train` that writes down what it has acknowledged, and can die: python -m tests.algorithm.lagging_driver ...

    LOG          JSON lines: groups that the memory has stored, checkpoints written and restored, what is still in play
    METHOD:N     the driver kills itself with SIGKILL when it begins METHOD (`_learn`, `take`) of iteration N, while
                 runners play a slice: the groups launched in this iteration do not end before
    HELD         directory, `hold` of the environment
    ARGUMENTS    of `srl train`
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any

from rllib_srl.cli.shared.cluster import quiet
from tests.quick_workers import quick_workers

if __name__ == "__main__":
    quiet(verbose=False)
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: on a busy machine workers would wait for minutes

SLICE_S = 60.0  # until runners play a slice


def main() -> int:
    from rllib_srl.algorithm.srl import SRL
    from rllib_srl.cli.main import main as srl
    from rllib_srl.replay.client import ReplayClient
    from rllib_srl.rollout.ahead import RolloutsAhead

    log, death, held, *arguments = sys.argv[1:]
    method, _, iteration = death.partition(":")
    shutil.rmtree(held, ignore_errors=True)
    Path(held).mkdir()

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

    def in_play(ahead: Any) -> list[str]:
        return [one.prompt.key for one in ahead.outstanding]

    def stored(memory: Any, visits: Any, groups: Any, now: int) -> dict[str, Any]:
        return {"iteration": now, "groups": {one.group_id: one.prompt.key for one in groups if one.group_id in visits}}

    def saved(algo: Any, directory: Any, *given: Any) -> dict[str, Any]:
        return {"iteration": algo.iteration, "in_play": in_play(algo.rollouts.ahead)}

    after(ReplayClient, "add", stored)
    after(SRL, "save_to_path", saved)
    after(SRL, "restore_from_path", lambda algo, answer, *given: {"iteration": algo.iteration})

    def is_last(group_id: str) -> bool:
        """Return whether a group is launched in the iteration in which the driver dies."""
        return group_id.startswith(f"{iteration}.")

    if method:
        owner = SRL if hasattr(SRL, method) else RolloutsAhead
        usual, launch = getattr(owner, method), RolloutsAhead.launch

        def holding(self: Any, runner_id: int, arguments: Any) -> None:
            for group_id, prompt in arguments["prompts"].items():
                if is_last(group_id):
                    (Path(held) / prompt.prompt_id).touch()
            launch(self, runner_id, arguments)

        def dying(self: Any, *given: Any, **named: Any) -> Any:
            ahead = self if owner is RolloutsAhead else self.rollouts.ahead
            if is_last(ahead.outstanding[-1].group_id):
                deadline = time.monotonic() + SLICE_S
                while not ahead._in_slice and time.monotonic() < deadline:
                    time.sleep(0.001)
                note("dies", in_slice=len(ahead._in_slice), in_play=in_play(ahead))
                os.kill(os.getpid(), signal.SIGKILL)
            return usual(self, *given, **named)

        RolloutsAhead.launch = holding
        setattr(owner, method, dying)
    return srl(["train", *arguments])


if __name__ == "__main__":
    with quick_workers():
        sys.exit(main())

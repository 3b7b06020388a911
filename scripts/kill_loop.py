#!/usr/bin/env python3
"""Kill a process that uses a memory, again and again, and check each time that no acknowledged call is lost.

    python scripts/kill_loop.py --kills 100

    parent ──fork──> user: add, draw_prompts, draw_groups, drop, snapshot ...   each acknowledged through a pipe
       │  SIGKILL at a random moment
       └─> opens the memory: it is that of a twin that made the acknowledged calls, or of one that made one call more;
           the call that was under way, repeated by name, gives the twin's answer: nothing is drawn twice

Call i is a function of (seed, i) and of the memory. A kill does not show what a machine without power loses; it shows
that no state on disk is half a call.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.payloads import encode
from rllib_srl.types import Group, Prompt, StopReason
from scripts.memory_laws import check_valid, content

LONGEST_LIFE_S = 0.15
SETTINGS: dict[str, Any] = {"capacity": 30, "admit": None, "max_uses": 99}


def opened(directory: Path, seed: int) -> SRLReplayBuffer:
    """Open a memory."""
    return SRLReplayBuffer(directory=directory, run="kills", seed=seed, **SETTINGS)


def a_group(number: int, now: int, generator: np.random.Generator) -> Group:
    """Return a group of two episodes."""
    length = int(generator.integers(2, 200))
    mask_N = np.tile(np.arange(length) > 0, 2)
    return Group(
        f"{now}.{number}",
        Prompt("env", f"p{number}", "ab"[number % 2]),
        generator.integers(0, 99, 2 * length).astype(np.int32),
        mask_N,
        np.where(mask_N, -0.5, 0).astype(np.float32),
        np.arange(3) * length,
        generator.integers(0, 2, 2).astype(np.float32),
        np.full((2, 2), now),
        (StopReason.TERMINATED,) * 2,
    )


def call(buffer: SRLReplayBuffer, seed: int, position: int) -> Any:
    """Make call number `position`, and return its answer in a form that `==` compares."""
    generator, now, name = np.random.default_rng([seed, position]), position, f"{position}.call"
    match position % 4:
        case 1:
            return [prompt.key for prompt in buffer.draw_prompts(3, now, name)]
        case 2:
            return [encode(group) for group in buffer.draw_groups(3, now, name)]
        case 3:
            return buffer.drop(sorted(buffer.tables.group_ids.values())[:1], name)
    numbers = generator.choice(60, 4, replace=False).tolist()
    return [vars(visit) for visit in buffer.add([a_group(number, now, generator) for number in numbers], now, name)]


def stored(buffer: SRLReplayBuffer) -> tuple[Any, ...]:
    """Return everything that the store of a buffer holds."""
    tables, state = buffer.store.read()
    payloads = [buffer.store.payload(int(seq)) for seq in np.sort(tables.groups["seq"][tables.groups.slots()])]
    return buffer.store.position, content(tables), payloads, state


def use(directory: Path, seed: int, position: int, pipe: int) -> None:
    """Make calls from `position` on until killed, and acknowledge each."""
    buffer = opened(directory, seed)
    while True:
        call(buffer, seed, position)
        os.write(pipe, position.to_bytes(8, "little"))
        if position % 9 == 0:
            buffer.snapshot(directory / "copy")
        position += 1


def one_life(directory: Path, seed: int, position: int, life_s: float) -> int:
    """Start a user, kill it after a while, and return the number of calls that it was told are stored."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            use(directory, seed, position, writing)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writing)
    time.sleep(life_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    output = b""
    while part := os.read(reading, 1 << 16):
        output += part
    os.close(reading)
    return len(output) // 8


def run(directory: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """Kill that often; return what was found."""
    generator, errors, position, num_lives = np.random.default_rng(seed), [], 0, 0
    twin = opened(directory / "twin", seed)
    for kill in range(num_kills):
        position += (num := one_life(directory / "killed", seed, position, generator.random() * LONGEST_LIFE_S))
        num_lives += num > 0
        while twin.store.position < position:
            call(twin, seed, twin.store.position)
        buffer = opened(directory / "killed", seed)
        try:
            check_valid(buffer)
            if buffer.store.position not in (position, position + 1):
                errors.append(f"kill {kill}: {buffer.store.position} calls stored, {position} acknowledged")
            again, want = (call(side, seed, position) for side in (buffer, twin))  # the one under way
            position += 1
            if again != want:
                errors.append(f"kill {kill}: call {position - 1} answers otherwise when it is repeated")
            if stored(buffer) != stored(twin):
                errors.append(f"kill {kill}: the memory differs from its twin after {position} calls")
        except AssertionError as error:
            errors.append(f"kill {kill}: {error!r}")
        buffer.close()
    twin.close()
    return {"num_kills": num_kills, "num_lives": num_lives, "num_calls": position, "errors": errors}


def main() -> int:
    """Run the loop and print what it found as JSON; return 1 if anything was lost."""
    parser = argparse.ArgumentParser(description="Kill a process that uses a memory; check that nothing is lost.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = run(Path(directory), arguments.kills, arguments.seed)
    print(json.dumps(report, indent=1))
    return int(bool(report["errors"]))


if __name__ == "__main__":
    sys.exit(main())

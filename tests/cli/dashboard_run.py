"""A run by hand for tests of the live page: metrics, transcripts, and a memory whose tokens are letters and tags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rllib_srl.replay.buffer import SRLReplayBuffer
from tests.cli.test_script_report import episode, evaluation, row
from tests.small_buffer import a_group, by_hand

EVIL = "<script>alert(1)</script>"
WORDS = {40: EVIL, 41: '"><img src=x onerror=alert(2)>', 1: "Q: "}


def decode(ids: Sequence[int]) -> str:
    """Return text for token ids: markup for some, letters for others."""
    return "".join(WORDS.get(int(one), chr(97 + int(one) % 26)) for one in ids)


def write_files(directory: Path) -> None:
    """Write settings, metrics and transcripts of four iterations."""
    (directory / "settings.yaml").write_text("iterations: 9\nmodel: tiny\nenv: sums\n")
    rows = [
        row(1, 0.125, **evaluation(0.8, **{"a": 0.9, EVIL: 0.7})),
        row(2, 0.25),
        row(3, 0.5, **evaluation(0.6, **{"a": 0.4, EVIL: 0.8})),
        row(4, 0.75, **{"replay/num_items": 12.0, "env_runners/live_token_share": 0.5}),
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    places = [(n, index) for n in range(1, 5) for index in range(2)]
    episodes = [episode(n, index, float(index), f"answer {n} {index}") for n, index in places]
    episodes[-1] |= {"prompt_id": EVIL, "env_id": "<b>env", "group_id": "<i>g"}
    episodes[-1]["turns"][1]["text"] = f"{EVIL}\ud83d\x1b[31m"
    (directory / "transcripts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in episodes))


def memory_of(directory: Path) -> SRLReplayBuffer:
    """Return the memory of a run, open: prompts p1 and p2, drawn for iteration 8, when p1 failed and p2 was reused."""
    buffer = by_hand(directory / "replay", min_buffer_size=1)
    buffer.add([a_group(1, (1, 1), 1, ids=[40, 41]), a_group(2, (1, 0), 1, ids=[42])], 1, "1.add")
    buffer.draw_prompts(0, 1, "1.draw_prompts")
    buffer.draw_prompts(2, 8, "8.draw_prompts")
    buffer.draw_groups(1, 8, "8.draw_groups")
    buffer.add([a_group(1, (0, 0), 8, ids=[40])], 8, "8.add")
    return buffer

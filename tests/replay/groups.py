"""Small groups, buffers for them, an environment that plays itself, and all that a buffer is, to compare two."""

import copy
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.intake import Visit
from rllib_srl.replay.items import key_of
from rllib_srl.types import Group, Prompt, StopReason
from scripts.memory_laws import content


def a_prompt(index: int | str, domain: str = "sums", history: tuple[str, ...] = (), step: str = "") -> Prompt:
    """Return a prompt."""
    return Prompt("env", f"p{index}", domain, history, step)


def laid_out(episodes: Sequence[tuple[Any, Any]], **fields: Any) -> Group:
    """Return a valid group of episodes of (token ids, which the policy wrote); `fields` replace what is made here."""
    streams, masks = zip(*episodes, strict=True)
    mask_N, size = np.concatenate(masks).astype(bool), len(streams)
    values: dict[str, Any] = {
        "group_id": "g",
        "prompt": Prompt("env", "q"),
        "token_ids_N": np.concatenate(streams).astype(np.int32),
        "loss_mask_N": mask_N,
        "behaviour_logp_N": np.where(mask_N, -0.5, 0).astype(np.float32),
        "offsets": np.cumsum([0, *map(len, streams)]),
        "rewards_G": np.zeros(size, np.float32),
        "versions_G2": np.zeros((size, 2), np.int64),
        "stop_reasons": (StopReason.TERMINATED,) * size,
    }
    return Group(**{**values, **fields})


def group_of(*episodes: tuple[Sequence[int], Sequence[int]], **fields: Any) -> Group:
    """Return a group of episodes of (prompt ids, written ids)."""
    parts = [([*prompt, *written], [False] * len(prompt) + [True] * len(written)) for prompt, written in episodes]
    return laid_out(parts, **fields)


def a_group(
    prompt: Prompt | int | str,
    now: int = 1,
    place: int = 0,
    rewards: Sequence[float] = (1.0, 0.0, 1.0, 0.0),
    num_turns: int = 1,
    salt: int = 0,
    **fields: Any,
) -> Group:
    """Return a group of a prompt, or of the one with an index; tokens depend on prompt, iteration and `salt` alone.

    A turn is five tokens of the policy after a reply of two; `fields` are of `Group`, in place of what is made here.
    """
    prompt = prompt if isinstance(prompt, Prompt) else a_prompt(prompt)
    task = np.random.default_rng(zlib.crc32(prompt.key.encode()))
    words = task.integers(10, 60, 12)  # an answer is made of its prompt's words, so that prompts differ
    generator = np.random.default_rng([zlib.crc32(prompt.key.encode()), now, salt])
    episodes = []
    for _ in rewards:
        pieces = [words[:3]]
        for _ in range(num_turns):
            pieces += [generator.integers(0, 4, 2), generator.choice(words, 5)]
        episodes.append((np.concatenate(pieces), [False] * 3 + [*[False] * 2, *[True] * 5] * num_turns))
    mask_N = np.concatenate([mask for _, mask in episodes])
    turns = [[f"{now}.{salt}.{g}.{t}" for t in range(num_turns)] for g in range(len(rewards))]
    values: dict[str, Any] = {
        "group_id": f"{now}.{place}",
        "prompt": prompt,
        "behaviour_logp_N": np.where(mask_N, -generator.random(len(mask_N)), 0).astype(np.float32),
        "rewards_G": np.array(rewards, np.float32),
        "versions_G2": np.full((len(rewards), 2), now),
        "extra": {"turns": turns} if num_turns > 1 else {},
    }
    return laid_out(episodes, **{**values, **fields})


# A memory with every part of the schedule on, so that each acts in the tests; by default all of them are off.
SCHEDULED: dict[str, Any] = {
    "spacing": "fsrs",
    "selection": "srl",
    "reuse_selection": "srl",
    "diversity_coeff": 0.5,
    "max_age": 32,
}


def a_buffer(directory: Path | None = None, **given: Any) -> SRLReplayBuffer:
    """Return a scheduled buffer of a few items whose tokens hold no text."""
    return SRLReplayBuffer(directory=directory, **{"capacity": 64, "admit": None, **SCHEDULED, **given})


def row_of(buffer: SRLReplayBuffer, prompt: Prompt | int) -> np.void:
    """Return the row of an item."""
    prompt = prompt if isinstance(prompt, Prompt) else a_prompt(prompt)
    row: np.void = buffer.tables.items[buffer.tables.slot_of(key_of(prompt))]
    return row


def rewards_of(prompt: Prompt, now: int, size: int = 4) -> list[float]:
    """Return what a policy with a skill of its own for each prompt earns; it is the same whenever it is asked."""
    generator = np.random.default_rng([zlib.crc32(prompt.prompt_id.encode()), now])
    skill = (zlib.crc32(prompt.prompt_id.encode()) % 97) / 97
    return (generator.random(size) < skill).astype(float).tolist()


def play(buffer: SRLReplayBuffer, now: int, num_prompts: int = 8, num_revisits: int = 3, **group: Any) -> dict:
    """Play one iteration as the algorithm does, and return all that the buffer answered.

    Fresh prompts are numbered by iteration and place, so that a run which is restored gets the same.
    """
    prompts = buffer.draw_prompts(num_revisits, now, f"{now}.draw_prompts") if now > 2 else []
    asked = list(prompts)
    prompts += [
        a_prompt(100 * now + place, ("sums", "words", "maps")[(now + place) % 3])
        for place in range(num_prompts - len(prompts))
    ]
    groups = [a_group(p, now, i, rewards_of(p, now), **group) for i, p in enumerate(prompts)]
    visits: list[Visit] = buffer.add(groups, now, f"{now}.add")
    reused = buffer.draw_groups(4, now, f"{now}.draw_groups") if now > 2 else []
    if now % 5 == 0 and reused:
        buffer.drop([reused[0].group_id], f"{now}.drop")
    return {
        "due": asked,
        "visits": [vars(visit) for visit in visits],
        "reused": [(group.group_id, group.token_ids_N.tobytes()) for group in reused],
        "stats": counted(buffer, now),
    }


def counted(buffer: SRLReplayBuffer, now: int) -> dict[str, float | None]:
    """Return the stats of a buffer, nan as None."""
    return {name: None if np.isnan(value) else value for name, value in buffer.stats(now).items()}


def everything(buffer: SRLReplayBuffer) -> dict[str, Any]:
    """Return all that a buffer's later answers depend on, in a form that `==` compares; group slots do not count."""
    found = content(buffer.tables)
    return {
        **found,
        "state": {**copy.deepcopy(buffer._state()), "counts": dict(+buffer.counts)},
        "payloads": {seq: buffer.store.payload(seq) for seq in found["groups"]},
    }


def journalled(buffer: SRLReplayBuffer) -> dict[str, Any]:
    """Return everything that a buffer's store holds, in a form that `==` compares."""
    tables, state = buffer.store.read()
    return {"position": buffer.store.position, "state": state, **content(tables)}

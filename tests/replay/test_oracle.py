"""Item statistics of recorded operations, against those of the former buffer (commit 13dc98b) with the same draws."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.items import key_of
from rllib_srl.replay.schedule.recall import grades_of
from rllib_srl.types import Prompt
from scripts.memory_laws import check_valid
from tests.replay.groups import a_group, a_prompt, rewards_of

RECORDED = Path(__file__).with_name("data") / "item_statistics.json"
NAMES = (
    *("stability", "difficulty", "interval", "due", "history_sum", "history_count", "reps", "lapses"),
    *("streak", "last_review", "created", "alpha", "beta", "pass_rate", "reward", "num_success", "group_size"),
    *("visits", "version", "variance", "nll", "novelty", "diversity", "num_silent"),
    *("num_groups", "is_solved"),  # recorded, and no longer stored
)
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "fsrs": {"spacing": "fsrs", "min_recall_interval": 2},
    "sm2": {"spacing": "contrib.spacings:SM2", "diversity_coeff": 0.5, "min_graded": 3},
}


def operations(buffer: SRLReplayBuffer) -> None:
    """Play, draw, rate and drop for 16 iterations; what is drawn depends on keys and iterations alone."""
    tables = buffer.tables

    def items(num: int, now: int, *_: Any) -> np.ndarray:
        order = np.argsort([(int(tables.items["key"][slot]) * (now + 7)) % 1009 for slot in tables.slots()])
        return tables.slots()[order[:num]]

    def groups(num: int, now: int, *_: Any, **__: Any) -> np.ndarray:
        held = np.flatnonzero((tables.groups["size"] > 0) & (tables.groups["born"] < now))
        drawn: np.ndarray = held[np.argsort(tables.groups["seq"][held])][now % 3 :: 5][:num]
        return drawn

    buffer.draws.items, buffer.draws.groups = items, groups  # type: ignore[method-assign, assignment]
    for now in range(1, 17):
        prompts = buffer.draw_prompts(3, now) if now > 1 else []
        prompts += [a_prompt(10 * now + i, "ab"[i % 2]) for i in range(2)]
        played = []
        for place, prompt in enumerate(dict.fromkeys(prompts)):
            size = 2 if place == 1 else 4
            played.append(a_group(prompt, now, place, rewards_of(prompt, now, size)))
        buffer.add(played, now)
        drawn = buffer.draw_groups(2, now)
        review(buffer, played[0].prompt, 0.25 * (now % 5), now)
        if drawn:
            review(buffer, drawn[0].prompt, 1.0 if now % 3 == 2 else 0.8, now)  # recorded as grades 4 and 3
        if now % 4 == 0 and drawn:
            buffer.drop([drawn[-1].group_id])


def review(buffer: SRLReplayBuffer, prompt: Prompt, rating: float, now: int) -> None:
    """Grade an item by a rating in [0, 1]."""
    buffer.recall.review([buffer.tables.slot_of(key_of(prompt))], grades_of(np.array([rating])), now)


def statistics(tables: Any) -> dict[str, list[float]]:
    """Return the columns of each item by prompt id."""
    rows = {tables.prompt_of(slot).prompt_id: tables.items[slot] for slot in tables.slots().tolist()}
    return {name: [round(float(row[column]), 9) for column in NAMES[:-2]] for name, row in sorted(rows.items())}


@pytest.mark.parametrize("variant", VARIANTS)
def test_items_have_the_statistics_that_the_former_buffer_gave_them(variant: str) -> None:
    buffer = SRLReplayBuffer(capacity=99, admit=None, **VARIANTS[variant])
    operations(buffer)
    recorded = json.loads(RECORDED.read_text())[variant]
    found = statistics(buffer.tables)
    assert found.keys() == recorded.keys() and len(found) >= 30
    # The former buffer discounted the history of the other variants in other ways.
    compared = [at for at, name in enumerate(NAMES[:-2]) if variant == "default" or not name.startswith("history")]
    for name, values in found.items():
        ours, theirs = np.array(values)[compared], np.array(recorded[name])[compared]
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9, err_msg=f"{name}: {NAMES}")
    check_valid(buffer)
    buffer.close()

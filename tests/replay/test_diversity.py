"""Diversity of items: by hand, bounded, in a buffer; and nothing of it where nothing needs it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.diversity.neighbours import diversity, novelty
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store import StoreError
from scripts.memory_laws import check_valid
from tests.replay.groups import a_buffer, a_group, a_prompt

NAN = np.nan


def rows(buffer):
    return buffer.tables.items[buffer.tables.slots()]


def test_parts_worked_by_hand():
    assert novelty(np.array([[1.0, 0.5], [0.25, NAN], [NAN, NAN], [-1.0, -1.0]])) == pytest.approx([0.25, 0.75, 1, 1])
    # k of 8 successes: S = k (8 - k) / 64, and 4 S at most 1
    variance = [k * (8 - k) / 64 for k in range(9)]
    assert diversity(variance, np.zeros(9)) == pytest.approx([2 * s for s in variance])
    assert diversity([0.25, 0.0, 5.0], np.array([0.5, 0.5, 0.0])) == pytest.approx([0.75, 0.25, 0.5])


@settings(max_examples=40)
@given(st.lists(st.floats(-1, 1) | st.just(NAN), min_size=1, max_size=9), st.floats(0, 1e6))
def test_diversity_is_bounded(similarity, variance):
    found = diversity(np.array([variance]), novelty(np.array([similarity])))
    assert 0 <= found[0] <= 1


def test_an_item_is_not_compared_with_itself():
    buffer = a_buffer(embedding="ngram")
    buffer.add([a_group(0, 1), a_group(1, 1)], 1)
    assert rows(buffer)["novelty"].tolist() == [1, 1]  # nothing was stored before
    buffer.add([a_group(0, 2)], 2)
    assert rows(buffer)["novelty"][0] > 0.8  # to the other; its own earlier vector is closer
    assert buffer.add([replace(a_group(0, 3), prompt=a_prompt(2))], 3)[0].is_new
    assert rows(buffer)["novelty"][2] < 0.8  # to p0, of the same words


# --- off ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"selection": "srl", "spacing": "fsrs"}, None),
        ({"diversity_coeff": 0.5}, "ngram"),
        ({"eviction": "least_diverse"}, "ngram"),
        ({"embedding": "ngram"}, "ngram"),
        ({"embedding": "ngram", "capacity": 0}, None),
    ],
)
def test_items_are_embedded_where_something_needs_it(given, expected):
    assert ReplaySettings(**given).embedding_used == expected


def test_a_default_buffer_embeds_nothing():
    script = (
        "import sys, numpy as np\n"
        "from rllib_srl.replay.rllib import RLlibReplayBuffer\n"
        "from tests.replay.groups import a_group\n"
        "buffer = RLlibReplayBuffer(admit=None)\n"
        "buffer.add([a_group(i, 1, i) for i in range(4)], 1)\n"
        "assert buffer.draw_prompts(2, 2) and buffer.draw_groups(2, 2) and buffer.tracker is None\n"
        "assert not buffer.tables.items[buffer.tables.slots()]['has_vector'].any()\n"
        "assert not len(buffer.tables.vectors[0])\n"
        "heavy = {'faiss', 'torch', 'transformers', 'pandas', 'ray.rllib', 'rllib_srl.contrib'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


def a_memory(directory, **given):
    return SRLReplayBuffer(directory=directory, capacity=64, admit=None, run="r", **given)


def test_a_memory_keeps_the_embedding_that_it_was_written_with(tmp_path):
    for name, first, second in (("off", {}, {"diversity_coeff": 0.5}), ("on", {"embedding": "ngram"}, {})):
        buffer = a_memory(tmp_path / name, **first)
        buffer.add([a_group(0, 1)], 1)
        buffer.snapshot(tmp_path / f"{name}.copy")
        buffer.close()
        with pytest.raises((ValueError, StoreError), match="was written with embedding .* or a new memory"):
            a_memory(tmp_path / name, **second)
        with pytest.raises((ValueError, StoreError), match="this memory was written with embedding"):
            a_memory(None, **second).restore(tmp_path / f"{name}.copy")
        again = a_memory(tmp_path / name, **first)
        check_valid(again)
        again.close()

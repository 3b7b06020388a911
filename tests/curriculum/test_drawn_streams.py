"""The streams that confirmations run on: drawn by lot, so that nobody chose them, and unlike those of development."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from rllib_srl.curriculum.streams import make_stream
from rllib_srl.tune_configs.streams import STAGE, STREAMS


@dataclass(frozen=True)
class Lot:
    """What a stream is drawn from. No lesson teaches these sizes; by then no stream had such a pair of them."""

    seed: int
    compared: Sequence[str]
    read: Sequence[str]
    between: Sequence[str]


SIZES, PAIR = {"two": 2, "three": 3, "five": 5, "six": 6, "seven": 7}, ("larger", "smaller")
SIZE_OF = {"compare": "num_numbers", "registers": "num_registers", "lookup": "num_pairs"}
FIRST = ("two", "five", "six")
LOTS = {
    "cpu_drawn": Lot(401, FIRST, FIRST, ["lookup_three", *(f"registers_{size}" for size in FIRST)]),
    "cpu_heldout": Lot(
        501, ("two", "six"), ("five", "seven"), ["lookup_two", "lookup_three", "registers_five", "registers_seven"]
    ),
    "cpu_heldout_2": Lot(601, ("two",), ("five", "six"), ["lookup_two", "registers_five", "registers_six"]),
}


def drawn_stages(lot: Lot) -> list[dict]:
    """Draw a stream by lot: world, domain and settings of each stage."""
    draw = random.Random(lot.seed)
    compared, read, between = draw.choice(lot.compared), draw.choice(lot.read), draw.choice(lot.between)
    drawn = [
        (f"compare_{compared}", {}),
        (f"compare_{compared}_smallest", {"ask": "smallest"}),
        *((f"registers_{read}_{task}", {"task": task}) for task in PAIR),
        (between, {}),
    ]
    draw.shuffle(drawn)
    stages = []
    for domain, settings in drawn:
        world, size = domain.split("_")[:2]
        env_config = {"num_shots": 0, SIZE_OF[world]: SIZES[size], **settings}
        stages.append({"world": world, "domain": domain, "env_config": env_config, "iterations": STAGE})
    return stages


@pytest.mark.parametrize("name", LOTS)
def test_a_stream_was_drawn_by_lot(name):
    assert STREAMS[name] == drawn_stages(LOTS[name])
    assert STREAMS[name] != drawn_stages(replace(LOTS[name], seed=LOTS[name].seed + 1))


def test_the_heldout_stream_has_other_domains():
    names = {name: [entry.name for entry in make_stream(STREAMS[name]).entries.values()] for name in STREAMS}
    assert len(names["cpu"]) == len(names["cpu_heldout"]) == 5
    assert not set(names["cpu_heldout"]) & {*names["cpu"], *names["cpu_drawn"]}
    assert not set(names["cpu_heldout_2"]) & {*names["cpu"], *names["cpu_drawn"], *names["cpu_heldout"]}
    assert names["cpu"] != names["cpu_turned"] and set(names["cpu"]) == set(names["cpu_turned"])

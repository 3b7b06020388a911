"""Counts per domain on the real path: what is played, drawn and stored of two domains, and where it is shown."""

import logging
from collections import Counter

import numpy as np
import pytest

from rllib_srl.cli import memory as script
from tests.algorithm.test_retention import EVEN, ODD
from tests.small_memory import go, memory_config

STAGES = [{**EVEN, "iterations": 3}, {**ODD, "iterations": 3}, EVEN]


@pytest.mark.slow
def test_counts_of_two_domains_are_those_of_what_was_played_and_drawn(
    random_llama_dir, tmp_path, ray_here, build, capsys, caplog
):
    config = memory_config(random_llama_dir, tmp_path / "log", revisit_fraction=0.5, reuse_fraction=0.25, capacity=12)
    config.env, config.env_config = None, {}
    algo = build(config.replay(eviction="largest_domain").environment(stream=STAGES))
    with caplog.at_level(logging.INFO, "rllib_srl.stages"):
        iterations = go(algo, 7)
    found: dict[str, Counter] = {"even": Counter(), "odd": Counter()}
    for one in iterations:
        for group in one.played:
            of = found[group.prompt.domain]
            of["num_groups"] += 1
            of["num_groups_zero_variance"] += bool(np.ptp(group.rewards_G) == 0)
        for prompt in one.revisits:
            found[prompt.domain]["num_revisits"] += 1
        for meta in one.reused:
            found[meta.prompt.domain]["num_reuses"] += 1
    told = iterations[-1].result["domains"]
    assert {domain: {name: of[name] for name in found[domain]} for domain, of in told.items()} == found
    assert all(of["num_revisits"] and of["num_groups_zero_variance"] for of in found.values())
    # A full memory is shared by its domains.
    assert {domain: of["num_items"] for domain, of in told.items()} == {"even": 6, "odd": 6}
    assert sum(of["num_stored_groups"] for of in told.values()) == iterations[-1].replay["num_stored_groups"]
    even = iterations[2].result["domains"]["even"]
    assert next(record.getMessage() for record in caplog.records if record.name == "rllib_srl.stages") == (
        f"stage of even ended: {even['num_items']:g} prompts and {even['num_stored_groups']:g} groups stored; "
        f"12 groups played, {even['num_groups_zero_variance']:g} of them of equal rewards; "
        f"{even['num_revisits']:g} revisits, {even['num_reuses']:g} reuses"
    )
    assert script.main(["stats", algo.logdir]) == 0
    heading, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert {row[0]: dict(zip(heading[1:], map(float, row[1:]), strict=True)) for row in rows} == told

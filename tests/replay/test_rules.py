"""Rules of a user's own: by registered name or import path, named where they are wrong, and never run by a reader."""

import numpy as np
import pytest

from rllib_srl.replay.admission import Refusal
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.client import ReplayClient
from rllib_srl.replay.diversity.embedders import NgramEmbedder
from rllib_srl.replay.reading import reading
from rllib_srl.replay.schedule.spacing import make_spacing
from rllib_srl.replay.selection.rules import SELECTIONS
from rllib_srl.replay.settings import ReplaySettings
from tests.replay.groups import a_buffer, a_group, a_prompt
from tests.small_buffer import said


def by_number(candidates, num, generator):
    """Take the items that came last, in order: `recent`, under a name of our own."""
    return np.argsort(-candidates.seq)[:num]


def oldest_stays(candidates, num, generator):
    """Evict what came last."""
    return np.argsort(-candidates.seq)[:num]


def nine_days(desired_retention=0.9, **parameters):
    """Wait nine days after whatever happened."""
    return make_spacing("fixed", desired_retention, interval=9.0)


def no_33(group, decode):
    """Refuse episodes in which the policy wrote token 33."""
    written_G = [
        group.stream(g)[group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]]].tolist() for g in range(group.size)
    ]
    found = tuple(g for g, written in enumerate(written_G) if "w33" in decode(written).split())
    return Refusal("thirty_three", found) if found else None


class Unigrams(NgramEmbedder):
    """Vectors of single tokens."""

    dim, orders = 8, (1,)


OWN = {
    "selection": by_number,
    "reuse_selection": by_number,
    "spacing": nine_days,
    "eviction": oldest_stays,
    "embedding": Unigrams,
    "admit": no_33,
}


def acting(settings):
    """Return what a buffer of ten prompts does with some settings: vectors, grades, draws and who is left."""
    buffer = SRLReplayBuffer(settings, decode=lambda ids: " ".join(f"w{i}" for i in ids))
    domains = ("sums", "words")
    groups = [a_group(a_prompt(i, domains[i % 2]), 1, i, (1.0, 0.0, 0.0, i % 2)) for i in range(10)]
    buffer.add(groups, 1, "1.add")
    store = buffer.tables
    return {
        "selection": [prompt.prompt_id for prompt in buffer.draw_prompts(3, 2, "2.draw_prompts")],
        "reuse_selection": [one.prompt.prompt_id for one in buffer.draw_groups(3, 2, "2.draw_groups")],
        "spacing": sorted(set(store.items["interval"][store.slots()].tolist())),
        "eviction": sorted(store.prompt_of(slot).prompt_id for slot in store.slots().tolist()),
        "embedding": buffer.tables.vectors[1].shape[1],
        "admit": buffer.counts["num_refused_thirty_three"],
    }


EXPECTED = {
    "selection": ["p5", "p4", "p3"],
    "reuse_selection": ["p5", "p4", "p3"],
    "spacing": [9.0],
    "eviction": [f"p{i}" for i in range(6)],
    "embedding": 8,
}


@pytest.mark.parametrize("setting", OWN)
def test_a_rule_of_ones_own_acts(setting):
    name = f"{__name__}:{OWN[setting].__qualname__}"
    plain = {} if setting == "admit" else {"admit": None}
    if setting in ("selection", "reuse_selection", "eviction"):
        plain |= {"capacity": 6, "eviction": f"{__name__}:oldest_stays"}
    settings = ReplaySettings(**{"capacity": 50, **plain, setting: name})
    settings.checked()
    found = acting(settings)[setting]
    if setting == "admit":
        groups = [a_group(a_prompt(i, ("sums", "words")[i % 2]), 1, i) for i in range(10)]
        assert 10 > found == sum(bool((one.token_ids_N[one.loss_mask_N] == 33).any()) for one in groups) > 0
    else:
        assert found == EXPECTED[setting]


def test_a_rule_that_only_this_process_knows_is_named_before_another_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(SELECTIONS, "held", by_number)
    settings = ReplaySettings(selection="held", admit=None)
    message = "replay_selection = 'held' is registered in this process.*expected an import path, 'module:rule'"
    with pytest.raises(ValueError, match=message):
        ReplayClient.start(settings, directory=tmp_path, seed=1, run="r", is_local=False, timeout_s=5.0)
    assert list(tmp_path.iterdir()) == []


def test_what_looks_into_a_memory_runs_no_code_that_it_names(tmp_path, capsys, monkeypatch):
    called = []
    monkeypatch.setattr(f"{__name__}.nine_days", lambda **given: called.append(1) or make_spacing("fixed"))
    own = {
        "selection": f"{__name__}:by_number",
        "eviction": f"{__name__}:oldest_stays",
        "embedding": f"{__name__}:Unigrams",
    }
    buffer = a_buffer(tmp_path, spacing=f"{__name__}:nine_days", **own)
    buffer.add([a_group(1)], 1)
    buffer.close()
    called.clear()
    monkeypatch.setattr(f"{__name__}.Unigrams", None)
    assert "1 of 1 items" in said(capsys, "list", tmp_path)
    assert "num_items" in said(capsys, "stats", tmp_path)
    with reading(tmp_path) as one:
        assert one.settings.selection == own["selection"] and np.isnan([*one.recall.values()]).all()
    assert "1 item removed" in said(capsys, "drop", tmp_path, "p1")
    assert called == []

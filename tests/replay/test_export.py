"""Groups as a file for other programs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rllib_srl.replay.tools.export import row_of
from tests.replay.stored import a_group


def test_a_row_has_plain_columns_by_episode():
    group = a_group(1, num_tokens=2)
    item = {"key": 7, "due": np.inf, "reps": 2}
    row = json.loads(json.dumps(row_of(group, item, lambda ids: "/".join(map(str, ids)))), parse_constant=pytest.fail)
    assert row["token_ids"] == [group.token_ids_N[:2].tolist(), group.token_ids_N[2:].tolist()]
    assert row["text"] == ["/".join(map(str, ids)) for ids in row["token_ids"]]
    assert row["item"] == {"key": 7, "due": "inf", "reps": 2}
    assert (row["prompt_id"], row["history"], json.loads(row["extra"])) == ("p1", ["first", "zweite ✓"], group.extra)
    assert "text" not in row_of(group, item, None)

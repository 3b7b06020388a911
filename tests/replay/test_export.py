"""Groups as files for others, and back."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from rllib_srl.replay.tools.export import Exported, export_groups, import_groups
from rllib_srl.types import Prompt
from tests.replay.stored import ITEM, a_group, an_item, assert_same

GROUPS = [a_group(0), a_group(1, num_tokens=1, extra={}), a_group(2, prompt=Prompt("w", "2", step="improve"))]
ROWS = [
    Exported(GROUPS[0], an_item(2**64 - 1, np.nan)),
    Exported(GROUPS[1]),
    Exported(GROUPS[2], an_item(1, np.inf)),
]


def test_nothing_is_lost(tmp_path):
    path = tmp_path / "deep/groups.jsonl"
    assert export_groups(iter(ROWS), path, item=ITEM) == 3
    imported = import_groups(path)
    assert imported.num_skipped == 0 and os.listdir(path.parent) == [path.name]
    for row, again in zip(ROWS, imported.rows, strict=True):
        assert_same(row.group, again.group)
        if row.item is None:
            assert again.item is None
        else:
            assert np.array(tuple(again.item.values()), ITEM).tobytes() == np.array(row.item[()], ITEM).tobytes()
    assert export_groups(imported.rows, tmp_path / "again.jsonl", item=ITEM) == 3
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_many_rows_and_none(tmp_path):
    assert export_groups((Exported(a_group(i)) for i in range(600)), tmp_path / "many.jsonl") == 600
    ids = [row.group.group_id for row in import_groups(tmp_path / "many.jsonl").rows]
    assert ids == [f"g{i}" for i in range(600)]
    assert export_groups([], tmp_path / "none.jsonl") == 0
    assert import_groups(tmp_path / "none.jsonl").rows == []


def test_other_programs_read_plain_columns(tmp_path):
    export_groups(ROWS, tmp_path / "g.jsonl", item=ITEM, text=lambda ids_T: "/".join(map(str, ids_T)))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "g.jsonl").read_text().splitlines()]
    assert [line["item"] and line["item"]["due"] for line in lines] == ["nan", None, "inf"]
    assert lines[1]["text"] == [str(token) for token in GROUPS[1].token_ids_N]


FAULTS = {
    "token_ids": ([[1, 2], ["x"]], "token_ids = [[1, 2], ['x']]; expected a list of lists of int32"),
    "loss_mask": ([[True]], "loss_mask has streams of other lengths than token_ids"),
    "behaviour_logp": ([[0.0], [2.5]], "behaviour_logp_N is not 0 outside loss_mask_N"),
    "rewards": ([0.5], "rewards has 1 entries; expected 2"),
    "stop_reasons": (["bored", "terminated"], "stop_reasons = ['bored', 'terminated']; expected a list of stop"),
    "versions": ([[1], [2]], "versions = [[1], [2]]; expected a list of pairs"),
    "extra": ("[]", "extra = '[]'; expected the text of a JSON object"),
    "origin": ("stolen", "origin = 'stolen'; expected fresh, revisit or reuse"),
    "item": ({"due": "soon"}, "item is not an object of numbers"),
    "group_id": (None, "group_id is missing"),
}


@pytest.mark.parametrize("field", FAULTS)
def test_a_broken_row_names_file_row_and_field(tmp_path, field):
    value, message = FAULTS[field]
    path = tmp_path / "g.jsonl"
    export_groups([Exported(a_group(i, num_tokens=1)) for i in range(3)], path)
    lines = path.read_text().splitlines()
    row = json.loads(lines[1])
    if value is None:
        del row[field]
    else:
        row[field] = value
    path.write_text("\n".join([lines[0], json.dumps(row), lines[2]]))
    with pytest.raises(ValueError) as caught:
        import_groups(path)
    assert str(caught.value).startswith("1 broken rows, nothing was imported: g.jsonl row 2: ")
    assert message in str(caught.value)
    imported = import_groups(path, on_fault="skip")
    assert [r.group.group_id for r in imported.rows] == ["g0", "g2"]
    assert imported.num_skipped == 1 and message in imported.faults[0]


def test_all_faults_of_all_rows_are_told(tmp_path):
    path = tmp_path / "g.jsonl"
    path.write_bytes(b'{"group_id": 1}\n\xff\n[]\n"text"\n' + b"{}\n" * 20)
    with pytest.raises(ValueError) as caught:
        import_groups(path)
    message = str(caught.value)
    assert message.startswith("24 broken rows") and message.endswith("; and 14 more rows")
    assert "row 1: group_id = 1; expected text; env_id is missing" in message
    assert "row 2: not JSON" in message and "row 3: it is a list" in message and "row 4: it is a str" in message


def test_a_failed_export_leaves_what_was_there(tmp_path):
    path = tmp_path / "g.jsonl"
    export_groups(ROWS[:1], path, item=ITEM)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"row 1: item has the columns .*; expected none"):
        export_groups(ROWS, path)
    with pytest.raises(ValueError, match=r"extra\['a'\] is a set"):
        export_groups([*ROWS, Exported(a_group(extra={"a": {1}}))], path, item=ITEM)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_names_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"g\.csv; expected a name that ends in \.jsonl"):
        export_groups([], tmp_path / "g.csv")
    with pytest.raises(ValueError, match="on_fault = 'ask'; expected 'refuse' or 'skip'"):
        import_groups(tmp_path / "g.jsonl", on_fault="ask")

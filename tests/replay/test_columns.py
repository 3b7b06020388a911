"""What travels as columns arrives as it was."""

import pickle
from dataclasses import dataclass, fields, replace
from dataclasses import field as field_of
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.replay.journal.codec import ColumnarList
from rllib_srl.types import Group, GroupMeta
from tests.replay.groups import a_group


def arrived(records: list[Any]) -> tuple[ColumnarList, int]:
    """Return what pickle makes of records, and the number of arrays that travelled."""
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(ColumnarList(records), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(sent, buffers=[bytes(buffer.raw()) for buffer in buffers]), len(buffers)


def assert_equal(ours: Any, theirs: Any) -> None:
    """Compare two records field by field, types of arrays included."""
    assert type(ours) is type(theirs)
    for field in fields(theirs):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(other, np.ndarray):
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape), field.name
            np.testing.assert_array_equal(mine, other)
        else:
            assert mine == other, field.name


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(2, 5), st.integers(1, 3), st.booleans()), max_size=6))
def test_groups_and_their_metadata_arrive_as_they_were(kinds):
    groups = [
        a_group(n, rewards=[1.0] * size, num_turns=num_turns, extra={"told": [n]} if has_extra else {})
        for n, (size, num_turns, has_extra) in enumerate(kinds)
    ]
    metas = [GroupMeta.of(group, None) for group in groups]
    for records in (groups, metas):
        found, _ = arrived(records)
        assert len(found) == len(records)
        for mine, other in zip(found, records, strict=True):
            assert_equal(mine, other)
    for group in arrived(groups)[0]:
        group.check_valid()


def test_the_number_of_arrays_does_not_grow_with_the_number_of_records():
    num_arrays = {n: arrived([a_group(k) for k in range(n)])[1] for n in (1, 40)}
    assert num_arrays == {1: 6, 40: 6}  # the array fields of a Group


def test_arrays_of_unlike_types_keep_them():
    plain = a_group(0)
    doubles = replace(a_group(1), rewards_G=np.array([0.5, 0.1, 0.2, 0.3]))
    found, _ = arrived([plain, doubles])
    assert [group.rewards_G.dtype for group in found] == [np.float32, np.float64]
    for mine, other in zip(found, (plain, doubles), strict=True):
        assert_equal(mine, other)


@dataclass(frozen=True)
class Note:
    """A record with an array of no dimension."""

    value: Any


@pytest.mark.parametrize("value", [np.array(3.0), np.ones((2, 0)), None, "text"])
def test_what_cannot_be_laid_end_to_end_travels_as_it_is(value):
    found, _ = arrived([Note(value), Note(value)])
    np.testing.assert_array_equal(np.array(found[1].value), np.array(value))
    assert arrived([])[0] == []
    assert isinstance(found, ColumnarList)


def test_num_loss_tokens_are_counted_stream_by_stream():
    group = a_group(0, num_turns=2)  # four episodes of 3 + 2 * (2 + 5) tokens, 2 * 5 of them the policy's
    mask_N = group.loss_mask_N.copy()
    mask_N[group.offsets[1] : group.offsets[2]] = False  # the second wrote nothing
    assert Group.num_loss_tokens_G(replace(group, loss_mask_N=mask_N)).tolist() == [10, 0, 10, 10]


@dataclass(frozen=True)
class Told:
    """A record that holds others."""

    notes: Any
    note: Any


@dataclass(frozen=True)
class Nothing:
    """A record without fields."""


@dataclass(frozen=True)
class Doubled:
    """A record that cannot be built from its fields in order."""

    twice: int = field_of(init=False)
    once: int = field_of(default=0, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", 2 * self.once)


@pytest.mark.parametrize(
    "values",
    [
        [Nothing(), Nothing()],
        [Doubled(once=1), Doubled(once=2)],
        [Told([Note(1)], Note(2)), Told((), Note(3))],
        [Told(1, Note(2)), Told(2, None)],
        [Note(Nothing()), Note(Doubled(once=4))],
    ],
)
def test_records_inside_records_arrive_as_they_were(values):
    assert arrived(values)[0] == values

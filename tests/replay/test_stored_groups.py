"""Stored groups arrive as they were, and what they are stored as is not copied on the way."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.replay.journal.codec import StoredGroup, StoredGroupBatch, encode
from rllib_srl.types import Group, GroupMeta
from tests.replay.groups import a_group


def sent(groups: list[Group]) -> tuple[list[Group], list[bytes], list[Any]]:
    """Return what pickle makes of a parcel, the payloads in it, and what travelled beside the stream."""
    payloads = [encode(group) for group in groups]
    buffers: list[pickle.PickleBuffer] = []
    parcel = StoredGroupBatch(StoredGroup.of(payload, "a group", "reuse") for payload in payloads)
    stream = pickle.dumps(parcel, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(stream, buffers=[bytes(buffer.raw()) for buffer in buffers]), payloads, buffers


def assert_equal(ours: Any, theirs: Any, **changed: Any) -> None:
    """Compare two records field by field, types of arrays included."""
    assert type(ours) is type(theirs)
    for field in fields(theirs):
        mine, other = getattr(ours, field.name), changed.get(field.name, getattr(theirs, field.name))
        if isinstance(other, np.ndarray):
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape), field.name
            np.testing.assert_array_equal(mine, other)
        else:
            assert mine == other, field.name


@given(st.lists(st.tuples(st.integers(2, 5), st.integers(1, 3), st.booleans()), max_size=5))
def test_stored_groups_arrive_as_they_were_but_as_reuses(kinds):
    groups = [
        a_group(n, rewards=[1.0] * size, num_turns=num_turns, extra={"told": [n]} if has_extra else {})
        for n, (size, num_turns, has_extra) in enumerate(kinds)
    ]
    found, _, _ = sent(groups)
    assert len(found) == len(groups)
    for mine, other in zip(found, groups, strict=True):
        assert_equal(mine, other, origin="reuse")
        mine.check_valid()


def test_a_payload_travels_uncopied_and_the_rest_in_as_many_arrays_however_many_groups_there_are():
    num_beside = {}
    for num in (1, 40):
        _, payloads, buffers = sent([a_group(n) for n in range(num)])
        address_of_payloads = {np.frombuffer(payload, np.uint8).ctypes.data for payload in payloads}
        assert address_of_payloads <= {np.frombuffer(buffer.raw(), np.uint8).ctypes.data for buffer in buffers}
        num_beside[num] = len(buffers) - num
    assert num_beside == {1: 3, 40: 3}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_it_travels_within_one_stream_too(protocol):
    groups = [a_group(n) for n in range(3)]
    parcel = StoredGroupBatch(StoredGroup.of(encode(group), "a group", "fresh") for group in groups)
    for mine, other in zip(pickle.loads(pickle.dumps(parcel, protocol=protocol)), groups, strict=True):
        assert_equal(mine, other)


def test_an_opened_group_describes_itself_and_takes_another_name():
    group = a_group(1)
    found = StoredGroup.of(encode(group), "1", "reuse")
    assert_equal(found.meta, GroupMeta.of(group, None), origin="reuse")
    assert_equal(pickle.loads(pickle.dumps(StoredGroupBatch([found])))[0], found.group)

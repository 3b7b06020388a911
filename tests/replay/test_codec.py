"""Groups and their bytes: nothing lost, nothing changed unnoticed."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.journal.codec import decode, encode, prompt_of, read_header
from rllib_srl.types import Group, Prompt, StopReason
from tests.replay.stored import a_group, assert_same

TEXT = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(TEXT, part, max_size=3),
    max_leaves=6,
)


@st.composite
def groups(draw) -> Group:
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    size, num_tokens = len(lengths), sum(lengths)
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    return Group(
        group_id=draw(TEXT),
        prompt=Prompt(draw(TEXT), draw(TEXT), draw(TEXT), tuple(draw(st.lists(TEXT, max_size=3))), draw(TEXT)),
        token_ids_N=generator.integers(-(1 << 31), 1 << 31, num_tokens).astype(np.int32),
        loss_mask_N=generator.random(num_tokens) < 0.5,
        behaviour_logp_N=generator.normal(size=num_tokens).astype(np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        rewards_G=generator.normal(size=size).astype(draw(st.sampled_from(["f4", "f8", ">f4"]))).astype("f4"),
        versions_G2=generator.integers(0, 1 << 60, (size, 2)),
        stop_reasons=tuple(draw(st.sampled_from(list(StopReason))) for _ in lengths),
        num_dropped=draw(st.integers(0, 3)),
        origin=draw(st.sampled_from(["fresh", "revisit", "reuse"])),
        extra=draw(st.dictionaries(TEXT, JSON, max_size=3)),
    )


@pytest.mark.slow
@given(groups())
@settings(max_examples=60)
def test_a_group_comes_back_as_it_was(group):
    payload = encode(group)
    again = decode(payload)
    assert_same(group, again)
    assert encode(again) == payload


def test_the_bytes_by_hand():
    payload = encode(a_group(num_tokens=3))
    magic, version, _, length, _ = struct.unpack("<4sHHII", payload[:16])
    assert (magic, version, length % 8) == (b"SRLG", 1, 0)
    header = json.loads(payload[16 : 16 + length])
    assert header["group_id"] == "g0" and header["arrays"][0] == ["token_ids_N", "<i4", [6]]
    # 6 ids: 24 bytes; 6 bits: 1, up to 8; 6 log-probs: 24; 3 offsets: 24; 2 rewards: 8; 2 x 2 versions: 32; checksum: 8
    assert len(payload) == 16 + length + 24 + 8 + 24 + 24 + 8 + 32 + 8
    assert payload[16 + length : 16 + length + 24] == a_group(num_tokens=3).token_ids_N.tobytes()


def test_decoding_copies_no_array_but_the_mask():
    payload = encode(a_group())
    group = decode(payload)
    memory = np.frombuffer(payload, np.uint8)
    for name in ("token_ids_N", "behaviour_logp_N", "offsets", "rewards_G", "versions_G2"):
        assert np.shares_memory(getattr(group, name), memory), name
        assert not getattr(group, name).flags.writeable


def test_any_changed_byte_is_noticed_and_the_group_named():
    payload = encode(a_group(7))
    for position in range(len(payload)):
        damaged = bytearray(payload)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(ValueError, match=r"group .* is damaged: its checksum"):
            decode(bytes(damaged))
    with pytest.raises(ValueError, match="group g7 is damaged"):
        decode(payload[:-1])
    with pytest.raises(ValueError, match="group 12 is damaged"):
        decode(payload[:20], "12")


def test_another_format_version_is_refused():
    body = bytearray(encode(a_group())[:-8])
    body[4] = 2
    sealed = bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))
    with pytest.raises(ValueError, match=r"group g0 is of format b'SRLG' version 2; expected b'SRLG' version 1"):
        decode(sealed)


def test_what_cannot_be_stored_is_named_all_at_once():
    group = a_group(
        loss_mask_N=np.zeros(12, np.int8),
        rewards_G=np.array(["a", "b"]),
        extra={"a": [1, (2,)], 3: {}, "c": np.float32(1)},
    )
    with pytest.raises(ValueError) as caught:
        encode(group)
    message = str(caught.value)
    assert message.startswith("group g0 cannot be stored: ") and message.count("; expected") == 5
    for fault in ("extra['a'][1] is a tuple", "the key 3", "extra['c'] is a float32", "loss_mask_N", "rewards_G"):
        assert fault in message


def test_a_header_tells_the_prompt_and_one_of_an_older_prompt_is_read():
    header = read_header(encode(a_group(3)))
    assert prompt_of(header["prompt"]) == a_group(3).prompt
    assert prompt_of({"env_id": "w", "prompt_id": "p", "history": []}) == Prompt("w", "p")

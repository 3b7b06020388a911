"""Groups and their bytes: nothing lost, nothing changed unnoticed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from rllib_srl.replay.payloads import decode, encode
from rllib_srl.types import Group, Prompt, StopReason
from tests.replay.groups import a_group
from tests.replay.stored import assert_same

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


def test_the_bytes_are_those_of_safetensors():
    group = a_group(1, rewards=(1.0, 0.0))
    payload = encode(group)
    arrays = load(payload)
    assert sorted(arrays) == sorted(
        ["token_ids_N", "loss_mask_N", "behaviour_logp_N", "offsets", "rewards_G", "versions_G2"]
    )
    for name, array in arrays.items():
        assert array.dtype == getattr(group, name).dtype and array.tolist() == getattr(group, name).tolist()
    # 20 ids: 80 bytes; 20 of the mask; 20 log-probs: 80; 3 offsets: 24; 2 rewards: 8; 2 x 2 versions: 32
    assert len(payload) == 8 + int.from_bytes(payload[:8], "little") + 80 + 20 + 80 + 24 + 8 + 32


def test_what_is_not_a_whole_payload_is_refused_and_named():
    payload = encode(a_group(7))
    headers = (payload.replace(b'"F32"', b'"Q32"', 1), payload.replace(b'"F32"', b'"F64"', 1))
    assert payload not in headers
    for damaged in (payload[:-1], payload + b"x", payload[:20], b"", b"x" * 100, payload[:8] + b"\xff" * 50, *headers):
        with pytest.raises(ValueError, match="^group 12 is damaged: "):
            decode(damaged, "12")


def test_what_cannot_be_stored_is_named_all_at_once():
    group = a_group(
        1,
        group_id="g0",
        loss_mask_N=np.zeros(40, np.int8),
        rewards_G=np.array(["a", "b"]),
        extra={"a": [1, (2,)], 3: {}, "c": np.float32(1)},
    )
    with pytest.raises(ValueError) as caught:
        encode(group)
    message = str(caught.value)
    assert message.startswith("group g0 cannot be stored: ") and message.count("; expected") == 5
    for error in ("extra['a'][1] is a tuple", "the key 3", "extra['c'] is a float32", "loss_mask_N", "rewards_G"):
        assert error in message

"""Groups, rows and commits for the tests of what is stored."""

from __future__ import annotations

import numpy as np

from rllib_srl.replay.journal.codec import encode
from rllib_srl.replay.journal.journal import Commit
from rllib_srl.types import Group, Prompt, StopReason

ITEM = np.dtype([("key", "u8"), ("due", "f8"), ("status", "i1"), ("domain", "i4")], align=True)
GROUP = np.dtype([("seq", "u8"), ("slot", "i4"), ("uses", "i4")], align=True)


def a_group(index: int = 0, num_tokens: int = 6, **fields) -> Group:
    """Return a group of two episodes whose every number depends on `index`."""
    generator = np.random.default_rng(index)
    mask_N = generator.random(2 * num_tokens) < 0.5
    mask_N[[0, num_tokens]] = False
    values = {
        "group_id": f"g{index}",
        "prompt": Prompt("world", f"p{index}", "sums", ("first", "zweite ✓")),
        "token_ids_N": generator.integers(0, 1 << 31, 2 * num_tokens, dtype=np.int32),
        "loss_mask_N": mask_N,
        "behaviour_logp_N": np.where(mask_N, -generator.random(2 * num_tokens), 0).astype(np.float32),
        "offsets": np.array([0, num_tokens, 2 * num_tokens]),
        "rewards_G": generator.random(2, dtype=np.float32),
        "versions_G2": np.array([[index, index], [index, index + 1]]),
        "stop_reasons": (StopReason.TERMINATED, StopReason.OUT_OF_TOKENS),
        "extra": {"turns": [["a", "b"], []], "can_iterate": True},
    }
    return Group(**{**values, **fields})


def assert_same(one: Group, other: Group) -> None:
    """Two groups are equal in every field, in values and in dtypes of arrays."""
    assert vars(one).keys() == vars(other).keys()
    for name, value in vars(one).items():
        theirs = getattr(other, name)
        if isinstance(value, np.ndarray):
            assert (value.dtype, value.shape) == (theirs.dtype, theirs.shape), name
            np.testing.assert_array_equal(value, theirs, err_msg=name)
        else:
            assert (value, type(value)) == (theirs, type(theirs)), name


def an_item(key: int, due: float = 0.0) -> np.void:
    """Return a row."""
    return np.array((key, due, 2, 1), ITEM)[()]


def a_row(seq: int, slot: int = 0, uses: int = 0) -> np.void:
    """Return the row of a group."""
    return np.array((seq, slot, uses), GROUP)[()]


def a_visit(index: int, **parts) -> Commit:
    """Return a commit with one new item, its vector and group, an answered request and two states."""
    values = {
        "items": {index: an_item(2**64 - 1 - index, index / 3)},
        "prompts": {index: Prompt("world", f"p{index}", "sums", ("a",))},
        "vectors": {index: np.full(3, index, np.float32)},
        "groups": {index: a_row(index, index)},
        "payloads": {index: encode(a_group(index))},
        "request": f"{index}.add",
        "answer": {"stored": [index, None, 0.1]},
        "state": {"generator": np.random.default_rng(index).bit_generator.state, "raw": bytes([index % 256])},
    }
    return Commit(**{**values, **parts})

"""Packing, receipt and the canary, without an engine."""

import dataclasses
import pickle
import weakref

import numpy as np
import pytest
import torch
import xxhash

from rllib_srl.engine.canary import (
    NOISE,
    NOISE_PERIOD,
    CanaryGap,
    canary_sequences,
    check_canary,
    check_fingerprints,
    noise,
    update_sequences,
)
from rllib_srl.engine.fingerprint import digests, moved, unmoved
from rllib_srl.engine.sync import WeightSyncError, pack, pack_stream, unpack, verify
from tests.engine.small_llama import make_byte_tokenizer


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(7, 3), "scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4),
        "steps": torch.tensor([1, 2, 3]), "transposed": torch.randn(4, 6).T,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unpack_gives_what_was_packed_cast_once(dtype: str) -> None:
    tensors = some_tensors()
    bundle = pack(tensors.items(), version=4, dtype=dtype)
    verify(bundle)
    got = dict(unpack(bundle))
    assert list(got) == list(tensors)
    for name, tensor in tensors.items():
        wanted = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        assert got[name].dtype == wanted.dtype
        assert torch.equal(got[name], wanted)


def test_layout_by_hand_and_a_tied_head_once() -> None:
    bundle = pack([("a", torch.tensor([1.0, 2.0])), ("b", torch.tensor([3.0]))], version=0, dtype="float32")
    # a takes bytes 0..8, b starts at the next multiple of 64
    assert [(spec.offset, spec.num_bytes, spec.shape) for spec in bundle.tensors] == [(0, 8, (2,)), (64, 4, (1,))]
    assert bundle.tensors[1].checksum == xxhash.xxh3_64_intdigest(np.float32(3).tobytes())
    assert bundle.buffer.nbytes == 128
    assert not bundle.buffer[8:64].any()
    matrix = torch.randn(5, 2)
    bundle = pack([("embed", matrix), ("norm", torch.ones(2)), ("head", matrix)], version=0, dtype="float32")
    assert [spec.name for spec in bundle.tensors] == ["embed", "norm"]
    clones = pack([("embed", matrix), ("head", matrix.clone())], version=0, dtype="float32")
    assert [spec.name for spec in clones.tensors] == ["embed", "head"]


def test_memory_of_an_earlier_bundle_is_used_again_where_it_fits() -> None:
    old, new = some_tensors(), {name: tensor + 1 for name, tensor in some_tensors().items()}
    memory = pack(old.items(), version=1, dtype="bfloat16").buffer
    bundle = pack(new.items(), version=2, dtype="bfloat16", memory=memory)
    assert bundle.buffer is memory
    verify(bundle)
    assert np.array_equal(bundle.buffer, pack(new.items(), version=2, dtype="bfloat16").buffer)
    wider = pack(new.items(), version=3, dtype="float32", memory=memory)
    assert wider.buffer is not memory
    verify(bundle)


def test_flipped_bits_truncated_buffers_and_swapped_contents_are_named() -> None:
    bundle = pack(some_tensors().items(), version=11, dtype="bfloat16")
    for spec in bundle.tensors:
        for position in {0, spec.num_bytes // 2, spec.num_bytes - 1} if spec.num_bytes else ():
            buffer = bundle.buffer.copy()
            buffer[spec.offset + position] ^= 0x10
            with pytest.raises(WeightSyncError, match="version 11") as caught:
                verify(dataclasses.replace(bundle, buffer=buffer))
            assert caught.value.tensors == (spec.name,)
    bundle = pack([("a", torch.ones(32)), ("b", torch.zeros(32))], version=1, dtype="float32")
    with pytest.raises(WeightSyncError) as caught:
        verify(dataclasses.replace(bundle, buffer=bundle.buffer[:140]))
    assert caught.value.tensors == ("b",)
    first, second = bundle.tensors
    swapped = dataclasses.replace(first, offset=second.offset), dataclasses.replace(second, offset=first.offset)
    with pytest.raises(WeightSyncError) as caught:
        verify(dataclasses.replace(bundle, tensors=swapped))
    assert caught.value.tensors == ("a", "b")


def test_verify_against_the_model_names_every_error_at_once() -> None:
    bundle = pack([("a", torch.ones(2, 3)), ("odd", torch.ones(1))], version=2, dtype="float32")
    with pytest.raises(WeightSyncError) as caught:
        verify(bundle, {"a": (3, 2), "lost": (4,)}, dtype="bfloat16")
    for words in ("missing", "no such tensors", "shapes differ", "casts"):
        assert words in str(caught.value)
    assert set(caught.value.tensors) == {"a", "odd", "lost"}
    verify(bundle, {"a": (2, 3), "odd": (1,)}, dtype="float32")
    with pytest.raises(WeightSyncError, match="twice"):
        verify(pack([("a", torch.ones(2)), ("a", torch.zeros(2))], version=2, dtype="float32"))


def test_the_error_survives_pickling_and_shortens_long_lists() -> None:
    error = WeightSyncError("bytes differ", 3, [f"t{i}" for i in range(20)])
    again = pickle.loads(pickle.dumps(error))
    assert (again.version, again.tensors, str(again)) == (3, error.tensors, str(error))
    assert "and 12 more" in str(error)
    assert "t8" not in str(error)


def test_canary_sequences_are_fixed_natural_and_shorter_than_the_context() -> None:
    tokenizer = make_byte_tokenizer()
    sequences = canary_sequences(tokenizer, 512)
    assert [len(s) for s in sequences] == [64] * 6
    assert sequences == canary_sequences(tokenizer, 512)
    assert tokenizer.decode(sequences[0]).startswith("17 + 25 = 42.")
    assert {len(s) for s in canary_sequences(tokenizer, 16)} == {15}
    with pytest.raises(ValueError, match="context_length = 3"):
        canary_sequences(tokenizer, 3)


@pytest.mark.parametrize(("lengths", "joined"), [
    ([64] * 6, [[0, 1, 2], [3, 4, 5]]),  # 48 tokens each: four heads would fit into 64, 3 + 3 is as few
    ([15] * 6, [[0], [1], [2], [3], [4], [5]]),  # a context that holds no two
    ([40, 3, 20], [[0], [1, 2]]),  # at most two heads of 16 in 40
    ([2], [[0]]),
])  # fmt: skip
def test_the_canary_of_updates_joins_heads_up_to_the_longest_text(lengths: list[int], joined: list[list[int]]) -> None:
    sequences = [[1000 * index + at for at in range(length)] for index, length in enumerate(lengths)]
    wanted = [[token for index in part for token in sequences[index][:16]] for part in joined]
    assert update_sequences(sequences) == wanted
    assert max(map(len, wanted)) <= max(lengths)


def test_gap_by_hand() -> None:
    # |differences| are 0.5, 0, 1: mean 0.5, max 1
    gap = CanaryGap.between([np.array([-1.0, -2.0]), np.array([-3.0])], [np.array([-1.5, -2.0]), np.array([-2.0])])
    assert gap == CanaryGap(mean=0.5, max=1.0)
    with pytest.raises(ValueError, match=r"\[1\].*\[2\]"):
        CanaryGap.between([np.zeros(1)], [np.zeros(2)])


@pytest.mark.parametrize(("dtype", "gap", "healthy", "passes"), [
    ("float32", CanaryGap(1e-5, 1e-3), None, True),
    ("float32", CanaryGap(1e-5, 1.1e-3), None, False),
    ("bfloat16", CanaryGap(0.15, 3.0), None, True),  # at version 0 only another model is refused
    ("bfloat16", CanaryGap(0.25, 0.5), None, False),
    ("bfloat16", CanaryGap(0.06, 9.0), CanaryGap(0.04, 0.3), True),  # 1.5 x 0.04
    ("bfloat16", CanaryGap(0.061, 0.3), CanaryGap(0.04, 0.3), False),
    ("float32", CanaryGap(float("nan"), float("nan")), None, False),
    ("bfloat16", CanaryGap(float("nan"), float("nan")), CanaryGap(0.04, 0.3), False),
])  # fmt: skip
def test_check_canary(dtype: str, gap: CanaryGap, healthy: CanaryGap | None, passes: bool) -> None:
    if passes:
        check_canary(gap, healthy, dtype, version=5)
        return
    with pytest.raises(WeightSyncError, match=r"version 5: .*expected (max|mean) <= ") as caught:
        check_canary(gap, healthy, dtype, version=5)
    assert f"mean {gap.mean:.2g}" in str(caught.value)


def test_noise_fills_every_tensor_alike_in_every_process() -> None:
    shapes = {"w": (700, 100), "b": (3,), "again": (700, 100)}
    found = dict(noise(shapes, torch.bfloat16))
    assert {name: tuple(one.shape) for name, one in found.items()} == shapes
    for one in found.values():
        assert one.dtype == torch.bfloat16 and torch.equal(one.abs(), torch.full_like(one, NOISE))
    assert torch.equal(found["w"], found["again"])
    assert torch.equal(found["w"].flatten()[NOISE_PERIOD:], found["w"].flatten()[: 70_000 - NOISE_PERIOD])
    assert found["w"].float().mean().abs() < 0.02 / 70_000**0.5 * 5


@pytest.mark.parametrize(("before", "noisy", "after", "is_same", "message"), [
    (1, 2, 1, True, ""), (1, 2, 3, False, ""), (1, 1, 3, False, "did not take the noise"),
    (1, 2, 2, False, "did not take the weights sent"), (1, 2, 3, True, "not those that the engine held before"),
])  # fmt: skip
def test_check_fingerprints(before: int, noisy: int, after: int, is_same: bool, message: str) -> None:
    prints = [{"good": (number,), "m": (at,)} for number, at in zip((7, 8, 7), (before, noisy, after), strict=True)]
    if not message:
        check_fingerprints(*prints, is_same=is_same, version=4)
        return
    with pytest.raises(WeightSyncError, match=f"version 4: engine 2: self-test: .*{message}") as caught:
        check_fingerprints(*prints, is_same=is_same, version=4, who="engine 2: ")
    assert caught.value.tensors == ("m",)


def test_a_fingerprint_shows_one_stale_block() -> None:
    matrix, other = torch.randn(40, 3), torch.randn(40, 3)
    before, after = {"m": digests(matrix)}, {"m": digests(other)}
    assert len(before["m"]) == 3  # 16 + 16 + 8 rows
    assert (unmoved(before, after), moved(before, after)) == ([], ["m"])
    other[16:32] = matrix[16:32]
    assert unmoved(before, {"m": digests(other)}) == ["m"]
    assert (unmoved(before, before), moved(before, before)) == (["m"], [])


def test_a_stream_of_tensors_gives_the_same_bundle_and_holds_few_at_once():
    tensors = {f"w{i}": torch.arange(4096.0) + i for i in range(40)}
    held: set[int] = set()
    most = 0

    def gathered():
        nonlocal most
        for name, tensor in tensors.items():
            one = tensor.clone()  # as a shard that was gathered for this step only
            held.add(id(one))
            weakref.finalize(one, held.discard, id(one))
            most = max(most, len(held))
            yield name, one
            del one

    layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    streamed = pack_stream(layout, gathered(), version=4, dtype="bfloat16")
    together = pack(tensors.items(), version=4, dtype="bfloat16")
    assert streamed.tensors == together.tensors and np.array_equal(streamed.buffer, together.buffer)
    assert most <= 7  # of 40: at most four in the threads, one that is yielded, and what the threads still release
    layout = [("a", (2, 3), torch.float32), ("b", (1,), torch.float32)]
    with pytest.raises(ValueError, match=r"tensor 'b' \(1,\); expected 'a' \(2, 3\)"):
        pack_stream(layout, [("b", torch.ones(1)), ("a", torch.ones(2, 3))], 0, "float32")
    with pytest.raises(ValueError, match="shorter"):
        pack_stream(layout, [("a", torch.ones(2, 3))], 0, "float32")

"""The trie's shape and its attention: its parts against the mask they stand for, five families against padding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rllib_srl.batch.layout import trie_layout
from rllib_srl.batch.trie import Trie
from rllib_srl.learner.scoring import token_logps
from rllib_srl.learner.trie_attention import CompiledFlex, attention, block_mask, mask_mod, register

STREAMS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)
WINDOW = 40  # of the families that slide; streams are longer
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
}  # fmt: skip
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES = {
    "llama": {}, "qwen2": {"use_sliding_window": True, **SLIDING}, "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16, **SLIDING}, "gemma3_text": {"query_pre_attn_scalar": 16, **SLIDING},
    "smollm3": {"pad_token_id": None},
}  # fmt: skip


def naive_mask(depth_T, window=None):
    """Walk from each token to its root, parent by parent."""
    parents = [max((j for j in range(i) if depth_T[j] == depth - 1), default=-1) for i, depth in enumerate(depth_T)]
    mask = np.zeros((len(depth_T), len(depth_T)), bool)
    for i, depth in enumerate(depth_T):
        j = i
        while j >= 0 and (window is None or depth - depth_T[j] < window):
            mask[i, j] = True
            j = parents[j]
    return mask


def covered(cover, num_tokens):
    """Return how often each pair is computed, and how often each row is met on the diagonal."""
    count, met = np.zeros((num_tokens, num_tokens), int), np.zeros(num_tokens, int)
    for squares in cover.squares:
        for start, run, mask in zip(squares.starts, squares.runs, squares.mask_NSS, strict=True):
            count[start : start + squares.size, start : start + squares.size] += mask
            met[run] += 1
            outside = np.ones(squares.size, bool)
            outside[run.start - start : run.stop - start] = False
            assert not mask[:, outside].any() and not mask[outside].any()
    for one in [*cover.triangles, *cover.below]:
        shape = one.rows.stop - one.rows.start, one.keys.stop - one.keys.start
        seen = np.tri(*shape, dtype=bool) if one.is_causal else np.ones(shape, bool) if one.mask is None else one.mask
        count[one.rows, one.keys] += seen
    for one in cover.triangles:
        assert one.rows == one.keys
        met[one.rows] += 1
    return count, met


@settings(max_examples=60)
@given(STREAMS, st.sampled_from([None, 1, 2, 3, 5]), st.sampled_from([1, 3, 8, 96]))
def test_a_cover_holds_each_seen_pair_once(streams, window, small):
    trie = trie_layout([np.array(s, np.int32) for s in streams]).trie
    wanted = naive_mask(trie.depth_T, window)
    np.testing.assert_array_equal(trie.mask_TT(window), wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rllib_srl.batch.trie.SMALL", small)
        patch.setattr("rllib_srl.batch.trie.FILL", small // 2)
        count, met = covered(trie.cover(window), len(trie))
    np.testing.assert_array_equal(count, wanted)
    assert (met == 1).all()


def test_ends_and_unrelated_tries_worked_by_hand():
    # few shot ─┬─ prompt ─┬─ a b      depths 0 1 2 3 4 3 2 3
    #           │          └─ c
    #           └─ prompt ─── d
    trie = Trie.of(np.array([0, 1, 2, 3, 4, 3, 2, 3]))
    assert trie.end_T.tolist() == [8, 8, 6, 5, 5, 6, 8, 8]
    assert Trie.of(np.array([0, 1, 0, 1])).end_T.tolist() == [2, 2, 4, 4]  # two tries, packed
    with pytest.raises(ValueError, match="at most 1 deeper"):
        Trie.of(np.array([0, 2]))
    trie = Trie.of(np.tile(np.arange(200), 10))
    cover = trie.cover()
    assert [one.rows for one in cover.triangles] == [slice(200 * n, 200 * n + 200) for n in range(10)]
    assert not cover.squares and not cover.below


@settings(max_examples=30)
@given(STREAMS, st.sampled_from([None, 1, 2, 4]))
def test_flex_attention_sees_the_explicit_mask(streams, window):
    trie = trie_layout([np.array(s, np.int32) for s in streams]).trie
    index = torch.arange(len(trie))
    seen = mask_mod(trie, window, "cpu")(None, None, index[:, None], index[None])
    np.testing.assert_array_equal(seen.numpy(), naive_mask(trie.depth_T, window))


def dense_blocks(mask_TT, size):
    """Return from the whole mask which blocks have a visible pair, and which have only visible pairs."""
    num = -(-len(mask_TT) // size)
    padded = np.zeros((num * size, num * size), bool)
    padded[: len(mask_TT), : len(mask_TT)] = mask_TT
    cut = padded.reshape(num, size, num, size)
    return cut.any((1, 3)), cut.all((1, 3))


@settings(max_examples=60)
@given(STREAMS, st.sampled_from([None, 1, 2, 4]), st.sampled_from([2, 3, 5]))
def test_blocks_are_those_of_the_explicit_mask(streams, window, size):
    trie = trie_layout([np.array(s, np.int32) for s in streams]).trie
    some, whole = trie.blocks(size, window)
    expected = dense_blocks(naive_mask(trie.depth_T, window), size)
    np.testing.assert_array_equal(whole, expected[1])
    if window is None:
        np.testing.assert_array_equal(some, expected[0])
    assert (some >= expected[0]).all() and (some >= whole).all()
    assert not np.triu(some, 1).any()


@pytest.mark.parametrize("window", [None, 300])
def test_the_block_mask_is_the_one_that_torch_finds_by_trying_every_pair(window):
    from torch.nn.attention.flex_attention import create_block_mask

    streams = [np.concatenate([np.full(700, n), np.arange(300 + 37 * m)]).astype(np.int32)
               for n in range(3) for m in range(4)]  # fmt: skip
    trie = trie_layout(streams).trie
    own = block_mask(trie, window, "cpu")
    theirs = create_block_mask(mask_mod(trie, window, "cpu"), None, None, len(trie), len(trie), device="cpu")
    assert own.shape == theirs.shape == (1, 1, len(trie), len(trie))
    assert own.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert torch.equal(own.full_kv_num_blocks, theirs.full_kv_num_blocks)
    assert own.full_kv_num_blocks.sum() > 10
    if window is None:  # the same lists, forward and backward
        for name in ("kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(own, name), getattr(theirs, name)), name
        for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
            assert torch.equal(getattr(own, name), getattr(theirs, name)), name
        assert torch.equal(own.to_dense(), theirs.to_dense())
    else:
        missing = theirs.to_dense().bool() & ~own.to_dense().bool()
        assert not missing.any() and own.sparsity() > 50


class Largest(TorchDispatchMode):
    """Notes the largest tensor that torch computes, in bytes."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, torch.Tensor):
                self.num_bytes = max(self.num_bytes, one.untyped_storage().nbytes())
        return out


def test_the_block_mask_of_65536_tokens_needs_less_than_4_mib():
    trie = Trie.of(np.tile(np.arange(2048), 32))
    with Largest() as largest:
        mask = block_mask(trie, None, "cpu")
    assert mask.kv_num_blocks.shape == (1, 1, 512)
    assert 0 < largest.num_bytes < 4 * 2**20  # torch's own function needs 7.5 bytes for each pair of tokens, 32 GB


def flex_inputs(length, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(1, heads, length, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, WINDOW])
def test_compiled_flex_attention_has_the_gradient_of_the_parts(monkeypatch, window):
    """On torch's dense reference kernel; the generated one needs a GPU: scripts/gpu_check.sh compares it."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    flex = CompiledFlex(backend="aot_eager")
    trie = trie_layout(family_streams()).trie
    mask = block_mask(trie, window, "cpu")
    own, theirs = flex_inputs(len(trie)), flex_inputs(len(trie))
    out, _ = attention(None, *own, None, scaling=0.3, sliding_window=window, trie=trie)
    flexed = flex(*theirs, block_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, flexed, atol=2e-6, rtol=1e-5)
    weight = torch.randn(out.shape)
    (out * weight).sum().backward()
    (flexed * weight).sum().backward()
    for a, b in zip(own, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_lengths_share_graphs_and_too_many_graphs_raise():
    flex = CompiledFlex(limit=4, backend="aot_eager")

    def run(length, window, dtype=torch.float32):
        trie = Trie.of(np.tile(np.arange(length), 3))
        mask = block_mask(trie, window, "cpu")
        with torch.no_grad():
            q, k, v = (one.detach() for one in flex_inputs(len(trie), dtype))
            return flex(q, k, v, block_mask=mask, scale=0.3, enable_gqa=True)

    for length in (200, 300, 411, 1003):
        run(length, None)
    first = flex.num_graphs
    assert first <= 2  # every length shares them
    for window in (40, 70):
        run(300, window)
    kinds = [(dtype, window) for dtype in (torch.bfloat16, torch.float64, torch.float16) for window in (None, 40)]
    with pytest.raises(RuntimeError, match="more than 4 compiled graphs; set prefix_sharing = False"):
        [run(300, window, dtype) for dtype, window in kinds]
    assert flex.num_graphs <= 5


def family_streams():
    """Return streams that share a few-shot text, prompts and answers of many lengths, and two that share nothing."""
    rng = np.random.default_rng(0)
    few, streams = rng.integers(1, 64, 110), []
    for _ in range(3):
        prompt = np.concatenate([few, rng.integers(1, 64, rng.integers(5, 130))])
        streams += [np.concatenate([prompt, rng.integers(1, 64, rng.integers(2, 130))]) for _ in range(3)]
    return [*streams, rng.integers(1, 64, 60), rng.integers(1, 64, 90)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_log_probs_and_gradients_of_padding(family):
    """Against transformers' own eager attention, stream by stream, beyond the window: relative L2 below 1e-5."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    streams = family_streams()
    layout = trie_layout(streams)
    assert max(map(len, streams)) > 2 * WINDOW and layout.token_ids_RT.size < 0.6 * sum(map(len, streams))
    weights = [torch.randn(len(stream) - 1) for stream in streams]
    model.set_attn_implementation(register())
    batch = {"token_ids": torch.from_numpy(layout.token_ids_RT), "trie": layout.trie, "temperature": 0.7}
    batch["position_ids"] = torch.from_numpy(layout.position_ids_RT)
    batch["predictor"] = torch.from_numpy(np.concatenate([path[:-1] for path in layout.paths]))
    batch["target"] = torch.from_numpy(np.concatenate([s[1:] for s in streams]).astype(np.int64))
    logp_N = token_logps(model, batch)["logp"]
    (logp_N * torch.cat(weights)).sum().backward()
    own = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    model.set_attn_implementation("eager")
    wanted = []
    for stream, weight in zip(streams, weights, strict=True):
        ids = torch.from_numpy(stream.astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / 0.7
        wanted.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
        (wanted[-1] * weight).sum().backward()
    padded = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert relative(logp_N.detach(), torch.cat(wanted).detach()) < 1e-5
    assert relative(own, padded) < 1e-5


def test_a_sliding_layer_that_forgot_its_window_would_be_seen(monkeypatch):
    """The mutant: without the window the same comparison fails."""
    monkeypatch.setattr(Trie, "cover", lambda self, window=None, own=Trie.cover: own(self, None))
    with pytest.raises(AssertionError):
        test_a_family_has_the_log_probs_and_gradients_of_padding("qwen2")


def relative(a, b):
    return float((a - b).norm() / b.norm())


def test_attention_in_bf16_is_that_of_fp32_rounded():
    trie = trie_layout(family_streams()).trie
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, heads, len(trie), 16).bfloat16() for heads in (4, 2, 2))
    exact, _ = attention(None, q.float(), k.float(), v.float(), None, trie=trie)
    rounded, _ = attention(None, q, k, v, None, trie=trie)
    assert rounded.dtype == torch.bfloat16
    assert relative(rounded.float(), exact) < 4e-3  # half a unit in the last of 8 bits

"""Log-probs and entropies from tiles against whole logits in fp64, with gradients, and never more than a tile alive."""

import math

import pytest
import torch

from rllib_srl.learner import scoring
from rllib_srl.learner.scoring import Scale, token_scores


def test_two_tokens_worked_by_hand():
    # logits (0, ln 3): p = (1/4, 3/4); entropy = ln 4 - 3/4 ln 3
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    logp, entropy = token_scores(hidden, weight, torch.tensor([0, 0]), torch.tensor([1, 0]), Scale())
    assert logp.tolist() == pytest.approx([math.log(0.75), math.log(0.25)], abs=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(4) - 0.75 * math.log(3)] * 2, abs=1e-6)


@pytest.mark.parametrize("kept_bytes", [0, 2**30])
@pytest.mark.parametrize("scale", [Scale(), Scale(0.7), Scale(1.3, 5.0)])
def test_tiles_equal_whole_logits_with_gradients(monkeypatch, scale, kept_bytes):
    monkeypatch.setattr(scoring, "ROWS", 16)
    monkeypatch.setattr(scoring, "TILE", {"cpu": 16 * 64})
    monkeypatch.setattr(scoring, "KEPT_BYTES", kept_bytes)
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 24, requires_grad=True), torch.randn(300, 24, requires_grad=True)
    row, token = torch.randint(0, 50, (80,)), torch.randint(0, 300, (80,))
    a, b = torch.randn(80), torch.randn(80)
    logp, entropy = token_scores(hidden, weight, row, token, scale)
    (logp @ a + entropy @ b).backward()
    own = [hidden.grad.clone(), weight.grad.clone()]
    hidden.grad = weight.grad = None
    logits = hidden.double() @ weight.double().T
    if scale.softcap:
        logits = scale.softcap * torch.tanh(logits / scale.softcap)
    whole = (logits / scale.temperature).log_softmax(-1)
    wanted_entropy = -(whole.exp() * whole).sum(-1)[row]
    (whole[row, token] @ a.double() + wanted_entropy @ b.double()).backward()
    torch.testing.assert_close(logp, whole[row, token].float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, wanted_entropy.float(), atol=3e-5, rtol=1e-5)
    for one, wanted in zip(own, (hidden.grad, weight.grad), strict=True):
        assert (one - wanted).norm() / wanted.norm() < 1e-5


def test_no_tensor_of_rows_by_vocabulary_is_made():
    """1,000 rows of 20,000 logits would be 80 MB each time; the largest that is made is the weight's own gradient."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(one.numel() for one in (out if isinstance(out, tuple) else (out,))
                                      if isinstance(one, torch.Tensor))])  # fmt: skip
            return out

    hidden, weight = torch.randn(1000, 8, requires_grad=True), torch.randn(20_000, 8, requires_grad=True)
    row, token = torch.arange(1000), torch.randint(0, 20_000, (1000,))
    with Watch():
        token_scores(hidden, weight, row, token, Scale())[0].sum().backward()
    assert largest <= scoring.TILE["cpu"] < 1000 * 20_000 / 4


def test_huge_logits_stay_finite():
    hidden, weight = torch.tensor([[1e4]], requires_grad=True), torch.tensor([[1.0], [-1.0], [0.5]])
    logp, entropy = token_scores(hidden, weight, torch.tensor([0]), torch.tensor([0]), Scale())
    (logp + entropy).sum().backward()
    assert logp.tolist() == [0.0] and entropy.tolist() == [0.0] and hidden.grad.isfinite().all()

"""The loss of retention, worked by hand: values and gradients over two tokens."""

import math

import pytest
import torch

from rllib_srl.losses.retention import Retention, scales


def logits_of(*probabilities):
    """Return logits [T, 2] of steps that give token 0 these probabilities, with gradient."""
    return torch.tensor([[p, 1 - p] for p in probabilities]).log().requires_grad_()


def test_one_token_by_hand():
    # -log(1/4); the gradient of the logits is q - 1 at the token, q at the other.
    logits = logits_of(0.25)
    loss = Retention(2.0).loss([logits], [torch.tensor([0])], [""])
    assert loss.item() == pytest.approx(-2 * math.log(0.25))
    assert torch.autograd.grad(loss, logits)[0][0].tolist() == pytest.approx([-1.5, 1.5])


def test_the_temperature_is_that_of_sampling():
    # Squares of 3/4 and 1/4: 9/10 and 1/10.
    loss = Retention(1.0, temperature=0.5).loss([logits_of(0.75)], [torch.tensor([0])], [""])
    assert loss.item() == pytest.approx(-math.log(0.9))


def test_a_domain_counts_by_its_tokens_and_each_domain_fully():
    # a: answers of 1 and 3 tokens, mean length 2; mean of L_y / 2 over 2 answers = sum of -log q / 4. b: one of 5.
    assert scales([1, 3, 5], ["a", "a", "b"], 2.0) == [0.5, 0.5, 0.4]
    logits, tokens = [logits_of(0.5), logits_of(0.8, 0.6, 0.9)], [torch.tensor([0]), torch.tensor([0, 1, 0])]
    one, three = math.log(0.5), math.log(0.8) + math.log(0.4) + math.log(0.9)
    together = Retention(2.0).loss(logits, tokens, ["a", "a"])
    assert together.item() == pytest.approx(-2 * (one + three) / 4, abs=1e-6)
    apart = Retention(2.0).loss(logits, tokens, ["a", "b"])
    assert apart.item() == pytest.approx(-2 * (one + three / 3), abs=1e-6)


@pytest.mark.parametrize(
    "values", [{"weight": -1.0}, {"weight": math.nan}, {"weight": math.inf}, {"temperature": 0.0},
               {"temperature": math.nan}, {"temperature": math.inf}],
)  # fmt: skip
def test_values_out_of_range_are_named(values):
    with pytest.raises(ValueError, match="expected weight >= 0 and temperature > 0, both finite"):
        Retention(**values)


TWO = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("logits", "tokens", "message"),
    [
        ([], [], "0 logits, 0 tokens, 0 domains; expected one of each per answer, and at least one"),
        ([logits_of(0.5, 0.5)], [TWO, TWO], "1 logits, 2 tokens, 1 domains; expected one of each per answer"),
        ([logits_of(0.5, 0.5, 0.5)], [TWO], r"answer 0: logits \[3, 2\], tokens \[2\]; expected \[T, V\] and \[T\]: "
         "the logits at the position before each written token, so none at the last token"),
        ([logits_of(0.5, 0.5), logits_of(0.5)], [TWO, TWO], r"answer 1: logits \[1, 2\], tokens \[2\]"),
        ([logits_of(0.5, 0.5)[None]], [TWO[None]], r"answer 0: logits \[1, 2, 2\], tokens \[1, 2\]"),
    ],
)  # fmt: skip
def test_logits_that_do_not_fit_the_tokens_are_refused(logits, tokens, message):
    with pytest.raises(ValueError, match=message):
        Retention().loss(logits, tokens, ["a"] * len(logits))

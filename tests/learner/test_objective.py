"""The loss of micro-batches under any settings: how they are cut changes nothing, nothing bad goes by in silence."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.learner.objective import SUMS, first_pass, played_loss, reused_loss, statistics
from rllib_srl.losses.kl import KL_ESTIMATORS
from rllib_srl.losses.policy import CORRECTIONS, RATIO_LEVELS
from rllib_srl.losses.settings import LossSettings

CLIPS = ("symmetric", "higher", "dual", "two_sided", "cispo", "sapo", "none")
GIVEN = st.fixed_dictionaries(
    {
        "ratio_level": st.sampled_from(sorted(RATIO_LEVELS)),
        "clip_rule": st.sampled_from(CLIPS),
        "correction": st.sampled_from(sorted(CORRECTIONS)),
        "ratio_anchor": st.sampled_from(["decoupled", "bypass"]),
        "kl_estimator": st.sampled_from(sorted(set(KL_ESTIMATORS) - {"k1"})),
        "kl_coeff": st.sampled_from([0.0, 0.3]),
        "kl_on_reused": st.sampled_from(["off", "weighted"]),
        "entropy_coeff": st.sampled_from([0.0, 0.1]),
        "sequence_window": st.just((0.8, 1.3)),
    }
)
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def made(lengths, seed, is_reused):
    """Return a micro-batch of episodes of these lengths, and what the model says of it."""
    rng = np.random.default_rng(seed)
    episode_N = np.repeat(np.arange(len(lengths)), lengths)
    num = len(episode_N)
    columns = {name: -1.5 + 0.4 * rng.normal(size=num) for name in ("behaviour_logp", "ref_logp", "prox", "logp")}
    tensors = {name: torch.tensor(column) for name, column in columns.items()}
    batch = {
        "is_reused": is_reused, "token_ids": torch.zeros(1, num), "episode": torch.from_numpy(episode_N),
        "advantage": torch.from_numpy(np.repeat(rng.normal(size=len(lengths)), lengths)),
        "scale": torch.from_numpy(np.repeat(rng.uniform(0.1, 1, size=len(lengths)), lengths)),
        "behaviour_logp": tensors["behaviour_logp"], "ref_logp": tensors["ref_logp"],
    }  # fmt: skip
    return batch, tensors["prox"], tensors["logp"], torch.from_numpy(rng.uniform(0, 2, size=num))


def run(loss_settings, batch, prox_N, logp_N, entropy_N, at=slice(None)):
    cut = {name: value[at] if name in COLUMNS else value for name, value in batch.items()}
    first_pass(cut, prox_N[at], 0.5)
    leaf = logp_N[at].clone().requires_grad_()
    objective = reused_loss if batch["is_reused"] else played_loss
    loss, sums = objective(cut, {"logp": leaf, "entropy": entropy_N[at]}, loss_settings)
    if leaf.numel():
        loss.backward()
    return loss.item(), leaf.grad, {name: float(sums.get(name, 0.0)) for name in SUMS}


COLUMNS = ("episode", "advantage", "scale", "behaviour_logp", "ref_logp")


@pytest.mark.slow
@settings(max_examples=150)
@given(GIVEN, LENGTHS, st.integers(0, 999), st.booleans(), st.integers(0, 4))
def test_cutting_and_shuffling_changes_nothing(given_settings, lengths, seed, is_reused, cut):
    """Two micro-batches of whole episodes have the loss, gradient and sums of one, in any order of its episodes."""
    loss_settings = LossSettings.made(**given_settings)
    everything = made(lengths, seed, is_reused)
    loss, gradient, sums = run(loss_settings, *everything)
    episode_N = everything[0]["episode"].numpy()
    order = np.random.default_rng(seed).permutation(len(lengths))
    cuts = [some for some in (order[:cut], order[cut:]) if len(some)]
    parts = [np.concatenate([np.flatnonzero(episode_N == e) for e in some]) for some in cuts]
    runs = [run(loss_settings, *everything, at=part) for part in parts]
    assert sum(one[0] for one in runs) == pytest.approx(loss, rel=1e-5, abs=1e-6)
    for part, one in zip(parts, runs, strict=True):
        np.testing.assert_allclose(one[1], gradient[part], rtol=1e-4, atol=1e-6)
    for name in set(SUMS) - {"num_computed_tokens", "reuse/num_computed_tokens"}:
        assert sum(one[2][name] for one in runs) == pytest.approx(sums[name], rel=1e-5, abs=1e-5), name


@settings(max_examples=100)
@given(given_settings=GIVEN, seed=st.integers(0, 999), is_reused=st.booleans(), is_good=st.booleans())
def test_an_episode_without_advantage_has_no_policy_gradient(given_settings, seed, is_reused, is_good):
    """Masks and clips take gradients away; none gives one to a token whose advantage is 0."""
    loss_settings = LossSettings.made(**{**given_settings, "kl_coeff": 0.0, "entropy_coeff": 0.0})
    batch, *rest = made([3, 2], seed, is_reused)
    batch["advantage"] = torch.where(batch["episode"] == int(is_good), batch["advantage"], 0.0)
    _, gradient, _ = run(loss_settings, batch, *rest)
    assert (gradient[batch["episode"] != int(is_good)] == 0).all()


@settings(max_examples=150)
@given(
    given_settings=GIVEN, seed=st.integers(0, 999), is_reused=st.booleans(),
    where=st.sampled_from(["logp", "prox", "behaviour_logp", "ref_logp"]),
    bad=st.sampled_from([float("nan"), float("inf"), float("-inf")]), at=st.integers(0, 4),
)  # fmt: skip
def test_what_is_not_finite_spoils_the_loss_and_is_counted(given_settings, seed, is_reused, where, bad, at):
    """Whatever mask or window it would have fallen into; the learner then skips the step."""
    batch, prox_N, logp_N, entropy_N = made([3, 2], seed, is_reused)
    {"logp": logp_N, "prox": prox_N}.get(where, batch.get(where))[at] = bad
    loss, gradient, sums = run(LossSettings.made(**given_settings), batch, prox_N, logp_N, entropy_N)
    assert np.isnan(loss) and sums["num_nonfinite_logps"] == 1
    assert gradient.isnan().all()


@pytest.mark.slow
@settings(max_examples=100)
@given(given_settings=GIVEN, lengths=LENGTHS, seed=st.integers(0, 999), is_reused=st.booleans())
def test_what_is_finite_stays_finite_and_statistics_are_shares(given_settings, lengths, seed, is_reused):
    batch, prox_N, logp_N, entropy_N = made(lengths, seed, is_reused)
    logp_N = logp_N * 40  # ratios beyond what exp can hold
    loss, gradient, sums = run(LossSettings.made(**given_settings), batch, prox_N, logp_N, entropy_N)
    stats = statistics(sums)
    assert np.isfinite(loss) and gradient.isfinite().all() and sums["num_nonfinite_logps"] == 0
    for name in ("clip_fraction", "masked", "reuse/clip_fraction", "reuse/left_out"):
        assert 0 <= stats[name] <= 1
    assert 0 <= stats["reuse/ess"] <= 1 + 1e-6

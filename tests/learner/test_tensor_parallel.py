"""Learners of a mesh (shards of data x parts of matrices or tokens) against one: gradients, memory, what they send."""

from __future__ import annotations

import numpy as np
import pytest
import ray
import torch

from rllib_srl.common.remote_calls import Call
from rllib_srl.engine.sync import unpack
from rllib_srl.learner.fsdp.sharding import local, norm_of_shards
from rllib_srl.learner.group.learners import Learners
from rllib_srl.learner.learner import GRPOTorchLearner
from rllib_srl.learner.scoring import load_causal_lm
from tests.small_learner import GROUPS, Gathering, learner_config, learner_group, make_group, relative_gap, update

STORED = [make_group(11, 5, [6, 2]), make_group(12, 9, [3, 1, 12])]
SPLIT, LONG = {"tensor_parallel": 2}, {"sequence_parallel": 2}
CANARY = [[1, 2, 3, 4, 5, 6], [9, 8, 7]]


class Meshed(Gathering):
    """Tells what it holds of weights, optimiser and reference, and the norm of its clipped gradient."""

    def postprocess_gradients(self, gradients_dict):
        clipped = super().postprocess_gradients(gradients_dict)
        self.clipped_norm = float(norm_of_shards(list(clipped.values())))
        return clipped

    def shares(self):
        """Return the share of the elements that this learner holds, and its clipped norm."""
        (optimizer,) = self._named_optimizers.values()
        own = {"policy": list(self.model.parameters()), "reference": list(self.reference.model.parameters())}
        own["optimizer"] = [optimizer.state[parameter]["exp_avg"] for parameter in own["policy"]]
        sizes = {name: sum(local(one).numel() for one in some) for name, some in own.items()}
        return {name: sizes[name] / sum(one.numel() for one in own[name]) for name in own}, self.clipped_norm


@pytest.fixture
def config(random_llama_dir):
    config = learner_config(random_llama_dir).env_runners(num_env_runners=1)
    return config.training(lr=1e-4, grad_clip=0.5, kl={"coeff": 0.05, "estimator": "k3"})


@pytest.mark.slow
@pytest.mark.parametrize(("num_learners", "fsdp"), [(2, True), (2, SPLIT), (4, SPLIT), (4, LONG)])
def test_a_mesh_trains_saves_and_sends_as_one_learner(config, ray_here, tmp_path, num_learners, fsdp):
    one, resumed = (learner_group(config.copy(copy_frozen=False)) for _ in range(2))
    config.learners(num_learners=num_learners, num_cpus_per_learner=0.25, learner_class=Meshed)
    mesh = learner_group(config.training(fsdp=fsdp))
    try:
        for batch in ((GROUPS, STORED), (GROUPS[:1], ()), (GROUPS, ())):  # of one group most shards are empty
            assert_equal_updates(mesh, one, batch)
        assert_shares(mesh, num_learners, one)
        weights = assert_sent_and_exported(mesh, one, tmp_path)
        learners = Learners(mesh)
        learners.save_shards(str(tmp_path / "shards"), 60)
        Learners(resumed).load_shards(str(tmp_path / "shards"), 60)
        loaded = {name: tensor.detach() for name, tensor in resumed._learner.model.named_parameters()}
        assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
        first, _ = assert_equal_updates(mesh, resumed, (GROUPS, STORED))  # weights and optimiser state
        learners.load_shards(str(tmp_path / "shards"), 60)
        again, _ = update(mesh, GROUPS, STORED)
        assert relative_gap(again[-1], first[-1]) == 0
        learners.gather(60)
        resumed.set_state(mesh.get_state())
        assert_equal_updates(mesh, resumed, (GROUPS, ()))
    finally:
        mesh.shutdown()


def assert_equal_updates(mesh, one, batch):
    found, stats = update(mesh, *batch)
    (wanted,), wanted_stats = update(one, *batch)
    assert len(found) == mesh.config.num_learners and all(relative_gap(own, wanted) < 1e-5 for own in found)
    for name in ("loss", "kl", "num_tokens", "entropy", "gradients_default_optimizer_global_norm"):
        assert stats[name] == pytest.approx(wanted_stats[name], rel=5e-5, abs=1e-7), name
    return found, stats


def assert_shares(mesh, num_learners, one):
    """Each learner holds its share of every kind of tensor, and the clipped gradient has the norm of `grad_clip`."""
    (gradient,) = (answer.get() for answer in one.foreach_learner(lambda learner: learner.gradients()))
    assert np.linalg.norm(np.concatenate([array.ravel() for array in gradient.values()])) > 0.5
    for answer in mesh.foreach_learner(lambda learner: learner.shares()):
        shares, clipped_norm = answer.get()
        assert shares.keys() == {"policy", "optimizer", "reference"}
        assert list(shares.values()) == pytest.approx([1 / num_learners] * 3, rel=0.01)  # norms are whole per part
        assert clipped_norm == pytest.approx(0.5, rel=1e-4)


def assert_sent_and_exported(mesh, one, directory):
    """The bundle for the engines holds the weights of one learner, and files the same numbers; return these."""
    wanted = {name: tensor.detach().clone() for name, tensor in one._learner.model.named_parameters()}
    learners = Learners(mesh)
    sent = learners.send(3, 60)
    logps = learners.score_sent(3, CANARY, 60)
    weights = {name: torch.tensor(np.asarray(tensor)) for name, tensor in unpack(ray.get(sent.ref))}
    assert weights.keys() == wanted.keys()
    arrays = [{name: tensor.numpy() for name, tensor in some.items()} for some in (weights, wanted)]
    assert relative_gap(*arrays) < 1e-6
    for own, canary in zip(logps, one._learner.scorer.score(CANARY), strict=True):
        np.testing.assert_allclose(own, canary, rtol=1e-4, atol=1e-5)
    every = learners._every(Call.of(GRPOTorchLearner.score_sent, 3, CANARY), 60, "scoring")
    assert all(np.array_equal(logps[0], each[0]) for each in every)
    learners.export(str(directory / "model"), 60)
    exported = dict(load_causal_lm(str(directory / "model")).named_parameters())
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
    return weights

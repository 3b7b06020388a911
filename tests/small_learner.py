"""Groups of random tokens, and a learner that keeps its gradients, for tests of the update."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl import SRLConfig
from rllib_srl.batch.shard import build_shards
from rllib_srl.learner.group.learners import Learners
from rllib_srl.learner.learner import GRPOTorchLearner
from rllib_srl.rollout.env_runner import token_spaces
from rllib_srl.types import Group, GroupMeta, Prompt
from tests.replay.groups import laid_out

VOCABULARY = 256
COMPARE = {"env": "rllib_srl.envs.math.compare:Compare", "env_config": {"num_shots": 0}}


class Recording(GRPOTorchLearner):
    """Keeps the reduced, unclipped gradients of its last update."""

    def postprocess_gradients(self, gradients_dict):
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.kept = {names[ref]: gradient.detach().clone().numpy() for ref, gradient in gradients_dict.items()}
        return super().postprocess_gradients(gradients_dict)

    def gradients(self):
        return self.kept


class Gathering(Recording):
    def postprocess_gradients(self, gradients_dict):
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.kept = {names[ref]: gradient.full_tensor().clone().numpy() for ref, gradient in gradients_dict.items()}
        return super(Recording, self).postprocess_gradients(gradients_dict)


def make_group(seed, prompt_length, answer_lengths):
    """Return a group whose episodes share a random prompt, and that prompt's first half with every other group."""
    shared = np.random.default_rng(0).integers(0, VOCABULARY, 8)
    rng = np.random.default_rng(seed)
    prompt = np.concatenate([shared, rng.integers(0, VOCABULARY, prompt_length)])
    episodes, logp = [], []
    for length in answer_lengths:
        ids = np.concatenate([prompt, rng.integers(0, VOCABULARY, length)])
        mask = np.arange(len(ids)) >= len(prompt)
        episodes.append((ids, mask))
        logp.append(np.where(mask, -5.5 + rng.normal(0, 0.3, len(mask)), 0.0))
    return laid_out(
        episodes,
        group_id=f"g{seed}",
        prompt=Prompt("env", str(seed)),
        behaviour_logp_N=np.concatenate(logp).astype(np.float32),
        rewards_G=rng.integers(0, 2, len(episodes)).astype(np.float32),
    )


def advantages_of(group):
    """Return an advantage an episode, always the same."""
    return np.random.default_rng(9 + group.size).normal(size=group.size)


GROUPS = [make_group(1, 4, [3, 9, 2]), make_group(2, 11, [17, 5]), make_group(3, 6, [1, 1, 4, 2, 8])]
ADVANTAGES = [advantages_of(group) for group in GROUPS]


def learner_config(model_dir, **environment):
    """Return the settings of a learner in float32 with small passes, without a memory; the environment is compare."""
    return (
        SRLConfig()
        .environment(**(environment or COMPARE))
        .rl_module(model_config={"model": str(model_dir)})
        .training(compute_dtype="float32", micro_batch_tokens=60)
        .learners(learner_class=Recording)
        .env_runners(max_turn_tokens=8, max_episode_tokens=128)
        .replay(revisit_fraction=0, reuse_fraction=0)
    )


def learner_group(config):
    config.validate()
    spaces = {DEFAULT_MODULE_ID: token_spaces(VOCABULARY)[DEFAULT_MODULE_ID]}
    spec = config.get_multi_rl_module_spec(spaces=spaces)
    return config.build_learner_group(rl_module_spec=spec)


def relative_gap(a, b):
    """Return |a - b| / |b| of two trees of arrays, each taken as one vector."""
    flat_a, flat_b = (np.concatenate([tree[name].ravel() for name in sorted(tree)]) for tree in (a, b))
    return np.linalg.norm(flat_a - flat_b) / np.linalg.norm(flat_b)


def update(
    group: Any,
    played: Sequence[Group],
    reused: Sequence[Group] = (),
    advantages: Sequence[np.ndarray] | None = None,
    **scales: Any,
) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
    """Train a learner group once; return the gradients of each learner and the statistics.

    `advantages` are of played groups and then of reused ones; None: those of `advantages_of`.
    """
    metas = [GroupMeta.of(one, ray.put(one)) for one in played]
    metas += [replace(GroupMeta.of(one, ray.put(one)), origin="reuse") for one in reused]
    advantages = [advantages_of(one) for one in (*played, *reused)] if advantages is None else advantages
    num_epochs, num_shards = group.config.num_epochs, max(1, group.config.num_learners)
    shards = build_shards(metas, advantages, num_shards, 30, **scales)
    if group.is_local:  # a test may have changed its config
        group._learner.settings = group._learner.config.loss_settings()
    results = Learners(group).update(shards, {}, num_epochs, 120)
    stats = {name: value.peek() for name, value in results[0][DEFAULT_MODULE_ID].items()}
    return [one.get() for one in group.foreach_learner(lambda learner: learner.gradients())], stats

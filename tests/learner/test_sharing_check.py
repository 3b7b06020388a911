"""Prefix sharing is checked on the real weights at start-up: a learner that would not be exact pads, and says so."""

import logging

import numpy as np
import pytest
import torch

from rllib_srl.batch.trie import Trie
from rllib_srl.learner.trie_attention import check_streams
from tests.batch.test_trie import FAMILIES, SIZES, WINDOW
from tests.engine.small_llama import make_byte_tokenizer
from tests.small_envs import small_config
from tests.small_learner import GROUPS, Recording, learner_group, relative_gap, update


@pytest.fixture(scope="module")
def sliding_dir(tmp_path_factory):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {**SIZES, "vocab_size": 288, "initializer_range": 0.12, **FAMILIES["qwen2"]}
    path = tmp_path_factory.mktemp("sliding")
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **shape)).save_pretrained(path)
    make_byte_tokenizer().save_pretrained(path)
    return path


def learner_of(model_dir, directory, **training):
    config = small_config(model_dir, directory).env_runners(max_episode_tokens=1024)
    config.training(lr=0.0, **training)
    return learner_group(config.learners(learner_class=Recording))


def siblings_see_each_other(depth_T):
    return Trie(np.full(len(depth_T), len(depth_T)), np.asarray(depth_T))


def refuses(depth_T):
    raise TypeError("forward() got an unexpected keyword argument 'trie'")


@pytest.mark.parametrize(
    ("broken", "reason"), [(siblings_see_each_other, "its log-probs differ by"), (refuses, "TypeError: forward")]
)
def test_a_model_that_shares_wrongly_pads(random_llama_dir, tmp_path, ray_here, monkeypatch, caplog, broken, reason):
    (wanted,), stats = update(learner_of(random_llama_dir, tmp_path, prefix_sharing=False), GROUPS)
    assert stats["is_prefix_sharing"] == 0
    monkeypatch.setattr(Trie, "of", staticmethod(broken))
    with caplog.at_level(logging.WARNING, "rllib_srl.learner.trie_attention"):
        group = learner_of(random_llama_dir, tmp_path)
    assert f"prefix sharing is off for LlamaForCausalLM: {reason}" in caplog.text
    (found,), stats = update(group, GROUPS)
    assert stats["is_prefix_sharing"] == 0 and relative_gap(found, wanted) == 0


def test_a_model_that_shares_rightly_shares(sliding_dir, random_llama_dir, tmp_path, ray_here, caplog):
    for model_dir in (sliding_dir, random_llama_dir):
        assert learner_of(model_dir, tmp_path)._learner.can_share_prefixes
    assert "prefix sharing is off" not in caplog.text


def test_the_check_reaches_beyond_the_window(sliding_dir, tmp_path, ray_here, monkeypatch):
    """A trie that forgot the window of sliding layers is exact below it."""
    assert max(map(len, check_streams(288, WINDOW, 1024))) > 3 * WINDOW
    monkeypatch.setattr(Trie, "cover", lambda self, window=None, own=Trie.cover: own(self, None))
    assert not learner_of(sliding_dir, tmp_path)._learner.can_share_prefixes

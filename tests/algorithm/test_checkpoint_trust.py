"""A checkpoint is data unless its user sealed it: weights are read without a pickle, all else only with trust."""

import os
import pickle

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.tune import Checkpoint
from ray.tune.trainable.trainable import _DICT_CHECKPOINT_FILE_NAME

from rllib_srl import SRL
from rllib_srl.algorithm.checkpointing import MODULE, TUNES_PICKLE
from rllib_srl.storage.checkpoints import CheckpointError, seal, verify_sealed
from rllib_srl.storage.seal_key import VARIABLE, SealKeyError, make_key
from rllib_srl.storage.weight_file import WEIGHTS, read_weights, write_weights
from tests.algorithm.poison import MORE, Bomb, poisoned
from tests.small_envs import small_config


def weights_of(algo) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in algo.learner_group.get_weights()[DEFAULT_MODULE_ID].items()}


def same(one, other) -> bool:
    return set(one) == set(other) and all(np.array_equal(one[name], other[name]) for name in one)


def test_weights_are_read_as_they_were_written_and_other_files_are_refused(tmp_path):
    weights = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b.c": np.float32([0.1])}
    weights["turned"] = weights["a"].T
    write_weights(tmp_path / WEIGHTS, weights)
    assert same(read_weights(tmp_path / WEIGHTS), weights) and os.listdir(tmp_path) == [WEIGHTS]
    for content in (pickle.dumps(Bomb(tmp_path / "marker")), b"", (2).to_bytes(8, "little") + b"{}"):
        (tmp_path / WEIGHTS).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{WEIGHTS} (cannot be read|contains no weights)"):
            read_weights(tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="does not exist; use another checkpoint"):
        read_weights(tmp_path / "nowhere")
    assert not (tmp_path / "marker").exists()


def test_weights_that_cannot_be_written_are_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError) as caught:
        write_weights(tmp_path / "nowhere" / WEIGHTS, {"a": np.zeros(3, np.float32)})
    assert str(tmp_path / "nowhere") in str(caught.value)


def test_tune_opens_a_pickle_of_the_name_that_is_refused():
    assert TUNES_PICKLE == _DICT_CHECKPOINT_FILE_NAME and TUNES_PICKLE in MORE


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    return small_config(random_llama_dir, tmp_path / "log")


@pytest.fixture
def trained(config, build, tmp_path):
    algo = build(config)
    algo.train()
    algo.save_to_path(tmp_path / "one")
    weights = weights_of(algo)
    algo.train()
    assert not same(weights_of(algo), weights)
    return algo, tmp_path / "one", weights


@pytest.mark.slow
def test_weights_come_from_a_poisoned_checkpoint_and_nothing_is_unpickled(trained, tmp_path):
    algo, path, weights = trained
    assert same(read_weights(path / MODULE / WEIGHTS), weights)
    marker = tmp_path / "marker"
    files = poisoned(path, marker)
    assert len(files) >= 6 + len(MORE), files
    algo.restore_weights(path)
    assert same(weights_of(algo), weights) and (algo.iteration, algo.version) == (1, 1)
    engine = {f"model.{name}": p.numpy() for name, p in algo.env_runner.engine._model.named_parameters()}
    assert same(engine, weights)
    algo.export_to_huggingface(tmp_path / "model")
    prompts = algo.source.get_state()
    before = {n: p.clone() for n, p in algo.learner_group._learner.model.named_parameters()}
    part = f"learner_group/learner/rl_module/{DEFAULT_MODULE_ID}"
    attempts = {
        "sealed with another key": [
            lambda: algo.restore_from_path(path),
            lambda: algo.restore_from_path(str(path)),
            lambda: algo.restore_from_path(path / part, component=part),
            lambda: algo.restore_from_path(path / "learner_group", component="learner_group"),
            lambda: algo.load_checkpoint(str(path)),
            lambda: SRL.from_checkpoint(path),
        ],
        "contains _dict_checkpoint.pkl": [
            lambda: algo.restore(str(path)),
            lambda: algo.restore(Checkpoint.from_directory(path)),
        ],
        "does not exist|has no manifest.json": [  # no checkpoint that anybody sealed
            lambda: algo.restore_from_path(path / part, component="learner_group")
        ],
    }
    for reason, calls in attempts.items():
        for call in calls:
            with pytest.raises(CheckpointError, match=reason):
                call()
    assert not marker.exists()
    after = dict(algo.learner_group._learner.model.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (algo.iteration, algo.source.get_state()) == (1, prompts)
    with pytest.raises((TypeError, KeyError, AttributeError)):  # what trust means
        algo.restore_from_path(path, trust=True)
    assert marker.exists()


@pytest.mark.slow
def test_what_somebody_else_sealed_is_restored_with_trust_or_with_their_key(trained, tmp_path, monkeypatch):
    algo, path, weights = trained
    theirs = tmp_path / "their.key"
    seal(path, verify_sealed(path), make_key(theirs))
    algo.restore_from_path(path, trust=True)
    assert same(weights_of(algo), weights) and algo.iteration == 1
    for given in ({"trust": True}, {"seal_key_file": theirs}):
        again = SRL.from_checkpoint(path, **given)
        assert same(weights_of(again), weights) and again.iteration == 1
        again.stop()
    monkeypatch.setenv(VARIABLE, str(theirs))
    algo.restore(str(path))  # as Tune does
    assert algo.iteration == 1
    theirs.chmod(0o644)
    for call in (algo.restore_from_path, SRL.from_checkpoint, algo.save_to_path):
        with pytest.raises(SealKeyError, match="expected 0600"):
            call(path)
    with pytest.raises(SealKeyError, match="expected 0600"):  # before hours are spent
        algo.config.copy(copy_frozen=False).training(checkpoint_every=1).build_algo()


@pytest.mark.slow
def test_adapters_are_read_without_a_pickle_too(config, build, tmp_path):
    pytest.importorskip("peft")
    algo = build(config, lora_rank=2, seal_key_file=str(tmp_path / "own.key"), lr=0.1)
    algo.train()
    algo.save_to_path(tmp_path / "one")
    weights = weights_of(algo)
    assert all("lora_" in name for name in weights)
    assert "lora_" in next(iter(read_weights(tmp_path / "one" / MODULE / WEIGHTS)))
    algo.train()
    poisoned(tmp_path / "one", tmp_path / "marker")
    algo.restore_weights(tmp_path / "one")
    assert same(weights_of(algo), weights) and not (tmp_path / "marker").exists()
    (tmp_path / "one" / MODULE / WEIGHTS).unlink()  # a reader does not fall back on the pickle
    seal(tmp_path / "one", {"version": 1})
    with pytest.raises(CheckpointError, match="does not exist; use another checkpoint"):
        algo.restore_weights(tmp_path / "one")
    assert not (tmp_path / "marker").exists() and (tmp_path / "own.key").is_file()

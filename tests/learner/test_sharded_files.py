"""Sharded files: what learners wrote is read again by any number of them, and what is not whole is refused."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from rllib_srl.learner.fsdp.sharded_files import INDEX, ShardedFiles, write_index, write_shard
from rllib_srl.learner.fsdp.sharding import local, of_local, own_rows, shard
from rllib_srl.storage.checkpoints import CheckpointError

VALUES = {"lr": 1e-5, "step": 3.0, "betas": [0.9, 0.95], "none": None}


def write(directory, tensors, cuts, values=VALUES):
    bounds = {name: [0, *(round(cut * len(t)) for cut in cuts), len(t)] for name, t in tensors.items()}
    for rank in range(len(cuts) + 1):
        spans = {name: slice(bounds[name][rank], bounds[name][rank + 1]) for name in tensors}
        write_shard(directory, rank, {name: tensors[name][span] for name, span in spans.items()})
    write_index(directory, len(cuts) + 1, {name: t.shape for name, t in tensors.items()}, values)


@settings(max_examples=40)
@given(
    st.lists(st.floats(0, 1), max_size=4).map(sorted),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted),
)
def test_any_rows_are_those_of_the_whole(tmp_path_factory, cuts, lengths, span):
    """However it was cut, empty parts included."""
    directory = tmp_path_factory.mktemp("shards")
    torch.manual_seed(len(cuts))
    tensors = {f"t{i}": torch.randn(n, *[2, 3][: i % 3]) for i, n in enumerate(lengths)}
    write(directory, tensors, cuts)
    files = ShardedFiles(directory)
    assert files.values == VALUES
    for name, tensor in tensors.items():
        assert files.shapes[name] == tuple(tensor.shape)
        assert torch.equal(files.rows(name, 0, len(tensor)), tensor)
        start, stop = (min(at, len(tensor)) for at in span)
        assert torch.equal(files.rows(name, start, stop), tensor[start:stop])


@pytest.fixture
def written(tmp_path):
    write(tmp_path, {"a": torch.arange(6.0).reshape(3, 2), "b": torch.arange(5).bfloat16()}, [0.5])
    return tmp_path


def test_number_formats_stay(written):
    files = ShardedFiles(written)
    assert files.rows("b", 1, 4).dtype == torch.bfloat16 and files.rows("b", 1, 4).tolist() == [1, 2, 3]


def test_a_shard_that_another_machine_kept_is_named(written):
    (written / "shard_00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no shard_00001.safetensors; expected all 2.*all of them share"):
        ShardedFiles(written)


def test_rows_that_are_missing_are_named(written):
    write_shard(written, 1, {"a": torch.zeros(0, 2), "b": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"a: parts \(2, 2\), \(0, 2\); expected rows of \(3, 2\)"):
        ShardedFiles(written)


def test_a_shard_of_another_model_is_named(written):
    write_shard(written, 0, {"a": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="shard_00000.safetensors and index.json differ in b"):
        ShardedFiles(written)


def test_damaged_files_are_refused(written):
    (written / "shard_00000.safetensors").write_bytes(b"\x80\x04]\x94.")  # a pickle, which is never opened as one
    with pytest.raises(CheckpointError, match="cannot be read"):
        ShardedFiles(written)
    (written / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ShardedFiles(written)


def test_the_index_is_plain_json(written):
    found = json.loads((written / INDEX).read_text())
    assert found == {"num_shards": 2, "shapes": {"a": [3, 2], "b": [5]}, "values": VALUES}


@pytest.mark.slow
def test_the_rows_of_a_learner_are_those_torch_gave_it():
    """Against `torch.chunk`, also where rows do not divide evenly and where some learners have none."""
    # A process has one default group, and an engine in this one may have made it already.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        assert process.submit(check_rows, (2, 3, 7)).result(timeout=120) == 12


def check_rows(nums_learners):
    """Compare every learner's rows with torch's chunks, and return the number of learners."""
    return sum(check_rows_of(num_learners) for num_learners in nums_learners)


def check_rows_of(num_learners):
    for rank in range(num_learners):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_learners)
        try:
            model = torch.nn.Module()
            model.base_model = torch.nn.Module()
            model.base_model.layers = torch.nn.ModuleList([torch.nn.Linear(2, rows) for rows in (1, 5, 8)])
            shard(model, model, torch.device("cpu"))
            for layer in model.base_model.layers:
                chunks = torch.arange(layer.out_features).chunk(num_learners)
                wanted = chunks[rank].tolist() if rank < len(chunks) else []
                start, stop = own_rows(layer.weight)
                assert np.arange(start, stop).tolist() == wanted and len(local(layer.weight)) == len(wanted)
                again = of_local(layer.weight, torch.full((len(wanted), 2), 7.0))
                assert again.shape == layer.weight.shape and again.placements == layer.weight.placements
        finally:
            torch.distributed.destroy_process_group()
    return num_learners

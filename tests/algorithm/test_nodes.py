"""Nodes of a cluster are compared before a run starts: every fault is one line, and equal nodes have none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest

from rllib_srl.algorithm.nodes.asking import BUILDS, _num_gpus, _num_places, _version
from rllib_srl.algorithm.nodes.reports import (
    FETCHED,
    PACKAGES,
    NodeReport,
    build_fault,
    directory_faults,
    faults,
    smallest_card,
)
from rllib_srl.engine.model_digest import model_digest
from rllib_srl.engine.models import ModelError, model_here
from tests.conftest import ROOT
from tests.small_worlds import small_config

GIB = 2.0**30
VERSIONS = {"rllib_srl": "0.1.0 (code aaaa)", "ray": "2.60.0", "torch": "2.13.0+cu128", "transformers": "5.1.0"}
DRIVER = NodeReport("d", "10.0.0.1", VERSIONS | {"vllm": "0.32.0"}, "12.8", 8, 8, 80 * GIB, "c3d4", True, 4)
OTHER = replace(DRIVER, node="o", address="10.0.0.2")


def fault_of(**changed) -> str:
    """Return the only fault of a node that differs from the driver's in these fields."""
    (line,) = faults(DRIVER, [OTHER, replace(OTHER, **changed)], "/models/x", (*PACKAGES, "vllm"))
    return line


def having(**versions) -> dict:
    """Return the versions of packages but these."""
    return {"versions": dict(DRIVER.versions) | versions}


def test_equal_nodes_have_no_fault():
    assert faults(DRIVER, [], "x") == [] == faults(DRIVER, [OTHER, OTHER], "x", (*PACKAGES, "vllm"))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            having(transformers="4.57.1"),
            "node 10.0.0.2 has transformers 4.57.1; expected 5.1.0, as on the driver's node: "
            "install the same packages there",
        ),
        (
            having(vllm=None),
            "node 10.0.0.2 has no package vllm; expected vllm 0.32.0, as on the driver's node: "
            "install the same packages there",
        ),
        (
            having(rllib_srl="0.1.0 (code bbbb)"),
            "node 10.0.0.2 has rllib_srl 0.1.0 (code bbbb); expected 0.1.0 (code aaaa), as on the driver's node: "
            "install the same packages there",
        ),
        (
            {"model": None},
            "node 10.0.0.2 has no model '/models/x'; expected the files of the driver's node: "
            "copy it there, or let both read one shared directory",
        ),
        (
            {"model": "a1b2"},
            "node 10.0.0.2 has other files as model '/models/x' (digest a1b2); expected those of the driver's node "
            "(digest c3d4): copy it there, or let both read one shared directory",
        ),
        (
            {"cuda": None, "num_cards": 0, "card_bytes": None} | having(torch="2.13.0+cpu"),
            "node 10.0.0.2 declares 8 GPUs to Ray, but torch 2.13.0+cpu there is built for CPUs; expected a build for "
            "CUDA 12.8 (bash scripts/setup.sh --set gpu), or no GPUs: num_gpus_per_env_runner = 0, "
            "num_gpus_per_learner = 0",
        ),
        (
            {"cuda": "12.4"},
            "node 10.0.0.2 has torch for CUDA 12.4; expected CUDA 12.8, as on the other nodes with GPUs: "
            "install the same packages there (bash scripts/setup.sh --set gpu)",
        ),
        (
            {"num_cards": 0, "card_bytes": None},
            "node 10.0.0.2 declares 8 GPUs to Ray, but torch for CUDA 12.8 sees none there; expected a driver that "
            "nvidia-smi shows and that is new enough, or no GPUs declared: ray start --num-gpus 0",
        ),
    ],
)
def test_each_fault_is_one_line(changed, line):
    assert fault_of(**changed) == line


def test_what_does_not_matter_is_no_fault():
    without_cards = {"cuda": None, "num_gpus": 0, "num_cards": None, "card_bytes": None}
    fine = [
        having(vllm=None),  # with another engine
        without_cards | having(torch="2.13.0+cpu"),  # a build for CPUs, where nothing needs a GPU
        {"model": FETCHED},
        {"num_cards": None, "card_bytes": None},  # the cards did not answer
        {"has_directory": False},  # compared by `directory_faults` only
    ]
    assert [faults(DRIVER, [replace(OTHER, **changed)], "x") for changed in fine] == [[]] * len(fine)
    assert faults(DRIVER, [replace(OTHER, **having(vllm="0.32.0+cpu"))], "x", (*PACKAGES, "vllm")) == []
    driver = replace(DRIVER, **without_cards)
    assert faults(driver, [OTHER, OTHER], "x") == []  # the driver's node has no GPU
    assert "expected CUDA 12.8" in faults(driver, [OTHER, OTHER, replace(OTHER, cuda="13.0")], "x")[0]
    assert faults(replace(DRIVER, model=FETCHED), [replace(OTHER, model="a1b2")], "x") == []


def test_faults_of_all_nodes_are_listed():
    bare = replace(OTHER, address="10.0.0.3", versions={}, model=None)
    lines = faults(DRIVER, [replace(OTHER, model="a1b2"), bare], "x")
    assert [line.split(" (")[0].split(";")[0] for line in lines] == [
        "node 10.0.0.2 has other files as model 'x'",
        *(f"node 10.0.0.3 has no package {name}" for name in PACKAGES),
        "node 10.0.0.3 has no model 'x'",
    ]


def test_a_directory_that_not_all_learners_see():
    apart = replace(OTHER, has_directory=False)
    assert directory_faults([DRIVER, OTHER], 8, "/out") == ([], [])
    assert directory_faults([DRIVER, replace(apart, num_learner_places=0)], 4, "/out") == ([], [])
    text = (
        "; expected --out on storage that all nodes mount, learners kept on nodes that do "
        "(custom_resources_per_learner), or checkpoint_every = 0"
    )
    begin = "node 10.0.0.2 does not see the run's directory /out, and "
    certain = f"{begin}learners there write their shards of fsdp to another disk{text}"
    possible = f"{begin}a learner placed there would write its shard to another disk{text}"
    assert directory_faults([DRIVER, apart], 5, "/out") == ([certain], [])  # the driver's node holds 4
    assert directory_faults([DRIVER, apart], 4, "/out") == ([], [possible])


def test_the_smallest_card_of_all_nodes_counts():
    driver = replace(DRIVER, num_gpus=0, num_cards=None, card_bytes=None)
    assert smallest_card([driver]) is None
    assert smallest_card([driver, OTHER, replace(OTHER, card_bytes=24 * GIB)]) == 24 * GIB


def test_a_torch_for_cpus_matters_only_beside_gpus():
    assert build_fault(0, None, "2.13.0+cpu", "this machine") == ""
    assert build_fault(1, "12.8", "2.13.0+cu128", "this machine") == ""
    assert build_fault(1, None, "2.13.0+cpu", "this machine") == (
        "this machine declares 1 GPUs to Ray, but torch 2.13.0+cpu there is built for CPUs; expected a build for CUDA "
        "(bash scripts/setup.sh --set gpu), or no GPUs: num_gpus_per_env_runner = 0, num_gpus_per_learner = 0"
    )


def test_a_package_is_found_under_the_name_of_its_build(monkeypatch):
    monkeypatch.setitem(BUILDS, "vllm", ("no-such-package", "numpy"))
    assert _version("vllm") == version("numpy") and _version("no-such-package") is None


def test_places_on_a_node():
    node = {"Resources": {"CPU": 4.0, "GPU": 2.0, "memory": 1e9}}
    has = node["Resources"]
    learner = {"CPU": 1, "GPU": 0.4}
    assert _num_places(has, [learner] * 8) == 4  # of CPUs; 5 by the GPUs
    assert _num_places(has, [learner] * 3) == 3
    assert _num_places(has, []) == 0 == _num_places(has, [{"CPU": 0, "learner": 1}])
    assert _num_places({}, [{"CPU": 0, "GPU": 0}] * 2) == 2
    assert _num_gpus(node, [{"CPU": 1}, learner]) == 2
    assert _num_gpus(node, [{"CPU": 1, "GPU": 0}]) == 0 == _num_gpus(node, [{"CPU": 8, "GPU": 1}])


# --- digests --------------------------------------------------------------------------------------


def test_a_digest_shows_another_model_and_ignores_other_files(tmp_path, random_llama_dir):
    one, other = tmp_path / "one", tmp_path / "other"
    for directory in (one, other):
        shutil.copytree(random_llama_dir, directory)
    (other / "README.md").write_text("mine")
    assert model_digest(one) == model_digest(other) and len(model_digest(one)) == 16
    (weights,) = other.glob("*.safetensors")
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert model_digest(one) != model_digest(other)
    assert model_digest(one, with_weights=False) == model_digest(other, with_weights=False)
    with (other / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert model_digest(one, with_weights=False) != model_digest(other, with_weights=False)


@pytest.mark.parametrize("at", [0, 2**20 - 1, -1])
def test_a_digest_samples_large_weights(tmp_path, at):
    size = 5 * 2**20
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(size))
    before = model_digest(tmp_path)
    raw = bytearray(size)
    raw[at] = 1
    file.write_bytes(raw)
    assert model_digest(tmp_path) != before
    file.write_bytes(bytes(size - 1))
    assert model_digest(tmp_path) != before


def test_a_model_is_found_without_downloading(tmp_path, random_llama_dir, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert model_here(str(random_llama_dir)) == random_llama_dir
    assert model_here("nobody/has-this-model") is None  # to be downloaded
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("nobody/has-this-model", str(tmp_path / "nothing")):
        with pytest.raises(ModelError):
            model_here(name)


# --- a cluster whose nodes differ ----------------------------------------------------------------


def happened(name, directory) -> dict:
    """Run one of `differing_nodes.py`, and return what it wrote."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.algorithm.differing_nodes", name, str(directory)]
    subprocess.run(command, check=True, timeout=380, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    return json.loads((directory / "out.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_node_that_joins_later_and_differs_is_not_played_on(tmp_path):
    """The run goes on with the other runner; once that is gone too it ends with the fault."""
    did = happened("joined", tmp_path)
    line = (
        f" has transformers 4.0.1; expected {version('transformers')}, as on the driver's node: "
        "install the same packages there"
    )
    assert did["ids"] == [[1, 2], [1], [1]] and {*did["num_groups"]} == {4}
    (left_out,) = (one for one in did["lines"] if "plays no more" in one)
    assert left_out.startswith("runner 2 plays no more in this run: node ") and left_out.endswith(line)
    (ended,) = did["ended"]
    assert ended.startswith("node ") and ended.endswith(line)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cluster_whose_nodes_differ_is_refused_before_training(tmp_path):
    did = happened("before", tmp_path)
    node, mend = f"node {did['address']}", "copy it there, or let both read one shared directory"
    here, there = model_digest(tmp_path / "head/model"), model_digest(tmp_path / "model/model")
    assert here != there
    expected = {
        "same": [],
        "bare": [
            f"{node} cannot load rllib_srl 0.1.0 (ModuleNotFoundError: No module named 'rllib_srl.algorithm.nodes'); "
            "expected the packages of the driver's node: install them there"
        ],
        "model": [
            f"{node} has other files as model '~/model' (digest {there}); expected those of the driver's node "
            f"(digest {here}): {mend}"
        ],
        "none": [f"{node} has no model '~/model'; expected the files of the driver's node: {mend}"],
        "old": [
            f"{node} has transformers 4.0.1; expected {did['transformers']}, as on the driver's node: "
            "install the same packages there"
        ],
    }
    assert {name: did[name] for name in expected} == expected
    assert sorted(did["all"]) == sorted(line for lines in expected.values() for line in lines)
    assert did["shared"] == [] and did["left"] == []
    (apart,) = did["apart"]
    assert apart.startswith(f"{node} does not see the run's directory /proc/self/cwd, and learners there write")
    assert did["reports"] == [[here, 0, None, False], [here, 0, None, False]]
    assert did["alone"] == [] and did["alone_s"] < 1 and did["alone_asked"] == []


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_learner_with_another_disk_cannot_export(ray_here, random_llama_dir, tmp_path, monkeypatch):
    config = small_config(random_llama_dir, tmp_path / "log", "Even").env_runners(num_env_runners=1)
    algo = config.learners(num_learners=1).training(checkpoint_every=0).build_algo()
    try:
        monkeypatch.chdir(tmp_path)  # the learner's working directory stays
        algo.check_export(tmp_path / "model")
        with pytest.raises(FileNotFoundError, match=r"^/proc/self/cwd/model is not seen by learner 0"):
            algo.check_export("/proc/self/cwd/model")
        assert not (tmp_path / "model").exists()
    finally:
        algo.stop()

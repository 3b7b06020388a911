"""A card for server and trainer: shares, number format, vLLM's own reading of the flags, and turns. Without a card."""

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from rllib_srl.algorithm import config as config_module
from rllib_srl.algorithm.gpu_memory import GIB
from rllib_srl.algorithm.model_shape import SHAPES
from rllib_srl.algorithm.resources import PlacementError
from rllib_srl.cli.serving import card
from rllib_srl.cli.serving.card import card_share, needs_of
from rllib_srl.cli.serving.job import Job, KeptDomain, ServedSettings
from rllib_srl.cli.serving.rated_run import rated_config
from rllib_srl.cli.serving.trainer_process import TURN, UP, TrainerProcess, take_turns
from rllib_srl.cli.serving.vllm_server import VLLMServer
from rllib_srl.cli.shared.diagnosis import FAILURE, OK
from rllib_srl.engine.models import local_model
from tests.waiting import wait_until


@pytest.fixture
def job():
    served = ServedSettings(model=str(local_model("tiny")), rank=16, context=512, temperature=1.0, dtype="bfloat16")
    return Job(served=served, keep=[KeptDomain(env="compare", domain="compare")])


def test_the_server_gets_what_the_trainer_leaves(job, monkeypatch):
    """1.5B on 24 GiB: .97 of it less the trainer's need; without training at most .9."""
    monkeypatch.setattr(card.ModelShape, "of", lambda _: SHAPES["1.5B"])
    server, trainer = needs_of(job)
    assert trainer.parts["its engine"] == 2 * SHAPES["1.5B"].num_parameters + 32 * 512 * SHAPES["1.5B"].kv_bytes
    share, left = card_share(job, 24 * GIB), 0.97 - trainer.total / (24 * GIB)
    assert 0 <= left - share < 0.01 and server.total < share * 24 * GIB
    assert card_share(job, 24 * GIB, is_trained=False) == 0.9 and card_share(job, None) == 0
    with pytest.raises(PlacementError, match=r"on a card of 16 GiB: its server needs .*its trainer .*--train-after 0"):
        card_share(job, 16 * GIB)
    monkeypatch.setattr(card.ModelShape, "of", lambda _: None)
    with pytest.raises(PlacementError, match="expected a config.json with a Llama-like model's sizes"):
        card_share(job, 80 * GIB)


def test_the_doctor_says_whether_a_model_fits():
    (small,), (large,), (cpu,) = (list(card.fit("tiny", num, gib)) for num, gib in ((1, 4), (1, 24), (0, 0)))
    assert small.status == FAILURE and "expected a larger card" in small.text
    assert large.status == OK and "tiny in bfloat16: vLLM reserves" in large.text and "on the CPU" in cpu.text


def test_the_trainers_run_is_valid_on_a_card(job, monkeypatch):
    monkeypatch.setattr(config_module, "num_gpus_here", lambda: 1.0)
    monkeypatch.setattr(config_module, "card_bytes_here", lambda: 24 * GIB)
    config = rated_config(job, Path())
    config.validate()
    assert (config.compute_dtype, config.num_gpus_per_learner, config.num_learners) == ("bfloat16", 0.5, 0)
    assert config.engine_settings()["device"] == "cuda" and config.engine_settings()["dtype"] == "bfloat16"
    assert not config.colocate


@pytest.mark.engine
def test_vllm_reads_the_flags_as_they_are_meant(job, tmp_path):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = {}
    for dtype, share in (("bfloat16", 0.55), ("float32", 0.0)):
        settings = job.served.model_copy(update={"dtype": dtype})
        server = VLLMServer(settings, tmp_path / "log", False, share)
        flags = server.flags(tmp_path / "socket", tmp_path / "template")
        arguments = AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(flags))
        found[dtype] = arguments.create_engine_config()
    on_card = found["bfloat16"]
    assert str(on_card.model_config.dtype) == str(on_card.lora_config.lora_dtype) == "torch.bfloat16"
    assert on_card.cache_config.gpu_memory_utilization == 0.55 and on_card.lora_config.max_lora_rank == 16
    assert str(found["float32"].lora_config.lora_dtype) == "torch.float32"


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    yield process
    process.kill()
    process.wait()


def test_on_a_cpu_a_trainer_is_stopped_once_its_ray_runs(tmp_path, sleeper):
    trainer = TrainerProcess(sleeper, tmp_path, on_card=False)
    assert not trainer.hold(True)  # to be tried again
    (tmp_path / UP).touch()
    state = psutil.Process(sleeper.pid).status
    assert trainer.hold(True) and wait_until(lambda: state() == psutil.STATUS_STOPPED)
    assert trainer.hold(False) and wait_until(lambda: state() != psutil.STATUS_STOPPED)


def test_on_a_card_a_trainer_waits_before_its_next_forward_pass(tmp_path, sleeper, random_llama_dir):
    """The sleeper stands for the trainer's process, which is not stopped; its lock is waited for in a thread."""
    import torch
    from torch.nn.modules import module as modules
    from transformers import AutoModelForCausalLM

    model, hooks = AutoModelForCausalLM.from_pretrained(random_llama_dir), modules._global_forward_pre_hooks
    before = dict(hooks)
    trainer = TrainerProcess(sleeper, tmp_path, on_card=True)
    with (tmp_path / TURN).open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not trainer.hold(True)  # to be tried again
    take_turns(tmp_path)
    try:
        assert trainer.hold(True) and psutil.Process(sleeper.pid).status() != psutil.STATUS_STOPPED
        passes = []
        thread = threading.Thread(target=lambda: passes.append(model(torch.tensor([[1, 2]]))), daemon=True)
        thread.start()
        thread.join(0.5)
        assert not passes
        assert trainer.hold(False)
        thread.join(60)
        assert len(passes) == 1
    finally:
        hooks.clear()
        hooks.update(before)
        trainer.kill()

"""`scripts/gpu_check.sh`: what it says without a GPU, its results, and its programs in their short form on a CPU."""

import json
import os
import re
import subprocess
import sys

import pytest

from rllib_srl.algorithm import checks as checks_module
from rllib_srl.algorithm import config as config_module
from rllib_srl.algorithm.model_shape import SHAPES
from scripts.gpu import check
from scripts.gpu import run as run_checks
from scripts.gpu.random_model import SHORT
from tests.conftest import ROOT


def gpu_check(*args, out=None):
    env = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    where = ["--out", str(out)] if out else []
    return subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_check.sh"), *args, *where],
        capture_output=True, text=True, env=env, timeout=500, check=False,
    )  # fmt: skip


def test_without_a_gpu_it_says_so_and_fails(tmp_path):
    run = gpu_check(out=tmp_path / "results")
    assert run.returncode == 3
    assert run.stdout.startswith("error: no GPU: torch finds none on this machine") and "nothing was run" in run.stdout
    assert not (tmp_path / "results").exists()


CALLS = {call: [step for step in check.STEPS if step.call == call] for call in (1, 2)}
WITHOUT = """
import json, runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "vllm", "gymnasium"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for module, *sys.argv[1:] in json.loads(sys.argv[1]):
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print("ended", module, int(end.code or 0), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_call_needs_neither_ray_nor_vllm():
    """Nor a network, nor gymnasium; and the last line of a step is the table's."""
    commands = [check.command_of(step, is_short=True)[2:] for step in CALLS[1]]
    env = {**os.environ, "SRL_TEST_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps(commands)],
        cwd=ROOT, capture_output=True, text=True, env=env, timeout=560, check=False,
    )  # fmt: skip
    *outputs, rest = re.split(r"^ended .*\n", done.stdout, flags=re.MULTILINE)
    assert rest == "" and done.returncode == 0, done.stderr[-2000:]
    assert re.findall(r"^ended (\S+) (\d)", done.stdout, re.MULTILINE) == [(step.module, "0") for step in CALLS[1]]
    last = {step.name: check.figures_of(text)[-1] for step, text in zip(CALLS[1], outputs, strict=True)}
    parts = {"tokens_per_s", "utilisation", "recompute_s", "optimiser_s", "launch_s", "padding"}
    assert parts <= last["learner_1.5b"].keys() == last["learner_8b_lora"].keys()
    assert last["packing_1.5b"]["wrong_tensors"] == 0 and last["search"]["same"] is True
    assert "passed" in last["tests"]["output"]


@pytest.mark.parametrize("call", [1, 2])
def test_the_limits_of_a_calls_steps_fit_into_six_minutes(call):
    """Serving lasts two minutes whatever the machine; the rest of its limit is its start."""
    limits = {step.name: step.limit_s for step in CALLS[call]}
    assert sum(limits.values()) - (60 if "serve" in limits else 0) <= check.CALL_S


def test_a_second_call_runs_only_what_has_not_passed(tmp_path, monkeypatch, capsys):
    steps = [check.Step(name, "some", call=1, limit_s=50, needs=()) for name in ("good", "bad", "late")]
    monkeypatch.setattr(check, "STEPS", steps)
    monkeypatch.setattr(check, "num_gpus_here", lambda: 1)
    ran, clock = [], [0.0]
    monkeypatch.setattr(check.time, "monotonic", lambda: clock[0])

    def run(step, out, is_short, limit_s):
        ran.append((step.name, limit_s))
        clock[0] += 50
        is_good = step.name != "bad" or clock[0] > 200
        return {"step": step.name, "passed": is_good, "status": int(not is_good), "seconds": 50, "figures": [{"a": 1}]}

    monkeypatch.setattr(check, "run", run)
    call = ["--call", "1", "--seconds", "110", "--out", str(tmp_path)]
    assert check.main(call) == 1
    assert ran == [("good", 50), ("bad", 50)]  # 10 seconds are left for the third
    assert "no time is left for late" in capsys.readouterr().out
    ran.clear()
    clock[0] = 200.0
    assert check.main(call) == 0
    assert ran == [("bad", 50), ("late", 50)]
    assert "| bad | 50 | a 1 |" in capsys.readouterr().out.splitlines()


FAILS = """
import sys, time
print('{"a": 1}', flush=True)
if sys.argv[1] == "hangs":
    time.sleep(60)
sys.exit("torch.OutOfMemoryError: CUDA out of memory. GPU 0 has a total capacity of 7.79 GiB of which 1 MiB is free.")
"""


def test_what_fails_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    """A card that is too small, a step without its packages, and one that does not end."""
    (tmp_path / "fails.py").write_text(FAILS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    steps = [
        check.Step("small", "fails", ("ends",), needs=()),
        check.Step("search", "fails", needs=("no_such_package",)),
        check.Step("late", "fails", ("hangs",), limit_s=3, needs=()),
    ]
    monkeypatch.setattr(check, "STEPS", steps)
    monkeypatch.setattr(check, "LEAST_S", 1)
    monkeypatch.setattr(check, "num_gpus_here", lambda: 1)
    assert check.main(["--out", str(tmp_path / "out")]) == 1
    assert [line.split("|")[3].strip() for line in capsys.readouterr().out.splitlines()[-4:-1]] == [
        "FAILED: the card is too small: it has 7.79 GiB", "needs no_such_package", "FAILED: no end within 3 s",
    ]  # fmt: skip


RUNS = [step for step in check.STEPS if step.module == check.RUN]


@pytest.mark.parametrize("step", RUNS, ids=lambda step: step.name)
def test_the_settings_of_a_run_are_valid_on_as_many_gpus_as_it_asks_for(step, tmp_path, monkeypatch):
    """And they are those that its name promises; with a tiny model in place of a large one."""
    for module in (config_module, checks_module):
        monkeypatch.setattr(module, "num_gpus_here", lambda: float(step.num_gpus))
    monkeypatch.setattr(config_module, "card_bytes_here", lambda: None)  # turns, where nothing else is asked for
    monkeypatch.setattr(run_checks, "SHAPES", dict.fromkeys(SHAPES, SHORT))
    config = run_checks.config_of(run_checks.parse(step.args), tmp_path)
    config.validate()
    processes = max(1, config.num_learners)
    assert config.num_gpus_per_env_runner + config.num_gpus_per_learner * processes == step.num_gpus
    wanted = {
        "float32": config.compute_dtype == "float32",
        "turns_1.5b": config.colocate is True,
        "adapters": config.lora_rank == 16 and config.lora_send == "adapter" and config.colocate,
        "max_lag": config.max_lag == 1 and not config.colocate,
        "fsdp_bf16": config.fsdp and config.fsdp_gather_dtype == "bfloat16" == config.compute_dtype,
        "engine_parallel": config.engine_tensor_parallel_size == 2 == config.num_gpus_per_env_runner,
        "offload_1.5b": config.activation_checkpointing == "offload",
        "adamw_8bit_1.5b": config.optimizer_name == "adamw_8bit",
        "paged_1.5b": config.optimizer_name == "paged_adamw_8bit",
    }
    assert wanted.get(step.name, True) and wanted.keys() < {one.name for one in RUNS}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["engine_135m", "defaults"])
def test_a_program_runs_in_its_short_form(name, tmp_path):
    (step,) = [step for step in check.STEPS if step.name == name]
    line = check.run(step, tmp_path, is_short=True, limit_s=500)
    assert line["passed"], (tmp_path / f"{name}.log").read_text()[-3000:]
    if step.module == check.RUN:
        *_, trained, peak = line["figures"]
        assert 0 <= trained["weight_sync/canary_mean"] < 0.1 and trained["env_runners/num_episodes"] == 16
        assert peak["learner_peak_gib"] == [0.0]

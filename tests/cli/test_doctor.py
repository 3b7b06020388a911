"""`srl doctor`: the machine, what fits, the table of docs/gpu.md, and bad input."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rllib_srl.cli import doctor

ROOT = Path(__file__).resolve().parents[2]


def test_help_is_fast():
    start = time.process_time()
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rllib_srl.cli", "doctor", "--help"],
        capture_output=True, text=True, cwd=ROOT, timeout=60, check=True,
    )  # fmt: skip
    assert "--gpus NxGIB" in run.stdout and time.process_time() - start < 1
    assert " torch" not in run.stderr and " ray" not in run.stderr


def test_a_machine_without_a_gpu_says_so(capsys):
    assert doctor.main(["--model", "smollm2-135m"]) == 0
    out = capsys.readouterr().out
    assert "GPU         none" in out and "no GPU: the run computes on the CPU" in out and "/dev/shm" in out


def test_ways_to_train_a_model_on_other_gpus(random_llama_dir, capsys):
    assert doctor.main(["--model", str(random_llama_dir), "--gpus", "4x80"]) == 0
    out = capsys.readouterr().out
    assert "on 4 x 80 GiB" in out and "no figure was measured on a GPU" in out
    for line in ("full (2 GPUs, one for the engine): fits", "lora = 16 (2 GPUs", "fsdp over 3 (4 GPUs"):
        assert line in out


def test_a_model_that_fits_nowhere_ends_with_1_and_the_reasons(random_llama_dir, capsys):
    assert doctor.main(["--model", str(random_llama_dir), "--gpus", "1x1"]) == 1
    out = capsys.readouterr().out
    assert "full (engine and learner share it): does not fit" in out and "expected" in out


@pytest.mark.parametrize("text", ["80", "0x80", "4x0", "axb", "4x80GB"])
def test_gpus_in_another_form_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--gpus", text])
    assert "expected NUMBERxGIB, such as 4x80" in capsys.readouterr().err


def test_an_unknown_model_is_one_line(capsys):
    assert doctor.main(["--model", "/nowhere/model", "--gpus", "1x80"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "/nowhere/model" in err and err.count("\n") == 1


def test_the_page_has_the_table_of_the_command(capsys):
    assert doctor.main(["--table"]) == 0
    assert capsys.readouterr().out in (ROOT / "docs/gpu.md").read_text(encoding="utf-8")

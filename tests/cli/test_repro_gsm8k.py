"""`scripts/repro_gsm8k.sh` from its first evaluation to its last line, with the tiny model and rows of GSM8K's form."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT

SMALL = "--engine transformers --num_env_runners 0 --prompt_format text --max_turn_tokens 8 --max_episode_tokens 512"
SMALL += " --evaluation_duration 6 --evaluation_interval none --num_prompts_per_batch 4 --group_size 2"


def row(number: int) -> dict[str, str]:
    """Return a question and a solution as GSM8K writes them."""
    total = number + 2
    question = f"Ann has {number} apples and buys 2 more. How many apples does she have?"
    return {"question": question, "answer": f"Ann has {number}+2=<<{number}+2={total}>>{total} apples.\n#### {total}"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_command_evaluates_trains_and_evaluates(ray_here, tmp_path):
    data, out = tmp_path / "gsm8k", tmp_path / "out"
    (data / "main").mkdir(parents=True)
    for split, numbers in (("train", range(3, 40)), ("test", range(50, 60))):
        table = pa.Table.from_pylist([row(number) for number in numbers])
        pq.write_table(table, data / "main" / f"{split}-00000-of-00001.parquet")
    given = {"PYTHON": sys.executable, "MODEL": "tiny", "DATA": str(data), "OUT": str(out), "ITERATIONS": "1"}
    given["RAY_ADDRESS"] = ray_here.get_runtime_context().gcs_address  # three commands start no Ray of their own
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/repro_gsm8k.sh"), *SMALL.split()],
        capture_output=True, text=True, env={**os.environ, **given}, timeout=560, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    before, after = (json.loads((out / f"{name}.json").read_text()) for name in ("before", "after"))
    assert (before["iteration"], after["iteration"]) == (0, 1)
    last = done.stdout.splitlines()[-1]
    assert last == f"| tiny | 6 | {before['accuracy']:.3f} | {after['accuracy']:.3f} |"

#!/usr/bin/env python3
"""Compare an iteration of the quick-start with the same step of TRL's GRPOTrainer, both sides in one run.

    python -m scripts.bench.trl                    about 15 minutes on 2 cores, nearly all of them TRL's
    python -m scripts.bench.trl --dtypes bfloat16  only its faster one

Same model, prompts, group size, length of answers, learning rate and seed; both sides generate, grade, learn and
deliver the new weights to the next iteration's sampler. Ours is the unchanged quick-start, memory included: it also
trains on the reused groups. TRL (pinned in scripts/requirements/trl.txt) generates with Transformers, since its vLLM
mode needs a GPU; it runs in each number format, and the faster one counts. Where this Python has no TRL it is installed
once, into its own environment build/trl on top of this one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

from rllib_srl.cli.shared.cluster import run_cleanly, start_ray
from scripts.bench import common as bench

LEAST_GAIN = 10.0  # how many times faster an iteration has to be than a step of TRL
DTYPES = ("bfloat16", "float32")
STEP_TIMEOUT_S = 1800.0
SCRIPTS = Path(__file__).resolve().parents[1]
REQUIREMENTS = SCRIPTS / "requirements" / "trl.txt"


def trl_python() -> Path:
    """Return an interpreter that has TRL: this one, or that of build/trl, which is made if need be.

    Raises:
        RuntimeError: pip could not install it.
    """
    if importlib.util.find_spec("trl"):
        return Path(sys.executable)
    directory = SCRIPTS.parent / "build" / "trl"
    python = directory / "bin" / "python"
    if list(directory.glob("lib/python*/site-packages/trl")):
        return python
    print(f"installing TRL into {directory} ...", flush=True)
    venv.create(directory, with_pip=True, clear=True)
    site = next(directory.glob("lib/python*/site-packages"))
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "ours.pth").write_text("\n".join(ours) + "\n")
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(REQUIREMENTS)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if process.returncode:
        raise RuntimeError(f"pip could not install {REQUIREMENTS.name}: {process.stderr.strip()[-500:]}")
    return python


def job_of(config: Any, num_steps: int) -> dict[str, Any]:
    """Return TRL's input for the same work: the prompts that this configuration draws first, and its settings."""
    from rllib_srl.curriculum.prompts import PromptSource
    from rllib_srl.engine.models import local_model

    creators, env_configs = config.env_creators(), config.env_configs()
    prompts = PromptSource(creators, env_configs, config.mixture_weights(), config.seed).draw(
        num_steps * config.num_prompts_per_batch
    )
    (env_id,) = creators
    env = creators[env_id](env_configs[env_id])
    rows = []
    for prompt in prompts:
        text, _ = env.reset(options={"prompt_id": prompt.prompt_id})
        rows.append({"prompt": text, "answer": env.unwrapped.gold_turns(prompt.prompt_id)[0].strip()})
    return {
        "model": str(local_model(config.model_config["model"])),
        "rows": rows,
        "group_size": config.group_size,
        "num_prompts": config.num_prompts_per_batch,
        "num_steps": num_steps,
        "max_tokens": config.max_turn_tokens,
        "stop": env.unwrapped.stop_strings[0],
        "lr": config.lr,
        "temperature": config.temperature,
        "seed": config.seed,
        "num_threads": int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1),
    }


def theirs(python: Path, job: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return seconds and mean reward of TRL's steps.

    Raises:
        RuntimeError: it failed; with the end of its output.
        subprocess.TimeoutExpired: it took longer than `STEP_TIMEOUT_S` per step.
    """
    # -P: without the folder of that file, in which this one hides the package of the same name
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    environment.pop("PYTHONPATH", None)
    process = subprocess.run(
        [str(python), "-P", str(SCRIPTS / "bench" / "trl_side.py")],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=STEP_TIMEOUT_S * job["num_steps"],
        env=environment,
    )
    if process.returncode:
        raise RuntimeError(f"TRL ended with exit status {process.returncode}: {process.stderr.strip()[-1500:]}")
    results: dict[str, list[float]] = json.loads(process.stdout.strip().splitlines()[-1])
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both sides, print them, and return 1 if the gain is below the bound."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--model", help="default: the quick-start's")
    parser.add_argument("--num-iterations", type=int, default=7, help="of ours, after one to warm up")
    parser.add_argument("--num-steps", type=int, default=2, help="of TRL's, in each number format")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="TRL's number formats")
    parser.add_argument("--least", type=float, default=LEAST_GAIN, help="exit status 1 below this gain")
    bench.add_output(parser)
    parser.add_argument("--verbose", action="store_true", help="show the output of Ray, RLlib, vLLM and transformers")
    arguments = parser.parse_args(argv)

    python = trl_python()
    settings = {"model": arguments.model} if arguments.model else {}
    config = bench.quickstart_config(**settings)
    begin = time.perf_counter()
    start_ray(arguments.verbose)
    mine = bench.iterations(config, arguments.num_iterations)
    engine = config.engine
    print(f"ours ({config.compute_dtype}, {engine}): {bench.spread(mine['seconds'])} s an iteration", flush=True)
    other = {}
    for dtype in arguments.dtypes:
        other[dtype] = theirs(python, {**job_of(config, arguments.num_steps), "dtype": dtype})
        print(f"TRL ({dtype}, Transformers): {bench.spread(other[dtype]['seconds'])} s a step", flush=True)
    fastest = min(median(side["seconds"]) for side in other.values())
    gain = fastest / median(mine["seconds"])
    rewards = ", ".join(f"TRL {dtype} {side['rewards'][0]:.2f}" for dtype, side in other.items())
    print(f"mean reward of a step: ours {mine['rewards'][0]:.2f}, {rewards}: both sides play the same prompts")
    is_met = gain >= arguments.least
    print(f"TRL's step over our iteration: {gain:.1f}; at least {arguments.least:g}: {bench.verdict(is_met)}")
    print(f"{bench.conditions(config.compute_dtype)}; {time.perf_counter() - begin:.0f} s in all")
    bench.write(arguments, {"ours": mine, "trl": other, "gain": gain})
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(run_cleanly(main, debug="--verbose" in sys.argv))

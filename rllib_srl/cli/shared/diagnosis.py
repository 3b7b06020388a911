"""The checks of `srl doctor`: of this machine, of a model on GPUs, and of the settings and environments of a run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from rllib_srl import SRLConfig
from rllib_srl.algorithm.checks import FailedCheck, in_turn
from rllib_srl.algorithm.gpu_memory import OPTIMIZER_BYTES, variants
from rllib_srl.algorithm.model_shape import ModelShape
from rllib_srl.algorithm.resources import PlacementError, card_bytes_here
from rllib_srl.cli.shared.baselines import played
from rllib_srl.cli.shared.cluster import ROOT, is_installed
from rllib_srl.cli.shared.display import one_line
from rllib_srl.cli.shared.settings import SettingsError, build_config, check
from rllib_srl.curriculum.prompts import prompts_of
from rllib_srl.engine.models import local_model
from rllib_srl.rollout.replies import attribute
from rllib_srl.types import RIGHT, Prompt

OK, WARNING, FAILURE = "ok", "warning", "failure"
GIB = 2**30
LEAST = 2.0  # GiB of free memory, of the disk and of /dev/shm, below which there is a warning
NUM_PROMPTS = 3  # of each environment that are graded
DEFAULT_MODEL = "smollm2-135m"
PLACED = (  # settings that a plan for GPUs chooses
    *("num_env_runners", "num_learners", "num_gpus_per_env_runner", "num_gpus_per_learner", "colocate"),
    "engine_tensor_parallel_size",
)


class Line(NamedTuple):
    """The result of a check. Invariant: `status` is `OK`, `WARNING` or `FAILURE`."""

    status: str
    topic: str
    text: str


class Findings:
    """Prints lines as they come, and counts them by status."""

    def __init__(self) -> None:
        self.num = Counter[str]()

    def add(self, lines: Iterable[Line]) -> bool:
        """Print lines; return whether none of them is a failure."""
        before = self.num[FAILURE]
        for line in lines:
            self.num[line.status] += 1
            print(f"{line.status:<9}{line.topic:<13}{' '.join(line.text.split())}", flush=True)
        return self.num[FAILURE] == before


# --- the machine ----------------------------------------------------------------------------------


def of_machine() -> Iterator[Line]:
    memory, shm = psutil.virtual_memory(), os.statvfs("/dev/shm")
    free, size = memory.available / GIB, shm.f_blocks * shm.f_frsize / GIB
    yield Line(OK, "cores", str(os.cpu_count()))
    yield _amount("memory", free, f"{memory.total / GIB:.0f} GiB, {free:.1f} of them free")
    where = f"{size:.2g} GiB, which holds weights on their way to the engines"
    yield _amount("/dev/shm", size, where, " (docker run --shm-size=4g)")
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        yield Line(OK, f"GPU {index}", f"{card.name}, {card.total_memory / GIB:.0f} GiB")
    if not torch.cuda.device_count():
        yield Line(OK, "GPU", "none: runs compute on the CPU; --gpus 1x80 plans for a GPU of another machine")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    engine = "vLLM" if find_spec("vllm") else "transformers (vLLM is not installed)"
    yield Line(OK, "torch", f"{torch.__version__}, built for {build}; engine {engine}")


def _amount(topic: str, amount: float, text: str, remedy: str = "") -> Line:
    """Return a line about an amount in GiB, a warning if it is too small."""
    few = amount < LEAST
    return Line(WARNING if few else OK, topic, text + f"; expected at least {LEAST:g}{remedy}" * few)


def of_package() -> Iterator[Line]:
    """Report whether the package that runs here is the installed one; `pip check` compares the versions it needs."""
    if not is_installed():
        text = f"the rllib_srl that runs here, in {ROOT}, is not the installed one; expected: pip install {ROOT}"
        yield Line(WARNING, "package", text)


# --- a model on GPUs ------------------------------------------------------------------------------


def gpus_here() -> tuple[int, float]:
    """Return the number of GPUs of this machine and the memory of the smallest, GiB."""
    return torch.cuda.device_count(), (card_bytes_here() or 0.0) / GIB


def of_gpus(values: Mapping[str, Any], number: int, gib: float, places_all: bool) -> Iterator[Line]:
    """Report the ways to train a model that fit on GPUs; `places_all` refuses settings that a plan chooses."""
    model = values.get("model", DEFAULT_MODEL)
    shape = ModelShape.of(Path(local_model(model)))
    if shape is None:
        text = f"model {model!r}; expected a config.json with a Llama-like model's sizes"
        yield Line(FAILURE, "GPU memory", text)
        return
    settings = _placed(values, places_all)
    method = f"an estimate, {'with' if settings.activation_checkpointing else 'without'} activation checkpointing"
    size = f"{shape.num_parameters / 1e9:.2f} billion parameters on {number} x {gib:.0f} GiB"
    yield Line(OK, "GPU memory", f"{model}: {size} ({method}; see docs/gpu.md)")
    candidates = variants(shape, settings, number, gib * GIB)
    for candidate in candidates:
        where = "engine and learner share it" if number == 1 else f"{candidate.num_gpus} GPUs, one for the engine"
        verdict = "; ".join(("does not fit", *candidate.errors)) if candidate.errors else "fits"
        text = f"{candidate.name} ({where}): {verdict}; learner {candidate.learner}"
        yield Line(WARNING if candidate.errors else OK, "GPU memory", text)
    if all(candidate.errors for candidate in candidates):
        yield Line(FAILURE, "GPU memory", "training does not fit; expected larger or more GPUs, or a smaller model")


def _placed(values: Mapping[str, Any], places_all: bool) -> Any:
    """Return the settings to plan with: those given, except for `PLACED`."""
    config, default = build_config(values), SRLConfig()
    config.activation_checkpointing = values.get("activation_checkpointing", True)
    for name in PLACED:
        if places_all and (value := getattr(config, name)) != getattr(default, name):
            raise SettingsError(f"{name} = {value!r} with --gpus; expected none: each plan places its own processes")
        setattr(config, name, getattr(default, name))
    if config.optimizer_name not in OPTIMIZER_BYTES:
        expected = ", ".join(OPTIMIZER_BYTES)
        raise SettingsError(f"optimizer_name = {config.optimizer_name!r}; expected one of {expected}")
    return config


# --- the parts of a run ---------------------------------------------------------------------------


def of_settings(config: SRLConfig) -> Iterator[Line]:
    """Validate a config: values, environments, the model's files, packages and resources."""
    try:
        check(config)
    except (SettingsError, PlacementError) as error:
        lines = str(error).splitlines()
        yield from (Line(FAILURE, "settings", line.strip()) for line in (lines[1:] or lines))
        return
    yield Line(OK, "settings", f"valid; engine = {config.engine}, {config.compute_dtype}")


def of_environments(config: SRLConfig) -> Iterator[Line]:
    """Play right answers and empty ones in each environment."""
    configs = config.env_configs()
    for env_id, creator in config.env_creators().items():
        look = partial(_graded, env_id, creator, configs[env_id], config.max_turns)
        (outcome,) = in_turn(config.env_timeout_s * NUM_PROMPTS, look)
        lines = [(FAILURE, outcome.text)] if isinstance(outcome, FailedCheck) else outcome
        yield from (Line(status, "environment", f"{env_id} {text}") for status, text in lines)


def _graded(env_id: str, creator: Any, env_config: dict[str, Any], max_turns: int) -> list[tuple[str, str]]:
    """Return status and text of each finding in one environment."""
    env = creator(env_config)
    try:
        prompts = [Prompt(env_id, str(name)) for name in islice(prompts_of(env, "train", 0), NUM_PROMPTS)]
        if not prompts:
            return [(FAILURE, "has no training prompts: prompt_ids('train', 0) is empty")]
        if attribute(env, "is_unpaid", False):
            return [(OK, "pays no reward: people rate its answers")]
        mark = attribute(env, "pass_reward", None) or RIGHT
        most = max(played(env, prompt, [""] * max_turns) for prompt in prompts)
        status = FAILURE if most >= mark else WARNING if most > 0 else OK
        expected = "; expected 0" if most > 0 else ""
        return [_right(env, prompts, mark), (status, f"pays {most:g} for an empty answer{expected}")]
    finally:
        if hasattr(env, "close"):
            env.close()


def _right(env: Any, prompts: Sequence[Prompt], mark: float) -> tuple[str, str]:
    """Return status and text about the reward of right answers."""
    gold_turns = attribute(env, "gold_turns", None)
    for prompt in prompts:
        turns = gold_turns(prompt.prompt_id) if gold_turns else ()
        if not turns:  # data with a reward function needs no answers
            return WARNING, f"has no gold_turns for prompt {prompt.prompt_id[:40]!r}: its right answer is not graded"
        reward = played(env, prompt, turns)
        if not reward >= mark:
            answer = one_line(" / ".join(turns), 60)
            which = f"the right answer {answer!r} of prompt {prompt.prompt_id[:40]!r}"
            return FAILURE, f"pays {reward:g} for {which}; expected 1"
    return OK, f"grades right answers to {len(prompts)} prompts as right"

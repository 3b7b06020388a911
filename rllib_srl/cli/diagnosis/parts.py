"""Checks of the parts of a run by themselves: settings, model and environments."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from rllib_srl import SRLConfig
from rllib_srl.algorithm.checks import Fault, in_turn
from rllib_srl.algorithm.model_shape import ModelShape
from rllib_srl.algorithm.resources import PlacementError
from rllib_srl.cli.diagnosis.lines import FAILURE, OK, WARNING, Line
from rllib_srl.cli.shared.settings import SettingsError, check
from rllib_srl.common.environments import prompts_of
from rllib_srl.engine import Sampling, make_engine
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.rollout.replies import attribute, reset, step
from rllib_srl.types import RIGHT, Prompt

NUM_PROMPTS = 3  # of each environment that are graded
MOST_PARAMETERS = 1_000_000_000  # of a model that is loaded in this process, in fp32
TEXT, NUM_TOKENS = "Question: What is 1 + 1?\nAnswer:", 8


def of_settings(config: SRLConfig) -> Iterator[Line]:
    """Validate a config: values, environments, the model's files, packages and resources."""
    try:
        check(config)
    except (SettingsError, PlacementError) as error:
        lines = str(error).splitlines()
        yield from (Line(FAILURE, "settings", one.strip()) for one in (lines[1:] or lines))
        return
    yield Line(OK, "settings", f"valid; engine = {config.rule_of('engine')}, {config.compute_dtype}")


def of_model(config: SRLConfig) -> Iterator[Line]:
    """Load tokenizer and weights, and generate one turn."""
    name, start = config.model_config["model"], time.perf_counter()
    try:
        directory = config.model_dir()
        tokenizer = load_tokenizer(directory)
        shape = ModelShape.of(directory)
        if shape is not None and shape.num_parameters > MOST_PARAMETERS:
            size = f"{shape.num_parameters / 1e9:.1f} billion parameters"
            yield Line(WARNING, "model", f"{name} has {size}; its weights are not loaded here")
            return
        ids = tokenizer(TEXT)["input_ids"]
        engine = make_engine(
            "transformers", directory, dtype="float32", seed=0, context_length=len(ids) + NUM_TOKENS, device="cpu"
        )
        (turn,) = engine.generate([ids], Sampling(max_tokens=NUM_TOKENS, temperature=0))
        engine.close()
    except Exception as error:  # any: weights and tokenizers fail in many ways
        yield Line(FAILURE, "model", f"{name} cannot be used: {type(error).__name__}: {error}")
        return
    if not np.isfinite(turn.logp).all():
        yield Line(FAILURE, "model", f"{name} gives log-probs that are not finite: its weights are damaged")
        return
    yield Line(OK, "model", f"{name} loads and writes one turn, {turn.text!r}, in {time.perf_counter() - start:.1f} s")


def of_environments(config: SRLConfig) -> Iterator[Line]:
    """Play right answers and empty ones in each environment."""
    configs = config.world_configs()
    for env_id, creator in config.world_creators().items():
        look = partial(_graded, env_id, creator, configs[env_id], config.max_turns)
        (found,) = in_turn(config.env_timeout_s * NUM_PROMPTS, look)
        yield from [Line(FAILURE, "environment", f"{env_id}: {found.text}")] if isinstance(found, Fault) else found


def _graded(env_id: str, creator: Any, env_config: dict[str, Any], max_turns: int) -> list[Line]:
    env = creator(env_config)
    try:
        prompts = [Prompt(env_id, str(one)) for one in islice(prompts_of(env, "train", 0), NUM_PROMPTS)]
        if not prompts:
            return [Line(FAILURE, "environment", f"{env_id} has no training prompts: prompt_ids('train', 0) is empty")]
        if attribute(env, "is_unpaid", False):
            return [Line(OK, "environment", f"{env_id} pays no reward: people rate its answers")]
        mark = attribute(env, "pass_reward", None) or RIGHT
        return [*_right(env, env_id, prompts, mark), *_empty(env, env_id, prompts, mark, max_turns)]
    finally:
        if hasattr(env, "close"):
            env.close()


def _right(env: Any, env_id: str, prompts: Sequence[Prompt], mark: float) -> Iterator[Line]:
    gold_turns = attribute(env, "gold_turns", None)
    if gold_turns is None:
        yield Line(WARNING, "environment", f"{env_id} has no gold_turns: whether right answers earn 1 is not known")
        return
    for prompt in prompts:
        turns = gold_turns(prompt.prompt_id)
        if not turns:  # data with a reward function needs no answers
            text = f"{env_id} has no gold_turns for prompt {prompt.prompt_id[:40]!r}"
            yield Line(WARNING, "environment", f"{text}: whether right answers earn 1 is not known")
            return
        reward = _played(env, prompt, turns)
        if not reward >= mark:
            said = " ".join(" / ".join(turns).split())[:60]
            text = f"{env_id}: the right answer {said!r} of prompt {prompt.prompt_id[:40]!r} earns {reward:g}"
            yield Line(FAILURE, "environment", f"{text}; expected 1")
            return
    yield Line(OK, "environment", f"{env_id}: right answers to {len(prompts)} prompts are graded as right")


def _empty(env: Any, env_id: str, prompts: Sequence[Prompt], mark: float, max_turns: int) -> Iterator[Line]:
    rewards = [_played(env, prompt, [""] * max_turns) for prompt in prompts]
    most = max(rewards, default=0.0)
    if most >= mark:
        text = f"{env_id}: an empty answer earns {most:g}; expected 0: silence would be learned"
        yield Line(FAILURE, "environment", text)
    elif most > 0:
        yield Line(WARNING, "environment", f"{env_id}: an empty answer earns {most:g}; expected 0")
    else:
        yield Line(OK, "environment", f"{env_id}: an empty answer earns 0")


def _played(env: Any, prompt: Prompt, turns: Sequence[str]) -> float:
    """Return the sum of rewards of an episode with these turns."""
    reset(env, prompt)
    total = 0.0
    for turn in turns:
        reply = step(env, turn)
        total += reply.reward
        if reply.is_terminated or reply.is_truncated:
            break
    return total



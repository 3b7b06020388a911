"""Checks that the environments, the model and the packages named by the settings exist and work, before a run starts.

    config_errors(config)  checks the values                               on every call
    early_errors(config)   checks environments, model and packages         success is cached per process and settings

Each environment is created, its prompts are listed, and it is reset once and closed; each call has the timeout
`env_timeout_s`. Of the model only config.json and tokenizer are read, no weights. transformers takes seconds to import
and is loaded only for `prompt_format = "chat"`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from torch import version

from rllib_srl.algorithm.resources import num_gpus_here
from rllib_srl.algorithm.settings import warn_once
from rllib_srl.common.environments import lacks
from rllib_srl.common.loading import OWN_DATA
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import ModelError, ModelSizes, cache_root, described_model, sizes_of
from rllib_srl.learner.regularisers.regularisers import made, parameter_errors, size_errors
from rllib_srl.rollout.env_calls import EnvCalls
from rllib_srl.rollout.player import first_ids
from rllib_srl.rollout.replies import Reply, reset
from rllib_srl.rollout.transcript import make_transcript
from rllib_srl.types import Prompt

MOST_ROWS = 20_000  # maximum rows of an environment's data whose lengths are checked
MOST_PROMPTS = 32  # maximum prompts checked of any other environment, if its first one is too long
NUM_SHOWN = 3  # prompts in a warning
NUM_CHARACTERS = 40  # of each prompt's question in a warning
LOOK_SHARE = 0.3  # fraction of env_timeout_s that the check of prompt lengths may take
_TEMPLATE_TOKENS = 512  # more than a chat template adds to a prompt
HUB_DEADLINE_S = 30.0  # timeout for a hub model's config and tokenizer, all files together

_passed: set[str] = set()  # keys of environment checks without error, see `_key`


# Settings that the two checks read; a check is skipped if one of its settings is invalid by itself.
MODEL_NAMES = ("model", "max_episode_tokens", "prompt_format")
ENVIRONMENT_NAMES = (
    *("env", "envs", "mixture", "prompt_order", "engine", "stream", "seed", "evaluation_"),
    *MODEL_NAMES[1:],
)


def early_errors(config: Any, known: Sequence[str]) -> list[str]:
    """Return all errors of the packages, the model and the environments that the settings name, [] if there is none.

    Args:
        config: an SRLConfig.
        known: the errors that `config_errors` found.
    """
    is_memory_known = not any(line.startswith(("replay_", "group_size")) for line in known)
    errors = list(_of_packages(config, is_memory_known))
    directory = None
    if not any(line.startswith(MODEL_NAMES) for line in known):
        name = config.model_config["model"]
        try:
            directory = _described(name, str(cache_root()))
            errors += _of_model(config, directory)
        except ModelError as error:
            errors.append(f"model = {name!r}; {error}")
    if any(line.startswith(ENVIRONMENT_NAMES) for line in known) or (key := _key(config, directory)) in _passed:
        return errors
    env_errors = _of_environments(config, directory)
    if not env_errors:
        _passed.add(key)
    return errors + env_errors


# --- packages and model ---------------------------------------------------------------------------


def _of_packages(config: Any, is_memory_known: bool) -> Iterator[str]:
    if config.engine == "vllm" and find_spec("vllm") is None:
        yield (
            "engine = 'vllm'; expected the package vllm (pip install 'rllib_srl[cpu]', on GPUs 'rllib_srl[gpu]'), "
            "or engine = 'transformers'"
        )
    if config.engine == "vllm" and version.cuda is not None and not config.num_gpus_per_env_runner:
        yield (
            f"num_gpus_per_env_runner = {config.num_gpus_per_env_runner!r} with engine = 'vllm' built for GPUs; "
            "expected above 0, engine = 'transformers', or the CPU packages: bash scripts/setup.sh --set cpu"
        )
    if not is_memory_known or not (settings := config.replay_settings()).is_on:
        return
    if settings.searches_on_gpu:
        if not any(name.startswith("faiss-gpu") for name in packages_distributions().get("faiss", ())):
            yield (
                "replay_diversity_device = 'gpu'; expected the package faiss-gpu in place of faiss-cpu (pip uninstall "
                "faiss-cpu; pip install 'rllib_srl[faiss-gpu]'), or 'cpu'"
            )
        if config.check_resources and num_gpus_here() < 1:
            yield "replay_diversity_device = 'gpu', but this machine has no GPU; expected 'cpu'"


@lru_cache(maxsize=64)  # exceptions are not cached
def _described(name: str, root: str) -> Path | None:
    """Return the directory of a model's config and tokenizer, None if the model is not unpacked yet.

    Raises:
        ModelError: there is no such model, or the hub does not answer in time.
    """
    (answer,) = in_turn(HUB_DEADLINE_S, partial(_caught, ModelError, partial(described_model, name, root)))
    if isinstance(answer, FailedCheck):
        reason = f"did not answer within {HUB_DEADLINE_S:g} s" if answer.is_late else answer.text
        raise ModelError(f"model {name!r} could not be looked up: the hub {reason}")
    if isinstance(answer, ModelError):
        raise answer
    place: Path | None = answer
    return place


def _of_model(config: Any, directory: Path | None) -> Iterator[str]:
    if directory is None:
        return
    name = config.model_config["model"]
    yield from (f"{error} {name!r}" for error in _of_sizes(config, sizes_of(directory)))
    if config.prompt_format == "chat" and (error := _chat_error(directory, config.max_turns == 1)):
        yield f"prompt_format = 'chat' with the model {name!r}; {error}"


def _of_sizes(config: Any, sizes: ModelSizes) -> Iterator[str]:
    """Yield an error for each setting that exceeds the model's sizes; the caller appends the model's name."""
    tokens, longest = config.max_episode_tokens, sizes.context
    if longest is not None and isinstance(tokens, int) and tokens > longest:
        yield f"max_episode_tokens = {tokens}; expected at most {longest}, the context of the model"
    if sizes.num_tokens is None:
        return
    if not any(parameter_errors(config.regularisers)):
        yield from size_errors(made(config.regularisers), sizes.num_tokens)


@lru_cache(maxsize=64)
def _chat_error(directory: Path, has_one_turn: bool) -> str:
    """Return why a model cannot be used with a chat template, "" if it can."""
    try:
        make_transcript("chat", load_tokenizer(directory), 1 if has_one_turn else None)
    except Exception as error:  # transformers raises many kinds of errors for unreadable tokenizers
        return " ".join(str(error).split())
    return ""


# --- environments ---------------------------------------------------------------------------------


def _key(config: Any, directory: Path | None) -> str:
    """Return all settings that `_of_environments` reads, as text."""
    return repr(
        (
            *(config.env_configs(), config.env_creators(), config.mixture, config.stream, directory),
            config.prompt_order,
            *(config.max_episode_tokens, config.prompt_format, config.env_timeout_s),
            *(config.evaluation_interval, config.evaluation_duration),
        )
    )


def _of_environments(config: Any, directory: Path | None) -> list[str]:
    """Create each environment, list its prompts and reset it to the first one; return error messages."""
    creators, configs = config.env_creators(), config.env_configs()
    makers = [partial(_made, creators[env_id], configs[env_id]) for env_id in configs]
    made = dict(zip(configs, in_turn(config.env_timeout_s, *makers), strict=True))
    envs = {env_id: env for env_id, env in made.items() if not isinstance(env, FailedCheck)}
    errors = [_with_setting(config, name, env.text) for name, env in made.items() if isinstance(env, FailedCheck)]
    looks = [partial(_error_of_prompts, config, env_id, env, directory) for env_id, env in envs.items()]
    for env_id, outcome in zip(envs, in_turn(config.env_timeout_s, *looks), strict=True):
        text = outcome.text if isinstance(outcome, FailedCheck) else outcome
        errors += [_with_setting(config, env_id, text)] if text else []
    in_turn(config.env_timeout_s, *(env.close for env in envs.values()))
    return errors


def _with_setting(config: Any, env_id: str, text: str) -> str:
    """Return an environment's error after the setting that names the environment: `data` for a user's own questions."""
    if config.stream:
        return f"stream: environment {env_id!r}; {text}"
    if config.env == OWN_DATA and (place := re.match("(path|hub_id)(?= = )", text)):
        return f"data{text[place.end() :]}"
    return f"envs: environment {env_id!r}; {text}" if config.envs else f"env = {env_id!r}; {text}"


def _made(creator: Callable[[dict[str, Any]], Any], env_config: dict[str, Any]) -> Any:
    """Return an environment, or a `FailedCheck` with the reason why it cannot be used."""
    try:
        env = creator(env_config)
    except Exception as error:  # user code can raise anything
        return FailedCheck(_said(error, "it cannot be created"))
    if errors := lacks(env):
        return FailedCheck("it cannot be played: " + "; ".join(errors))
    return env


def _error_of_prompts(config: Any, env_id: str, env: Any, directory: Path | None) -> str:
    """Return the error message for an environment's prompts, "" if they are valid."""
    try:
        creators = {env_id: lambda _: env}
        source = PromptSource(creators, {}, {env_id: 1.0}, config.seed or 0, config.task_stream(), config.prompt_order)
        prompt = source.first(env_id)
        if config.evaluation_interval and not source.heldout(1):
            return "it has no held-out prompts; expected at least one, or evaluation_interval = None"
    except Exception as error:  # user code can raise anything
        return _said(error, "its prompts cannot be listed")
    step_s = getattr(env.unwrapped, "step_timeout_s", 0.0)
    if isinstance(step_s, int | float) and step_s >= config.env_timeout_s:
        return (
            f"a reward may take reward_timeout_s = {step_s:g}; expected less than env_timeout_s = "
            f"{config.env_timeout_s:g}, the timeout of a whole step"
        )
    try:
        reply = reset(env, prompt)
    except Exception as error:  # user code can raise anything
        return f"its prompt {prompt.prompt_id!r}: {_said(error, 'reset failed')}"
    count = _counter(config.prompt_format, directory, config.max_turns == 1)
    if count is None:
        return ""
    try:
        lengths = _lengths(config, source, env, prompt, reply, count)
    except Exception as error:  # user code can raise anything
        return _said(error, "its prompts cannot be counted in tokens")
    return _error_of_lengths(config, lengths, env_id, env)


def _error_of_lengths(config: Any, lengths: Sequence[tuple[str, int]], env_id: str, env: Any) -> str:
    """Return the error message if all prompts are too long, and warn if some are: a run leaves them out."""
    most = config.max_episode_tokens
    long = [(prompt_id, num) for prompt_id, num in lengths if num >= most]
    if not long:
        return ""
    prompt_id, num = max(long, key=lambda pair: pair[1])
    if len(long) == len(lengths):
        return (
            f"its prompt {prompt_id!r} has {num} tokens; expected fewer than max_episode_tokens = {most}, which "
            "includes the answer"
        )
    question = getattr(env.unwrapped, "data_question", None)  # prompt ids of rows are hashes
    of_row = {row: f" ({question(row)[0][:NUM_CHARACTERS]!r})" if question else "" for row, _ in long[:NUM_SHOWN]}
    shown = ", ".join(repr(row) + text for row, text in of_row.items()) + (", ..." if len(long) > NUM_SHOWN else "")
    warn_once(
        f"environment {env_id!r}: {len(long)} of the {len(lengths)} prompts checked have max_episode_tokens = {most} "
        f"tokens or more, and will be left out: {shown}; the longest has {num}. Shorten them, or set "
        f"max_episode_tokens to {num + config.max_turn_tokens} if the model's context allows it"
    )
    return ""


def _lengths(
    config: Any, source: PromptSource, env: Any, first: Prompt, reply: Reply, count: Callable[[Reply], int]
) -> list[tuple[str, int]]:
    """Return prompt ids with their numbers of tokens: of all rows of data, else of a few prompts if one is too long.

    Rows of data are the prompts of an environment with `size_of`, which bounds the bytes of a prompt. A token has
    at least one byte, so a text with fewer bytes than the limit in tokens is not tokenised. The check has a time limit.
    """
    most = config.max_episode_tokens
    size_of = getattr(env.unwrapped, "size_of", None)
    lengths, until = [(first.prompt_id, count(reply))], time.monotonic() + LOOK_SHARE * config.env_timeout_s
    if not hasattr(env.unwrapped, "prompt_ids") or (size_of is None and lengths[0][1] < most):
        return lengths
    ids = (str(row_id) for split in ("train", "heldout") for row_id in source.ids(first.env_id, split))
    for prompt_id in islice(ids, MOST_PROMPTS if size_of is None else MOST_ROWS):
        if prompt_id == first.prompt_id:
            continue
        num = _TEMPLATE_TOKENS + size_of(prompt_id) if size_of else most
        lengths.append((prompt_id, num if num < most else count(reset(env, Prompt(first.env_id, prompt_id)))))
        if time.monotonic() > until:
            break
    return lengths


@lru_cache(maxsize=8)
def _counter(
    prompt_format: str, directory: Path | None, has_one_turn: bool
) -> Callable[[Reply], int] | None:
    """Return a function that counts the tokens of a prompt; None without a tokenizer."""
    if directory is None:
        return None
    if prompt_format == "chat" and _chat_error(directory, has_one_turn):
        return None
    if prompt_format == "chat":
        transcript = make_transcript("chat", load_tokenizer(directory), 1 if has_one_turn else None)
        return lambda reply: len(first_ids(transcript, reply))
    if not (directory / "tokenizer.json").is_file():
        return None
    tokenizer = _tokenizer(directory)
    return lambda reply: len(
        tokenizer.encode(f"{reply.system}\n\n{reply.observation}" if reply.system else reply.observation).ids
    )


@lru_cache(maxsize=8)
def _tokenizer(directory: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def _said(error: Exception, what: str) -> str:
    """Return an error on one line: only its message if that is written for users, else `what`, type and message."""
    message = " ".join(str(error).split())
    is_for_users = isinstance(error, ValueError | ImportError) and message
    return message if is_for_users else f"{what}: {type(error).__name__}: {message}"


# --- calls with a timeout -------------------------------------------------------------------------


@dataclass(frozen=True)
class FailedCheck:
    """An error in place of a return value. Invariant: `text` is one line."""

    text: str
    is_late: bool = False


def _caught(kind: type[Exception], function: Callable[[], Any]) -> Any:
    try:
        return function()
    except kind as error:
        return error


def in_turn(timeout_s: float, *functions: Callable[[], Any]) -> list[Any]:
    """Call functions one after the other; return their values, a `FailedCheck` for each that fails or times out."""
    if not functions:
        return []
    calls = EnvCalls(num_workers=1, timeout_s=timeout_s)
    answers: dict[Any, Any] = {}
    try:
        for number, function in enumerate(functions):
            calls.submit(number, function)
        while calls.num_open:
            for call in calls.poll(timeout_s):
                answers[call.call_id] = FailedCheck(call.error, call.timed_out) if call.error else call.value
    finally:
        calls.close()
    return [answers[number] for number in range(len(functions))]

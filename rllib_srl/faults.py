"""What can be wrong with an SRLConfig, as plain functions: settings in, lines of faults out.

Each line reads "name = value; expected ...". Nothing here starts a process or loads a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rllib_srl.advantages import ADVANTAGES
from rllib_srl.learner import OPTIMIZERS
from rllib_srl.losses import KL_ESTIMATORS
from rllib_srl.models import check_model_name

# RLlib's settings that would parse and then do nothing here: name -> (default, what to use instead).
UNUSED = {
    "train_batch_size": (32, "num_prompts_per_batch and group_size"),
    "_train_batch_size_per_learner": (None, "num_prompts_per_batch and group_size"),
    "minibatch_size": (None, "num_epochs: each epoch is one step over the whole batch"),
    "shuffle_batch_per_epoch": (False, "nothing: gradients are summed over the whole batch"),
    "gamma": (1.0, "nothing: rewards of an episode are summed"),
    "rollout_fragment_length": (200, "nothing: episodes are played to their end"),
    "batch_mode": ("truncate_episodes", "nothing: episodes are played to their end"),
    "num_envs_per_env_runner": (1, "num_env_threads and engine_max_num_seqs"),
    "evaluation_num_env_runners": (0, "nothing: evaluation plays on the training engines"),
    "evaluation_parallel_to_training": (False, "nothing: evaluation plays on the training engines"),
    "evaluation_duration_unit": ("episodes", '"episodes" (one greedy episode a held-out prompt)'),
    "evaluation_config": (None, "evaluation_pass_k and the settings of training"),
    "custom_evaluation_function": (None, "a subclass of SRL with its own evaluate()"),
    "num_aggregator_actors_per_learner": (0, "nothing: learners fetch groups themselves"),
    "torch_compile_learner": (False, "nothing in this version"),
    "torch_skip_nan_gradients": (False, "nothing: non-finite gradients are always skipped and counted"),
    "compress_observations": (False, "nothing: observations are token ids"),
    "clip_rewards": (None, "the environment's own rewards in [0, 1]"),
    "_env_to_module_connector": (None, "prompt_format"),
    "_module_to_env_connector": (None, "prompt_format"),
    "_learner_connector": (None, "a subclass of GRPOTorchLearner"),
}
AT_LEAST = {
    "num_prompts_per_batch": 1,
    "group_size": 2,
    "max_turns": 1,
    "max_turn_tokens": 1,
    "max_episode_tokens": 8,
    "micro_batch_tokens": 1,
    "num_env_threads": 1,
    "engine_max_num_seqs": 1,
    "engine_tensor_parallel_size": 1,
    "checkpoint_every": 0,
    "checkpoints_kept": 1,
    "num_transcripts": 0,
    "evaluation_pass_k": 0,
    "num_env_runners": 0,
    "num_learners": 0,
    "num_epochs": 1,
}
ABOVE_ZERO = (
    "temperature",
    "clip_high",
    "env_timeout_s",
    "sample_timeout_s",
    "update_timeout_s",
    "sync_timeout_s",
    "start_timeout_s",
    "engine_kv_cache_gib",
    "engine_memory_utilization",
)
ONE_OF = {
    "engine": ("vllm", "transformers"),
    "weight_transfer": ("object_store", "nccl", "ipc"),
    "prompt_format": ("text", "chat"),
    "kl_estimator": KL_ESTIMATORS,
    "compute_dtype": ("auto", "float32", "bfloat16"),
    "optimizer_name": OPTIMIZERS,
}


def faults_of(config: Any) -> list[str]:
    """Return every fault of the settings, [] if there is none."""
    checks = (_unknown, _unused, _numbers, _choices, _pairs, _placement, _model, _worlds, _replay)
    return [line for check in checks for line in check(config)]


def _unknown(config: Any) -> Iterator[str]:
    known = vars(type(config)())
    for name in sorted(set(vars(config)) - set(known) - {"class"}):  # RLlib's from_state leaves "class" behind
        if not name.startswith("_"):
            yield f"{name} = {getattr(config, name)!r}; expected no setting of that name"


def _unused(config: Any) -> Iterator[str]:
    for name, (default, instead) in UNUSED.items():
        if getattr(config, name) != default:
            value = getattr(config, name)
            yield f"{name.lstrip('_')} = {value!r}; expected {default!r}, SRL does not use it: use {instead}"
    if config.is_multi_agent:
        yield "policies of several agents; expected one: SRL trains a single policy"


def _numbers(config: Any) -> Iterator[str]:
    for name, least in AT_LEAST.items():
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            yield f"{name} = {value!r}; expected an integer of at least {least}"
    for name in ABOVE_ZERO:
        if not _is_number(getattr(config, name)) or getattr(config, name) <= 0:
            yield f"{name} = {getattr(config, name)!r}; expected a number above 0"
    if not _is_number(config.clip_low) or not 0 < config.clip_low <= 1:
        yield f"clip_low = {config.clip_low!r}; expected a number in (0, 1]"
    if config.is_truncation is not None and (not _is_number(config.is_truncation) or config.is_truncation <= 0):
        yield f"is_truncation = {config.is_truncation!r}; expected a number above 0, or None"
    for name in ("kl_coeff", "weight_decay"):
        if not _is_number(getattr(config, name)) or getattr(config, name) < 0:
            yield f"{name} = {getattr(config, name)!r}; expected a number of at least 0"
    if config.seed is not None and (not isinstance(config.seed, int) or config.seed < 0):
        yield f"seed = {config.seed!r}; expected an integer of at least 0, or None"


def _choices(config: Any) -> Iterator[str]:
    for name, choices in {**ONE_OF, "advantage": tuple(ADVANTAGES)}.items():
        if getattr(config, name) not in choices:
            yield f"{name} = {getattr(config, name)!r}; expected one of {', '.join(map(repr, choices))}"


def _pairs(config: Any) -> Iterator[str]:
    turn, episode = config.max_turn_tokens, config.max_episode_tokens
    if isinstance(turn, int) and isinstance(episode, int) and turn >= episode:
        yield f"max_turn_tokens = {turn}; expected less than max_episode_tokens = {episode}, which holds the prompt too"
    if config.optimizer_name == "sgd" and config.weight_decay:
        yield f"weight_decay = {config.weight_decay}; expected 0 with optimizer_name = 'sgd'"
    if not isinstance(config.adam_betas, tuple | list) or len(config.adam_betas) != 2:
        yield f"adam_betas = {config.adam_betas!r}; expected two numbers"


def _placement(config: Any) -> Iterator[str]:
    num_gpus = config.num_gpus_per_env_runner
    has_engine_gpu = num_gpus > 0
    if config.num_env_runners == 0 and config.num_learners != 0:
        yield f"num_env_runners = 0 (all in one process); expected num_learners = 0, not {config.num_learners}"
    if config.weight_transfer != "object_store" and not (has_engine_gpu and config.num_gpus_per_learner > 0):
        yield f"weight_transfer = {config.weight_transfer!r}; expected 'object_store' without GPUs on both sides"
    if config.engine == "transformers" and config.weight_transfer != "object_store":
        yield f"weight_transfer = {config.weight_transfer!r}; expected 'object_store' with engine = 'transformers'"
    if num_gpus >= 1 and config.engine_tensor_parallel_size != num_gpus:
        yield (
            f"engine_tensor_parallel_size = {config.engine_tensor_parallel_size}; expected "
            f"num_gpus_per_env_runner = {num_gpus:g}"
        )
    if config.colocate and has_engine_gpu and num_gpus + config.num_gpus_per_learner > 1:
        yield (
            f"colocate = True with {num_gpus:g} + {config.num_gpus_per_learner:g} GPUs; "
            "expected fractions that sum to at most 1"
        )


def _model(config: Any) -> Iterator[str]:
    try:
        name = config.model_config["model"]
        check_model_name(name)
    except ValueError as error:
        yield f"model_config['model'] = {name!r}; {error}"
    extra = sorted(set(config.model_config) - {"model"})
    if extra:
        yield f"model_config has {extra}; expected only 'model'"


def _worlds(config: Any) -> Iterator[str]:
    if config.env is None and not config.worlds:
        yield "env = None; expected an environment: .environment('compare') or .environment(worlds={...})"
        return
    if config.env is not None and config.worlds:
        yield f"env = {config.env!r} and worlds = {sorted(config.worlds)}; expected one of the two"
        return
    try:
        config.world_creators()
    except ValueError as error:
        yield f"env: {error}" if not config.worlds else f"worlds: {error}"
        return
    weights = config.mixture or {}
    if config.mixture is not None and (set(weights) - set(config.world_configs()) or not weights):
        yield f"mixture = {weights!r}; expected weights of some of {sorted(config.world_configs())}"
    elif any(not _is_number(weight) or weight <= 0 for weight in weights.values()):
        yield f"mixture = {weights!r}; expected weights above 0"


def _replay(config: Any) -> Iterator[str]:
    for name in ("replay_revisit_fraction", "replay_reuse_fraction"):
        if getattr(config, name) != 0:
            yield f"{name} = {getattr(config, name)!r}; expected 0: this version has no memory yet"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

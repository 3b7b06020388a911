"""All settings of a run: one model for each part, and what is generated from them.

    SETTINGS["kl_coeff"]    the `Setting` of this name: default, meaning, what it needs

Flags, YAML files, Tune's names, docs/settings.md, the methods of `SRLConfig` and its errors come from `PARTS`. This
module loads neither Ray nor torch.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, Strict

from rllib_srl.common.setting_model import PRESET, Pair, Setting, Settings, by, setting, where
from rllib_srl.losses.settings import LossSettings
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.storage.paths import local_path

logger = logging.getLogger(__name__)


def _is_share(number: float | None) -> bool:
    return number is None or 0 <= number <= 1 or number == int(number) > 0


def _error_of_directory(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str | os.PathLike):
        return "expected a path, or None"
    try:
        local_path(os.fspath(value))
    except ValueError as error:
        return str(error)
    return ""


Gpus = Annotated[float | None, where(_is_share)]
_SHARE = "a share below 1, a whole number, or None"


class EnvironmentSettings(Settings):
    """The environments that are played."""

    env: Any = setting(
        None, 'environment: an installed name (docs/environments.md), or "package.module:Class"', is_rllib=True
    )
    env_config: dict[str, Any] | None = setting(
        {}, "settings of the environment, such as num_shots=4", "a mapping", is_rllib=True
    )
    envs: dict[str, dict[str, Any] | None] | None = setting(
        None, "several environments: name -> env_config; None: `env` alone",
        "a mapping from the names of environments to their env_config, or None"
    )
    mixture: dict[str, Annotated[float, Field(gt=0)]] | None = setting(
        None, "name -> sampling weight of each environment among fresh prompts; None: equal weights",
        "a mapping from the names of environments to weights above 0, or None"
    )
    prompt_order: Literal["mixture", "epochs"] = setting(
        "mixture", '"mixture" (each environment in its own passes, drawn by weight) or "epochs" (each prompt of all '
        "environments once an epoch)"
    )
    stream: Any = setting(
        None, "domains that change over training, instead of env and envs (docs/continual.md); None: fixed"
    )


class ModelSettings(Settings):
    """The model that is trained. `model` stands for model_config["model"]."""

    model: Any = setting(
        "smollm2-135m", 'policy: "smollm2-135m", "tiny", a local directory, or a Hugging Face hub id', is_rllib=True
    )


class EnvRunnerSettings(Settings):
    """How episodes are played."""

    num_env_runners: int = setting(
        1, "processes that generate and play episodes; 0: the main process does, for debugging", is_rllib=True, ge=0
    )
    num_cpus_per_env_runner: float = setting(1, "CPUs that Ray reserves per env runner", is_rllib=True, ge=0)
    num_gpus_per_env_runner: Gpus = setting(
        None, "GPUs that Ray reserves per env runner; below 1: a share of one", _SHARE, is_rllib=True
    )
    custom_resources_per_env_runner: dict[str, float] = setting(
        {}, "further Ray resources per env runner", "amounts by name", is_rllib=True
    )
    sample_timeout_s: float = setting(1200.0, "timeout of one round of sampling, seconds", is_rllib=True, gt=0)
    engine: Literal["auto", "vllm", "transformers"] = setting(
        "auto", '"vllm", "transformers" (exact but slow), or "auto": vLLM if it is installed'
    )
    engine_tensor_parallel_size: int = setting(
        1, "GPUs over which one engine splits the model", ge=1
    )
    engine_memory_utilization: float | None = setting(
        None, "vLLM on a GPU: share of the GPU's memory to reserve; None: 0.9, or 0.45 beside a learner", gt=0, le=1
    )
    engine_kv_cache_gib: float = setting(
        1.0, "vLLM on a CPU: size of the KV cache, GiB", gt=0
    )
    engine_max_num_seqs: int = setting(
        256, "maximum number of turns that one engine generates at the same time", ge=1
    )
    engine_num_threads: int | None = setting(
        None, "CPU threads per engine; None: OMP_NUM_THREADS if set, else its share of all cores", ge=1
    )
    colocate: bool | None = setting(
        None,
        "engine and learner take turns on one GPU: the engine sleeps (frees its memory) during updates; None: True "
        "only where the default shares put both on one GPU and its memory does not hold both, or is unknown"
    )
    prompt_format: Literal["text", "chat"] = setting(
        "text", '"text" (observations as plain text) or "chat" (the model\'s chat template)'
    )
    temperature: float = setting(
        1.0, "sampling temperature in training, > 0; also applied to the learner's log-probs", ge=0.01, le=100
    )
    max_turns: int = setting(8, "maximum number of turns in an episode", ge=1)
    max_turn_tokens: int = setting(64, "maximum number of tokens the policy generates in a turn", ge=1)
    max_episode_tokens: int | None = setting(
        None, "maximum tokens in an episode with its prompt, and the engine's context; None: 1024, or the model's less",
        ge=8
    )
    env_timeout_s: float = setting(10.0, "timeout of one environment reset or step, seconds", gt=0)
    num_env_threads: int = setting(8, "threads per runner for calls to environments", ge=1)
    max_concurrent_episodes: int | None = setting(
        None, "maximum number of episodes that a runner plays at the same time, for environments that start programs; "
        "None: all", ge=1
    )
    max_lag: int = setting(
        0, "policy updates between the start of a group and its training, at most; 0: rollout and training take turns; "
        "above 0: runners play on during updates, docs/rollouts.md", ge=0
    )
    in_flight: int | None = setting(
        None, "groups that are played or wait to be trained on, at most; None: (max_lag + 1) * "
        "num_prompts_per_batch", needs="max_lag", ge=2
    )
    slice_s: float = setting(
        0.5, "seconds that a runner plays between two chances to load weights", needs="max_lag", gt=0
    )
    late: Literal["memory", "drop"] = setting(
        "memory", 'groups with more lag are stored and not trained on ("memory"), or dropped ("drop")', needs="max_lag"
    )
    num_transcripts: int = setting(
        2, "groups per runner and iteration that are written to transcripts.jsonl; 0: none", ge=0
    )


class TrainingSettings(Settings):
    """Batches, optimiser and files; the loss is `LossSettings`."""

    callbacks: Any = setting(
        None, 'callbacks: "contrib.trackers:wandb", "module:Class", a list; not kept by --resume', is_rllib=True
    )
    seed: int | None = setting(None, "random seed of the run; none: a different one for each", is_rllib=True, ge=0)
    lr: Annotated[float, Field(ge=0)] | list[Any] | tuple[Any, ...] = setting(
        1e-6, "learning rate, or a schedule [[step, rate], ...] whose steps are generated turns",
        "a number of at least 0, or a schedule [[turns, rate], ...]", is_rllib=True
    )
    num_epochs: int = setting(
        1, "optimiser steps per batch; with 1, clip rules act only on reused groups or with ratio_anchor bypass",
        is_rllib=True, ge=1
    )
    grad_clip: float | None = setting(1.0, "maximum norm of the gradient", is_rllib=True, gt=0)
    num_prompts_per_batch: int = setting(16, "number of prompts played in each iteration (P)", ge=1)
    group_size: int = setting(
        8, "episodes per prompt (G), at least 2, or 1 with advantage posterior or none",
        "an integer of at least 2, or of 1 with advantage = 'posterior' or 'none'", ge=1
    )
    regularisers: dict[str, Any] | None = setting(
        None, "further terms of the loss by name: ewc l2 lwf distill, with parameters, docs/losses.md; None: none",
        "a mapping from some of distill, ewc, l2, lwf, or import paths, to their parameters, or None"
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", '"float32", "bfloat16", or "auto": bfloat16 on GPUs and on processors with AMX, else float32'
    )
    micro_batch_tokens: int = setting(
        4096, "maximum tokens per forward and backward pass; a longer episode gets its own pass", ge=1
    )
    prefix_sharing: bool = setting(
        True, "compute shared prompts once; disabled at start-up for models where this is not exact"
    )
    activation_checkpointing: bool | Literal["offload"] = setting(
        False,
        'True: store each layer\'s input only and recompute the rest (less memory, slower); "offload": the same, with '
        "the inputs in host memory, on GPUs"
    )
    offload_frozen: bool = setting(
        False,
        "keep the weights of reference policy and teachers in host memory, and on the GPU only while they score; no "
        "effect on CPUs"
    )
    fsdp: bool = setting(
        False, "shard weights, gradients and optimiser state over the learners (FSDP2), docs/gpu.md"
    )
    fsdp_gather_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        'format in which a learner gathers the weights of layers from the others: "bfloat16" halves that traffic and '
        'its memory, with compute_dtype = "bfloat16"; what is stored and summed stays float32', needs="fsdp"
    )
    lora_rank: int = setting(
        0, "rank of LoRA adapters, the only weights trained; 0: no adapters, train all weights", ge=0
    )
    lora_alpha: float | None = setting(None, "adapters are scaled by alpha / rank; None: by 2", needs="lora_rank", gt=0)
    lora_targets: Annotated[tuple[str, ...], Strict(False)] = setting(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "layers that get adapters, by the last part of their names", "names of layers, such as ('q_proj', 'v_proj')",
        needs="lora_rank", min_length=1
    )
    lora_send: Literal["adapter", "merged"] = setting(
        "adapter", 'what engines receive: the "adapter", which they apply themselves, or "merged" weights, docs/gpu.md',
        needs="lora_rank"
    )
    optimizer_name: Literal["adamw", "sgd", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"] = setting(
        "adamw", '"adamw", "sgd" or "adamw_8bit"; on GPUs also "paged_adamw" or "paged_adamw_8bit"'
    )
    adam_betas: Annotated[Pair, where(lambda *betas: all(0 <= beta < 1 for beta in betas))] = setting(
        (0.9, 0.999), "AdamW's beta1 and beta2", "two numbers in [0, 1)"
    )
    weight_decay: float = setting(0.0, "AdamW's decoupled weight decay; 0: none", ge=0)
    update_timeout_s: float = setting(1800.0, "timeout of one update of the learners, seconds", gt=0)
    sync_timeout_s: float = setting(300.0, "timeout of one weight transfer, seconds", gt=0)
    start_timeout_s: float = setting(
        600.0, "timeout of the start or restart of engines, and of learners, seconds", gt=0
    )
    checkpoint_every: int = setting(10, "iterations between checkpoints; 0: no checkpoints", ge=0)
    checkpoints_kept: int = setting(2, "number of newest checkpoints kept in log_directory", ge=1)
    seal_key_file: str | Path | None = setting(
        None, "file with the key that signs checkpoints; None: $RLLIB_SRL_SEAL_KEY_FILE or one per user",
        "the path of a file, or None"
    )
    log_directory: Annotated[Any, by(_error_of_directory)] = setting(
        None, "directory of checkpoints, transcripts and event files; None: a new one in ~/ray_results"
    )
    check_resources: bool = setting(
        True, "fail at start-up if the cluster is too small; False: for clusters that grow on demand"
    )


class LearnerSettings(Settings):
    """RLlib's settings of the learner processes."""

    num_learners: int = setting(0, "learner processes; 0: the main process trains", is_rllib=True, ge=0)
    num_cpus_per_learner: float | Literal["auto"] = setting(
        "auto", "CPUs that Ray reserves per learner; auto: 1 without a GPU, else 0", is_rllib=True
    )
    num_gpus_per_learner: Gpus = setting(
        None, "GPUs that Ray reserves per learner; below 1: a share of one", _SHARE, is_rllib=True
    )
    num_cpus_for_main_process: float = setting(1, "CPUs that Ray reserves for the main process", is_rllib=True, ge=0)


class EvaluationSettings(Settings):
    """When held-out prompts are answered."""

    evaluation_interval: int | None = setting(
        None, "iterations between evaluations; none: no evaluation", is_rllib=True, ge=1
    )
    evaluation_duration: int = setting(128, "number of held-out prompts per evaluation", is_rllib=True, ge=1)
    evaluation_pass_k: int = setting(0, "number of sampled answers per held-out prompt for pass@k; 0: no pass@k", ge=0)


class Part(NamedTuple):
    """One part of the settings."""

    title: str  # in docs/settings.md and --help
    method: str  # method of SRLConfig that takes its settings; "": only RLlib's methods do
    model: type[Settings]

    @property
    def rows(self) -> dict[str, Setting]:
        """The part's settings by name."""
        return self.model.table()


PARTS = (
    Part("environment", "environment", EnvironmentSettings),
    Part("model", "", ModelSettings),
    Part("env runners and engine", "env_runners", EnvRunnerSettings),
    Part("training", "training", TrainingSettings),
    Part("loss", "training", LossSettings),
    Part("learners", "", LearnerSettings),
    Part("evaluation", "evaluation", EvaluationSettings),
    Part("memory", "replay", ReplaySettings),
)
SETTINGS = {name: row for part in PARTS for name, row in part.rows.items()}
NO_ATTRIBUTES = ("model", "callbacks")  # settings that RLlib's methods take, so not attributes of SRLConfig
LONGEST_EPISODE = 1024  # tokens: default of `max_episode_tokens`, unless the model's context is shorter

_SECRET_NAME = re.compile(r"(key|token|secret|password|passwd|authorization|cookie|credential)s?$", re.IGNORECASE)
_USER_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_warned: set[str] = set()


def settings_of(method: str) -> dict[str, Setting]:
    """Return the settings of SRL that a method of `SRLConfig` takes, RLlib's left out."""
    rows = (row for part in PARTS if part.method == method for row in part.rows.items())
    return {name: row for name, row in rows if not row.is_rllib}


def warn_once(line: str) -> None:
    """Log a warning once per process: a run validates its settings several times."""
    if line not in _warned:
        _warned.add(line)
        logger.warning(line)


def errors_of(values: Mapping[str, Any], parts: Iterable[Part] = PARTS) -> tuple[dict[str, str], list[str]]:
    """Return name -> error of each invalid value, and the errors of combinations of the others.

    Values that are left to a preset are not checked.
    """
    wrong: dict[str, str] = {}
    together: list[str] = []
    for part in parts:
        prefix, rows = part.model.prefix, part.rows
        subset = {name: value for name, value in values.items() if name in rows}
        subset = {n: v for n, v in subset.items() if not (rows[n].is_preset and isinstance(v, str) and v == PRESET)}
        errors, others = part.model.split_errors({name.removeprefix(prefix): value for name, value in subset.items()})
        wrong |= {prefix + name: prefix + line for name, line in errors.items()}
        together += [prefix + line for line in others]
    return wrong, together


def without_secrets(value: Any, name: str = "") -> Any:
    """Return the value of a setting without passwords and keys, by their names or form, nor users in addresses."""
    from rllib_srl.replay.admission import redact

    if isinstance(value, Mapping):
        return {key: without_secrets(of, str(key)) for key, of in value.items()}
    if isinstance(value, list | tuple):
        parts = [without_secrets(of, name) for of in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if not isinstance(value, str):
        return value
    return "[secret]" if _SECRET_NAME.search(name) else redact(_USER_IN_ADDRESS.sub("[password]", value))

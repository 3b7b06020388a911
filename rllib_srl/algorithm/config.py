"""SRLConfig: all settings of the algorithm as flat attributes, so that Tune can search over each one.

The grouped methods are RLlib's (`environment`, `rl_module`, `env_runners`, `learners`, `training`, `evaluation`,
`fault_tolerance`, ...) and take the settings of SRL beside RLlib's own; SRL adds `replay` and `planner`.
`validate` reports all errors at once. `docs/settings.md` is generated from the tables below.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.tune.registry import ENV_CREATOR, _global_registry
from ray.tune.registry import register_trainable as _register_trainable

from rllib_srl.algorithm.checks import early_faults
from rllib_srl.algorithm.resources import best_dtype, engine_threads
from rllib_srl.algorithm.validation import faults_of
from rllib_srl.common.environments import Creator, resolve
from rllib_srl.common.foreign_names import in_place_of
from rllib_srl.curriculum import TABLE as PLANNER_TABLE
from rllib_srl.curriculum import PlannerSettings
from rllib_srl.curriculum.streams import Stream, make_stream
from rllib_srl.learner.model_setup import TARGETS
from rllib_srl.losses.presets import PRESET
from rllib_srl.losses.settings import TABLE as LOSS_TABLE
from rllib_srl.losses.settings import LossSettings
from rllib_srl.replay.settings import TABLE as REPLAY_TABLE
from rllib_srl.replay.settings import ReplaySettings

logger = logging.getLogger(__name__)

# name: (default, unit and meaning). `__init__`, the grouped methods and docs/settings.md read these tables.
ENVIRONMENT = {
    "worlds": (None, "several environments: name -> env_config; None: `env` alone"),
    "mixture": (None, "name -> sampling weight of each environment among fresh prompts; None: equal weights"),
    "stream": (None, "domains that change over training, instead of env and worlds (docs/continual.md); None: fixed"),
}
ENV_RUNNERS = {
    "engine": ("auto", '"vllm", "transformers" (exact but slow), or "auto": vLLM if it is installed'),
    "engine_tensor_parallel_size": (1, "GPUs over which one engine splits the model"),
    "engine_memory_utilization": (0.9, "vLLM on a GPU: share of GPU memory to reserve, in (0, 1]"),
    "engine_kv_cache_gib": (1.0, "vLLM on a CPU: size of the KV cache, GiB"),
    "engine_max_num_seqs": (256, "maximum number of turns that one engine generates at the same time"),
    "engine_num_threads": (None, "CPU threads per engine; None: OMP_NUM_THREADS if set, else its share of all cores"),
    "weight_transfer": ("object_store", 'transport to the engines: "object_store"; on GPUs also "nccl" or "ipc"'),
    "colocate": (False, "engine and learner share one GPU; the engine sleeps (frees GPU memory) during updates"),
    "prompt_format": ("text", '"text" (observations as plain text) or "chat" (the model\'s chat template)'),
    "temperature": (1.0, "sampling temperature in training, > 0; also applied to the learner's log-probs"),
    "max_turns": (8, "maximum number of turns in an episode"),
    "max_turn_tokens": (64, "maximum number of tokens the policy generates in a turn"),
    "max_episode_tokens": (1024, "maximum tokens in an episode, prompt included; also the engine's context length"),
    "env_timeout_s": (10.0, "timeout of one environment reset or step, seconds"),
    "num_env_threads": (8, "threads per runner for calls to environments"),
    "num_transcripts": (2, "groups per runner and iteration that are written to transcripts.jsonl; 0: none"),
}
TRAINING = {
    "num_prompts_per_batch": (16, "number of prompts played in each iteration (P)"),
    "group_size": (8, "episodes per prompt (G), at least 2"),
    "advantage": (PRESET, "group mean_only batch leave_one_out recalibrated gae, docs/losses.md (group if no preset)"),
    **LOSS_TABLE,
    "compute_dtype": ("auto", '"float32", "bfloat16", or "auto": bfloat16 if the hardware supports it, else float32'),
    "micro_batch_tokens": (4096, "maximum tokens per forward and backward pass; a longer episode gets its own pass"),
    "prefix_sharing": (True, "compute shared prompts once; disabled at start-up for models where this is not exact"),
    "activation_checkpointing": (False, "store each layer's input only and recompute the rest: less memory, slower"),
    "fsdp": (False, "shard weights, gradients and optimiser state over the learners (FSDP2)"),
    "lora_rank": (0, "rank of LoRA adapters, the only weights trained; 0: no adapters, train all weights"),
    "lora_alpha": (None, "adapters are scaled by lora_alpha / lora_rank; None: by 2"),
    "lora_targets": (TARGETS, "layers that get adapters, by the last part of their names"),
    "optimizer_name": ("adamw", '"adamw", "sgd" or "adamw_8bit"; on GPUs also "paged_adamw" or "paged_adamw_8bit"'),
    "adam_betas": ((0.9, 0.999), "AdamW's beta1 and beta2"),
    "weight_decay": (0.0, "AdamW's decoupled weight decay; 0: none"),
    "update_timeout_s": (1800.0, "timeout of one update of the learners, seconds"),
    "sync_timeout_s": (300.0, "timeout of one weight transfer, seconds"),
    "start_timeout_s": (600.0, "timeout of the start or restart of an engine, seconds"),
    "checkpoint_every": (10, "iterations between checkpoints in log_directory; 0: no checkpoints"),
    "checkpoints_kept": (2, "number of newest checkpoints kept in log_directory"),
    "seal_key_file": (None, "file with the key that signs checkpoints; None: $RLLIB_SRL_SEAL_KEY_FILE or one per user"),
    "log_directory": (None, "directory of checkpoints, transcripts and event files; None: a new one in ~/ray_results"),
    "check_resources": (True, "fail at start-up if the cluster is too small; False: for clusters that grow on demand"),
}
EVALUATION = {
    "evaluation_pass_k": (0, "number of sampled answers per held-out prompt for pass@k; 0: no pass@k"),
    "evaluation_iterations": (0, "self-improvement steps per greedy answer, in environments that support it; 0: none"),
}
REPLAY = {f"replay_{name}": entry for name, entry in REPLAY_TABLE.items()}
PLANNER = {f"planner_{name}": entry for name, entry in PLANNER_TABLE.items()}
SETTINGS = {**ENVIRONMENT, **ENV_RUNNERS, **TRAINING, **EVALUATION, **REPLAY, **PLANNER}


class SRLConfig(AlgorithmConfig):
    """Settings of `SRL`; build it with `SRLConfig().environment(...).build_algo()`.

    Invariant: `validate` refuses attributes without a leading underscore that are neither RLlib's nor in `SETTINGS`.
    """

    compute_dtype: str
    engine: str
    engine_num_threads: int | None

    def __init__(self, algo_class: type | None = None) -> None:
        """Set SRL's defaults; some of RLlib's own settings get other defaults for language models."""
        from rllib_srl.algorithm.srl import SRL
        from rllib_srl.rollout.env_runner import LLMEnvRunner

        super().__init__(algo_class=algo_class or SRL)
        for name, (default, _) in SETTINGS.items():
            setattr(self, name, default)
        self._model_config = {"model": "smollm2-135m"}
        self.env_runner_cls = LLMEnvRunner
        self.num_env_runners = 1
        self.lr = 1e-6
        self.grad_clip = 1.0
        self.gamma = 1.0  # rewards of an episode are summed, never discounted
        self.evaluation_duration = 128  # held-out prompts
        self.sample_timeout_s = 1200.0
        self.evaluation_sample_timeout_s = 1200.0
        self.delay_between_env_runner_restarts_s = 1.0
        self.add_default_connectors_to_env_to_module_pipeline = False
        self.add_default_connectors_to_module_to_env_pipeline = False
        self.add_default_connectors_to_learner_pipeline = False
        self._dont_auto_sync_env_runner_states = True

    # --- grouped methods ----------------------------------------------------------------------

    def environment(self, env: Any = NotProvided, *, worlds: Any = NotProvided, **kwargs: Any) -> SRLConfig:
        """Set one environment, several environments (`worlds`) with an optional `mixture`, or a `stream` of domains."""
        ours, theirs = _divide({**kwargs, "worlds": worlds}, ENVIRONMENT, "environment")
        super().environment(env, **theirs)
        return self._assign(ours)

    def env_runners(self, **kwargs: Any) -> SRLConfig:
        """Set engine, sampling and episode limits (`ENV_RUNNERS`), beside RLlib's own settings."""
        ours, theirs = _divide(kwargs, ENV_RUNNERS, "env_runners")
        super().env_runners(**theirs)
        return self._assign(ours)

    def training(self, **kwargs: Any) -> SRLConfig:
        """Set batch, loss and optimiser (`TRAINING`), beside RLlib's own settings such as `lr` and `num_epochs`."""
        ours, theirs = _divide(kwargs, TRAINING, "training")
        super().training(**theirs)
        return self._assign(ours)

    def evaluation(self, **kwargs: Any) -> SRLConfig:
        """Set when and on how many held-out prompts to evaluate (`evaluation_duration` counts prompts)."""
        ours, theirs = _divide(kwargs, EVALUATION, "evaluation")
        super().evaluation(**theirs)
        return self._assign(ours)

    def replay(self, **kwargs: Any) -> SRLConfig:
        """Set the memory; names are those of `REPLAY` without the prefix."""
        return self._assign_short("replay", kwargs, REPLAY)

    def planner(self, **kwargs: Any) -> SRLConfig:
        """Set the planner of continual learning; names are those of `PLANNER` without the prefix."""
        return self._assign_short("planner", kwargs, PLANNER)

    def _assign_short(self, part: str, values: Mapping[str, Any], table: Mapping[str, Any]) -> SRLConfig:
        names = sorted(name.removeprefix(f"{part}_") for name in table)
        if unknown := sorted(set(values) - set(names)):
            raise TypeError(_refusal(part, unknown, names) + f"\nexpected some of {names}")
        return self._assign({f"{part}_{name}": value for name, value in values.items()})

    def _assign(self, values: Mapping[str, Any]) -> SRLConfig:
        for name, value in values.items():
            if value is not NotProvided:
                setattr(self, name, value)
        return self

    # --- checks -------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every setting, and the environments and the model that they name (`checks.py`).

        Raises:
            ValueError: all errors at once, one line each: "name = value; expected ...".
        """
        if not self.in_evaluation:
            self.create_local_env_runner = self.num_env_runners == 0
            faults = faults_of(self)
            if faults := [*faults, *early_faults(self, faults)]:
                raise ValueError("SRLConfig is invalid:\n  " + "\n  ".join(faults))
            self._settle()
        super().validate()

    def _settle(self) -> None:
        """Resolve "auto" and None for this machine, so that results and checkpoints contain the values in use."""
        if self.compute_dtype == "auto":
            self.compute_dtype = best_dtype(min(self.num_gpus_per_env_runner, self.num_gpus_per_learner))
        if self.engine_num_threads is None:
            self.engine_num_threads = engine_threads(self.num_env_runners * self.engine_tensor_parallel_size)
        if self.engine == "auto":
            self.engine = "vllm" if find_spec("vllm") else "transformers"
            if self.engine == "transformers":
                logger.warning("vLLM is not installed: using the TransformersEngine, which is exact but slower")

    # --- derived ------------------------------------------------------------------------------

    def loss_settings(self) -> LossSettings:
        """Return the resolved settings of the loss: the user's value, else the preset's, else the default."""
        return LossSettings.of(self)

    def replay_settings(self) -> ReplaySettings:
        """Return the memory's settings, without their prefix."""
        return ReplaySettings(**{name: getattr(self, f"replay_{name}") for name in REPLAY_TABLE})

    def planner_settings(self) -> PlannerSettings:
        """Return the planner's settings, without their prefix."""
        return PlannerSettings(**{name: getattr(self, f"planner_{name}") for name in PLANNER_TABLE})

    def task_stream(self) -> Stream | None:
        """Return the stream of domains, None for a fixed mixture."""
        return None if self.stream is None else make_stream(self.stream)

    def world_configs(self) -> dict[str, dict]:
        """Return environment id -> env_config of every environment."""
        if stream := self.task_stream():
            return {env_id: dict(entry.env_config) for env_id, entry in stream.entries.items()}
        if self.worlds:
            return {str(name): dict(env_config or {}) for name, env_config in self.worlds.items()}
        return {self._env_id(): dict(self.env_config or {})}

    def world_creators(self) -> dict[str, Callable[[dict], gym.Env]]:
        """Return environment id -> creator.

        Raises:
            ValueError: an environment that cannot be found.
        """
        if self.worlds or self.stream:
            return {name: resolve(name, registry=_from_tune) for name in self.world_configs()}
        return {self._env_id(): resolve(self.env, registry=_from_tune)}

    def mixture_weights(self) -> dict[str, float]:
        """Return environment id -> weight among fresh prompts; equal weights without `mixture`."""
        return {str(k): float(v) for k, v in (self.mixture or dict.fromkeys(self.world_configs(), 1.0)).items()}

    def _env_id(self) -> str:
        return self.env if isinstance(self.env, str) else f"{self.env.__module__}:{self.env.__qualname__}"

    def engine_settings(self, model_dir: Path) -> dict[str, Any]:
        """Return the arguments of `make_engine`."""
        common = {
            "kind": self.engine,
            "model_dir": model_dir,
            "dtype": self.compute_dtype,
            "seed": self.seed or 0,
            "context_length": self.max_episode_tokens,
            "max_num_seqs": self.engine_max_num_seqs,
        }
        if self.engine == "transformers":
            return common
        return common | {
            "tensor_parallel_size": self.engine_tensor_parallel_size,
            "memory_utilization": self.engine_memory_utilization,
            "kv_cache_gib": self.engine_kv_cache_gib,
            "weight_transfer": self.weight_transfer,
            "num_threads": None if self.num_gpus_per_env_runner else self.engine_num_threads,
        }

    def get_default_learner_class(self) -> type:
        """Return `GRPOTorchLearner`."""
        from rllib_srl.learner.learner import GRPOTorchLearner

        return GRPOTorchLearner

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Return the spec of the Hugging Face causal language model (`CausalLMModule`)."""
        from rllib_srl.learner.rl_module import CausalLMModule

        return RLModuleSpec(module_class=CausalLMModule)

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}


def register() -> None:
    """Register "SRL" with Tune, for `tune.Tuner("SRL", ...)`."""
    from rllib_srl.algorithm.srl import SRL

    _register_trainable("SRL", SRL)


def _from_tune(name: str) -> Creator | None:
    return _global_registry.get(ENV_CREATOR, name) if _global_registry.contains(ENV_CREATOR, name) else None


def _divide(values: Mapping[str, Any], table: Mapping[str, Any], part: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments of a grouped method into SRL's settings and RLlib's.

    Raises:
        TypeError: a setting that the method does not take; the message names all of them and their replacements.
    """
    theirs = inspect.signature(getattr(AlgorithmConfig, part)).parameters
    if unknown := sorted(set(values) - set(table) - set(theirs)):
        raise TypeError(_refusal(part, unknown, {*table, *theirs} - {"self", "kwargs"}))
    ours = {name: value for name, value in values.items() if name in table}
    return ours, {name: value for name, value in values.items() if name not in table}


def _refusal(part: str, unknown: Sequence[str], known: Collection[str]) -> str:
    """Return the error message for settings that a grouped method does not take, with a replacement for each."""
    homes: dict[str, Mapping[str, Any]]
    homes = {"environment": ENVIRONMENT, "env_runners": ENV_RUNNERS, "training": TRAINING, "evaluation": EVALUATION}
    lines = []
    for name in unknown:
        home = next((f"it is a setting of {other}()" for other, table in homes.items() if name in table), "")
        hint = home or in_place_of(name, known) or in_place_of(name, SETTINGS)
        lines.append(f"  {name}; expected no setting of that name here{f'; {hint}' if hint else ''}")
    return "\n".join([f"{part}() got unknown settings:", *lines])

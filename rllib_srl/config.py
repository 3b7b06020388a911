"""SRLConfig: every setting of the algorithm, flat, so that Tune sees each one.

The grouped methods are RLlib's (`environment`, `rl_module`, `env_runners`, `learners`, `training`,
`evaluation`, `fault_tolerance`, ...) and take our settings beside RLlib's own; `replay` is ours.
`validate` reports every fault at once. `docs/settings.md` is generated from the table below.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.tune.registry import ENV_CREATOR, _global_registry
from ray.tune.registry import register_trainable as _register_trainable

from rllib_srl.adapters import TARGETS
from rllib_srl.faults import faults_of
from rllib_srl.hardware import best_dtype, engine_threads
from rllib_srl.losses.presets import PRESET
from rllib_srl.losses.settings import TABLE as LOSS_TABLE
from rllib_srl.losses.settings import LossSettings
from rllib_srl.planner import TABLE as PLANNER_TABLE
from rllib_srl.planner import PlannerSettings
from rllib_srl.replay.settings import TABLE as REPLAY_TABLE
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.streams import Stream, make_stream
from rllib_srl.worlds import resolve

logger = logging.getLogger(__name__)

# name: (default, unit and meaning). One table: __init__, the grouped methods and the docs read it.
ENVIRONMENT = {
    "worlds": (None, "several environments: name -> env_config; None plays `env` alone"),
    "mixture": (None, "name -> weight of each world among fresh prompts; None weighs them equally"),
    "stream": (None, "domains over time, in place of env and worlds: a list of stages, a schedule or a drift"),
}
ENV_RUNNERS = {
    "engine": ("auto", '"vllm", "transformers" (plain, exact, slow), or "auto": vLLM where it is installed'),
    "engine_tensor_parallel_size": (1, "GPUs one engine spreads its model over"),
    "engine_memory_utilization": (0.9, "share of GPU memory the engine takes, in (0, 1]"),
    "engine_kv_cache_gib": (1.0, "GiB of KV cache on a CPU"),
    "engine_max_num_seqs": (256, "turns generated at the same time, at most"),
    "engine_num_threads": (None, "CPU threads of one engine; None: OMP_NUM_THREADS, else its share of all cores"),
    "weight_transfer": ("object_store", '"object_store"; on GPUs also "nccl" or "ipc"'),
    "colocate": (False, "engine and learner share one GPU: the engine sleeps while the learner works"),
    "prompt_format": ("text", '"text" (the observation as it is) or "chat" (the model\'s chat template)'),
    "temperature": (1.0, "of sampling in training, > 0; the learner's log-probs use the same"),
    "max_turns": (8, "turns of an episode, at most"),
    "max_turn_tokens": (64, "tokens of one turn, at most"),
    "max_episode_tokens": (1024, "tokens of a whole episode, prompt included; the engine's context"),
    "env_timeout_s": (10.0, "seconds one reset or step of an environment may take"),
    "num_env_threads": (8, "threads that environments of one runner share"),
    "num_transcripts": (2, "groups written out as text each iteration, per runner"),
}
TRAINING = {
    "num_prompts_per_batch": (16, "prompts played each iteration, P"),
    "group_size": (8, "episodes of each prompt, G, at least 2"),
    "advantage": (PRESET, "a key of `advantages.ADVANTAGES` (group)"),
    **LOSS_TABLE,
    "compute_dtype": ("auto", '"float32", "bfloat16", or "auto": bfloat16 where the processor has it'),
    "micro_batch_tokens": (4096, "tokens of one forward and backward pass, at most (one longer episode passes alone)"),
    "prefix_sharing": (True, "compute shared prompts once (exact; checked at start-up, off where it would not be)"),
    "activation_checkpointing": (False, "keep only each layer's input, compute the rest again: slower, smaller"),
    "fsdp": (False, "spread weights, gradients and optimiser state over the learners (FSDP2)"),
    "lora_rank": (0, "train low-rank adapters of this rank alone; 0 trains all weights"),
    "lora_alpha": (None, "adapters are scaled by lora_alpha / lora_rank; None: by 2"),
    "lora_targets": (TARGETS, "last part of the names of the layers that get adapters"),
    "optimizer_name": ("adamw", '"adamw", "sgd", "adamw_8bit"; on GPUs "paged_adamw", "paged_adamw_8bit"'),
    "adam_betas": ((0.9, 0.999), "AdamW's moving-average rates"),
    "weight_decay": (0.0, "AdamW's, per step and learning rate"),
    "update_timeout_s": (1800.0, "seconds one update of the learners may take"),
    "sync_timeout_s": (300.0, "seconds one weight transfer may take"),
    "start_timeout_s": (600.0, "seconds an engine may take to start or restart"),
    "checkpoint_every": (10, "iterations between checkpoints in the log directory; 0 writes none"),
    "checkpoints_kept": (2, "newest checkpoints kept there"),
    "log_directory": (None, "where checkpoints, transcripts and event files lie; None: a new one under ~/ray_results"),
    "check_resources": (True, "refuse at once what the cluster cannot hold; False on clusters that grow by themselves"),
}
EVALUATION = {
    "evaluation_pass_k": (0, "also sample k answers a held-out prompt and report pass@k; 0 skips that"),
}
REPLAY = {f"replay_{name}": entry for name, entry in REPLAY_TABLE.items()}
PLANNER = {f"planner_{name}": entry for name, entry in PLANNER_TABLE.items()}
SETTINGS = {**ENVIRONMENT, **ENV_RUNNERS, **TRAINING, **EVALUATION, **REPLAY, **PLANNER}


class SRLConfig(AlgorithmConfig):
    """Settings of `SRL`; build it with `SRLConfig().environment(...).build_algo()`.

    Invariant: every attribute without a leading underscore is RLlib's or in `SETTINGS`, or `validate` refuses it.
    """

    def __init__(self, algo_class: type | None = None) -> None:
        """Start from SRL's defaults; they differ from RLlib's where language models need it."""
        from rllib_srl.env_runner import LLMEnvRunner
        from rllib_srl.srl import SRL

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
        """Set what is played: one environment, several `worlds` with an optional `mixture`, or a `stream` of them."""
        ours, theirs = _divide({**kwargs, "worlds": worlds}, ENVIRONMENT)
        super().environment(env, **theirs)
        return self._assign(ours)

    def env_runners(self, **kwargs: Any) -> SRLConfig:
        """Set engine, sampling and limits of episodes (`ENV_RUNNERS`), beside RLlib's own settings."""
        ours, theirs = _divide(kwargs, ENV_RUNNERS)
        super().env_runners(**theirs)
        return self._assign(ours)

    def training(self, **kwargs: Any) -> SRLConfig:
        """Set batch, loss and optimiser (`TRAINING`), beside RLlib's own settings such as `lr` and `num_epochs`."""
        ours, theirs = _divide(kwargs, TRAINING)
        super().training(**theirs)
        return self._assign(ours)

    def evaluation(self, **kwargs: Any) -> SRLConfig:
        """Set when and on how many held-out prompts to evaluate (`evaluation_duration` counts prompts)."""
        ours, theirs = _divide(kwargs, EVALUATION)
        super().evaluation(**theirs)
        return self._assign(ours)

    def replay(self, **kwargs: Any) -> SRLConfig:
        """Set the memory; names are those of `REPLAY` without the prefix."""
        return self._assign_short("replay", kwargs, REPLAY)

    def planner(self, **kwargs: Any) -> SRLConfig:
        """Set what continual learning plans; names are those of `PLANNER` without the prefix."""
        return self._assign_short("planner", kwargs, PLANNER)

    def _assign_short(self, part: str, values: Mapping[str, Any], table: Mapping[str, Any]) -> SRLConfig:
        ours, unknown = _divide({f"{part}_{name}": value for name, value in values.items()}, table)
        if unknown:
            names = sorted(name.removeprefix(f"{part}_") for name in table)
            raise TypeError(f"{part}() got unknown settings {sorted(values)}; expected some of {names}")
        return self._assign(ours)

    def _assign(self, values: Mapping[str, Any]) -> SRLConfig:
        for name, value in values.items():
            if value is not NotProvided:
                setattr(self, name, value)
        return self

    # --- checks -------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every setting.

        Raises:
            ValueError: naming all faults at once, one line each: "name = value; expected ...".
        """
        if not self.in_evaluation:
            self.create_local_env_runner = self.num_env_runners == 0
            if faults := faults_of(self):
                raise ValueError("SRLConfig has faults:\n  " + "\n  ".join(faults))
            self._settle()
        super().validate()

    def _settle(self) -> None:
        """Replace "auto" by what this machine has, so that results and checkpoints say what was used."""
        if self.compute_dtype == "auto":
            self.compute_dtype = best_dtype(min(self.num_gpus_per_env_runner, self.num_gpus_per_learner))
        if self.engine_num_threads is None:
            self.engine_num_threads = engine_threads(self.num_env_runners * self.engine_tensor_parallel_size)
        if self.engine == "auto":
            self.engine = "vllm" if find_spec("vllm") else "transformers"
            if self.engine == "transformers":
                logger.warning("vLLM is not installed: the TransformersEngine samples, slower and exact")

    # --- derived ------------------------------------------------------------------------------

    def loss_settings(self) -> LossSettings:
        """Return every setting of the loss as it is used: the user's, else the preset's, else the default."""
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
        """Return environment id -> env_config of every world."""
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
        """Return environment id -> weight among fresh prompts."""
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
        """Return the GRPO learner."""
        from rllib_srl.learner import GRPOTorchLearner

        return GRPOTorchLearner

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Return the Hugging Face causal language model."""
        from rllib_srl.rl_module import CausalLMModule

        return RLModuleSpec(module_class=CausalLMModule)

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}


def register() -> None:
    """Put "SRL" into Tune's registry, so that `tune.Tuner("SRL", ...)` finds it."""
    from rllib_srl.srl import SRL

    _register_trainable("SRL", SRL)


def _from_tune(name: str) -> Callable[[dict], gym.Env] | None:
    return _global_registry.get(ENV_CREATOR, name) if _global_registry.contains(ENV_CREATOR, name) else None


def _divide(values: Mapping[str, Any], table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    ours = {name: value for name, value in values.items() if name in table}
    return ours, {name: value for name, value in values.items() if name not in table}

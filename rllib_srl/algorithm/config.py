"""SRLConfig: all settings of the algorithm as flat attributes, so that Tune can search over each one.

The grouped methods are RLlib's (`environment`, `rl_module`, `env_runners`, `learners`, `training`, `evaluation`,
`fault_tolerance`, ...) and take SRL's settings in addition to RLlib's; SRL adds `replay`.
`validate` reports all errors at once. `docs/settings.md` is generated from the tables in `settings.py`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.tune.registry import ENV_CREATOR, _global_registry
from ray.tune.registry import register_trainable as _register_trainable
from ray.util.placement_group import PlacementGroup, remove_placement_group

from rllib_srl.algorithm.checks import early_errors
from rllib_srl.algorithm.gpu_memory import fit_awake
from rllib_srl.algorithm.model_shape import ModelShape
from rllib_srl.algorithm.named import NAMED, TABLES, named_settings
from rllib_srl.algorithm.own_data import agent_settings, data_settings, reward_settings
from rllib_srl.algorithm.resources import (
    PlacementError,
    best_dtype,
    card_bytes_here,
    engine_memory_share,
    engine_threads,
    gpu_shares,
    num_gpus_here,
    warn_of_cpu,
)
from rllib_srl.algorithm.settings import LONGEST_EPISODE, NO_ATTRIBUTES, PARTS, SETTINGS, settings_of, warn_once
from rllib_srl.algorithm.validation import config_errors, warnings_of
from rllib_srl.common.callbacks import callbacks_of, may_plan
from rllib_srl.common.environments import Creator, resolve
from rllib_srl.common.foreign_names import in_place_of
from rllib_srl.common.loading import AGENT, LOSS_RULES, MEMORY_RULES, OWN_DATA, with_whole_paths
from rllib_srl.common.placement import learner_resources, packed_places
from rllib_srl.common.setting_model import is_number
from rllib_srl.curriculum.streams import Stream, make_stream
from rllib_srl.engine.adapters import AdapterSpec
from rllib_srl.engine.models import ModelError, described_model, local_model, sizes_of
from rllib_srl.learner.regularisers.regularisers import made
from rllib_srl.learner.regularisers.rule import Regulariser
from rllib_srl.losses.settings import LossSettings
from rllib_srl.replay.settings import ReplaySettings

# Settings whose relative paths are made absolute.
_NAME_FILES = ("env_config", "envs", "stream", *LOSS_RULES, *MEMORY_RULES)
NAME_CODE = ("env", *_NAME_FILES)  # settings that name functions and classes of a user

logger = logging.getLogger(__name__)

# RLlib's grouped methods, for the hint at a setting that was given to another one
_GROUPED = (
    *("environment", "env_runners", "training", "learners", "evaluation", "rl_module", "callbacks", "debugging"),
    *("reporting", "checkpointing", "fault_tolerance"),
)

# Settings that `validate` chooses together from the available GPUs, unless the user has set them
PLACEMENT = ("num_gpus_per_env_runner", "num_gpus_per_learner", "num_learners", "colocate")


class SRLConfig(AlgorithmConfig):
    """Settings of `SRL`; build it with `SRLConfig().environment(...).build_algo()`.

    Invariant: `validate` refuses attributes without a leading underscore that are neither RLlib's nor in `SETTINGS`.
    """

    compute_dtype: str
    max_episode_tokens: Any  # None until `validate` chooses
    env_config: dict[str, Any]
    engine: str
    engine_num_threads: int | None  # chosen by `validate`, as is the next
    engine_memory_utilization: float | None
    num_gpus_per_env_runner: Any  # None until `validate` chooses, as is the next
    num_gpus_per_learner: Any
    num_learners: Any
    colocate: Any

    def __init__(self, algo_class: type | None = None) -> None:
        """Set SRL's defaults; some of RLlib's own settings get other defaults for language models."""
        from rllib_srl.algorithm.srl import SRL
        from rllib_srl.rollout.env_runner import LLMEnvRunner

        super().__init__(algo_class=algo_class or SRL)
        for name, row in SETTINGS.items():
            if name not in NO_ATTRIBUTES:
                super().__setattr__(name, copy(row.initial))
        self._names: dict[str, str] = {}  # of algorithm and memory, by kind
        self._given: list[str] = []  # settings that the user has set, of those that names set
        self._model_config = {"model": SETTINGS["model"].default}
        self.env_runner_cls = LLMEnvRunner
        self.gamma = 1.0  # rewards of an episode are summed, never discounted
        self.evaluation_sample_timeout_s = 1200.0
        self.delay_between_env_runner_restarts_s = 1.0
        self.add_default_connectors_to_env_to_module_pipeline = False
        self.add_default_connectors_to_module_to_env_pipeline = False
        self.add_default_connectors_to_learner_pipeline = False
        self._dont_auto_sync_env_runner_states = True

    # --- grouped methods ----------------------------------------------------------------------

    def environment(
        self,
        env: Any = NotProvided,
        *,
        envs: Any = NotProvided,
        agent: Any = None,
        agent_command: Sequence[str] | None = None,
        tasks: Any = None,
        **kwargs: Any,
    ) -> SRLConfig:
        """Set one environment, several environments (`envs`) with an optional `mixture`, or a `stream` of domains.

        Args:
            env: name, import path, class or creator of the environment.
            envs: name -> env_config of each environment.
            agent: instead of an environment, a function run(client, task) -> reward, sync or async, or its import
                path: it calls the policy through a client of OpenAI's API (docs/agents.md).
            agent_command: instead of `agent`, a program and its arguments.
            tasks: the agent's tasks: a file, or an object that yields rows; None: {"seed": number}.
            kwargs: other settings of environments, and RLlib's. With an agent, `env_config` has further settings of
                the environment `agent`.

        Raises:
            ValueError: both an agent and an environment are given, or the agent cannot be named.
        """
        if agent is not None or agent_command is not None:
            others = {"env": env, "envs": envs, "stream": kwargs.get("stream", NotProvided)}
            if names := [name for name, value in others.items() if value not in (NotProvided, None)]:
                raise ValueError(f"agent and {', '.join(names)}; expected one of them")
            agent_config = agent_settings(agent, agent_command, tasks)
            env, kwargs["env_config"] = AGENT, {**(kwargs.get("env_config") or {}), **agent_config}
            self.env_config = {}
        elif tasks is not None:
            raise ValueError("tasks without an agent; expected agent=... or agent_command=..., or data(...)")
        ours, theirs = _divide({**kwargs, "envs": envs}, "environment")
        super().environment(env, **theirs)
        self.env_config = self.env_config  # RLlib has changed it in place
        return self._assign(ours)

    def data(self, data: Any, **settings: Any) -> SRLConfig:
        """Train on a user's own questions: a file, a data set of the hub, or an object that yields rows.

        Args:
            data: "my.jsonl" (or .json, .csv, .parquet), "org/name", or a `datasets.Dataset`, a table or a list of rows.
            settings: `question` and `answer`, the names of columns; `heldout`, a file or split; `split`; and any
                setting of the environment `question_file` (docs/own-data.md).

        Raises:
            ValueError: the object does not yield rows, or a row that JSON cannot hold.
        """
        rewards = {name: value for name, value in (self.env_config or {}).items() if "reward" in name}
        self.env_config = {}
        return self.environment(OWN_DATA, env_config={**rewards, **data_settings(data, **settings)})

    def reward(self, functions: Any, **settings: Any) -> SRLConfig:
        """Reward the answers to a user's own questions by functions; call it with `data`, in any order.

        Args:
            functions: f(prompt, answer, row) -> number from 0 to 1, its import path "module:f" or "file.py:f", the URL
                of a server, or a list of them; sync or async.
            settings: `weights` of several functions; `form` ("batch" for functions of lists; "trl" or "verl" for those
                with their arguments); `low` and `high`, the range of values; `timeout_s`, `retries`, `concurrency`,
                `on_error`.

        Raises:
            ValueError: a function that other processes cannot import by its name.
        """
        if self.env not in (None, OWN_DATA):
            raise ValueError(
                f"reward() with env = {self.env!r}; expected .data(...): other environments compute their own rewards"
            )
        earlier = {name: value for name, value in (self.env_config or {}).items() if "reward" not in name}
        self.env_config = {**earlier, **reward_settings(functions, **settings)}
        return self

    def env_runners(self, **kwargs: Any) -> SRLConfig:
        """Set engine, sampling and episode limits, and RLlib's own settings."""
        ours, theirs = _divide(kwargs, "env_runners")
        super().env_runners(**theirs)
        return self._assign(ours)

    def training(self, algorithm: str | None = None, **kwargs: Any) -> SRLConfig:
        """Set batch, loss and optimiser, and RLlib's own settings such as `lr` and `num_epochs`.

        Args:
            algorithm: "grpo", "dapo", "spo" or "srl" sets its parts, except those that the user sets (`named.py`).
            kwargs: settings.

        Raises:
            ValueError: there is no algorithm of this name.
        """
        self._assign_named("algorithm", algorithm)
        ours, theirs = _divide(kwargs, "training")
        super().training(**theirs)
        return self._assign(ours)

    def evaluation(self, **kwargs: Any) -> SRLConfig:
        """Set when and on how many held-out prompts to evaluate (`evaluation_duration` counts prompts)."""
        ours, theirs = _divide(kwargs, "evaluation")
        super().evaluation(**theirs)
        return self._assign(ours)

    def replay(self, memory: str | None = None, **kwargs: Any) -> SRLConfig:
        """Set the memory; names are those of docs/settings.md without the prefix `replay_`.

        Args:
            memory: "none", "uniform", "balanced" or "srl" sets its parts, except those that the user sets.
            kwargs: settings.

        Raises:
            ValueError: there is no memory of this name.
            TypeError: a setting that it does not have.
        """
        self._assign_named("replay", memory)
        names = sorted(name.removeprefix("replay_") for name in settings_of("replay"))
        if unknown := sorted(set(kwargs) - set(names)):
            raise TypeError(_refusal("replay", unknown, names) + f"\nexpected some of {names}")
        return self._assign({f"replay_{name}": value for name, value in kwargs.items()})

    def distill(self, teacher: Any = "start", **parameters: Any) -> SRLConfig:
        """Add the KL to frozen teachers on the policy's own answers; parameters: docs/losses.md#distillation."""
        terms = {**(self.regularisers or {}), "distill": {"teacher": teacher, **parameters}}
        return self._assign({"regularisers": terms})

    def callbacks(self, callbacks_class: Any = NotProvided, **kwargs: Any) -> SRLConfig:
        """Set RLlib's callbacks, by class or by name: "contrib.trackers:wandb", "my_module:MyCallback", or a list."""
        super().callbacks(callbacks_of(callbacks_class), **kwargs)
        return self

    def update_from_dict(self, config_dict: dict[str, Any]) -> SRLConfig:
        """Set settings by name; "algorithm", "replay", "model" and callbacks are names as in their methods."""
        values = dict(config_dict)  # RLlib also passes configs, whose "model" is a dictionary
        for kind in TABLES:
            self._assign_named(kind, values.pop(kind, None))
        if "model" in values and not isinstance(values["model"], Mapping):
            self.rl_module(model_config={"model": values.pop("model")})
        for name in values.keys() & {"callbacks", "callbacks_class"}:
            values[name] = callbacks_of(values[name])
        config: SRLConfig = super().update_from_dict(values)
        return config

    def _assign_named(self, kind: str, name: str | None) -> None:
        """Take a named algorithm or memory, in place of an earlier one of its kind."""
        if name is not None:
            names = {**self._names, kind: name}
            values = named_settings(names)
            for setting in NAMED.difference(self._given):
                super().__setattr__(setting, copy(values.get(setting, SETTINGS[setting].initial)))
            self._names = names

    def _assign(self, values: Mapping[str, Any]) -> SRLConfig:
        for name, value in values.items():
            if value is not NotProvided:
                setattr(self, name, value)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a setting, which a named algorithm or memory then leaves; the files that it names get absolute paths."""
        super().__setattr__(name, with_whole_paths({name: value})[name] if name in _NAME_FILES else value)
        if name in NAMED:
            self._given = sorted({*self._given, name})

    # --- checks -------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every setting, and the environments and the model that they name (`checks.py`).

        Raises:
            ValueError: all errors at once, one line each: "name = value; expected ...".
        """
        if not self.in_evaluation:
            self.create_local_env_runner = self.num_env_runners == 0
            user_values = {name: getattr(self, name) for name in (*PLACEMENT, "max_episode_tokens")}
            self.choose_length()
            errors = [*self._choose_gpus(), *config_errors(self)]
            if errors := [*errors, *early_errors(self, errors)]:
                for name, value in user_values.items():  # chosen values must not count as the user's at the next call
                    setattr(self, name, value)
                raise ValueError("SRLConfig is invalid:\n  " + "\n  ".join(errors))
            for line in sorted(warnings_of(self)):
                warn_once(line)
            self._settle()
            if user_values["colocate"] is None and self.colocate:
                self.colocate = not self._fit_awake()
                logger.info("engine and learner share a GPU%s", " in turns" if self.colocate else ", both awake")
        super().validate()

    def choose_length(self) -> None:
        """Set the longest episode, unless the user has: `LONGEST_EPISODE`, or the context of a shorter model."""
        if self.max_episode_tokens is not None:
            return
        self.max_episode_tokens = LONGEST_EPISODE
        if not isinstance(self._model_config, Mapping):  # `config_errors` reports it
            return
        try:
            directory = described_model(self.model_config["model"])
        except ModelError:  # `early_errors` reports it
            return
        context = sizes_of(directory).context if directory else None
        if context is not None:
            self.max_episode_tokens = min(LONGEST_EPISODE, context)

    def _choose_gpus(self) -> list[str]:
        """Set the GPUs of each process that the user has left open; return error messages.

        A learner on a GPU gets its own process, because Ray reserves no GPU for the main process and would also give
        the learner's card to an engine.
        """
        counts, size = (self.num_env_runners, self.num_learners), self.engine_tensor_parallel_size
        if not all(isinstance(number, int) for number in (*counts, size)):
            return []  # `config_errors` reports it
        user_gpus = (self.num_gpus_per_env_runner, self.num_gpus_per_learner)
        num_gpus = num_gpus_here() if None in user_gpus else 0
        try:
            shares = gpu_shares(num_gpus, *counts, size, user_gpus)
        except PlacementError as error:
            self.num_gpus_per_env_runner, self.num_gpus_per_learner = (number or 0 for number in user_gpus)
            return [str(error)]
        self.num_gpus_per_env_runner, self.num_gpus_per_learner = shares.per_env_runner, shares.per_learner
        if num_gpus:
            warn_of_cpu(*user_gpus, shares)
        errors = []
        if self.colocate is None:
            errors = list(self._cannot_take_turns(int(num_gpus))) if shares.is_colocated else []
            self.colocate = shares.is_colocated and not errors
        if is_number(shares.per_learner) and shares.per_learner > 0 and counts[1] == 0 and counts[0] > 0:
            self.num_learners = 1
        if None in user_gpus and (shares.per_env_runner or shares.per_learner):
            logger.info("GPUs: %g per env runner, %g per learner", shares.per_env_runner, shares.per_learner)
        return errors

    def _cannot_take_turns(self, num_gpus: int) -> Iterator[str]:
        """Yield each setting that prevents engine and learner from taking turns on a card, which is the default."""
        counts = f"num_env_runners = {self.num_env_runners} and num_learners = {self.num_learners} on {num_gpus} GPUs"
        remedy = "expected a GPU for each process, or colocate = False: both then use the same GPU at the same time"
        if self.max_lag:
            yield f"max_lag = {self.max_lag!r} with {counts}; {remedy}"
        if self.fsdp:
            yield f"fsdp = True with {counts}; {remedy}"

    def _fit_awake(self) -> bool:
        """Return whether engine and learner fit onto one GPU together; False where it is unknown.

        It is known on one machine: other nodes may have smaller GPUs.
        """
        card_bytes = card_bytes_here()
        if card_bytes is None or num_gpus_here() > torch.cuda.device_count():
            return False
        name = self.model_config["model"]
        shape = ModelShape.of(described_model(name) or local_model(name))
        return shape is not None and fit_awake(shape, self, card_bytes)

    def _settle(self) -> None:
        """Resolve "auto" and None for this machine, so that results and checkpoints contain the values in use."""
        if self.compute_dtype == "auto":
            self.compute_dtype = best_dtype(min(self.num_gpus_per_env_runner, self.num_gpus_per_learner))
        if self.engine_num_threads is None:
            self.engine_num_threads = engine_threads(self.num_env_runners * self.engine_tensor_parallel_size)
        if self.engine_memory_utilization is None:
            self.engine_memory_utilization = engine_memory_share(self.num_gpus_per_env_runner)
        if self.engine == "auto":
            self.engine = "vllm" if find_spec("vllm") else "transformers"
            if self.engine == "transformers":
                logger.warning("vLLM is not installed: using the TransformersEngine, which is exact but slower")

    # --- derived ------------------------------------------------------------------------------

    def loss_settings(self) -> LossSettings:
        """Return the resolved settings of the loss: the user's value, else the preset's, else the default."""
        return LossSettings.of(self)

    def made_regularisers(self) -> dict[str, Regulariser]:
        """Return the regularisers in use, by name."""
        return made(self.regularisers)

    def replay_settings(self) -> ReplaySettings:
        """Return the memory's settings, without their prefix; `min_graded` is at most `group_size`."""
        prefix = ReplaySettings.prefix
        values = {name.removeprefix(prefix): getattr(self, name) for name in ReplaySettings.table()}
        settings = ReplaySettings.model_construct(**values)
        return settings.model_copy(update={"min_graded": min(settings.min_graded, self.group_size)})

    def may_draw(self, kind: str) -> bool:
        """Return whether the memory is ever drawn from for "revisit" or "reuse"."""
        return bool(getattr(self, f"replay_{kind}_fraction"))

    def may_hold(self) -> bool:
        """Return whether answers may be held: without a stream or plans of callbacks all domains are being learned."""
        return bool(self.replay_retain) and (self.stream is not None or may_plan(self))

    def adapter_spec(self) -> AdapterSpec:
        """Return the form of the adapters; only with `lora_rank` above 0."""
        return AdapterSpec.of(self.lora_rank, self.lora_alpha, self.lora_targets)

    def sends_adapter(self) -> bool:
        """Return whether engines receive the adapters and not whole weights."""
        return bool(self.lora_rank) and self.lora_send == "adapter"

    @property
    def longest_episode(self) -> int:
        """The maximum tokens of an episode; `LONGEST_EPISODE` before `validate` has chosen them."""
        return int(self.max_episode_tokens or LONGEST_EPISODE)

    def task_stream(self) -> Stream | None:
        """Return the stream of domains, None for a fixed mixture."""
        return None if self.stream is None else make_stream(self.stream)

    def env_configs(self) -> dict[str, dict[str, Any]]:
        """Return environment id -> env_config of every environment."""
        if stream := self.task_stream():
            return {env_id: dict(entry.env_config) for env_id, entry in stream.entries.items()}
        if self.envs:
            return {str(name): dict(env_config or {}) for name, env_config in self.envs.items()}
        return {self._env_id(): dict(self.env_config or {})}

    def env_creators(self) -> dict[str, Callable[[dict[str, Any]], gym.Env[Any, Any]]]:
        """Return environment id -> creator.

        Raises:
            ValueError: an environment that cannot be found.
        """
        if self.envs or self.stream:
            return {name: resolve(name, registry=_from_tune) for name in self.env_configs()}
        return {self._env_id(): resolve(self.env, registry=_from_tune)}

    def mixture_weights(self) -> dict[str, float]:
        """Return environment id -> weight among fresh prompts; equal weights without `mixture`."""
        return {str(k): float(v) for k, v in (self.mixture or dict.fromkeys(self.env_configs(), 1.0)).items()}

    def _env_id(self) -> str:
        return self.env if isinstance(self.env, str) else f"{self.env.__module__}:{self.env.__qualname__}"

    def model_dir(self) -> Path:
        """Return the directory of the model."""
        return local_model(self.model_config["model"])

    def described_model(self) -> Path | None:
        """Return the directory of the model, downloaded if it has to be; None while a packaged model is not unpacked.

        A packaged model is unpacked by the first process that asks for `model_dir`, while engines are imported.
        """
        return None if described_model(self.model_config["model"]) is None else self.model_dir()

    def engine_settings(self) -> dict[str, Any]:
        """Return the arguments of `make_engine` except the model's directory."""
        common = {
            "kind": self.engine,
            "dtype": self.compute_dtype,
            "seed": self.seed or 0,
            "context_length": self.max_episode_tokens,
            "max_num_seqs": self.engine_max_num_seqs,
        }
        if self.sends_adapter():
            common["adapter"] = self.adapter_spec()
        if self.engine == "transformers":
            return common | {"device": "cuda" if self.num_gpus_per_env_runner else "cpu"}
        return common | {
            "tensor_parallel_size": self.engine_tensor_parallel_size,
            "memory_utilization": self.engine_memory_utilization,
            "kv_cache_gib": self.engine_kv_cache_gib,
            "num_threads": None if self.num_gpus_per_env_runner else self.engine_num_threads,
            "can_sleep": bool(self.colocate),
        }

    def get_default_learner_class(self) -> type:
        """Return `GRPOTorchLearner`."""
        from rllib_srl.learner.learner import GRPOTorchLearner

        return GRPOTorchLearner

    def build_learner_group(
        self,
        *,
        env: Any = None,
        spaces: Any = None,
        rl_module_spec: Any = None,
        placement_group: PlacementGroup | None = None,
    ) -> LearnerGroup:
        """Start the learners, outside Tune on as few nodes as can hold them; see RLlib's method for the arguments.

        Raises:
            ActorFailure: a remote learner died, or they found no places or did not start within `start_timeout_s`.
        """
        from rllib_srl.learner.group.learners import started

        packed = None
        if placement_group is None:
            packed = packed_places(learner_resources(self), self.num_learners, self.start_timeout_s)
        options = {"env": env, "spaces": spaces, "rl_module_spec": rl_module_spec}
        build = partial(super().build_learner_group, **options, placement_group=placement_group or packed)
        try:
            return started(build, self.num_learners, self.start_timeout_s) if self.num_learners else build()
        except BaseException:
            if packed is not None:
                remove_placement_group(packed)
            raise

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Return the spec of the Hugging Face causal language model (`CausalLMModule`)."""
        from rllib_srl.learner.rl_module import CausalLMModule

        return RLModuleSpec(module_class=CausalLMModule)

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}


def _describe(method: str) -> None:
    """Give a grouped method the signature and the documentation of its settings, for completion and `help`."""
    function = getattr(SRLConfig, method)
    rows = {name.removeprefix("replay_"): row for name, row in settings_of(method).items()}
    *parameters, var_keyword = inspect.signature(function).parameters.values()
    named = {parameter.name for parameter in parameters}
    kind = inspect.Parameter.KEYWORD_ONLY
    keywords = [inspect.Parameter(name, kind, default=row.initial) for name, row in rows.items() if name not in named]
    function.__signature__ = inspect.Signature([*parameters, *keywords, var_keyword])
    listed = "\n".join(f"    {name}: {row.meaning}" for name, row in rows.items())
    function.__doc__ = f"{inspect.getdoc(function)}\n\nSettings:\n{listed}"


for _method in ("environment", "env_runners", "training", "evaluation", "replay"):
    _describe(_method)


def register() -> None:
    """Register "SRL" with Tune, for `tune.Tuner("SRL", ...)`."""
    from rllib_srl.algorithm.srl import SRL

    _register_trainable("SRL", SRL)


def _from_tune(name: str) -> Creator | None:
    return _global_registry.get(ENV_CREATOR, name) if _global_registry.contains(ENV_CREATOR, name) else None


def _divide(values: Mapping[str, Any], method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments of a grouped method into SRL's settings and RLlib's.

    Raises:
        TypeError: a setting that the method does not take; the message names all of them and their replacements.
    """
    taken, theirs = set(settings_of(method)), inspect.signature(getattr(AlgorithmConfig, method)).parameters
    if unknown := sorted(set(values) - taken - set(theirs)):
        raise TypeError(_refusal(method, unknown, {*taken, *theirs} - {"self", "kwargs"}))
    ours = {name: value for name, value in values.items() if name in taken}
    return ours, {name: value for name, value in values.items() if name not in taken}


def _refusal(method: str, unknown: Sequence[str], known: Collection[str]) -> str:
    """Return the error message for settings that a grouped method does not take, with a replacement for each."""
    lines = []
    for name in unknown:
        home = _home(name)
        hint = f"it is a setting of {home}()" if home else in_place_of(name, known) or in_place_of(name, SETTINGS)
        lines.append(f"  {name}; expected no setting of that name here{f'; {hint}' if hint else ''}")
    return "\n".join([f"{method}() got unknown settings:", *lines])


def _home(name: str) -> str:
    """Return the grouped method that takes a setting, SRL's or RLlib's; "" if there is none."""
    ours = [part.method for part in PARTS if part.method and name in settings_of(part.method)]
    theirs = [
        *(method for method in _GROUPED if method == name),
        *(method for method in _GROUPED if name in inspect.signature(getattr(AlgorithmConfig, method)).parameters),
    ]
    return next(iter([*ours, *theirs]), "")

"""The EnvRunner with a language-model engine inside: many multi-turn episodes at once, tokens in, tokens out.

    driver: play(prompts) ──> rollout.play(engine, environments) ──> SingleAgentEpisodes ──> Groups in the object store
            <── RunnerBatch: GroupMeta (small), transcripts of a few, counts

The runner keeps no state that a restart would lose: prompts, seeds and weights all come from the driver.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import ray
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import NUM_EPISODES

from rllib_srl.engine import Sampling, make_engine
from rllib_srl.engine.canary import CanaryGap
from rllib_srl.engine.fingerprint import Fingerprint
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.sync import WeightBundle
from rllib_srl.models import local_model
from rllib_srl.prompts import PromptSource
from rllib_srl.rollout import EnvCalls, Limits, PlayRequest, make_transcript, play, settle, to_group
from rllib_srl.spaces import TokenSpace
from rllib_srl.types import GroupMeta, Prompt


@dataclass(frozen=True)
class RunnerBatch:
    """What one `play` call tells the driver.

    Invariant: every prompt is either in `groups` or counted in `num_dropped_groups`.
    """

    version: int
    groups: list[GroupMeta]
    num_dropped_groups: int
    stop_reasons: dict[str, int]  # over all episodes, lost ones included
    num_turns: int
    transcripts: list[dict[str, Any]]
    errors: list[str]  # one line for each episode that infrastructure ended
    seconds: dict[str, float] = field(default_factory=dict)  # play_s, and of it engine_s and environment_s
    metrics: Any = None


@dataclass(frozen=True)
class Loaded:
    """How an engine took weights: how far its policy is from the learner's, and get_s, load_s and engine_canary_s."""

    gap: CanaryGap
    seconds: dict[str, float]


class LLMEnvRunner(EnvRunner, Checkpointable):
    """Plays prompts with the engine's current weights.

    Invariant: `engine.version` is the version of the last weights that were verified here.
    """

    def __init__(self, *, config: Any, tune_trial_id: str | None = None, **kwargs: Any) -> None:
        """Start engine and environment threads; RLlib passes `worker_index` and more.

        What goes wrong here is kept for `check_started` to raise: RLlib drops an actor whose constructor
        raises, and the reason with it.
        """
        super().__init__(config=config, **kwargs)
        self.tune_trial_id = tune_trial_id
        self._fault: Exception | None = None
        try:
            self._start()
        except Exception as error:  # any: it is raised again, in the driver
            self._fault = error

    def _start(self) -> None:
        self._model_dir = local_model(self.config.model_config["model"])
        self.engine = make_engine(**self.config.engine_settings(self._model_dir))
        self.tokenizer = load_tokenizer(self._model_dir)
        self.transcript = make_transcript(self.config.prompt_format, self.tokenizer)
        self.calls = EnvCalls(num_workers=self.config.num_env_threads, timeout_s=self.config.env_timeout_s)
        configs = self.config.world_configs()
        self.creators = self.config.world_creators()
        # One callable per world for good: idle instances are kept per callable.
        self.worlds = {env_id: partial(creator, configs[env_id]) for env_id, creator in self.creators.items()}
        self._source: PromptSource | None = None
        self._callbacks = [cls() for cls in _as_list(self.config.callbacks_class)]

    # --- playing ------------------------------------------------------------------------------

    def sample(
        self,
        *,
        prompts: Sequence[Prompt] | None = None,
        group_size: int = 1,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
        **overrides: Any,
    ) -> list[SingleAgentEpisode]:
        """Play episodes to their end and return them, those that infrastructure ended included.

        Args:
            prompts: what to play; None draws from this runner's own stream of training prompts (for use
                outside `SRL`, which always hands prompts over).
            group_size: episodes of each prompt.
            num_timesteps: without `prompts`: play at least this many turns.
            num_episodes: without `prompts`: play this many episodes; default 1.
            explore: False plays greedily.
            random_actions: not possible with a language model; True is refused.
            force_reset: episodes always start fresh; accepted for RLlib's evaluation, which passes it.
            overrides: fields of `Sampling`, such as `temperature`.

        Raises:
            ValueError: `random_actions`, or a prompt that does not fit the limits.
        """
        if random_actions:
            raise ValueError("random_actions = True; a language model has no random action: expected False")
        if explore is False:
            overrides["temperature"] = 0.0
        if prompts is not None:
            return self._play(prompts, group_size, overrides)
        episodes: list[SingleAgentEpisode] = []
        while not _is_enough(episodes, num_timesteps, num_episodes):
            missing = (num_episodes or 1) - len(episodes) if num_timesteps is None else 1
            episodes += self._play(self._own_source().draw(missing), 1, overrides)
        return episodes

    def play_groups(
        self,
        prompts: Sequence[tuple[str, Prompt]],
        group_size: int,
        seed: int | None,
        num_transcripts: int = 0,
        as_groups: bool = True,
        revisits: Collection[str] = (),
        **overrides: Any,
    ) -> RunnerBatch:
        """Play prompts G times each, keep the tokens here, and tell the driver about them.

        Args:
            prompts: (group id, prompt) pairs.
            group_size: G.
            seed: restarts the engine's sampling generator; None leaves it running.
            num_transcripts: how many groups are returned as text as well.
            as_groups: False for evaluation, where single episodes count and nothing trains.
            revisits: ids of the groups whose prompts come from the memory.
            overrides: fields of `Sampling`.
        """
        if seed is not None:
            self.engine.reseed(seed)
        version, start = self.engine.version, time.perf_counter()
        seconds: dict[str, float] = {}
        ids = [group_id for group_id, _ in prompts]
        played = [prompt for _, prompt in prompts]
        episodes = self._play(played, group_size, overrides, ids, seconds, settles=as_groups)
        by_group: dict[str, list[SingleAgentEpisode]] = {group_id: [] for group_id in ids}
        for episode in episodes:
            by_group[episode.custom_data["group_id"]].append(episode)
        least = 2 if as_groups else 1
        groups = [
            to_group(
                prompt,
                group_id,
                by_group[group_id],
                origin="revisit" if group_id in revisits else "fresh",
                at_least=least,
                keep_turns=self.config.replay_task_growth,
            )
            for group_id, prompt in prompts
        ]
        metas = [GroupMeta.of(group, self._keep(group) if as_groups else None) for group in groups if group is not None]
        shown = [line for group_id in ids[:num_transcripts] for line in map(transcript_of, by_group[group_id])]
        errors = [str(e.custom_data["error"]) for e in episodes if e.custom_data.get("error")]
        reasons = Counter(e.custom_data["stop_reason"].value for e in episodes)
        seconds["play_s"] = time.perf_counter() - start
        return RunnerBatch(
            version=version,
            groups=metas,
            num_dropped_groups=len(groups) - len(metas),
            stop_reasons=dict(reasons),
            num_turns=sum(len(episode) for episode in episodes),
            transcripts=shown,
            errors=errors,
            seconds=seconds,
            metrics=self.get_metrics(),
        )

    def _play(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        overrides: Mapping[str, Any],
        group_ids: Sequence[str] | None = None,
        seconds: dict[str, float] | None = None,
        settles: bool = False,
    ) -> list[SingleAgentEpisode]:
        ids = group_ids or [prompt.key for prompt in prompts]
        requests = [
            PlayRequest(prompt, group_id, index)
            for group_id, prompt in zip(ids, prompts, strict=True)
            for index in range(group_size)
        ]
        sampling = {"max_tokens": self.config.max_turn_tokens, "temperature": self.config.temperature, **overrides}
        limits = Limits(
            max_turns=self.config.max_turns,
            max_turn_tokens=self.config.max_turn_tokens,
            max_episode_tokens=self.config.max_episode_tokens or self.engine.context_length,
        )
        episodes = list(
            play(
                requests,
                engine=self.engine,
                worlds=self.worlds,
                transcript=self.transcript,
                sampling=Sampling(**sampling),
                limits=limits,
                calls=self.calls,
                deadline_s=self.config.sample_timeout_s * 0.9,  # so that the runner answers before the driver gives up
                seconds=seconds,
            )
        )
        if settles:
            deadline_s = self.config.sample_timeout_s * 0.05
            settle(episodes, worlds=self.worlds, calls=self.calls, deadline_s=deadline_s)
        for episode in episodes:
            self._callback("on_episode_end", episode=episode)
        self._callback("on_sample_end", samples=episodes)
        self.metrics.log_value(NUM_EPISODES, len(episodes), reduce="sum")
        order = {(request.group_id, request.index): at for at, request in enumerate(requests)}
        return sorted(episodes, key=lambda e: order[e.custom_data["group_id"], e.custom_data["index"]])

    def _own_source(self) -> PromptSource:
        if self._source is None:
            seed = (self.config.seed or 0) + 1000 * (self.worker_index or 0)
            worlds = (self.creators, self.config.world_configs(), self.config.mixture_weights())
            self._source = PromptSource(*worlds, seed, self.config.task_stream())
        return self._source

    def _keep(self, group: Any) -> Any:
        return ray.put(group) if self.config.num_env_runners > 0 else group

    def _callback(self, name: str, **kwargs: Any) -> None:
        shared = {"env_runner": self, "metrics_logger": self.metrics, "env": None, "rl_module": None, "env_index": 0}
        if name == "on_sample_end":
            shared = {"env_runner": self, "metrics_logger": self.metrics}
        make_callback(name, self._callbacks, getattr(self.config, f"callbacks_{name}"), kwargs={**shared, **kwargs})

    # --- weights ------------------------------------------------------------------------------

    def load_weights(
        self, ref: Any, learner_logps: Sequence[np.ndarray], sequences: Sequence[Sequence[int]], timeout_s: float
    ) -> Loaded:
        """Fetch, verify and load weights; return how far the engine's policy is from the learner's.

        Raises:
            WeightSyncError: the receipt failed; the message names version and tensors.
        """
        times = [time.perf_counter()]
        bundle = _fetch(ref, timeout_s)
        times.append(time.perf_counter())
        self.engine.load_weights(bundle)
        times.append(time.perf_counter())
        compared = self.compare(learner_logps, sequences)
        spent = dict(zip(("get_s", "load_s"), (end - start for start, end in pairwise(times)), strict=True))
        return Loaded(compared.gap, {**spent, **compared.seconds})

    def compare(self, learner_logps: Sequence[np.ndarray], sequences: Sequence[Sequence[int]]) -> Loaded:
        """Return how far the engine's policy is from the learner's."""
        start = time.perf_counter()
        gap = CanaryGap.between(self.engine.score(sequences), learner_logps)
        return Loaded(gap, {"engine_canary_s": time.perf_counter() - start})

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Connect to the learner through vLLM's own backend; see `VLLMEngine.init_transfer`."""
        self.engine.init_transfer(init_info)

    def receive_weights(self, update_info: dict[str, Any], version: int) -> None:
        """Take one whole update through vLLM's own backend; see `VLLMEngine.receive`."""
        self.engine.receive(update_info, version)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the engine's log-probs of the canary; see `Engine.score`."""
        return self.engine.score(sequences)

    def fingerprint(self) -> Fingerprint:
        """Return digests of what the engine computes with; see `Engine.fingerprint`."""
        return self.engine.fingerprint()

    def rest(self) -> None:
        """Free the engine's memory for a learner on the same card (`colocate`)."""
        self.engine.sleep()

    def rise(self) -> None:
        """Undo `rest`."""
        self.engine.wake()

    # --- what RLlib asks of an EnvRunner --------------------------------------------------------

    def assert_healthy(self) -> None:
        """Pass: RLlib calls this through `apply`, which ends the actor, and the reason with it, when it raises."""

    def check_started(self) -> None:
        """Raise what the constructor ran into, if anything."""
        if self._fault is not None:
            raise self._fault

    def get_spaces(self) -> dict[str, Any]:
        """Return the token spaces of the model, for every key that RLlib looks up."""
        space = TokenSpace(1 if self._fault else len(self.tokenizer))
        return dict.fromkeys((INPUT_ENV_SPACES, INPUT_ENV_SINGLE_SPACES, DEFAULT_MODULE_ID), (space, space))

    def get_metrics(self) -> Any:
        """Return and reset what callbacks logged here since the last call."""
        return self.metrics.reduce()

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Return nothing: everything that matters lives on the driver."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Ignore RLlib's state: weights arrive verified through `load_weights` only."""

    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        """Return what builds an equal runner."""
        return (), {"config": self.config, "worker_index": self.worker_index}

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """Return nothing; see `get_state`."""
        return []

    def where(self) -> dict[str, Any]:
        """Return process id and node, for messages that name a culprit."""
        return {"pid": os.getpid(), "node": ray.util.get_node_ip_address() if ray.is_initialized() else "local"}

    def stop(self) -> None:
        """Close environments and engine."""
        if self._fault is None:
            self.calls.close()
            self.engine.close()


def transcript_of(episode: SingleAgentEpisode) -> dict[str, Any]:
    """Describe an episode in text, for people; the driver adds advantage and iteration."""
    data = episode.custom_data
    return {
        "group_id": data["group_id"],
        "index": data["index"],
        "env_id": data["prompt"].env_id,
        "prompt_id": data["prompt"].prompt_id,
        "turns": [{"role": role, "text": text} for role, text in data["text"]],
        "reward": float(episode.get_return()),
        "stop_reason": data["stop_reason"].value,
        "version": int(data["versions"][0]),
    }


def _fetch(ref: Any, timeout_s: float) -> WeightBundle:
    return ray.get(ref, timeout=timeout_s) if isinstance(ref, ray.ObjectRef) else ref


def _is_enough(episodes: Sequence[SingleAgentEpisode], num_timesteps: int | None, num_episodes: int | None) -> bool:
    if num_timesteps is not None:
        return sum(len(episode) for episode in episodes) >= num_timesteps
    return len(episodes) >= (num_episodes or 1)


def _as_list(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]

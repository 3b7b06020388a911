"""The EnvRunner with a language-model engine: plays many multi-turn episodes at once, tokens in, tokens out.

    driver: play(prompts) ──> Player(engine, environments) ──> SingleAgentEpisodes ──> Groups in the object store
            <── RunnerBatch: GroupMeta (small), transcripts of a few, counts

With `max_lag` the driver calls `advance` instead, again and again: the runner plays for the time of a slice, returns
the groups that have ended, and keeps the others for the next slice, which may have newer weights.

The runner keeps no state that a restart would lose: prompts, seeds and weights come from the driver. The groups are a
second return value of the same call: the driver owns return values, so they outlive the runner.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Unpack

import gymnasium as gym
import ray
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import NUM_EPISODES

from rllib_srl.common.remote_calls import Place
from rllib_srl.engine import Sampling, import_engine, make_engine
from rllib_srl.engine.fingerprint import Fingerprint
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.sync import WeightBundle
from rllib_srl.rollout.batches import Loaded, PlayArguments, RunnerBatch, Slice
from rllib_srl.rollout.env_calls import EnvCalls, settle
from rllib_srl.rollout.episodes import answers_of, is_unparsed, reward_sums, transcript_of, unpaid_answers
from rllib_srl.rollout.groups_in_play import GroupInPlay, GroupsInPlay
from rllib_srl.rollout.player import Limits, Player
from rllib_srl.rollout.transcript import make_transcript
from rllib_srl.types import Group, GroupMeta, Prompt

PLAY_SHARE = 0.9  # fraction of `sample_timeout_s`, so that the runner returns before the driver's timeout
SETTLE_SHARE = 0.05


class LLMEnvRunner(EnvRunner, Checkpointable):
    """Plays prompts with the engine's current weights.

    Invariant: `engine.version` is the version of the last weights that were verified here.
    """

    def __init__(self, *, config: Any, tune_trial_id: str | None = None, **kwargs: Any) -> None:
        """Start engine and environment threads; RLlib passes `worker_index` and more.

        An exception is stored, and `check_started` raises it: RLlib drops an actor whose constructor
        raises, and the reason with it.
        """
        super().__init__(config=config, **kwargs)
        self.tune_trial_id = tune_trial_id
        self._fault: Exception | None = None
        try:
            self._start()
        except Exception as error:  # any: `check_started` raises it in the driver
            self._fault = error

    def _start(self) -> None:
        if self.worker_index and not self.config.num_gpus_per_env_runner:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # since 2.60 Ray leaves all GPUs visible to actors that have none
        settings = self.config.engine_settings()
        import_engine(**settings)  # takes seconds, while the driver may still unpack the model
        self._model_dir = self.config.model_dir()
        self.engine = make_engine(model_dir=self._model_dir, **settings)
        self.tokenizer = load_tokenizer(self._model_dir)
        self.transcript = make_transcript(self.config.prompt_format, self.tokenizer, self.config.max_turns)
        self.calls = EnvCalls(num_workers=self.config.num_env_threads, timeout_s=self.config.env_timeout_s)
        configs = self.config.env_configs()
        self.creators = self.config.env_creators()
        # The same callable for the runner's lifetime: `EnvPool` discards the instances of another one.
        self.envs = {env_id: partial(creator, configs[env_id]) for env_id, creator in self.creators.items()}
        self._in_play: GroupsInPlay | None = None
        classes = self.config.callbacks_class
        self._callbacks = [cls() for cls in (classes if isinstance(classes, list | tuple) else [classes])]

    # --- playing ------------------------------------------------------------------------------

    def sample(
        self, *, prompts: Sequence[Prompt], group_size: int = 1, explore: bool = True, **overrides: Any
    ) -> list[SingleAgentEpisode]:
        """Play episodes to their end and return them, including those ended by infrastructure.

        Without `explore` the policy plays greedily; overrides are fields of `Sampling`, such as `temperature`.

        Raises:
            ValueError: a prompt that does not fit the limits.
        """
        overrides |= {} if explore else {"temperature": 0.0}
        groups = self._play({str(at): prompt for at, prompt in enumerate(prompts)}, group_size, overrides)
        return [episode for group in groups for episode in group.episodes]

    def play_groups(
        self,
        prompts: Mapping[str, Prompt],
        group_size: int,
        seed: int | None,
        num_transcripts: int = 0,
        as_groups: bool = True,
        revisits: Collection[str] = (),
        with_answers: bool = False,
        min_episodes: int = 2,
        **overrides: Any,
    ) -> RunnerBatch:
        """Play each prompt G times; the `ref` of a group's metadata is the group itself.

        `PlayArguments` explains the arguments; overrides are fields of `Sampling`.
        """
        if seed is not None:
            self.engine.reseed(seed)
        start = time.perf_counter()
        seconds: dict[str, float] = {}
        marks: dict[str, Any] = {"revisits": revisits, "shown": list(prompts)[:num_transcripts]}
        marks["min_episodes"] = min_episodes if as_groups else 1
        played = self._play(prompts, group_size, overrides, seconds, settles=as_groups, **marks)
        batch = self._batch_of(played, as_groups)
        seconds["play_s"] = time.perf_counter() - start
        kept = {meta.group_id for meta in batch.groups} if with_answers else ()
        answers = {group.group_id: answers_of(group.episodes) for group in played if group.group_id in kept}
        return replace(batch, seconds=seconds, metrics=self.get_metrics(), answers=answers)

    def _batch_of(self, played: Sequence[GroupInPlay], as_groups: bool = True) -> RunnerBatch:
        """Return groups, without those with too few valid episodes, and what is counted over all episodes."""
        keeps_turns = self.config.replay_on_group is not None
        groups = [one.collected(keeps_turns) for one in played]
        metas = [GroupMeta.of(group, group if as_groups else None) for group in groups if group is not None]
        episodes = [episode for one in played for episode in one.episodes]
        return RunnerBatch(
            self.engine.version,
            metas,
            len(groups) - len(metas),
            dict(Counter(e.custom_data["stop_reason"].value for e in episodes)),
            num_turns=sum(len(episode) for episode in episodes),
            transcripts=[transcript_of(episode) for one in played if one.is_shown for episode in one.episodes],
            errors=[str(e.custom_data["error"]) for e in episodes if e.custom_data.get("error")],
            num_unparsed=sum(map(is_unparsed, episodes)),
            reward_sums=reward_sums(episodes),
            unpaid=unpaid_answers(episodes),
        )

    @ray.method(num_returns=2)
    def advance(
        self, version: int, slice_s: float, enough: int, begin: PlayArguments | None
    ) -> tuple[Slice | None, list[Group]]:
        """Play for `slice_s` seconds and return the groups that have ended; the others go on in the next slice.

        Weights may be loaded between slices; the next token of every running turn is sampled from the new ones.

        Args:
            version: as in `play_groups_apart`, which says what is returned.
            slice_s: seconds after which the slice ends; it ends earlier if no group is left.
            enough: the slice also ends with this many ended groups; 0: no limit.
            begin: new groups to play; None: no new ones.

        Raises:
            Exception: as in `play_groups`; no group is left in play then.
        """
        if self.engine.version != version:
            return None, []
        if self._in_play is None:
            self._in_play = self._new_play({}, {})  # environments that wait never hold up the engine
        try:
            if begin is not None:
                self._begin(self._in_play, begin)
            ended = self._in_play.advance(time.monotonic() + slice_s, enough)
            batches = self._batches_of(ended)
        except BaseException:
            self.drop_play()
            raise
        apart = {group_id: batch.apart() for group_id, batch in batches.items()}
        groups = [group for _, own in apart.values() for group in own]
        bare = {group_id: batch for group_id, (batch, _) in apart.items()}
        return Slice(bare, self._in_play.take_seconds(), len(self._in_play)), groups

    def _begin(self, in_play: GroupsInPlay, arguments: PlayArguments) -> None:
        if (seed := arguments["seed"]) is not None and not len(in_play):
            self.engine.reseed(seed)
        shown = list(arguments["prompts"])[: arguments.get("num_transcripts", 0)]
        in_play.add(
            arguments["prompts"],
            arguments["group_size"],
            deadline_s=self.config.sample_timeout_s * PLAY_SHARE,
            revisits=arguments.get("revisits", ()),
            shown=shown,
            min_episodes=arguments.get("min_episodes", 2),
        )
        self.engine.expect(in_play.prompts)

    def _batches_of(self, ended: Sequence[GroupInPlay]) -> dict[str, RunnerBatch]:
        """Settle rewards and return a batch for each group; the first one has the runner's metrics."""
        self._end_episodes([episode for one in ended for episode in one.episodes])
        batches: dict[str, RunnerBatch] = {}
        for one in ended:
            metrics = None if batches else self.get_metrics()
            batches[one.group_id] = replace(self._batch_of([one]), metrics=metrics, seconds={"play_s": one.seconds})
        return batches

    def drop_play(self) -> None:
        """Drop all groups in play; nothing of them is returned."""
        if self._in_play is not None:
            self._in_play.close()
        self._in_play = None

    @ray.method(num_returns=2)
    def play_groups_apart(
        self, version: int, **arguments: Unpack[PlayArguments]
    ) -> tuple[RunnerBatch | None, list[Group]]:
        """Play as `play_groups`; return metadata whose `ref` is None, and the groups as a separate object.

        If the engine has another version of the policy, the runner was restarted since and has the weights of its
        files: it returns (None, []) without playing.
        """
        if self.engine.version != version:
            return None, []
        return self.play_groups(**arguments).apart()

    def _play(
        self,
        prompts: Mapping[str, Prompt],
        group_size: int,
        overrides: Mapping[str, Any],
        seconds: dict[str, float] | None = None,
        settles: bool = False,
        **marks: Any,
    ) -> list[GroupInPlay]:
        """Play groups to their end; return them in the order of `prompts`. See `GroupsInPlay.add` for `marks`."""
        if self._in_play:
            raise RuntimeError(f"{len(self._in_play)} groups are in play in slices; finish them first")
        self.engine.expect(set(prompts))
        in_play = self._new_play(overrides, {} if seconds is None else seconds, is_ordered=self.engine.is_reproducible)
        in_play.add(prompts, group_size, deadline_s=self.config.sample_timeout_s * PLAY_SHARE, **marks)
        ended = {group.group_id: group for group in in_play.to_the_end()}
        played = [ended[group_id] for group_id in prompts]
        self._end_episodes([episode for group in played for episode in group.episodes], settles)
        return played

    def _new_play(
        self, overrides: Mapping[str, Any], seconds: dict[str, float], is_ordered: bool = False
    ) -> GroupsInPlay:
        sampling = {"max_tokens": self.config.max_turn_tokens, "temperature": self.config.temperature, **overrides}
        limits = Limits(
            max_turns=self.config.max_turns,
            max_turn_tokens=self.config.max_turn_tokens,
            max_episode_tokens=self.config.max_episode_tokens or self.engine.context_length,
            max_concurrent=self.config.max_concurrent_episodes,
        )
        player = Player(
            engine=self.engine,
            envs=self.envs,
            transcript=self.transcript,
            sampling=Sampling(**sampling),
            limits=limits,
            calls=self.calls,
            is_ordered=is_ordered,
            seconds=seconds,
        )
        return GroupsInPlay(player)

    def _end_episodes(self, episodes: Sequence[SingleAgentEpisode], settles: bool = True) -> None:
        """Settle the rewards of ended episodes, call the callbacks and count the episodes."""
        if settles:
            deadline_s = self.config.sample_timeout_s * SETTLE_SHARE
            settle(episodes, envs=self.envs, calls=self.calls, deadline_s=deadline_s)
        for episode in episodes:
            self._callback("on_episode_end", episode=episode)
        self._callback("on_sample_end", samples=episodes)
        self.metrics.log_value(NUM_EPISODES, len(episodes), reduce="sum")

    def _callback(self, name: str, **kwargs: Any) -> None:
        shared = {"env_runner": self, "metrics_logger": self.metrics, "env": None, "rl_module": None, "env_index": 0}
        if name == "on_sample_end":
            shared = {"env_runner": self, "metrics_logger": self.metrics}
        make_callback(name, self._callbacks, getattr(self.config, f"callbacks_{name}"), kwargs={**shared, **kwargs})

    # --- weights ------------------------------------------------------------------------------

    def load_weights(self, ref: Any, sequences: Sequence[Sequence[int]], timeout_s: float) -> Loaded:
        """Fetch, verify and load weights; return the engine's log-probs of `sequences` under them.

        Raises:
            WeightSyncError: verification failed; the message names version and tensors.
        """
        times = [time.perf_counter()]
        bundle: WeightBundle = ray.get(ref, timeout=timeout_s) if isinstance(ref, ray.ObjectRef) else ref
        times.append(time.perf_counter())
        self.engine.load_weights(bundle)
        times.append(time.perf_counter())
        logps = self.engine.score(sequences)
        times.append(time.perf_counter())
        spent = (end - start for start, end in pairwise(times))
        return Loaded(logps, dict(zip(("get_s", "load_s", "engine_canary_s"), spent, strict=True)))

    def load_noise(self) -> tuple[Fingerprint, Fingerprint]:
        """Load noise in place of the weights; return the engine's fingerprints before and after."""
        before = self.engine.fingerprint()
        self.engine.load_noise()
        return before, self.engine.fingerprint()

    def fingerprint(self) -> Fingerprint:
        return self.engine.fingerprint()

    def sleep(self) -> None:
        """Free the engine's memory for a learner on the same GPU (`colocate`)."""
        self.engine.sleep()

    def wake_up(self) -> None:
        """Undo `sleep`."""
        self.engine.wake()

    # --- RLlib's EnvRunner interface -------------------------------------------------------------

    def assert_healthy(self) -> None:
        """Do nothing: if this raised, RLlib's `apply` would end the actor and lose the reason; see `check_started`."""

    def check_started(self) -> Place:
        """Return where this process is, or raise the exception of the constructor, if there was one."""
        if self._fault is not None:
            raise self._fault
        return Place.here()

    def get_spaces(self) -> dict[str, Any]:
        return token_spaces(1 if self._fault else len(self.tokenizer))

    def get_metrics(self) -> Any:
        """Return and reset the metrics logged on this runner since the last call."""
        return self.metrics.reduce()

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Return {}: the driver holds all state."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Do nothing: weights are set only through `load_weights` and `receive_weights`."""

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[()], dict[str, Any]]:
        """Return the constructor arguments of an equal runner."""
        return (), {"config": self.config, "worker_index": self.worker_index}

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return []

    def stop(self) -> None:
        """Close environments and engine."""
        if self._fault is None:
            self.drop_play()
            self.calls.close()
            self.engine.close()


def token_spaces(vocab_size: int) -> dict[str, Any]:
    """Return the space of token sequences of a model, for observations and actions, under every key of RLlib."""
    space = gym.spaces.Sequence(gym.spaces.Discrete(vocab_size), stack=True)
    return dict.fromkeys((INPUT_ENV_SPACES, INPUT_ENV_SINGLE_SPACES, DEFAULT_MODULE_ID), (space, space))

"""The EnvRunner with a language-model engine: plays many multi-turn episodes at once, tokens in, tokens out.

    driver: play(prompts) ──> Player(engine, environments) ──> SingleAgentEpisodes ──> Groups in the object store
            <── RunnerBatch: GroupMeta (small), transcripts of a few, counts

With `max_lag` the driver calls `advance` instead, again and again: the runner plays for the time of a slice, returns
the groups that have ended, and keeps the others for the next slice, which may have newer weights.

The runner keeps no state that a restart would lose: prompts, seeds and weights come from the driver. The groups are a
second return value of the same call: the driver owns return values, so they outlive the runner.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium as gym
import ray
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import NUM_EPISODES

from rllib_srl.common.callbacks import listed
from rllib_srl.common.remote_calls import Place
from rllib_srl.engine import import_engine, make_engine
from rllib_srl.engine.fingerprint import Fingerprint
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.protocol import Sampling
from rllib_srl.engine.sync import WeightBundle
from rllib_srl.rollout.batches import Loaded, PlayArguments, RunnerBatch, Slice
from rllib_srl.rollout.env_calls import EnvCalls, settle
from rllib_srl.rollout.episodes import (
    MIN_EPISODES,
    LiveEpisode,
    answers_of,
    is_unparsed,
    reward_sums,
    to_group,
    transcript_of,
    unpaid_answers,
)
from rllib_srl.rollout.player import Limits, Player
from rllib_srl.rollout.transcript import make_transcript
from rllib_srl.types import Group, GroupMeta, Prompt

PLAY_SHARE = 0.9  # fraction of `sample_timeout_s`, so that the runner returns before the driver's timeout
SETTLE_SHARE = 0.05


@dataclass
class GroupInPlay:
    """A prompt that is played, and the episodes of it that have ended."""

    group_id: str
    prompt: Prompt
    size: int  # episodes
    is_revisit: bool
    is_shown: bool  # is it in transcripts?
    min_episodes: int
    start: float = field(default_factory=time.monotonic)
    seconds: float = 0.0  # from the start to the end of the last episode
    episodes: list[SingleAgentEpisode] = field(default_factory=list)

    def collected(self, keeps_turns: bool = False) -> Group | None:
        """Return the group of the ended episodes, None if too few are valid; see `to_group`."""
        origin = "revisit" if self.is_revisit else "fresh"
        return to_group(self.prompt, self.group_id, self.episodes, origin, self.min_episodes, keeps_turns)

    def has_ended_with(self, episode: SingleAgentEpisode) -> bool:
        """Add an ended episode; return whether it was the last one."""
        self.episodes.append(episode)
        if len(self.episodes) < self.size:
            return False
        self.episodes.sort(key=lambda ended: ended.custom_data["index"])
        self.seconds = time.monotonic() - self.start
        return True


class GroupsInPlay:
    """Plays groups with one `Player`. Invariant: a group is here until `advance` has returned it."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self._groups: dict[str, GroupInPlay] = {}

    def __len__(self) -> int:
        """Return the number of groups that have not ended."""
        return len(self._groups)

    @property
    def prompts(self) -> dict[str, Prompt]:
        """Return the prompts by group id."""
        return {group_id: group.prompt for group_id, group in self._groups.items()}

    def add(
        self,
        prompts: Mapping[str, Prompt],
        group_size: int,
        *,
        deadline_s: float,
        revisits: Collection[str] = (),
        shown: Collection[str] = (),
        min_episodes: int = MIN_EPISODES,
    ) -> None:
        """Add new groups; `shown` has the ids of those to return as text. See `PlayArguments` and `Player.add`."""
        episodes = [LiveEpisode(prompt, id_, index) for id_, prompt in prompts.items() for index in range(group_size)]
        self._player.add(episodes, deadline_s)
        for group_id, prompt in prompts.items():
            marks = group_id in revisits, group_id in shown
            self._groups[group_id] = GroupInPlay(group_id, prompt, group_size, *marks, min_episodes)

    def advance(self, until: float = math.inf, enough: int = 0) -> list[GroupInPlay]:
        """Play until the monotonic clock shows `until`, no group is left, or `enough` groups have ended (0: any).

        Return the groups that have ended, in this order. Call `close` after an exception.
        """
        ended: list[GroupInPlay] = []
        for episode in self._player.advance(until):
            group = self._groups[episode.custom_data["group_id"]]
            if group.has_ended_with(episode):
                ended.append(self._groups.pop(group.group_id))
                if len(ended) == enough:
                    break
        return ended

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds in the engine and of waiting for environments since the last call."""
        seconds = dict(self._player.seconds)
        self._player.seconds.update(dict.fromkeys(seconds, 0.0))
        return seconds

    def close(self) -> None:
        self._groups.clear()
        self._player.close()


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
        self._error: Exception | None = None
        try:
            self._start()
        except Exception as error:  # any: `check_started` raises it in the driver
            self._error = error

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
        self._callbacks = [cls() for cls in listed(self.config.callbacks_class)]

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
        groups, _ = self._play({str(at): prompt for at, prompt in enumerate(prompts)}, group_size, overrides)
        return [episode for group in groups for episode in group.episodes]

    def play_groups(
        self,
        version: int,
        prompts: Mapping[str, Prompt],
        group_size: int,
        seed: int | None,
        num_transcripts: int = 0,
        as_groups: bool = True,
        revisits: Collection[str] = (),
        with_answers: bool = False,
        min_episodes: int = 2,
        **overrides: Any,
    ) -> tuple[RunnerBatch | None, list[Group]]:
        """Play each prompt G times; return metadata whose `ref` is None, and the groups, [] without `as_groups`.

        If the engine has another version of the policy, the runner was restarted since and has the weights of its
        files: it returns (None, []) without playing. `PlayArguments` explains the arguments; overrides are fields of
        `Sampling`.
        """
        if self.engine.version != version:
            return None, []
        start = time.perf_counter()
        least = min_episodes if as_groups else 1
        marks = {"seed": seed, "num_transcripts": num_transcripts, "revisits": revisits, "min_episodes": least}
        played, seconds = self._play(prompts, group_size, overrides, settles=as_groups, **marks)
        batch, groups = self._batch_of(played)
        seconds["play_s"] = time.perf_counter() - start
        kept = {meta.group_id for meta in batch.groups} if with_answers else ()
        answers = {group.group_id: answers_of(group.episodes) for group in played if group.group_id in kept}
        batch = replace(batch, seconds=seconds, metrics=self.get_metrics(), answers=answers)
        return batch, groups if as_groups else []

    def _batch_of(self, played: Sequence[GroupInPlay]) -> tuple[RunnerBatch, list[Group]]:
        """Return what is counted over all episodes, and the groups with enough valid episodes."""
        keeps_turns = self.config.replay_on_group is not None
        groups = [group for entry in played if (group := entry.collected(keeps_turns)) is not None]
        episodes = [episode for entry in played for episode in entry.episodes]
        batch = RunnerBatch(
            self.engine.version,
            [GroupMeta.of(group, None) for group in groups],
            len(played) - len(groups),
            dict(Counter(e.custom_data["stop_reason"].value for e in episodes)),
            num_turns=sum(len(episode) for episode in episodes),
            transcripts=[transcript_of(episode) for entry in played if entry.is_shown for episode in entry.episodes],
            errors=[str(e.custom_data["error"]) for e in episodes if e.custom_data.get("error")],
            num_unparsed=sum(map(is_unparsed, episodes)),
            reward_sums=reward_sums(episodes),
            unpaid=unpaid_answers(episodes),
        )
        return batch, groups

    def advance(
        self, version: int, slice_s: float, enough: int, begin: PlayArguments | None
    ) -> tuple[Slice | None, list[Group]]:
        """Play for `slice_s` seconds and return the groups that have ended; the others go on in the next slice.

        Weights may be loaded between slices; the next token of every running turn is sampled from the new ones.

        Args:
            version: as in `play_groups`, which says what is returned.
            slice_s: seconds after which the slice ends; it ends earlier if no group is left.
            enough: the slice also ends with this many ended groups; 0: no limit.
            begin: new groups to play; None: no new ones.

        Raises:
            Exception: as in `play_groups`; no group is left in play then.
        """
        if self.engine.version != version:
            return None, []
        if self._in_play is None:
            self._in_play = self._new_play({}, is_ordered=False)  # environments that wait never hold up the engine
        try:
            if begin is not None:
                self._begin(self._in_play, **begin)
            ended = self._in_play.advance(time.monotonic() + slice_s, enough)
            self._end_episodes([episode for entry in ended for episode in entry.episodes])
            batches: dict[str, RunnerBatch] = {}
            groups: list[Group] = []
            for entry in ended:
                batch, group = self._batch_of([entry])
                metrics = None if batches else self.get_metrics()  # the first one has the runner's
                batches[entry.group_id] = replace(batch, metrics=metrics, seconds={"play_s": entry.seconds})
                groups += group
        except BaseException:
            self.drop_play()
            raise
        return Slice(batches, self._in_play.take_seconds(), len(self._in_play)), groups

    def _begin(
        self,
        in_play: GroupsInPlay,
        prompts: Mapping[str, Prompt],
        group_size: int,
        seed: int | None = None,
        num_transcripts: int = 0,
        **marks: Any,
    ) -> None:
        """Add groups; see `PlayArguments`, and `GroupsInPlay.add` for `marks`."""
        if seed is not None and not len(in_play):
            self.engine.reseed(seed)
        shown, deadline_s = list(prompts)[:num_transcripts], self.config.sample_timeout_s * PLAY_SHARE
        in_play.add(prompts, group_size, deadline_s=deadline_s, shown=shown, **marks)
        self.engine.expect(in_play.prompts)

    def drop_play(self) -> None:
        """Drop all groups in play; nothing of them is returned."""
        if self._in_play is not None:
            self._in_play.close()
        self._in_play = None

    def _play(
        self,
        prompts: Mapping[str, Prompt],
        group_size: int,
        overrides: Mapping[str, Any],
        settles: bool = False,
        **marks: Any,
    ) -> tuple[list[GroupInPlay], dict[str, float]]:
        """Play groups to their end; return them in the order of `prompts`, and seconds. See `_begin` for `marks`."""
        if self._in_play:
            raise RuntimeError(f"{len(self._in_play)} groups are in play in slices; finish them first")
        in_play = self._new_play(overrides, is_ordered=self.engine.is_reproducible)
        self._begin(in_play, prompts, group_size, **marks)
        try:
            ended = {group.group_id: group for group in in_play.advance()}
        finally:
            in_play.close()
        played = [ended[group_id] for group_id in prompts]
        self._end_episodes([episode for group in played for episode in group.episodes], settles)
        return played, in_play.take_seconds()

    def _new_play(self, overrides: Mapping[str, Any], is_ordered: bool) -> GroupsInPlay:
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
        )
        return GroupsInPlay(player)

    def _end_episodes(self, episodes: Sequence[SingleAgentEpisode], settles: bool = True) -> None:
        """Settle the rewards of ended episodes, call the callbacks and count the episodes."""
        if settles:
            deadline_s = self.config.sample_timeout_s * SETTLE_SHARE
            settle(episodes, envs=self.envs, calls=self.calls, deadline_s=deadline_s)
        for episode in episodes:
            self._callback("on_episode_end", episode=episode, env=None, rl_module=None, env_index=0)
        self._callback("on_sample_end", samples=episodes)
        self.metrics.log_value(NUM_EPISODES, len(episodes), reduce="sum")

    def _callback(self, name: str, **kwargs: Any) -> None:
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
        self.engine.sleep()

    def wake_up(self) -> None:
        self.engine.wake()

    # --- RLlib's EnvRunner interface -------------------------------------------------------------

    def assert_healthy(self) -> None:
        """Do nothing: if this raised, RLlib's `apply` would end the actor and lose the reason; see `check_started`."""

    def check_started(self) -> Place:
        """Return where this process is, or raise the exception of the constructor, if there was one."""
        if self._error is not None:
            raise self._error
        return Place.here()

    def get_spaces(self) -> dict[str, Any]:
        return token_spaces(1 if self._error else len(self.tokenizer))

    def get_metrics(self) -> Any:
        return self.metrics.reduce()

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Return {}: the driver holds all state."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Do nothing: weights are set only through `load_weights` and `receive_weights`."""

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), {"config": self.config, "worker_index": self.worker_index}

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return []

    def stop(self) -> None:
        if self._error is None:
            self.drop_play()
            self.calls.close()
            self.engine.close()


def token_spaces(vocab_size: int) -> dict[str, Any]:
    """Return the space of token sequences of a model, for observations and actions, under every key of RLlib."""
    space = gym.spaces.Sequence(gym.spaces.Discrete(vocab_size), stack=True)
    return dict.fromkeys((INPUT_ENV_SPACES, INPUT_ENV_SINGLE_SPACES, DEFAULT_MODULE_ID), (space, space))

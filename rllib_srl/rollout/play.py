"""Play prompts to the end: engine and environments take turns until a `StopReason`, many episodes at once.

    request -> construct? -> reset -> [ engine writes a turn -> environment answers ]* -> SingleAgentEpisode
                (thread)    (thread)     (continuous batch)        (thread)

One loop owns everything: it steps the engine while anything is being written, looks without waiting
for environments that have answered in between, and waits for them only while nothing is being written.

An episode has one step a turn: observation = the new prompt-side ids, action = the sampled ids exactly
as sampled, `extra_model_outputs["action_logp"]`, reward. The observation after the last turn is empty.
(An episode that infrastructure ended may close with an observation nobody answered.)
`custom_data` holds `prompt`, `group_id`, `index`, `stop_reason`, `versions`, `text` and `error`.

Every request yields exactly one episode, in order of completion, whatever happens to it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.engine.protocol import Sampling, Turn, TurnWriter
from rllib_srl.rollout.calls import EnvCalls, FinishedCall, one_line
from rllib_srl.rollout.live import LiveEpisode, PlayRequest, fault_of
from rllib_srl.rollout.replies import Reply, construct, reset, step
from rllib_srl.rollout.transcript import Transcript
from rllib_srl.types import StopReason

logger = logging.getLogger(__name__)

# While nothing is being written, answers that come within this of one another are written to together:
# an engine that starts on the first answer alone pays a whole step for one request.
_LINGER_S = 0.002
_MAX_LINGER_S = 0.05
_PAUSED_S = 0.01  # how long to wait before asking a paused engine again


@dataclass(frozen=True)
class Limits:
    """How far an episode may go.

    Invariant: a turn never gets more tokens than are left of `max_episode_tokens` and of the engine's context.
    """

    max_turns: int
    max_turn_tokens: int
    max_episode_tokens: int  # of the whole stream, prompt included
    max_concurrent: int | None = None  # episodes, and so environment instances, at once; None = all

    def __post_init__(self) -> None:
        """Check every value; all faults at once."""
        values = {**vars(self), "max_concurrent": 1 if self.max_concurrent is None else self.max_concurrent}
        faults = [f"{name} = {value}; expected at least 1" for name, value in values.items() if value < 1]
        if faults:
            raise ValueError("limits: " + "; ".join(faults))


def play(
    requests: Sequence[PlayRequest],
    *,
    engine: TurnWriter,
    worlds: Mapping[str, Callable[[], Any]],
    transcript: Transcript,
    sampling: Sampling,
    limits: Limits,
    calls: EnvCalls,
    deadline_s: float,
    seconds: dict[str, float] | None = None,
) -> Iterator[SingleAgentEpisode]:
    """Play every request and yield its episode as soon as it has ended.

    Args:
        requests: what to play, started in this order.
        engine: writes the turns; nothing else may run on it.
        worlds: environment id -> a function that makes an instance.
        transcript: text <-> tokens.
        sampling: temperature, top_p, top_k and further stop strings; `max_tokens` is set turn by turn from `limits`.
        limits: how far an episode may go.
        calls: the threads environments run in, and their idle instances.
        deadline_s: seconds from now after which whatever still runs ends as ABORTED.
        seconds: filled with `engine_s`, the time the engine worked, and `environment_s`, the time it stood still
            because every episode waited for its environment.

    Raises:
        ValueError: at once, for a request twice or of an unknown environment; on the way, for a prompt that is
            empty or leaves no room for a turn.
        TooManyHangingCallsError: see `EnvCalls.poll`.
    """
    names = [(request.group_id, request.index) for request in requests]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"request (group_id, index) = {twice} appears twice; expected each episode once")
    unknown = sorted({request.prompt.env_id for request in requests} - set(worlds))
    if unknown:
        raise ValueError(f"env_id = {', '.join(map(repr, unknown))}; expected one of {', '.join(map(repr, worlds))}")
    return _Loop(
        engine=engine,
        worlds=worlds,
        transcript=transcript,
        sampling=sampling,
        limits=limits,
        calls=calls,
        deadline_s=deadline_s,
        waiting=deque(requests),
        seconds={} if seconds is None else seconds,
    ).run()


@dataclass(eq=False)
class _Loop:
    """The event loop of one `play`.

    Invariant: a live episode is either in `writing` (the engine has its request) or has one call open.
    """

    engine: TurnWriter
    worlds: Mapping[str, Callable[[], Any]]
    transcript: Transcript
    sampling: Sampling
    limits: Limits
    calls: EnvCalls
    deadline_s: float
    waiting: deque[PlayRequest]
    seconds: dict[str, float]
    live: set[LiveEpisode] = field(default_factory=set)
    writing: dict[str, LiveEpisode] = field(default_factory=dict)
    ended: deque[SingleAgentEpisode] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.deadline_s
        self._max_tokens = min(self.limits.max_episode_tokens, self.engine.context_length)
        self.seconds.update(engine_s=0.0, environment_s=0.0)
        self._samplings: dict[tuple[int, tuple[str, ...]], Sampling] = {}

    def run(self) -> Iterator[SingleAgentEpisode]:
        try:
            while self.waiting or self.live:
                self._start()
                for call in self._advance():
                    self._take_reply(call)
                if time.monotonic() >= self._deadline:
                    self._abort_all()
                while self.ended:
                    yield self.ended.popleft()
        finally:  # also when the caller stops listening, or a prompt turns out to be unplayable
            self._drop_all()

    def _start(self) -> None:
        limit = self.limits.max_concurrent
        while self.waiting and (limit is None or len(self.live) < limit):
            live = LiveEpisode(self.waiting.popleft(), self.engine.version)
            self.live.add(live)
            env_id = live.request.prompt.env_id
            live.instance = self.calls.pool.take(env_id, self.worlds[env_id])
            if live.instance is None:
                self._call(live, "construct", construct, self.worlds[env_id])
            else:
                self._call(live, "reset", reset, live.instance.env, live.request.prompt)

    def _call(self, live: LiveEpisode, doing: str, function: Callable[..., Any], *args: Any) -> None:
        live.doing = doing
        self.calls.submit(live, function, *args)

    def _advance(self) -> list[FinishedCall]:
        """Step the engine or, if nothing is being written, wait for environments; return what they answered."""
        if self.writing and not self.engine.is_paused:
            with self._timed("engine_s"):
                self._step_engine()
            return self.calls.poll(0.0)
        if self.writing:
            time.sleep(_PAUSED_S)
            return self.calls.poll(0.0)
        with self._timed("environment_s"):
            replies = self.calls.poll(max(self._deadline - time.monotonic(), 0.0))
            linger_until = time.monotonic() + _MAX_LINGER_S
            while time.monotonic() < linger_until and (more := self.calls.poll(_LINGER_S)):
                replies += more
        return replies

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def _step_engine(self) -> None:
        try:
            turns = self.engine.step()
        except Exception as error:
            message = f"the engine failed while it wrote {len(self.writing)} turns: {one_line(error)}"
            for live in self._stop_writing():
                self._end(live, StopReason.ENGINE_FAILED, message)
            return
        for turn in turns:
            writer = self.writing.pop(turn.request_id, None)
            if writer is None:
                logger.warning("the engine returned turn %s, which nobody waits for", turn.request_id)
            elif fault := fault_of(turn):
                self._end(writer, StopReason.ENGINE_FAILED, f"the engine's turn {turn.request_id} {fault}")
            else:
                self._take_turn(writer, turn)

    def _take_turn(self, live: LiveEpisode, turn: Turn) -> None:
        live.add_turn(turn)
        assert live.instance is not None
        self._call(live, "step", step, live.instance.env, turn.text)

    def _take_reply(self, call: FinishedCall) -> None:
        live = call.call_id
        assert isinstance(live, LiveEpisode)
        if call.error:
            if live.instance is not None and not call.timed_out:  # a hung thread may be inside its instance for ever
                self.calls.discard(live.instance)
            live.instance = None
            reason = StopReason.ENV_TIMEOUT if call.timed_out else StopReason.ENV_CRASHED
            self._end(live, reason, f"{live.where}: {call.error}")
        elif live.doing == "construct":
            live.instance = call.value
            self._call(live, "reset", reset, call.value.env, live.request.prompt)
        elif live.doing == "reset":
            self._begin(live, call.value)
        else:
            self._go_on(live, call.value)

    def _begin(self, live: LiveEpisode, reply: Reply) -> None:
        ids = self.transcript.first(reply.observation, reply.tools)
        if not 0 < len(ids) < self._max_tokens:
            raise ValueError(
                f"prompt {live.request.prompt.prompt_id!r} of environment {live.request.prompt.env_id!r} has "
                f"{len(ids)} tokens; expected 1 to {self._max_tokens - 1}, so that a turn fits max_episode_tokens = "
                f"{self.limits.max_episode_tokens} and the engine's context_length = {self.engine.context_length}"
            )
        live.begin(ids, reply)
        self._write(live)

    def _go_on(self, live: LiveEpisode, reply: Reply) -> None:
        """Close the turn with the environment's answer; end the episode, or let the policy write the next turn."""
        turn = live.turn
        assert turn is not None
        reason = self._ending(live, turn, reply)
        ids = [] if reason else self.transcript.later(reply.observation, live.stream[-1], reply.role)
        if len(live.stream) + len(ids) >= self._max_tokens:
            reason, ids = reason or StopReason.OUT_OF_TOKENS, []
        live.answer(ids, reply)
        if reason:
            self._end(live, reason, is_terminated=reply.is_terminated)
        else:
            self._write(live)

    def _ending(self, live: LiveEpisode, turn: Turn, reply: Reply) -> StopReason | None:
        """Say how the episode ends with this turn, if it does; a turn that was cut off explains every other ending."""
        is_over = reply.is_terminated or reply.is_truncated
        if reply.stop_reason is not None and reply.stop_reason.is_infrastructure:
            return reply.stop_reason  # nobody graded it, however it was cut off
        if not is_over and live.num_turns < self.limits.max_turns:
            return None
        if turn.reason == "length":
            return StopReason.OUT_OF_TOKENS
        if not is_over:
            return StopReason.OUT_OF_TURNS
        return reply.stop_reason or (StopReason.TERMINATED if reply.is_terminated else StopReason.TRUNCATED)

    def _write(self, live: LiveEpisode) -> None:
        """Let the engine write the next turn."""
        live.doing = "writing"
        request_id = f"{live.request.group_id}/{live.request.index}/{live.num_turns}"
        try:
            with self._timed("engine_s"):
                self.engine.submit(request_id, live.stream, self._sampling_of(live))
        except Exception as error:
            self._end(live, StopReason.ENGINE_FAILED, f"{live.where}: {one_line(error)}")
        else:
            self.writing[request_id] = live

    def _sampling_of(self, live: LiveEpisode) -> Sampling:
        assert live.instance is not None
        room = min(self.limits.max_turn_tokens, self._max_tokens - len(live.stream))
        key = (room, live.instance.stop_strings)
        if key not in self._samplings:
            stop = self.sampling.stop + self.transcript.stop(live.instance.stop_strings)
            self._samplings[key] = replace(self.sampling, max_tokens=room, stop=stop)
        return self._samplings[key]

    def _end(self, live: LiveEpisode, reason: StopReason, error: str = "", is_terminated: bool = False) -> None:
        """Take the episode out of the loop, to be yielded."""
        if error:
            logger.info("episode %s ended as %s: %s", live.episode.id_, reason.value, error)
        self.live.discard(live)
        self._give_back(live)
        self.ended.append(live.finish(reason, error, is_terminated))

    def _give_back(self, live: LiveEpisode) -> None:
        if live.instance is not None:
            self.calls.pool.put(live.request.prompt.env_id, live.instance)
            live.instance = None

    def _stop_writing(self) -> list[LiveEpisode]:
        """Take everything back from the engine."""
        stopped, request_ids = list(self.writing.values()), list(self.writing)
        self.writing.clear()
        try:
            self.engine.abort(request_ids)
        except Exception as error:  # an engine that has just failed may fail here too
            logger.warning("the engine could not drop %d requests: %s", len(request_ids), one_line(error))
        return stopped

    def _abort_all(self) -> None:
        """End every episode that has not ended, started or not."""
        unfinished = sorted(self.live, key=lambda live: (live.request.group_id, live.request.index))
        self._drop_all()
        unfinished += [LiveEpisode(request, self.engine.version) for request in self.waiting]
        self.waiting.clear()
        for live in unfinished:
            self._end(live, StopReason.ABORTED, f"{live.where}: deadline_s = {self.deadline_s:g} passed")

    def _drop_all(self) -> None:
        """Leave nothing behind in the engine or in the threads; an instance that a call is inside of is lost."""
        for live in self._stop_writing() if self.writing else []:
            self._give_back(live)
        inside = self.calls.abandon(self.live)
        for live in self.live:
            if live.instance is not None and live not in inside:
                self.calls.discard(live.instance)
            live.instance = None
        self.live.clear()

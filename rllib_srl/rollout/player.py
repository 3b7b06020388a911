"""Play prompts to the end: engine and environments alternate until a `StopReason`, many episodes at once.

    LiveEpisode -> construct? -> reset -> [ engine generates a turn -> environment step ]* -> SingleAgentEpisode
                    (thread)    (thread)     (continuous batch)        (thread)

One event loop: it steps the engine while any turn is being generated, polls the environment calls in
between without waiting, and waits for them only while no turn is being generated.

An episode has one step per turn: observation = the new prompt-side ids, action = the sampled ids exactly
as sampled, `extra_model_outputs["action_logp"]`, reward. The observation after the last turn is empty.
(An episode ended by infrastructure may close with an observation that has no turn.)
`custom_data` holds `prompt`, `group_id`, `index`, `stop_reason`, `versions`, `text`, `error`, `pass_reward`, `starts`.

An environment whose agent calls the policy itself (`Reply.ask`) works the same way: a call is a turn, and
`Conversations` decides what tokens it is given. The episode is written when it ends, one conversation after the other.

Every `LiveEpisode` yields exactly one episode, in order of completion, for every `StopReason`.

    player.add(episodes, deadline_s)
    for episode in player.advance(until)        in slices, with new episodes between them, or to the end
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.engine.protocol import Sampling, Turn, TurnWriter
from rllib_srl.rollout.conversations import OUT_OF_CALLS, TOO_LONG, AskRefusedError, Conversations
from rllib_srl.rollout.env_calls import EnvCalls, FinishedCall, RunEndedError, one_line
from rllib_srl.rollout.episodes import LiveEpisode
from rllib_srl.rollout.replies import Reply, answer, construct, refuse, reset, step
from rllib_srl.rollout.transcript import Transcript
from rllib_srl.types import ProcessBrokenError, StopReason

logger = logging.getLogger(__name__)

# While no turn is being generated, replies that arrive within this time of one another start together:
# an engine that starts on the first reply alone spends a whole step on one request.
_LINGER_S = 0.002
_MAX_LINGER_S = 0.05
_REST_S = 0.1  # seconds after which a slice ends while all episodes wait for their environments
_MAX_REFUSED = 8  # refused calls with which an episode ends
# Refusals after which the failure of an agent counts as an ending that the policy caused.
_REFUSED_AS = {OUT_OF_CALLS: StopReason.OUT_OF_TURNS, TOO_LONG: StopReason.OUT_OF_TOKENS}


def first_ids(transcript: Transcript, reply: Reply) -> list[int]:
    """Return the tokens with which an episode begins, from the reply to its reset.

    Raises:
        ValueError: the chat template does not support the reply, or refuses its messages.
    """
    if not reply.messages or not transcript.is_chat:
        return transcript.first(reply.observation, reply.tools, reply.system)
    system = [{"role": "system", "content": reply.system}] if reply.system else []
    try:
        return transcript.whole([*system, *reply.messages], reply.tools)
    except Exception as error:  # templates may raise anything to refuse a conversation
        roles = ", ".join(message["role"] for message in (*system, *reply.messages))
        raise ValueError(
            f"the chat template refuses a prompt with the roles {roles} ({one_line(error)}); expected user "
            "and assistant to alternate, as the template demands, or prompt_format = 'text'"
        ) from error


def _policy_caused(live: LiveEpisode) -> StopReason | None:
    """Return the limit that the policy reached before its agent failed; None if the agent failed by itself."""
    has_turns = live.conversations is not None and live.conversations.num_turns > 0
    return live.refused_as if has_turns else None


def error_of(turn: Turn) -> str:
    """Return the reason why a turn is unusable, or ""."""
    if turn.reason == "aborted":
        return "was aborted by the engine"
    if not 0 < len(turn.token_ids) == len(turn.logp):
        return f"has {len(turn.token_ids)} tokens and {len(turn.logp)} log-probs; expected equal numbers of at least 1"
    if not (np.isfinite(turn.logp).all() and (turn.logp <= 1e-4).all()):
        return "has a log-prob that is not finite and <= 0"
    return ""


@dataclass(frozen=True)
class Limits:
    """The limits of an episode.

    Invariant: a turn never gets more tokens than remain of `max_episode_tokens` and of the engine's context.
    """

    max_turns: int
    max_turn_tokens: int
    max_episode_tokens: int  # maximum of the whole stream, prompt included
    max_concurrent: int | None = None  # concurrent episodes, and so environment instances; None = all


@dataclass(eq=False)
class Player:
    """The event loop: plays the episodes that it was given, to the end or in slices.

    Invariant: a live episode is in `writing` (the engine has its request), in `ready`, or has one open call.
    """

    engine: TurnWriter  # it must have no other requests
    envs: Mapping[str, Callable[[], Any]]  # environment id -> a function that makes an instance
    transcript: Transcript
    sampling: Sampling  # temperature and further stop strings; `max_tokens` is set per turn from `limits`
    limits: Limits
    calls: EnvCalls  # the threads environments run in, and their idle instances
    is_ordered: bool  # step the engine only while no environment call is open; see `_advance`
    # environment_s: while every episode waits for its environment
    seconds: dict[str, float] = field(default_factory=lambda: {"engine_s": 0.0, "environment_s": 0.0})
    waiting: deque[LiveEpisode] = field(default_factory=deque)
    live: set[LiveEpisode] = field(default_factory=set)
    writing: dict[str, LiveEpisode] = field(default_factory=dict)
    ready: list[LiveEpisode] = field(default_factory=list)  # to be submitted; only if `is_ordered`
    ended: deque[SingleAgentEpisode] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._deadline = self._until = math.inf  # the earliest of the unfinished episodes; the end of the slice
        self._num_added = 0
        self._max_tokens = min(self.limits.max_episode_tokens, self.engine.context_length)
        self._samplings: dict[tuple[Any, ...], Sampling] = {}

    def add(self, episodes: Sequence[LiveEpisode], deadline_s: float) -> None:
        """Queue new episodes, to be started in this order and changed in place.

        Those that are unfinished `deadline_s` seconds from now end as ABORTED.

        Raises:
            ValueError: an unknown environment; nothing was queued.
        """
        unknown = sorted({live.prompt.env_id for live in episodes} - set(self.envs))
        if unknown:
            known = ", ".join(map(repr, self.envs))
            raise ValueError(f"env_id = {', '.join(map(repr, unknown))}; expected one of {known}")
        deadline = time.monotonic() + deadline_s
        for place, live in enumerate(episodes, self._num_added):
            live.place, live.deadline_s, live.deadline = place, deadline_s, deadline
        self._num_added += len(episodes)
        self._deadline = min(self._deadline, deadline)
        self.waiting.extend(episodes)

    @property
    def num_unfinished(self) -> int:
        """Return how many episodes have not ended, started or not."""
        return len(self.waiting) + len(self.live)

    def advance(self, until: float = math.inf) -> Iterator[SingleAgentEpisode]:
        """Play until no episode is left or the monotonic clock shows `until`; yield each episode as it ends.

        A slice, which has a finite `until`, also ends once every episode has waited for its environment for `_REST_S`:
        new episodes and new weights need not wait for the rest of it. Call `close` after an exception.

        Raises:
            TooManyHangingCallsError: see `EnvCalls.poll`.
            RunEndedError: an environment raised an exception with `ends_run`.
            ProcessBrokenError: the engine cannot be used any further.
        """
        self._until = until
        yield from self._take_ended()  # the caller may have stopped iterating
        while self.num_unfinished and time.monotonic() < until:
            self._start()
            is_at_rest = not self.writing and until < math.inf
            replies = self._advance()
            for call in replies:
                self._take_reply(call)
            if time.monotonic() >= self._deadline:
                self._abort_overdue()
            yield from self._take_ended()
            if is_at_rest and not replies:
                return

    def _take_ended(self) -> Iterator[SingleAgentEpisode]:
        while self.ended:
            yield self.ended.popleft()

    def close(self) -> None:
        """Drop all episodes without ending them: their requests, and the environments with a running call."""
        for live in [*self._stop_writing(list(self.writing)), *self.ready]:
            self._give_back(live)
        self.ready.clear()
        self.waiting.clear()
        self._abandon(self.live)
        self.live.clear()

    def _start(self) -> None:
        limit = self.limits.max_concurrent
        while self.waiting and (limit is None or len(self.live) < limit):
            live = self.waiting.popleft()
            live.versions = (self.engine.version, self.engine.version)
            self.live.add(live)
            creator = self.envs[live.prompt.env_id]
            live.instance = self.calls.pool.take(creator)
            if live.instance is None:
                self._call(live, "construct", construct, creator)
            else:
                self._call(live, "reset", reset, live.instance.env, live.prompt)

    def _call(self, live: LiveEpisode, doing: str, function: Callable[..., Any], *args: Any) -> None:
        live.doing = doing
        self.calls.submit(live, function, *args)

    def _advance(self) -> list[FinishedCall]:
        """Step the engine or, if no turn is being generated, wait for environments; return the finished calls.

        With `is_ordered` the engine is stepped only while no environment call is open, and gets the turns in the order
        of the episodes. Otherwise the timing of the environment threads would decide which turns share a batch, and so
        how the log-probs of a reproducible engine are rounded.
        """
        if self.is_ordered:
            if num_open := len(self.live) - len(self.writing) - len(self.ready):
                return self._all_replies(num_open)
            for live in sorted(self.ready, key=_place_of):
                self._submit(live)
            self.ready.clear()
        if self.writing:
            with self._timed("engine_s"):
                self._step_engine()
            return self.calls.poll(0.0)
        with self._timed("environment_s"):
            replies = self.calls.poll(self._patience())
            linger_until = time.monotonic() + _MAX_LINGER_S
            while time.monotonic() < linger_until and (more := self.calls.poll(_LINGER_S)):
                replies += more
        return replies

    def _all_replies(self, num_open: int) -> list[FinishedCall]:
        """Wait for all open calls, at most until the slice ends; return the finished ones in the order of episodes."""
        replies: list[FinishedCall] = []
        with self._timed("environment_s"):
            while len(replies) < num_open and self._patience():
                replies += self.calls.poll(self._patience())
        return sorted(replies, key=lambda call: _place_of(call.call_id))

    def _patience(self) -> float:
        """Return for how many seconds to wait for environments: until an episode is overdue or the slice ends."""
        longest = math.inf if self._until == math.inf else _REST_S
        return max(0.0, min(longest, min(self._deadline, self._until) - time.monotonic()))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def _step_engine(self) -> None:
        try:
            turns = self.engine.step()
        except ProcessBrokenError:
            raise
        except Exception as error:
            message = f"the engine failed while generating {len(self.writing)} turns: {one_line(error)}"
            for live in self._stop_writing(list(self.writing)):
                self._end(live, StopReason.ENGINE_FAILED, message)
            return
        for turn in turns:
            writer = self.writing.pop(turn.request_id, None)
            if writer is None:
                logger.warning("the engine returned an unknown turn %s", turn.request_id)
            elif reason := error_of(turn):
                self._end(writer, StopReason.ENGINE_FAILED, f"turn {turn.request_id} of the engine {reason}")
            else:
                self._take_turn(writer, turn)

    def _take_turn(self, live: LiveEpisode, turn: Turn) -> None:
        live.add_turn(turn)
        assert live.instance is not None
        if live.conversations is not None:
            self._call(live, "step", answer, live.instance.env, turn.text, turn.reason, live.stream, turn.token_ids)
        else:
            self._call(live, "step", step, live.instance.env, turn.text, turn.token_ids, live.versions[1])

    def _take_reply(self, call: FinishedCall) -> None:
        live = call.call_id
        assert isinstance(live, LiveEpisode)
        if call.ends_run:
            raise RunEndedError(f"environment {live.prompt.env_id!r}: {call.error.partition(': ')[2]}")
        if call.error:
            if live.instance is not None:
                stop = self.calls.abandon_instance if call.timed_out else self.calls.discard
                stop(live.instance)  # after a timeout a hung thread may still be executing in it
            live.instance = None
            reason = StopReason.ENV_TIMEOUT if call.timed_out else StopReason.ENV_CRASHED
            self._end(live, _policy_caused(live) or reason, f"{live.where}: {call.error}")
        elif live.doing == "construct":
            live.instance = call.value
            self._call(live, "reset", reset, call.value.env, live.prompt)
        elif live.doing == "reset":
            self._begin(live, call.value)
        elif live.conversations is not None:
            self._hear(live, call.value)
        else:
            self._go_on(live, call.value)

    def _begin(self, live: LiveEpisode, reply: Reply) -> None:
        if reply.ask is not None:
            live.conversations = Conversations(self.transcript, self._max_tokens)
            live.begin([], reply)
            self._hear(live, reply)
            return
        try:
            ids = first_ids(self.transcript, reply)
        except ValueError as error:
            if not reply.messages:
                raise
            self._end(live, StopReason.ENV_CRASHED, f"{live.where}: {error}")  # only this row of data is at fault
            return
        if not 0 < len(ids) < self._max_tokens:
            message = (
                f"prompt {live.prompt.prompt_id!r} of environment {live.prompt.env_id!r} has "
                f"{len(ids)} tokens; expected 1 to {self._max_tokens - 1}, so that a turn fits max_episode_tokens = "
                f"{self._max_tokens}"
            )
            self._end(live, StopReason.PROMPT_TOO_LONG, message)
            return
        live.begin(ids, reply)
        self._write(live)

    def _go_on(self, live: LiveEpisode, reply: Reply) -> None:
        """Close the turn with the environment's reply; end the episode or start the policy's next turn."""
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

    def _hear(self, live: LiveEpisode, reply: Reply) -> None:
        """Handle what an agent did after its last call: another call, which gets a turn or is refused, or the end."""
        assert live.conversations is not None and live.instance is not None
        live.conversations.answered(reply.answered)
        turn, live.turn, live.last_reply = live.turn, None, reply
        if reply.is_terminated or reply.is_truncated:
            if not live.conversations.num_turns:
                self._end(live, StopReason.ENV_CRASHED, f"{live.where}: the agent ended before a call was answered")
                return
            self._end(live, self._ending_of_agent(live, turn, reply), is_terminated=reply.is_terminated)
            return
        assert reply.ask is not None  # `replies` checks it
        live.ask = reply.ask
        try:
            if live.num_turns >= self.limits.max_turns:
                raise AskRefusedError(OUT_OF_CALLS, f"the episode has used {self.limits.max_turns} calls (max_turns)")
            live.stream = live.conversations.open(reply.ask)
        except AskRefusedError as refusal:
            self._refuse(live, refusal)
        else:
            self._write(live)

    def _refuse(self, live: LiveEpisode, refusal: AskRefusedError) -> None:
        assert live.instance is not None
        live.num_refused += 1
        live.refused_as = _REFUSED_AS.get(refusal.code, live.refused_as)
        if live.num_refused > _MAX_REFUSED:
            self.calls.discard(live.instance)
            live.instance = None
            reason = _policy_caused(live) or StopReason.ENV_CRASHED
            self._end(live, reason, f"{live.where}: more than {_MAX_REFUSED} calls were refused, the last: {refusal}")
            return
        self._call(live, "step", refuse, live.instance.env, refusal.code, str(refusal))

    def _ending_of_agent(self, live: LiveEpisode, turn: Turn | None, reply: Reply) -> StopReason:
        if reply.stop_reason is not None:
            return reply.stop_reason
        if turn is not None and turn.reason == "length":
            return StopReason.OUT_OF_TOKENS
        return StopReason.TERMINATED if reply.is_terminated else StopReason.TRUNCATED

    def _ending(self, live: LiveEpisode, turn: Turn, reply: Reply) -> StopReason | None:
        """Return the stop reason if the episode ends with this turn, else None.

        Infrastructure comes first, then a turn that was cut off, then the other reasons.
        """
        is_over = reply.is_terminated or reply.is_truncated
        if reply.stop_reason is not None and reply.stop_reason.is_infrastructure:
            return reply.stop_reason  # not graded, so whether the turn was cut off does not matter
        if not is_over and live.num_turns < self.limits.max_turns:
            return None
        if turn.reason == "length":
            return StopReason.OUT_OF_TOKENS
        if not is_over:
            return StopReason.OUT_OF_TURNS
        return reply.stop_reason or (StopReason.TERMINATED if reply.is_terminated else StopReason.TRUNCATED)

    def _write(self, live: LiveEpisode) -> None:
        """Start the next turn: submit it, or queue it if `is_ordered`."""
        live.doing = "writing"
        if self.is_ordered:
            self.ready.append(live)
        else:
            self._submit(live)

    def _submit(self, live: LiveEpisode) -> None:
        request_id = f"{live.group_id}/{live.index}/{live.num_turns}"
        try:
            with self._timed("engine_s"):
                self.engine.submit(request_id, live.stream, self._sampling_of(live))
        except ProcessBrokenError:
            raise
        except Exception as error:
            self._end(live, StopReason.ENGINE_FAILED, f"{live.where}: {one_line(error)}")
        else:
            self.writing[request_id] = live

    def _sampling_of(self, live: LiveEpisode) -> Sampling:
        assert live.instance is not None
        room = min(self.limits.max_turn_tokens, self._max_tokens - len(live.stream))
        if live.ask is not None and live.ask.max_tokens is not None:
            room = min(room, live.ask.max_tokens)
        ends = self.transcript.end_ids
        key = (room, live.ask.stop if live.ask is not None else live.instance.stop_strings, ends)
        if key not in self._samplings:
            stop_strings = live.ask.stop if live.ask is not None else self.transcript.stop(live.instance.stop_strings)
            stop = self.sampling.stop + stop_strings
            self._samplings[key] = replace(self.sampling, max_tokens=room, stop=stop, end_ids=ends)
        return self._samplings[key]

    def _end(self, live: LiveEpisode, reason: StopReason, error: str = "", is_terminated: bool = False) -> None:
        """Remove the episode from the loop and queue it for `advance` to yield."""
        if error:
            logger.info("episode %s ended as %s: %s", live.episode.id_, reason.value, error)
        self.live.discard(live)
        self._give_back(live)
        self.ended.append(live.finish(reason, error, is_terminated))

    def _give_back(self, live: LiveEpisode) -> None:
        if live.instance is not None:
            self.calls.pool.put(live.instance)
            live.instance = None

    def _stop_writing(self, request_ids: Sequence[str]) -> list[LiveEpisode]:
        """Abort requests of the engine; return their episodes."""
        if not request_ids:
            return []
        stopped = [self.writing.pop(request_id) for request_id in request_ids]
        try:
            self.engine.abort(request_ids)
        except Exception as error:  # an engine that has just failed may fail here too
            logger.warning("the engine could not abort %d requests: %s", len(request_ids), one_line(error))
        return stopped

    def _abandon(self, episodes: Collection[LiveEpisode]) -> None:
        """Abandon the open calls of episodes and give up their instances; one with a running call is lost."""
        inside = self.calls.abandon(episodes)
        for live in episodes:
            if live.instance is not None:
                (self.calls.abandon_instance if live in inside else self.calls.discard)(live.instance)
            live.instance = None

    def _abort_overdue(self) -> None:
        """End the episodes whose deadline has passed as ABORTED, started or not; an instance in a call is lost."""
        now = time.monotonic()
        overdue = [live for live in self.live if live.deadline <= now]
        requests = [request_id for request_id, live in self.writing.items() if live.deadline <= now]
        stopped = {*self._stop_writing(requests), *(live for live in self.ready if live.deadline <= now)}
        self.ready = [live for live in self.ready if live not in stopped]
        self._abandon([live for live in overdue if live not in stopped])
        unstarted = [live for live in self.waiting if live.deadline <= now]
        self.waiting = deque(live for live in self.waiting if live.deadline > now)
        for live in unstarted:
            live.versions = (self.engine.version, self.engine.version)
        for live in [*sorted(overdue, key=lambda live: (live.group_id, live.index)), *unstarted]:
            self._end(live, StopReason.ABORTED, f"{live.where}: deadline_s = {live.deadline_s:g} passed")
        self._deadline = min((live.deadline for live in (*self.live, *self.waiting)), default=math.inf)


def _place_of(live: Hashable) -> int:
    assert isinstance(live, LiveEpisode)
    return live.place

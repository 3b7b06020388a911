"""Rollout: play prompts to episodes and collect the episodes of a prompt in a group.

    play(episodes, engine, worlds, ...) -> episodes in order of completion -> settle -> to_group -> Group

`player`        the event loop of `play`; `live_episode` an episode while it is played
`env_calls`     the threads that environments run in, and the pool of idle instances
`replies`       validation of an environment's replies
`transcript`    text <-> tokens, control tokens
`groups`        episodes <-> groups, rewards that depend on the whole group
`env_runner`    the EnvRunner with an engine; `batches` what it returns; `runner_group` the calls to several
"""

from rllib_srl.rollout.env_calls import EnvCalls, FinishedCall, TooManyHangingCallsError
from rllib_srl.rollout.groups import answers_of, flatten, settle, to_episodes, to_group
from rllib_srl.rollout.live_episode import LiveEpisode
from rllib_srl.rollout.player import Limits, play
from rllib_srl.rollout.transcript import ChatTranscript, RawTranscript, Transcript, make_transcript

__all__ = [
    "ChatTranscript",
    "EnvCalls",
    "FinishedCall",
    "Limits",
    "LiveEpisode",
    "RawTranscript",
    "TooManyHangingCallsError",
    "Transcript",
    "answers_of",
    "flatten",
    "make_transcript",
    "play",
    "settle",
    "to_episodes",
    "to_group",
]

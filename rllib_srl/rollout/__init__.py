"""Playing: prompts become episodes, episodes become groups.

    play(requests, engine, worlds, ...) -> episodes in order of completion -> settle -> to_group -> Group

`calls` are the threads environments run in, `pool` their idle instances, `replies` what they may answer,
`transcript` text <-> tokens, `live` one episode under way, `settling` rewards that a whole group decides.
"""

from rllib_srl.rollout.calls import EnvCalls, FinishedCall, TooManyHangingCallsError
from rllib_srl.rollout.groups import flatten, to_episodes, to_group
from rllib_srl.rollout.live import PlayRequest
from rllib_srl.rollout.play import Limits, play
from rllib_srl.rollout.settling import settle
from rllib_srl.rollout.transcript import ChatTranscript, RawTranscript, Transcript, make_transcript

__all__ = [
    "ChatTranscript",
    "EnvCalls",
    "FinishedCall",
    "Limits",
    "PlayRequest",
    "RawTranscript",
    "TooManyHangingCallsError",
    "Transcript",
    "flatten",
    "make_transcript",
    "play",
    "settle",
    "to_episodes",
    "to_group",
]

"""Workers that are closed again, a tokeniser, and `play` with everything filled in."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from typing import Any

import pytest

from rllib_srl.engine.protocol import Sampling
from rllib_srl.rollout.env_calls import EnvCalls
from rllib_srl.rollout.player import Limits
from rllib_srl.rollout.transcript import RawTranscript
from tests.rollout.fakes import FakeEnv, make_tokenizer, play


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer(merges=[("a", "b")])


@pytest.fixture
def calls() -> Iterator[EnvCalls]:
    """Return four workers; a test in which a call hangs shortens `timeout_s` when the others have ended."""
    calls = EnvCalls(4, 20.0)
    yield calls
    calls.close(1.0)


@pytest.fixture
def play_with(calls: EnvCalls, tokenizer: Any):
    """Return `play` with defaults for all it needs; `limits` is a dictionary of changes."""
    FakeEnv.made.clear()

    def play_some(live, engine, envs=None, limits=None, deadline_s=60.0, **changes):
        defaults = {"max_turns": 4, "max_turn_tokens": 50, "max_episode_tokens": 500}
        return play(
            live, engine=engine, envs=envs or {"env": FakeEnv},
            transcript=changes.pop("transcript", None) or RawTranscript(tokenizer),
            sampling=changes.pop("sampling", None) or Sampling(max_tokens=1, temperature=0.7),
            limits=Limits(**{**defaults, **(limits or {})}), calls=changes.pop("calls", None) or calls,
            deadline_s=deadline_s,
        )  # fmt: skip

    return play_some

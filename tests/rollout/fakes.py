"""A tokeniser, an engine that writes what a script says, and small environments, good and hostile."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rllib_srl.engine.protocol import EngineError, Sampling, Turn
from rllib_srl.rollout.episodes import LiveEpisode
from rllib_srl.rollout.player import Player
from rllib_srl.types import Prompt

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")


def make_tokenizer(
    *,
    chat_template: str | None = None,
    with_bos: bool = True,
    merges: Sequence[tuple[str, str]] = (),
    specials: Sequence[str] = SPECIAL,
):
    """Return a byte-level tokeniser: specials (ids 0-3), then one id a byte in alphabet order, then one a merge."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    if with_bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    eos = "<|im_end|>" if chat_template else "<eos>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token=eos, additional_special_tokens=list(specials[2:])
    )
    tokenizer.chat_template = chat_template
    return tokenizer


class ScriptedEngine:
    """Writes `script(request_id, prompt ids)`, one token a step; log-prob of token i of a turn is -(i + 1) / 8.

    A turn longer than `max_tokens` is cut off with the reason "length". `log` holds what happened, in order.
    """

    def __init__(
        self,
        tokenizer: Any,
        script: Callable[[str, list[int]], Sequence[int]],
        context_length: int = 1000,
        step_s: float = 0.0,
    ) -> None:
        self.tokenizer, self.script, self.context_length, self.step_s = tokenizer, script, context_length, step_s
        self.version, self.is_reproducible = 7, False
        self.log: list[tuple[str, str]] = []
        self.submitted: dict[str, tuple[list[int], Sampling]] = {}
        self.num_steps = 0
        self._running: dict[str, tuple[list[int], int, int]] = {}  # ids to write, written, first version

    def expect(self, group_ids: Any) -> None:
        """As an engine with a model."""

    def submit(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> None:
        if request_id in self.submitted or not 0 < len(token_ids) < self.context_length:
            raise EngineError(f"request {request_id!r} with {len(token_ids)} tokens")
        self.submitted[request_id] = (list(token_ids), sampling)
        self.log.append(("submit", request_id))
        self._running[request_id] = (list(self.script(request_id, list(token_ids))), 0, self.version)

    def step(self) -> list[Turn]:
        self.num_steps += 1
        time.sleep(self.step_s)
        turns = []
        for request_id, (ids, written, first_version) in list(self._running.items()):
            written += 1
            limit = self.submitted[request_id][1].max_tokens
            self._running[request_id] = (ids, written, first_version)
            if written < min(len(ids), limit):
                continue
            del self._running[request_id]
            self.log.append(("turn", request_id))
            reason = "stop" if len(ids) <= limit else "length"
            turns.append(self._turn(request_id, ids[:limit], reason, first_version))
        return turns

    def _turn(self, request_id: str, ids: list[int], reason: str, first_version: int) -> Turn:
        return Turn(
            request_id=request_id, token_ids=np.array(ids, np.int32),
            logp=-np.arange(1, len(ids) + 1, dtype=np.float32) / 8,
            text=self.tokenizer.decode(ids, skip_special_tokens=True), reason=reason, first_version=first_version,
            last_version=self.version,
        )  # fmt: skip

    def num_running(self) -> int:
        return len(self._running)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.log.append(("abort", request_id))
            self._running.pop(request_id, None)


class FakeEnv(gym.Env):
    """Asks, answers each turn with "[text]", and after `num_turns` pays the number of the letter "x" in the last.

    The prompt id may name a mischief: "crash-reset", "sleep-step" and so on. Instances are counted,
    and one that two threads are inside of at once says so.
    """

    made: list["FakeEnv"] = []
    stop_strings: tuple[str, ...] = ("\n",)

    def __init__(self, num_turns: int = 1, mischief: str = ""):
        if mischief:
            misbehave(mischief, "construct")
        self.num_turns, self.num_closed, self.num_resets, self.turn = num_turns, 0, 0, 0
        self._inside = threading.Lock()
        FakeEnv.made.append(self)

    def prompt_ids(self, split: str, seed: int) -> list[str]:
        return []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        with self._alone():
            assert options is not None
            self.turn, self.prompt_id = 0, options["prompt_id"]
            self.num_resets += 1
            misbehave(self.prompt_id, "reset")
            return "".join(options["history"]) + f"ask {self.prompt_id}:", {"turn": 0, "secret": object()}

    def step(self, action: str):
        with self._alone():
            self.turn += 1
            misbehave(self.prompt_id, "step")
            is_over = self.turn >= self.num_turns
            return f"[{action.strip()}]", float(action.count("x")), is_over, False, {"turn": self.turn}

    def close(self) -> None:
        self.num_closed += 1

    def _alone(self):
        if self._inside.locked():
            raise AssertionError("two calls are inside of one instance")
        return self._inside


class Answering(FakeEnv):
    """Answers the first step with a given object, or a given reset."""

    def __init__(self, answer: Any, to_reset: bool = False):
        super().__init__()
        self.answer, self.to_reset = answer, to_reset

    def reset(self, **kwargs: Any):
        return self.answer if self.to_reset else super().reset(**kwargs)

    def step(self, action: str):
        return self.answer


def misbehave(mischief: str, place: str) -> None:
    """Do what `mischief` names if it is due at `place`: "crash-step" crashes in step."""
    if mischief == f"crash-{place}":
        raise KeyError(f"no luck\nin {place}")
    if mischief == f"exit-{place}":
        raise SystemExit(3)
    if mischief == f"sleep-{place}":
        time.sleep(60)
    while mischief == f"loop-{place}":
        pass
    while mischief == f"stubborn-{place}":
        try:
            time.sleep(0.001)
        except Exception:
            continue


def play(episodes: Sequence[LiveEpisode], *, deadline_s: float, **given: Any) -> Iterator[Any]:
    """Play episodes to their end, and close the player then, or when the caller stops iterating."""
    player = Player(is_ordered=given["engine"].is_reproducible, **given)
    player.add(episodes, deadline_s)

    def ended() -> Iterator[Any]:
        try:
            yield from player.advance()
        finally:
            player.close()

    return ended()


def unplayed(*prompt_ids: str, env_id: str = "env", group_id: str = "g", history: tuple[str, ...] = ()):
    return [
        LiveEpisode(Prompt(env_id, prompt_id, history=history), group_id, index)
        for index, prompt_id in enumerate(prompt_ids)
    ]

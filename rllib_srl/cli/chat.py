"""Talk to a model in the terminal: a run's newest checkpoint, a checkpoint, a model, or one that is served.

    srl chat results/first
    srl chat results/first/checkpoint_000010 --system "Answer in one word." --temperature 0
    srl chat smollm2-135m
    srl chat results/served                       by its server: + or - rates the last answer, =4 or =none too
    srl chat --server http://127.0.0.1:8000/?token=...      the same by the address that srl serve printed
    printf 'What is 3 + 4?\\nAnd one more?\\n' | srl chat results/first       one turn per line

A line is one turn of yours; "\\n" in it stands for a line break, and empty lines are skipped. `/reset` starts a new
conversation, `/quit` or the end of input ends the program, and "//" starts a line whose text begins with "/". With a
served model + and - need no Enter in a terminal, =good 4 rates as the scheme of its ratings says, =none takes a rating
back; a text that begins with + or - begins with a blank.

The model's chat template forms the conversation. A model without one gets "Question: ... Answer:"; --prompt_format text
asks for that of any model. Replies go to standard output, notes to standard error.
"""

from __future__ import annotations

import argparse
import codecs
import os
import secrets
import sys
import termios
import tty
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rllib_srl import SRLConfig
from rllib_srl.algorithm.checkpointing import policy_of
from rllib_srl.cli.serving.served_directory import Address, DirectoryError, ServedDirectory, address_in, ask
from rllib_srl.cli.shared.cluster import hushed_stderr
from rllib_srl.cli.shared.display import printable_lines, showing_progress
from rllib_srl.cli.shared.flags import Program, integer_from
from rllib_srl.cli.shared.runs import Source, source_of
from rllib_srl.cli.shared.settings import (
    SettingsError,
    all_settings,
    build_config,
    check,
    given_settings,
    model_config_of,
)
from rllib_srl.engine import Engine, Sampling, make_engine
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model, sizes_of
from rllib_srl.engine.sync import pack_stream
from rllib_srl.envs.text import asked
from rllib_srl.learner.model_setup import policy_weights, weights_layout
from rllib_srl.rollout.transcript import Transcript, make_transcript

OF_RUN = ("engine", "compute_dtype", "max_episode_tokens")  # settings of a run that its engine gets here, too
OF_ENGINE = (*OF_RUN, "num_gpus_per_env_runner", "seed")
FLAGS = (*OF_ENGINE, "prompt_format")
# A config has many settings without effect here. These need no learner, no memory and no prompts of the run.
NO_TRAINING = {"env": "copy_words", "num_cpus_per_env_runner": 0, "num_learners": 0, "num_gpus_per_learner": 0}
NO_TRAINING |= {"replay_capacity": 0, "replay_revisit_fraction": 0.0, "replay_reuse_fraction": 0.0}
CONTEXT = 4096  # most tokens of a conversation, unless the run or a flag has more
MAX_TOKENS = 256  # of a reply
PROMPT = "> "
COMMANDS = ("/reset", "/quit")
THUMBS = {"+": "good", "-": "bad"}
TIMEOUT_S = 600.0  # for an answer of a server


@dataclass(frozen=True)
class Form:
    """The way in which messages become tokens: the model's chat template, or plain text as an environment's prompts."""

    transcript: Transcript
    system: str = ""
    is_chat: bool = True

    @property
    def stop(self) -> tuple[str, ...]:
        """Return the strings that end a reply, besides the end-of-sequence token."""
        return () if self.is_chat else ("\n",)

    def first(self, message: str) -> list[int]:
        """Return the tokens from the start of a conversation to the reply."""
        return self.transcript.first(message if self.is_chat else asked(message), "", self.system)

    def later(self, message: str, last_id: int) -> list[int]:
        """Return the tokens from the end of a reply, whose last token was `last_id`, to the next one."""
        return self.transcript.later(message if self.is_chat else f"\n{asked(message)}", last_id)


class Dialogue:
    """A dialogue between a person and a model; subclasses say what answers."""

    def __init__(self, lines: TextIO, out: TextIO, notes: TextIO) -> None:
        """Read from `lines`; write replies to `out` and notes to `notes`."""
        self._lines, self._out, self._notes = lines, out, notes
        self._is_live = lines.isatty() and out.isatty()

    def run(self) -> None:
        """Talk until `/quit` or the end of input."""
        for line in iter(self._read, ""):
            message = line.strip().replace("\\n", "\n")
            if message == "/quit":
                break
            if message == "/reset":
                self._reset()
                self._note("new conversation")
            elif message.startswith("/") and not message.startswith("//"):
                command = message.split()[0]
                self._note(f"unknown command {command}; expected {' or '.join(COMMANDS)}, or // to begin a text with /")
            elif message:
                self._answer(message.removeprefix("/") if message.startswith("//") else message)

    def _reset(self) -> None:
        raise NotImplementedError

    def _answer(self, message: str) -> None:
        raise NotImplementedError

    def _read(self) -> str:
        if self._is_live:
            self._write(PROMPT)
        line = self._lines.readline()
        if not line and self._is_live:
            self._write("\n")
        return line

    def _show(self, said: str) -> None:
        """Write a reply."""
        self._write(printable_lines(said.rstrip("\n")) + "\n")

    def _write(self, piece: str) -> None:
        print(piece, end="", file=self._out, flush=True)

    def _note(self, note: str) -> None:
        print(f"({note})", file=self._notes, flush=True)


class ServedDialogue(Dialogue):
    """The dialogue with a served model. Invariant: `_messages` has the system message, and what was said and shown."""

    def __init__(
        self,
        where: ServedDirectory | Address,
        system: str | None,
        sampling: Mapping[str, Any],
        lines: TextIO,
        out: TextIO,
        notes: TextIO,
    ) -> None:
        """Talk after a `system` message; each request has the fields `sampling`, of which None is left out."""
        super().__init__(lines, out, notes)
        self._where = where
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self._system = [{"role": "system", "content": system}] if system else []
        self._reset()

    def _reset(self) -> None:
        self._messages, self._newest = list(self._system), ""

    def _read(self) -> str:
        if not self._is_live or not self._newest:
            return super()._read()
        self._write(PROMPT)
        key = pressed(self._lines.fileno())
        if key in THUMBS:
            self._write(f"{key}\n")
            return key
        if key in ("", "\n"):
            self._write("\n")
            return key
        first = key if key.isprintable() else ""
        self._write(first)
        return first + self._lines.readline()

    def _answer(self, message: str) -> None:
        rating = THUMBS.get(message) or (message[1:].strip() if message.startswith("=") else "")
        try:
            if rating:
                self._rate(rating)
            else:
                self._ask(message)
        except DirectoryError as error:
            self._note(str(error))

    def _ask(self, message: str) -> None:
        said = [*self._messages, {"role": "user", "content": message}]
        body = {"model": "policy", "messages": said, **self._sampling}
        reply = ask(self._where, "/chat/completions", TIMEOUT_S, body)
        (choice,), self._newest = reply["choices"], reply["id"]
        text = choice["message"]["content"] or ""
        self._messages = [*said, {"role": "assistant", "content": text}]
        self._show(text)
        if choice["finish_reason"] == "length":
            self._note("cut off (--max-tokens)")

    def _rate(self, value: str) -> None:
        if not self._newest:
            self._note("there is no answer to rate yet")
            return
        found = ask(self._where, f"/conversations/{self._newest}/rating", TIMEOUT_S, {"rating": value}, "PUT")
        trained = "" if found["is_trained_on"] else "; it is not trained on"
        self._note(f"{found['rating']}, reward {found['reward']}{trained}")


def pressed(terminal: int) -> str:
    """Return the next key of a terminal, a whole character, without waiting for Enter; "" at the end of the input."""
    usual, decoder, key = termios.tcgetattr(terminal), codecs.getincrementaldecoder("utf-8")("replace"), ""
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)
        while not key:
            byte = os.read(terminal, 1)
            if byte in (b"", b"\x04", b"\0"):  # Ctrl-D, and Ctrl-D from before `setcbreak`
                return ""
            key = decoder.decode(byte)
        if not key.isprintable() and key != "\n":  # such as an arrow, which is several bytes
            termios.tcflush(terminal, termios.TCIFLUSH)
        return key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, usual)


class Terminal(Dialogue):
    """The dialogue with a model that is loaded here. Invariant: `_ids` are the tokens so far, replies as sampled."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        form: Form,
        sampling: Sampling,
        context: int,
        lines: TextIO,
        out: TextIO,
        notes: TextIO,
    ) -> None:
        """Talk with an engine that has the model's weights; a whole conversation has at most `context` tokens."""
        super().__init__(lines, out, notes)
        self._engine, self._tokenizer, self._form, self._sampling = engine, tokenizer, form, sampling
        self._most = context - sampling.max_tokens
        self._reset()

    def _reset(self) -> None:
        self._ids: list[int] = []

    def _answer(self, message: str) -> None:
        later = self._form.later(message, self._ids[-1]) if self._ids else self._form.first(message)
        prompt = [*self._ids, *later]
        if len(prompt) > self._most:
            room = f"expected at most {self._most}, so that a reply fits the context"
            remedy = "/reset starts a new conversation, --max_episode_tokens gives more room"
            self._note(f"with your message the conversation has {len(prompt)} tokens; {room}: {remedy}")
            return
        (turn,) = self._engine.generate([prompt], self._sampling)
        ids = turn.token_ids.tolist()
        self._ids = [*prompt, *ids]
        said = ids[: len(ids) - (ids[-1] in self._sampling.end_ids)]
        self._show(self._tokenizer.decode(said, skip_special_tokens=True))
        if turn.reason != "stop":
            self._note(f"cut off after {self._sampling.max_tokens} tokens (--max-tokens)")


def engine_config(settings: Mapping[str, Any], given: Mapping[str, Any], directory: Path) -> SRLConfig:
    """Return a valid config with the settings of the engine; SettingsError: one is invalid."""
    values = {name: settings[name] for name in OF_RUN if settings.get(name) is not None}
    values |= {"seed": secrets.randbelow(2**31), **{name: given[name] for name in OF_ENGINE if name in given}}
    longest = sizes_of(directory).context or CONTEXT
    if "max_episode_tokens" not in given:
        values["max_episode_tokens"] = min(longest, max(CONTEXT, values.get("max_episode_tokens") or 0))
    values["max_turn_tokens"] = 1
    config = build_config({**NO_TRAINING, **values, "model": settings["model"]})
    check(config)
    return config


def loaded(source: Source, config: SRLConfig, directory: Path) -> Engine:
    """Return an engine with the weights of a checkpoint, or of the model; CheckpointError: it is damaged."""
    policy = about = None
    if source.checkpoint:  # first: a damaged checkpoint is found before an engine starts
        policy, about = policy_of(source.checkpoint, model_config_of(source.settings))
    engine = make_engine(model_dir=directory, **config.engine_settings())
    if policy is not None and about is not None:
        version = int(about.get("version", 0))
        weights = (weights_layout(policy.model), policy_weights(policy.model))
        engine.load_weights(pack_stream(*weights, version, config.compute_dtype))
    return engine


def form_of(
    settings: Mapping[str, Any], tokenizer: Any, system: str | None, given: Mapping[str, Any]
) -> tuple[Form, str]:
    """Return the form of the conversation and its description; the prompt of `system` None is the environment's."""
    prompt = (settings.get("env_config") or {}).get("system_prompt", "") if system is None else system
    how = given.get("prompt_format", "chat" if getattr(tokenizer, "chat_template", None) else "text")
    name = "the model's chat template" if how == "chat" else "Question: ... Answer:"
    return Form(make_transcript(how, tokenizer), prompt, how == "chat"), name


def add_flags(parser: argparse.ArgumentParser) -> None:
    text = "a run's directory, a checkpoint, a model, or one of srl serve"
    parser.add_argument("what", nargs="?", metavar="WHAT", help=text)
    parser.add_argument("--server", metavar="URL", help="address that srl serve printed; its token may be in SRL_TOKEN")
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: that of the run's environment)")
    text = "sampling temperature, 0: greedy (default: that of the run's training, else 1)"
    parser.add_argument("--temperature", dest="heat", type=float, metavar="T", help=text)  # `temperature` is a setting
    text = f"maximum number of tokens of a reply (default: {MAX_TOKENS}, or half the context if that is less)"
    parser.add_argument("--max-tokens", type=integer_from(1), metavar="N", help=text)


def fault_of(arguments: argparse.Namespace) -> str:
    if (arguments.what is None) == (arguments.server is None):
        return "expected WHAT or --server URL, and not both"
    if arguments.heat is not None and arguments.heat != 0 and not 0.01 <= arguments.heat <= 100:
        return f"--temperature {arguments.heat}; expected 0 or a number from 0.01 to 100"
    return ""


def max_tokens_of(given: int | None, context: int) -> int:
    if given is not None and given >= context:
        raise SettingsError(f"--max-tokens {given}; expected less than the context of {context} tokens")
    return min(MAX_TOKENS, context // 2) if given is None else given


def chat(arguments: argparse.Namespace, lines: TextIO | None = None) -> int:
    given = given_settings(arguments)
    where = address_in(arguments.server) if arguments.server else ServedDirectory(Path(arguments.what))
    if not isinstance(where, ServedDirectory) or where.exists:
        if given:
            raise SettingsError(f"--{next(iter(given))} is for a model that is loaded here; leave it out with a server")
        more = {"temperature": arguments.heat, "max_tokens": arguments.max_tokens}
        ServedDialogue(where, arguments.system, more, lines or sys.stdin, sys.stdout, sys.stderr).run()
        return 0
    source = source_of(arguments.what)
    settings = source.settings
    with showing_progress(1, sys.stderr) as progress:
        progress.begin("loading the model ...")
        directory = local_model(settings["model"])
        config = engine_config(settings, given, directory)
        tokenizer = load_tokenizer(directory)
        max_tokens = max_tokens_of(arguments.max_tokens, config.max_episode_tokens)
        temperature = settings.get("temperature", 1.0) if arguments.heat is None else arguments.heat
        form, name = form_of(settings, tokenizer, arguments.system, given)
        with hushed_stderr(arguments.verbose):
            engine = loaded(source, config, directory)
    with closing(engine):
        print(f"({source.checkpoint or arguments.what}; {name}; /reset, /quit)", file=sys.stderr, flush=True)
        sampling = Sampling(max_tokens, temperature=temperature, stop=form.stop, end_ids=form.transcript.end_ids)
        streams = (lines or sys.stdin, sys.stdout, sys.stderr)
        Terminal(engine, tokenizer, form, sampling, config.max_episode_tokens, *streams).run()
    return 0


USAGE = "%(prog)s WHAT | --server URL [--system TEXT] [--temperature T] [--max-tokens N] [--SETTING VALUE ...]"
WITHOUT = tuple(name for name in all_settings() if name not in FLAGS)
main = Program(__doc__, add_flags, chat, usage=USAGE, without=WITHOUT, verbose="vLLM and transformers", fault=fault_of)

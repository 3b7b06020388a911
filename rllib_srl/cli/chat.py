"""Talk to a model in the terminal: a run's newest checkpoint, a checkpoint, a model, or one that is served.

    srl chat results/first
    srl chat results/first/checkpoint_000010 --system "Answer in one word." --temperature 0
    srl chat smollm2-135m
    srl chat results/served                       by its server: + or - rates the last answer
    srl chat --server http://127.0.0.1:8000/?token=...      the same by the address that srl serve printed
    printf 'What is 3 + 4?\\nAnd one more?\\n' | srl chat results/first       one turn per line

A line is one turn of yours; "\\n" in it stands for a line break, and empty lines are skipped. `/reset` starts a new
conversation, `/quit` or the end of input ends the program, and "//" starts a line whose text begins with "/". A served
model's answers are rated by a line + (good), - (bad) or = with a value of its scheme, such as =4, =good 4 or =none.

The model's chat template forms the conversation. A model without one gets "Question: ... Answer:"; --prompt_format text
asks for that of any model. Replies go to standard output, notes to standard error.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rllib_srl.algorithm.named import MEMORIES
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
from rllib_srl.engine import make_engine
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model, sizes_of
from rllib_srl.envs.text import asked
from rllib_srl.rollout.transcript import Transcript, make_transcript

if TYPE_CHECKING:
    from rllib_srl.algorithm.config import SRLConfig
    from rllib_srl.engine.protocol import Engine, Sampling

OF_RUN = ("engine", "compute_dtype", "max_episode_tokens")  # settings of a run that its engine gets here, too
OF_ENGINE = (*OF_RUN, "num_gpus_per_env_runner", "seed")
FLAGS = (*OF_ENGINE, "prompt_format")
# A config has many settings without effect here. These need no learner, no memory and no prompts of the run.
NO_TRAINING = {"env": "copy_words", "num_cpus_per_env_runner": 0, "num_learners": 0, "num_gpus_per_learner": 0}
NO_TRAINING |= MEMORIES["none"]
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


class LoadedModel:
    """The conversation with a model that is loaded here. Invariant: `_ids` are its tokens, replies as sampled."""

    def __init__(self, engine: Engine, tokenizer: Any, form: Form, sampling: Sampling, context: int) -> None:
        """Use an engine that has the model's weights; a whole conversation has at most `context` tokens."""
        self._engine, self._tokenizer, self._form, self._sampling = engine, tokenizer, form, sampling
        self._most = context - sampling.max_tokens
        self.reset()

    def reset(self) -> None:
        self._ids: list[int] = []

    def answer(self, message: str) -> tuple[str | None, str]:
        """Return the reply, None if there is none, and a note."""
        later = self._form.later(message, self._ids[-1]) if self._ids else self._form.first(message)
        prompt = [*self._ids, *later]
        if len(prompt) > self._most:
            room = f"expected at most {self._most}, so that a reply fits the context"
            remedy = "/reset starts a new conversation, --max_episode_tokens gives more room"
            return None, f"with your message the conversation has {len(prompt)} tokens; {room}: {remedy}"
        (turn,) = self._engine.generate([prompt], self._sampling)
        ids = turn.token_ids.tolist()
        self._ids = [*prompt, *ids]
        reply = self._tokenizer.decode(ids[: len(ids) - (ids[-1] in self._sampling.end_ids)], skip_special_tokens=True)
        cut = f"cut off after {self._sampling.max_tokens} tokens (--max-tokens)"
        return reply, "" if turn.reason == "stop" else cut


class ServedModel:
    """The conversation with a served model. Invariant: `_messages` has the system message, and what was said."""

    def __init__(self, where: ServedDirectory | Address, system: str | None, sampling: Mapping[str, Any]) -> None:
        """Begin with a `system` message; each request has the fields `sampling`, of which None is left out."""
        self._where = where
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self._system = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self._messages, self._newest = list(self._system), ""

    def answer(self, message: str) -> tuple[str | None, str]:
        """Return the reply, None after a rating, and a note."""
        rating = THUMBS.get(message) or (message[1:].strip() if message.startswith("=") else "")
        try:
            return (None, self._rate(rating)) if rating else self._ask(message)
        except DirectoryError as error:
            return None, str(error)

    def _ask(self, message: str) -> tuple[str, str]:
        messages = [*self._messages, {"role": "user", "content": message}]
        body = {"model": "policy", "messages": messages, **self._sampling}
        reply = ask(self._where, "/chat/completions", TIMEOUT_S, body)
        (choice,), self._newest = reply["choices"], reply["id"]
        text = choice["message"]["content"] or ""
        self._messages = [*messages, {"role": "assistant", "content": text}]
        return text, "cut off (--max-tokens)" if choice["finish_reason"] == "length" else ""

    def _rate(self, value: str) -> str:
        if not self._newest:
            return "there is no answer to rate yet"
        rating = ask(self._where, f"/conversations/{self._newest}/rating", TIMEOUT_S, {"rating": value}, "PUT")
        trained = "" if rating["is_trained_on"] else "; it is not trained on"
        return f"{rating['rating']}, reward {rating['reward']}{trained}"


def talk(model: LoadedModel | ServedModel, lines: TextIO, out: TextIO, notes: TextIO) -> None:
    """Talk until `/quit` or the end of input; write replies to `out` and notes to `notes`."""
    is_live = lines.isatty() and out.isatty()

    def read() -> str:
        print(PROMPT if is_live else "", end="", file=out, flush=True)
        return lines.readline()

    def note(text: str) -> None:
        print(f"({text})", file=notes, flush=True)

    for line in iter(read, ""):
        message = line.strip().replace("\\n", "\n")
        if message == "/quit":
            return
        if message == "/reset":
            model.reset()
            note("new conversation")
        elif message.startswith("/") and not message.startswith("//"):
            command = message.split()[0]
            note(f"unknown command {command}; expected {' or '.join(COMMANDS)}, or // to begin a text with /")
        elif message:
            reply, about = model.answer(message.removeprefix("/") if message.startswith("//") else message)
            if reply is not None:
                print(printable_lines(reply.rstrip("\n")), file=out, flush=True)
            if about:
                note(about)
    if is_live:
        print(file=out)


def engine_config(settings: Mapping[str, Any], flags: Mapping[str, Any], directory: Path) -> SRLConfig:
    """Return a valid config with the settings of the engine; SettingsError: one is invalid."""
    values = {name: settings[name] for name in OF_RUN if settings.get(name) is not None}
    values |= {"seed": secrets.randbelow(2**31), **{name: flags[name] for name in OF_ENGINE if name in flags}}
    longest = sizes_of(directory).context or CONTEXT
    if "max_episode_tokens" not in flags:
        values["max_episode_tokens"] = min(longest, max(CONTEXT, values.get("max_episode_tokens") or 0))
    values["max_turn_tokens"] = 1
    config = build_config({**NO_TRAINING, **values, "model": settings["model"]})
    check(config)
    return config


def loaded(source: Source, config: SRLConfig, directory: Path) -> Engine:
    """Return an engine with the weights of a checkpoint, or of the model; CheckpointError: it is damaged."""
    from rllib_srl.algorithm.checkpointing import policy_of
    from rllib_srl.engine.sync import pack_stream
    from rllib_srl.learner.model_setup import policy_weights, weights_layout

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
    settings: Mapping[str, Any], tokenizer: Any, system: str | None, flags: Mapping[str, Any]
) -> tuple[Form, str]:
    """Return the form of the conversation and its description; the prompt of `system` None is the environment's."""
    prompt = (settings.get("env_config") or {}).get("system_prompt", "") if system is None else system
    prompt_format = flags.get("prompt_format", "chat" if getattr(tokenizer, "chat_template", None) else "text")
    name = "the model's chat template" if prompt_format == "chat" else "Question: ... Answer:"
    return Form(make_transcript(prompt_format, tokenizer), prompt, prompt_format == "chat"), name


def add_flags(parser: argparse.ArgumentParser) -> None:
    text = "a run's directory, a checkpoint, a model, or one of srl serve"
    parser.add_argument("what", nargs="?", metavar="WHAT", help=text)
    parser.add_argument("--server", metavar="URL", help="address that srl serve printed; its token may be in SRL_TOKEN")
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: that of the run's environment)")
    text = "sampling temperature, 0: greedy (default: that of the run's training, else 1)"
    parser.add_argument("--temperature", dest="heat", type=float, metavar="T", help=text)  # `temperature` is a setting
    text = f"maximum number of tokens of a reply (default: {MAX_TOKENS}, or half the context if that is less)"
    parser.add_argument("--max-tokens", type=integer_from(1), metavar="N", help=text)


def error_of(arguments: argparse.Namespace) -> str:
    if (arguments.what is None) == (arguments.server is None):
        return "expected WHAT or --server URL, and not both"
    if arguments.heat is not None and arguments.heat != 0 and not 0.01 <= arguments.heat <= 100:
        return f"--temperature {arguments.heat}; expected 0 or a number from 0.01 to 100"
    return ""


def chat(arguments: argparse.Namespace, lines: TextIO | None = None) -> int:
    flags, streams = given_settings(arguments, WITHOUT), (lines or sys.stdin, sys.stdout, sys.stderr)
    where = address_in(arguments.server) if arguments.server else ServedDirectory(Path(arguments.what))
    if not isinstance(where, ServedDirectory) or where.exists:
        if flags:
            raise SettingsError(f"--{next(iter(flags))} is for a model that is loaded here; leave it out with a server")
        more = {"temperature": arguments.heat, "max_tokens": arguments.max_tokens}
        talk(ServedModel(where, arguments.system, more), *streams)
        return 0
    from rllib_srl.engine.protocol import Sampling

    source = source_of(arguments.what)
    settings = source.settings
    with showing_progress(1, sys.stderr) as progress:
        progress.begin("loading the model ...")
        directory = local_model(settings["model"])
        config = engine_config(settings, flags, directory)
        tokenizer = load_tokenizer(directory)
        context = config.max_episode_tokens
        max_tokens = arguments.max_tokens or min(MAX_TOKENS, context // 2)
        if max_tokens >= context:
            raise SettingsError(f"--max-tokens {max_tokens}; expected less than the context of {context} tokens")
        temperature = settings.get("temperature", 1.0) if arguments.heat is None else arguments.heat
        form, name = form_of(settings, tokenizer, arguments.system, flags)
        with hushed_stderr(arguments.verbose):
            engine = loaded(source, config, directory)
    with closing(engine):
        print(f"({source.checkpoint or arguments.what}; {name}; /reset, /quit)", file=sys.stderr, flush=True)
        sampling = Sampling(max_tokens, temperature=temperature, stop=form.stop, end_ids=form.transcript.end_ids)
        talk(LoadedModel(engine, tokenizer, form, sampling, context), *streams)
    return 0


USAGE = "%(prog)s WHAT | --server URL [--system TEXT] [--temperature T] [--max-tokens N] [--SETTING VALUE ...]"
WITHOUT = tuple(name for name in all_settings() if name not in FLAGS)
main = Program(__doc__, add_flags, chat, usage=USAGE, without=WITHOUT, verbose="vLLM and transformers", error=error_of)

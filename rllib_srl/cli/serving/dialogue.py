"""A dialogue in the terminal, one line a turn, and the one with a served model, in which a person rates its answers.

    > Name a fruit.
    A pear.
    > +                       the last answer is good; - is bad, =4 or =good 4 as the scheme says, =none takes it back

In a terminal + and - need no Enter; a text that begins with one of them begins with a blank.
"""

from __future__ import annotations

import codecs
import os
import termios
import tty
from collections.abc import Mapping
from typing import Any, TextIO

from rllib_srl.cli.serving.served_directory import Address, DirectoryError, ServedDirectory, ask
from rllib_srl.cli.shared.display import printable_lines

PROMPT = "> "
COMMANDS = ("/reset", "/quit")
THUMBS = {"+": "good", "-": "bad"}
TIMEOUT_S = 600.0


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

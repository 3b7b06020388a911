"""A dialogue in the terminal, one line a turn: commands, and what is written where. `srl chat` has two of them."""

from __future__ import annotations

from typing import TextIO

from rllib_srl.cli.shared.display import printable_lines

PROMPT = "> "
COMMANDS = ("/reset", "/quit")


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

"""Prompt templates with {question} and other fields of a question's row.

    template = PromptTemplate("Topic: {topic}\\nQ: {question}\\nA:")
    template.fields                                              ("topic", "question")
    template.filled({"topic": "sums", "question": "1 + 1?"})     "Topic: sums\\nQ: 1 + 1?\\nA:"

A literal brace is doubled. Values are inserted verbatim; braces in them are not fields.
"""

from __future__ import annotations

import string
from collections.abc import Mapping

QUESTION = "question"
DEFAULT = "Question: {question}\nAnswer:"


class PromptTemplate:
    """A template. Invariant: `errors` is empty exactly if it can be filled, and then `fields` contains "question"."""

    def __init__(self, text: str):
        """Parse a template; its errors are in `errors`."""
        self.errors: list[str] = []
        self._parts: list[tuple[str, str | None]] = []
        try:
            read = list(string.Formatter().parse(text))
        except ValueError as error:  # a stray brace
            read = []
            self.errors.append(self._error(text, f"{error}; write a literal brace twice"))
        for literal, name, form, conversion in read:
            if name is not None and (not name.isidentifier() or form or conversion):
                self.errors.append(self._error(text, f"{{{name}}} is not a plain field name"))
            self._parts.append((literal, name))
        if not self.errors and QUESTION not in self.fields:
            self.errors.append(self._error(text, "{question} is not in it"))

    @staticmethod
    def _error(text: str, reason: str) -> str:
        return f"prompt_template = {text!r}: {reason}; expected text with {{question}}"

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the distinct names in braces, as written."""
        return tuple(dict.fromkeys(name for _, name in self._parts if name is not None))

    @property
    def start(self) -> str:
        """Return the text in front of the first field, without white space around it."""
        return self._parts[0][0].strip() if self._parts else ""

    def filled(self, values: Mapping[str, str]) -> str:
        """Return the text with the value of each field in its place."""
        return "".join(literal + (values[name] if name is not None else "") for literal, name in self._parts)

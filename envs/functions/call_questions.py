"""Generate requests that one function call answers, from a table of functions and their phrasings.

    number 1234  ->  "Book a table for 4 at Luna at 19:00, outside."
                     [{"book_table": {"place": ["Luna"], "people": [4], "time": ["19:00"], "outside": [True]}}]

A request is a function and a value for each of its arguments. All requests are numbered consecutively: every request
has one number and its own text. An optional argument has None among its values.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from rllib_srl.envs.tools.matching import Expected


@dataclass(frozen=True)
class Argument:
    """An argument and its possible values.

    Invariant: no two values have the same wording. With None among the values the argument is optional.
    """

    name: str
    type: str  # in JSON schema's words; "array" is of text
    description: str
    values: Sequence[Any]
    said: str = "{}"  # wording of a value; None is left out
    default: Any = None

    def phrase(self, value: Any) -> str:
        """Return the wording of the value in the request."""
        if value is None:
            return ""
        shown = " and ".join(value) if isinstance(value, tuple) else str(value)
        return self.said.format(shown)

    @property
    def schema(self) -> dict[str, Any]:
        """Return the argument's JSON schema."""
        about: dict[str, Any] = {"type": self.type, "description": self.description}
        if self.type == "array":
            about["items"] = {"type": "string"}
        if self.default is not None:
            about["default"] = self.default
        return about

    def alternatives(self, value: Any) -> list[Any]:
        """Return the values that a right call may give; "" stands for leaving the argument out."""
        if value is None:
            return [""] if self.default is None else ["", self.default]
        stated = [list(value) if isinstance(value, tuple) else value]
        return [*stated, ""] if value == self.default else stated


@dataclass(frozen=True)
class Function:
    """A function and the wording of its requests. Invariant: `request` names every argument once, in braces."""

    name: str
    description: str
    request: str
    arguments: tuple[Argument, ...]

    @cached_property
    def size(self) -> int:
        """Return the number of requests."""
        return prod(len(argument.values) for argument in self.arguments)

    @cached_property
    def doc(self) -> dict[str, Any]:
        """Return {"name", "description", "parameters"}."""
        required = [argument.name for argument in self.arguments if None not in argument.values]
        properties = {argument.name: argument.schema for argument in self.arguments}
        parameters = {"type": "object", "properties": properties, "required": required}
        return {"name": self.name, "description": self.description, "parameters": parameters}

    def values(self, number: int) -> dict[str, Any]:
        """Return the argument values of request `number`, 0 <= number < size."""
        chosen = {}
        for argument in self.arguments:
            number, index = divmod(number, len(argument.values))
            chosen[argument.name] = argument.values[index]
        return chosen


@dataclass(frozen=True)
class Request:
    """One request. Invariant: `arguments` answer `text`, and so does every call that `expected` allows."""

    function: Function
    text: str
    arguments: Mapping[str, Any]
    expected: Expected


_CITIES = ("Oslo", "Lima", "Cairo", "Quito", "Turin", "Perth", "Delhi", "Osaka", "Accra", "Riga", "Hanoi", "Bergen")
_PEOPLE = ("Ann", "Ben", "Carla", "Deniz", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jun")
_TIMES = tuple(f"{hour}:{minute:02}" for hour in range(8, 21) for minute in (0, 30))
_FOODS = ("milk", "eggs", "bread", "rice", "apples", "tea", "salt", "soap", "cheese", "beans")
_PAIRS = tuple(itertools.combinations(_FOODS, 2))

FUNCTIONS = (
    Function(
        "get_weather",
        "Get the weather forecast for a city.",
        "What will the weather in {city} be {day}{unit}?",
        (
            Argument("city", "string", "name of the city", _CITIES),
            Argument("day", "integer", "days from today", range(2, 15), "in {} days"),
            Argument("unit", "string", "celsius or fahrenheit", (None, "celsius", "fahrenheit"), " in {}", "celsius"),
        ),
    ),
    Function(
        "book_table",
        "Reserve a table in a restaurant.",
        "Book a table for {people} at {place} at {time}{outside}.",
        (
            Argument("place", "string", "name of the restaurant", ("Luna", "Olive", "Harbour", "Saffron", "Mirto")),
            Argument("people", "integer", "number of guests", range(2, 9)),
            Argument("time", "string", "time of day as in 19:30", _TIMES),
            Argument("outside", "boolean", "whether to sit outside", (None, True), ", outside", False),
        ),
    ),
    Function(
        "send_message",
        "Send a text message to a contact.",
        "Tell {to} that {text}{urgent}.",
        (
            Argument("to", "string", "name of the contact", _PEOPLE),
            Argument(
                "text",
                "string",
                "what to say",
                tuple(f"{what} at {time}" for what in ("the meeting is", "dinner is", "we leave") for time in _TIMES),
            ),
            Argument("urgent", "boolean", "whether it is urgent", (None, True), ", and mark it as urgent", False),
        ),
    ),
    Function(
        "set_timer",
        "Start a kitchen timer.",
        "Set a timer {minutes}{label}.",
        (
            Argument("minutes", "integer", "how long it runs", range(2, 91), "for {} minutes"),
            Argument("label", "string", "its name", (None, "pasta", "rice", "cake", "tea", "laundry"), " called {}"),
        ),
    ),
    Function(
        "convert_currency",
        "Convert an amount of money.",
        "How much are {amount} {source} in {target}?",
        (
            Argument("amount", "number", "amount in the first currency", tuple(n / 2 for n in range(5, 65))),
            Argument("source", "string", "code of the currency to convert from", ("EUR", "USD", "JPY", "GBP")),
            Argument("target", "string", "code of the currency to convert to", ("CHF", "NOK", "INR", "BRL")),
        ),
    ),
    Function(
        "add_to_list",
        "Add things to a shopping list.",
        "Put {things} on my {store} list.",
        (
            Argument("things", "array", "what to buy", _PAIRS),
            Argument("store", "string", "which list", ("market", "pharmacy", "weekend", "office", "party")),
        ),
    ),
    Function(
        "find_trains",
        "Find trains between two cities.",
        "Which trains go {start}{end} {time}?",
        (
            Argument("start", "string", "where the journey starts", _CITIES[:6], "from {}"),
            Argument("end", "string", "where it ends", _CITIES[6:], " to {}"),
            Argument("time", "string", "earliest departure as in 19:30", _TIMES, "after {}"),
        ),
    ),
    Function(
        "set_lights",
        "Set the lights of a room.",
        "Set the lights in the {room} to {brightness} percent{colour}.",
        (
            Argument("room", "string", "which room", ("kitchen", "bedroom", "bathroom", "hall", "office")),
            Argument("brightness", "integer", "percent of full light", range(5, 100, 5)),
            Argument("colour", "string", "colour of the light", (None, "red", "blue", "green", "warm white"), " in {}"),
        ),
    ),
    Function(
        "transfer_money",
        "Send money to somebody.",
        "Send {amount} euros to {to}{note}.",
        (
            Argument("amount", "number", "euros", tuple(n / 4 for n in range(20, 90))),
            Argument("to", "string", "who gets it", _PEOPLE),
            Argument("note", "string", "what it is for", (None, "rent", "lunch", "tickets"), " for {}"),
        ),
    ),
    Function(
        "rectangle_area",
        "Compute the area of a rectangle.",
        "What is the area of a rectangle of {width} by {height}{unit}?",
        (
            Argument("width", "integer", "length of one side", range(2, 32)),
            Argument("height", "integer", "length of the other side", range(33, 63)),
            Argument("unit", "string", "unit of length", (None, "metres", "inches"), " {}"),
        ),
    ),
)
NUM_REQUESTS = sum(function.size for function in FUNCTIONS)


def request(number: int) -> Request:
    """Return request `number`, 0 <= number < `NUM_REQUESTS`."""
    for function in FUNCTIONS:
        if number < function.size:
            break
        number -= function.size
    values = function.values(number)
    arguments = {argument.name: argument for argument in function.arguments}
    phrases = {name: arguments[name].phrase(value) for name, value in values.items()}
    plain_values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return Request(
        function=function,
        text=function.request.format(**phrases),
        arguments={name: value for name, value in plain_values.items() if value is not None},
        expected={function.name: {name: arguments[name].alternatives(value) for name, value in values.items()}},
    )

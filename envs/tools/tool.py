"""Tools: plain Python functions with type hints, described to a policy and called with checked arguments.

    def add(a: int, b: int = 1) -> int:
        '''Add two numbers.

        Args:
            a: the first
            b: the second
        '''

    tool = Tool.of(add)
    tool.schema()              {"type": "function", "function": {"name": "add", "description": "Add two numbers.", ...}}
    tool.arguments(ToolCall("add", (2,), {"b": 3}))     {"a": 2, "b": 3}
    tool.arguments(ToolCall("add", ("2",)))             CallError: add: a is '2'; Input should be a valid integer. ...

The hints become a JSON schema, and pydantic checks the arguments against them in strict mode: no conversion between
int and text, but an int is accepted as a float. Descriptions come from the docstring, in Google's style.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, NotRequired, get_type_hints

from rllib_srl.envs.tools.calls import CallError, ToolCall, shown


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call by name.

    Invariant: `run` gets only arguments that fit the function's hints or, for `declared` tools, that bind by name.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    function: Callable[..., Any]
    is_bounded: bool = False  # enforces its own deadline, or cannot run long: called without a thread
    checker: Any = field(default=None, repr=False, compare=False)  # pydantic's, of the function's hints

    @classmethod
    def of(cls, function: Callable[..., Any], *, name: str = "", is_bounded: bool = False) -> Tool:
        """Return the tool described by a function's hints and docstring.

        Args:
            function: or a bound method; every parameter has a hint
            name: of the tool; default the function's own
            is_bounded: see the class

        Raises:
            ValueError: lists parameters without a hint, variable arguments, and a missing docstring.
        """
        described = _described(getattr(function, "__func__", function))
        about = (described.description, described.parameters)
        return cls(name or function.__name__, *about, function, is_bounded, described.checker)

    @classmethod
    def declared(cls, schema: Mapping[str, Any], function: Callable[..., Any], *, is_bounded: bool = False) -> Tool:
        """Return a tool with an external schema; arguments are bound by name, and their types are not checked.

        Args:
            schema: {"name", "description", "parameters"}
            function: to call
            is_bounded: see the class
        """
        parameters = dict(schema.get("parameters") or {"type": "object", "properties": {}})
        return cls(str(schema["name"]), str(schema.get("description", "")), parameters, function, is_bounded)

    def schema(self) -> dict[str, Any]:
        """Return the tool in the schema of chat templates and the OpenAI interface."""
        about = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": about}

    def signature(self) -> str:
        """Return the call as a policy would write it, such as `add(a: int, b: int = 1)`."""
        required = self.parameters.get("required", ())
        parts = []
        for name, about in self.parameters.get("properties", {}).items():
            optional = "" if name in required else f" = {about['default']!r}" if "default" in about else " = ..."
            parts.append(f"{name}: {_type_name(about)}{optional}")
        return f"{self.name}({', '.join(parts)})"

    def arguments(self, call: ToolCall) -> dict[str, Any]:
        """Return the checked arguments of a call by name.

        Raises:
            CallError: lists everything that does not fit, and the signature.
        """
        names = list(self.parameters.get("properties", {}))
        arguments = dict(zip(names, call.args))
        errors = [f"{len(call.args)} arguments by position; expected at most {len(names)}"] * (
            len(call.args) > len(names)
        )
        errors += [f"{name} is given twice" for name in call.kwargs if name in arguments]
        arguments.update(call.kwargs)
        if call.is_text:
            arguments = self.read(ToolCall(self.name, (), arguments))
        errors += [f"{name} is unknown" for name in arguments if name not in names]
        errors += [f"{name} is missing" for name in self.parameters.get("required", ()) if name not in arguments]
        if not errors and self.checker is not None:
            arguments, errors = _checked(self.checker, arguments)
        if errors:
            raise CallError(f"{self.name}: {'; '.join(errors)}. Expected {self.signature()}")
        return arguments

    def read(self, call: ToolCall) -> dict[str, Any]:
        """Return the arguments of a call whose values are all text, by name, converted to the types of the schema."""
        arguments = {**dict(zip(self.parameters.get("properties", {}), call.args)), **call.kwargs}
        return {name: self._read(name, value) for name, value in arguments.items()}

    def _read(self, name: str, value: Any) -> Any:
        """Return the value of a text if the tool expects another type than text."""
        about = self.parameters.get("properties", {}).get(name, {})
        if not isinstance(value, str) or _takes_text(about):
            return value
        for read in (json.loads, ast.literal_eval):
            try:
                return read(value.strip())
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
        return value


@dataclass(frozen=True)
class _Description:
    description: str
    parameters: dict[str, Any]
    checker: Any


@cache
def _described(function: Callable[..., Any]) -> _Description:
    import docstring_parser

    _check_describable(function)
    written = docstring_parser.parse(function.__doc__ or "", docstring_parser.DocstringStyle.GOOGLE)
    about = {param.arg_name: " ".join((param.description or "").split()) for param in written.params}
    schema, checker = _schema_of(function, about)
    description = " ".join(filter(None, (written.short_description, written.long_description)))
    return _Description(" ".join(description.split()), schema, checker)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("self", None)
    return parameters


def _check_describable(function: Callable[..., Any]) -> None:
    hints, errors = get_type_hints(function), []
    for name, parameter in _parameters(function).items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            errors.append(f"parameter {name} is {parameter.kind.description}; expected a parameter that can be named")
        elif name not in hints:
            errors.append(f"parameter {name} has no type hint")
    if not (function.__doc__ or "").strip():
        errors.append("it has no docstring")
    if errors:
        raise ValueError(f"tool {function.__name__!r}: " + "; ".join(errors))


def _schema_of(function: Callable[..., Any], about: Mapping[str, str]) -> tuple[dict[str, Any], Any]:
    from pydantic import ConfigDict, Field, TypeAdapter, with_config
    from typing_extensions import TypedDict  # pydantic asks for this one below Python 3.12

    hints, parameters, fields = get_type_hints(function, include_extras=True), _parameters(function), {}
    for name, parameter in parameters.items():
        hint: Any = Annotated[hints[name], Field(description=about.get(name) or None)]
        fields[name] = hint if parameter.default is parameter.empty else NotRequired[hint]
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    arguments = with_config(config)(TypedDict(function.__name__, fields))  # type: ignore[operator]
    checker = TypeAdapter(arguments)
    schema = checker.json_schema()
    for name, prop in schema.get("properties", {}).items():
        prop.pop("title", None)
        default = parameters[name].default
        if default is not inspect.Parameter.empty:
            prop["default"] = default
    plain = {"type": "object", "properties": schema.get("properties", {}), "required": schema.get("required", [])}
    return {**plain, **({"$defs": schema["$defs"]} if "$defs" in schema else {})}, checker


def _checked(checker: Any, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments converted by the hints, and error messages."""
    from pydantic import ValidationError

    try:
        return dict(checker.validate_json(json.dumps(arguments))), []
    except ValidationError as error:
        errors = []
        for problem in error.errors(include_url=False, include_context=False):
            where = ".".join(str(part) for part in problem["loc"])
            errors.append(f"{where or 'the call'} is {shown(repr(problem['input']))}; {problem['msg']}")
        return {}, errors


def _type_name(about: Mapping[str, Any]) -> str:
    if "enum" in about:
        return " | ".join(map(repr, about["enum"]))
    if "const" in about:
        return repr(about["const"])
    if "anyOf" in about:
        return " | ".join(_type_name(option) for option in about["anyOf"])
    kind = about.get("type", "object" if "$ref" in about else "any")
    if kind == "array" and "items" in about:
        return f"list[{_type_name(about['items'])}]"
    return _NAMES.get(kind, str(kind))


_NAMES = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "null": "None",
    "array": "list",
    "object": "dict",
}


def _takes_text(about: Mapping[str, Any]) -> bool:
    kinds = [option.get("type") for option in about.get("anyOf", (about,))] + [about.get("type")]
    return "string" in kinds or any(isinstance(value, str) for value in about.get("enum", ()))

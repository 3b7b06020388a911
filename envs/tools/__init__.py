"""Tool use: functions a policy may call, the formats it calls them in, and worlds in which it does.

    class Sums(ToolWorld):
        def tools(self, prompt_id): return [add]                    add: a plain function with hints and a docstring
        def gold_calls(self, prompt_id): return [ToolCall("add", (), {"a": 2, "b": 3})]

`calls` parses (and never evaluates), `tool` describes and checks, `deadline` watches the clock, `formats` and
`model_formats` read and write, `matching` compares with what is expected, `world` plays.
"""

from envs.tools.call_format import CallFormat
from envs.tools.calls import CallError, Said, ToolCall, ToolTimeoutError
from envs.tools.formats import CALL_FORMATS
from envs.tools.tool import Tool
from envs.tools.world import ToolSettings, ToolWorld

__all__ = [
    "CALL_FORMATS",
    "CallError",
    "CallFormat",
    "Said",
    "Tool",
    "ToolCall",
    "ToolSettings",
    "ToolTimeoutError",
    "ToolWorld",
]

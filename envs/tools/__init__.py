"""Tool use: functions a policy may call, the formats of calls, and environments with tools.

    class Sums(ToolQuestionEnv):
        def tools(self, prompt_id): return [add]                    add: a plain function with hints and a docstring
        def gold_calls(self, prompt_id): return [ToolCall("add", (), {"a": 2, "b": 3})]

`calls` parses calls without evaluating them, `tool` describes tools and checks arguments, `deadline` enforces timeouts,
`formats` and `model_formats` read and write calls, `matching` compares calls with the expected ones, `env` is the
base of environments, and `environment` the public one, `rllib_srl.ToolEnvironment`.
"""

from rllib_srl.envs.tools.call_format import CallFormat
from rllib_srl.envs.tools.calls import CallError, Said, ToolCall, ToolTimeoutError
from rllib_srl.envs.tools.formats import CALL_FORMATS
from rllib_srl.envs.tools.tool import Tool
from rllib_srl.envs.tools.tool_questions import ToolQuestionEnv, ToolSettings

__all__ = [
    "CALL_FORMATS",
    "CallError",
    "CallFormat",
    "Said",
    "Tool",
    "ToolCall",
    "ToolQuestionEnv",
    "ToolSettings",
    "ToolTimeoutError",
]

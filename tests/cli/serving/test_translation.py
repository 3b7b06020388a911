"""What a client's request becomes for vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rllib_srl.cli.serving.translation import Sampling, forwarded
from rllib_srl.envs.agents.requests import read_request


def sent(usual: Sampling, **fields: Any) -> dict[str, Any]:
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return forwarded(read_request(json.dumps(asked).encode()), usual, "v0")[0]


@pytest.mark.parametrize(("ends", "wanted"), [((), None), ((7, 9), [7, 9])])
def test_what_closes_a_turn_in_the_template_ends_an_answer(ends: tuple[int, ...], wanted: list[int] | None) -> None:
    assert sent(Sampling(1.0, 64, ("\n",), ends)).get("stop_token_ids") == wanted


def test_a_greedy_request_may_say_so_twice() -> None:
    body = sent(Sampling(1.0, 64, ()), temperature=0, top_p=0)
    assert (body["temperature"], body["top_p"]) == (0, 1.0)  # vLLM refuses a top_p of 0

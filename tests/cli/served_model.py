"""A directory of `srl serve` written by the real stores: three versions, conversations with markup, and ratings."""

from __future__ import annotations

from pathlib import Path

from rllib_srl.cli.serving.served_directory import ServedDirectory
from rllib_srl.cli.serving.stores import Stores
from rllib_srl.people.lineage.conversations import Conversation, Tokens

EVIL = "<script>alert(1)</script>"
FIXED = {"model": "small", "rank": 8, "context": 64, "temperature": 1.0}
CHANGE = {"change": -0.02, "num": 200, "num_lost": 9, "num_gained": 5, "before": 0.8, "after": 0.78}
CHANGE |= {"low": -0.05, "high": 0.01}
PASSED = {"gate": "kept", "outcome": "passed", "reason": "0.800 -> 0.780, -2.0 points", "domain": "compare"}
LOST = {"gate": "kept", "outcome": "harmful", "reason": f"fell by 9 points {EVIL}", "domain": "compare"}


def conversation(number: int, question: str, answer: str = "A pear.", version: int = 0, **more: str) -> Conversation:
    tokens = None if more else Tokens([1, 2], [3, 4], [-0.5, -0.25])
    at = f"2026-11-01T10:{number // 60:02d}:{number % 60:02d}+00:00"
    messages = [{"role": "user", "content": question}]
    return Conversation(f"chatcmpl-{number:04d}", version, at, messages, answer, "stop", tokens, more.get("why", ""))


def about(verdict: dict[str, str]) -> dict[str, object]:
    return {"verdicts": [verdict], "changes": {"compare": CHANGE}, "metrics": {"reuse/kl": 0.0125}}


def write_served(directory: Path) -> None:
    """Write versions 1 (superseded), 2 (active) and 3 (rejected), and four conversations, two of them rated."""
    served = ServedDirectory(directory)
    served.fix_settings(FIXED)
    stores = Stores(served)

    def fill() -> None:
        log, rate, lineage = stores.conversations.log, stores.ratings.rate, stores.lineage
        said = [
            conversation(1, "Name a fruit."),
            conversation(2, f"What is {EVIL}?", '"><img src=x onerror=alert(2)>\x1b[31m', 1),
            conversation(3, "Name a Straße.", "Hauptstraße", 2, why="sampled with temperature = 0.2"),
            conversation(4, "Name a colour.", "Red.", 2),
        ]
        for one in said:
            log(one)
        rate(said[0].as_answer(), "good", "ann")
        rate(said[1].as_answer(), "2", "ann")
        for number, use in ((1, {"chatcmpl-0001/0": "good"}), (2, {"chatcmpl-0002/0": "2"})):
            version = lineage.begin(use, {"lr": 0.001})
            assert version.number == number
            lineage.finish(number, {"adapter": "ab" * 32}, about(PASSED))
            lineage.activate(number, "it passed all gates; canary gap mean 1e-06, max 2e-06 nats")
        lineage.reject(lineage.begin({"x/0": "bad"}, {}).number, f"kept compare: {LOST['reason']}", about(LOST))

    stores.now(fill)
    stores.close()

#!/usr/bin/env python3
"""Play an evening with a served model: chats with ratings by a rule, training, gates, a hot push, a rollback.

    python scripts/evening.py --out results/evening                    the tiny model, about 10 minutes on 2 cores
    python scripts/evening.py --model smollm2-135m --lr 2e-4 --rule short --out results/evening
    python scripts/evening.py --page --out results/evening             ratings, pauses, rollback by clicks on its page
    python scripts/evening.py --latency --model smollm2-135m --lr 2e-4 --rule short --out results/latency
                                                   1 and 2 alone, with 16 ratings and a small gate: about 5 minutes

    1  srl serve; 60 chats, rated by a rule (a word is good, a number or nothing is bad)
    2  a version is trained in the background, while questions go on: their latency, in turn with training paused
    3  held-out questions, rated by the same rule, before and after
    4  60 harmful ratings (a right comparison is bad): the gate on `compare` must reject what was learned from them
    5  srl versions --rollback

With --page, Chromium without a window opens the page of the server, and pictures of it are written to DIR-pictures.
Questions are asked by HTTP in both forms.

Exit status 0: the rating rose, the harmful version was rejected, the rollback works, and training has delayed the 95th
percentile of the latency by no more than --share, or 10 ms.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages

from rllib_srl.cli.serving.figures import percentile
from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.display import table
from rllib_srl.cli.shared.flags import help_of
from scripts.page.hands import PageHands

_WORDS = """
    apple basket bell bird boat book bottle bridge broom bucket button candle carpet chair cherry cloud coat corn desk
    drum duck fence field flower forest garden glass hammer horse island kettle ladder lamp leaf letter lion map mirror
"""
WORDS = _WORDS.split()
VERSION_S, CALL_S = 1800.0, 120.0
GAP_S = 0.3  # between two questions of somebody who chats, at least
READING = 2.0  # times as long as an answer took, it is read; training goes on meanwhile
LEEWAY_S = 0.01  # by which training may delay the 95th percentile, however short answers are
NUM_RATED = 16  # for the delay alone
BLOCK = 12  # questions, in turn with and without training
RATER = "rule"
_SERVING = re.compile(r"serving (\S+)")

Rule = Callable[[str, str], bool]  # question, answer -> good


def is_word(question: str, answer: str) -> bool:
    """Return whether the answer is one word of letters."""
    return answer.strip().isalpha()


def is_short(question: str, answer: str) -> bool:
    """Return whether the answer has at most 12 words."""
    return 0 < len(answer.split()) <= 12


def is_wrong(question: str, answer: str) -> bool:
    """Return whether the answer to a comparison is not the largest number."""
    return answer.strip() != str(max(int(number) for number in re.findall(r"\d+", question)))


RULES = {"word": is_word, "short": is_short}


class Hands(Protocol):
    """What a person does beside asking."""

    def rate(self, name: str, is_good: bool) -> None:
        """Rate an answer by its id."""

    def pause(self, is_paused: bool) -> None:
        """Pause training, or continue it."""

    def roll_back(self, reason: str) -> str:
        """Roll the active version back; return what is said about it."""


class NotServed(ValueError):
    """`srl serve` does not start; the message says where its own message is."""


class Served:
    """A process of `srl serve`, its client, and the hands of a person who uses HTTP and the command line."""

    def __init__(self, flags: Sequence[object], directory: Path, log: IO[str] | None = None) -> None:
        """Start `srl serve` and wait until it answers.

        Args:
            flags: model and flags, without directory and port.
            directory: of the served model.
            log: for its messages; None: standard error.

        Raises:
            NotServed: it ends.
        """
        self.directory = directory
        program = [sys.executable, "-m", "rllib_srl.cli"]
        command = [*program, "serve", *map(str, flags), "--out", str(directory), "--port", "0"]
        self._versions = [*program, "versions", str(directory)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        match = _SERVING.match(self.process.stdout.readline())
        if match is None:
            status = self.process.wait(CALL_S)
            raise NotServed(f"srl serve --out {directory} has ended with status {status}; its own message says why")
        self._url = match[1]
        self.page = self.process.stdout.readline().removeprefix("page ").strip()
        self._token = (directory / "token").read_text().strip()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON reply to a request."""
        return json.loads(self.read(method, path, body))

    def read(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the reply to a request."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=CALL_S) as response:
            content: bytes = response.read()
            return content

    def ask(self, question: str) -> tuple[str, str, float]:
        """Return id and text of an answer, and how long it took, seconds."""
        begun = time.perf_counter()
        said = {"model": "policy", "messages": [{"role": "user", "content": question}]}
        reply = self.call("POST", "/chat/completions", said)
        return reply["id"], reply["choices"][0]["message"]["content"] or "", time.perf_counter() - begun

    def rate(self, name: str, is_good: bool) -> None:
        """Rate an answer."""
        self.call("PUT", f"/conversations/{name}/rating", {"rating": "good" if is_good else "bad", "rater": RATER})

    def pause(self, is_paused: bool) -> None:
        """Pause training, or continue it."""
        self.call("POST", "/training", {"paused": is_paused})

    def roll_back(self, reason: str) -> str:
        """Roll the active version back; return the output of `srl versions`."""
        return self.versions("--rollback", "--reason", reason)

    def versions(self, *flags: str) -> str:
        """Return the output of `srl versions`."""
        return subprocess.check_output([*self._versions, *flags], text=True, timeout=CALL_S)

    def stop(self) -> None:
        """End the server."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def question_of(rng: random.Random) -> str:
    """Return a question of somebody who wants to hear about things."""
    return f"Tell me about {rng.choice(WORDS)} and {rng.choice(WORDS)}."


def comparison_of(rng: random.Random) -> str:
    """Return a question of the domain to keep."""
    a, b, c = rng.sample(range(10, 100), 3)
    return f"Which is largest: {a}, {b} or {c}?"


def share_good(served: Served, rng: random.Random, rule: Rule, num: int) -> float:
    """Return the share of good answers to held-out questions, which are not rated."""
    asked = [question_of(rng) for _ in range(num)]
    return sum(rule(question, served.ask(question)[1]) for question in asked) / num


class Person:
    """Somebody who chats, rates by a rule, and waits for versions."""

    def __init__(self, served: Served, hands: Hands, rng: random.Random) -> None:
        """Prepare to chat.

        Args:
            served: the server that is asked.
            hands: how answers are rated and training is paused.
            rng: for the questions.
        """
        self._served, self._hands, self._rng = served, hands, rng
        self.taken: dict[bool, list[float]] = {False: [], True: []}  # training is paused -> latencies, seconds

    def chat(self, make: Callable[[random.Random], str], rule: Rule, num: int) -> None:
        """Ask and rate."""
        for _ in range(num):
            question = make(self._rng)
            name, answer, _ = self._served.ask(question)
            self._hands.rate(name, rule(question, answer))

    def wait_for(self, number: int) -> str:
        """Chat until a version is decided; return its state.

        Training is paused and resumed every `BLOCK` questions, so that whatever else the machine does slows both alike.

        Raises:
            TimeoutError: it is not decided in time.
        """
        deadline, num = time.monotonic() + VERSION_S, 0
        while time.monotonic() < deadline:
            is_paused = num % (2 * BLOCK) >= BLOCK
            if num % BLOCK == 0:
                self._hands.pause(is_paused)
            num += 1
            seconds = self._served.ask(question_of(self._rng))[2]
            self.taken[is_paused].append(seconds)
            time.sleep(max(GAP_S, READING * seconds))
            versions = {version["number"]: version for version in self._served.call("GET", "/versions")["versions"]}
            if number in versions and versions[number]["state"] not in ("training", "candidate"):
                self._hands.pause(False)
                return str(versions[number]["state"])
        raise TimeoutError(f"version {number} was not decided within {VERSION_S:g} s")

    def delay(self, share: float) -> tuple[list[list[str]], bool]:
        """Return the 95th percentiles as rows, and whether training delays it by at most a share or `LEEWAY_S`."""
        paused, going_on = self.taken[True], self.taken[False]
        without, beside = (percentile(seconds, 0.95) or 0.0 for seconds in (paused, going_on))
        limit = f"limit {share:+.0%}, or {1000 * LEEWAY_S:.0f} ms"
        rows = [
            ["p95 of an answer, training paused", f"{1000 * without:.1f} ms ({len(paused)} answers)"],
            ["p95 of an answer, with training", f"{1000 * beside:.1f} ms ({len(going_on)} answers)"],
            ["delay of the p95", f"{1000 * (beside - without):+.1f} ms, {beside / without - 1:+.1%}; {limit}"],
        ]
        return rows, beside <= max((1 + share) * without, without + LEEWAY_S)


def latency(served: Served, hands: Hands, arguments: argparse.Namespace) -> bool:
    """Train one version, and print how much that delays answers; return whether it is little enough."""
    person = Person(served, hands, random.Random(arguments.seed))
    person.chat(question_of, RULES[arguments.rule], arguments.chats)
    begun = time.monotonic()
    state = person.wait_for(1)
    rows, is_fast = person.delay(arguments.share)
    print(table([["version 1", f"{state} after {time.monotonic() - begun:.0f} s"], *rows]))
    return is_fast


def evening(served: Served, hands: Hands, arguments: argparse.Namespace) -> bool:
    """Play the evening, print what happened; return whether all went as it should."""
    held_out = random.Random(arguments.seed + 1)
    rule = RULES[arguments.rule]
    person = Person(served, hands, random.Random(arguments.seed))
    before = share_good(served, held_out, rule, arguments.heldout)
    person.chat(question_of, rule, arguments.chats)
    state = person.wait_for(1)
    after = share_good(served, held_out, rule, arguments.heldout)
    person.chat(comparison_of, is_wrong, arguments.chats)
    harmful = person.wait_for(2)
    print(served.versions())
    active = served.call("GET", "/versions")["active"]
    if active:
        print(hands.roll_back("the evening is over"))
        print(served.versions())
    back = served.call("GET", "/versions")["active"]
    delayed, is_fast = person.delay(arguments.share)
    rows = [
        ["version 1, from good ratings", state],
        ["held-out answers that the rule calls good", f"{before:.3f} -> {after:.3f} of {arguments.heldout}"],
        ["version 2, from harmful ratings", harmful],
        ["active, and after the rollback", f"{active}, {back}"],
        *delayed,
    ]
    print(table(rows))
    is_rejected = harmful == "rejected" and active == 1
    return state == "active" and after > before and is_rejected and back == 0 and is_fast


def by_page(served: Served, arguments: argparse.Namespace) -> bool:
    """Play the evening on the page; return whether all went as it should, without an error on the page."""
    with PageHands(served.page) as hands:
        is_good = evening(served, hands, arguments)
        pictures = hands.shoot(arguments.out.with_name(f"{arguments.out.name}-pictures"))
        print(f"pictures: {', '.join(map(str, pictures))}")
        for error in hands.errors:
            print(f"on the page: {json.dumps(error)}")
        return is_good and not hands.errors


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(**help_of(__doc__))
    parser.add_argument("--model", default="tiny", help="name or directory of a model (default: tiny)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new directory of the served model")
    parser.add_argument("--rule", choices=RULES, default="word", help="what is good (default: word)")
    parser.add_argument("--chats", type=int, default=60, help="rated chats of each half (default: 60)")
    parser.add_argument("--heldout", type=int, default=200, help="held-out questions (default: 200)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 1e-3)")
    parser.add_argument("--share", type=float, default=0.1, help="largest delay of the p95 (default: 0.1)")
    parser.add_argument("--page", action="store_true", help="rate, pause and roll back by clicks on the page")
    text = "train one version on 16 ratings, with 80 prompts of the gate, and measure the delay alone"
    parser.add_argument("--latency", action="store_true", help=text)
    parser.add_argument("--seed", type=int, default=0, help="of the questions (default: 0)")
    arguments = parser.parse_args()
    return run_cleanly(lambda: play(arguments), debug=False)


def play(arguments: argparse.Namespace) -> int:
    """Serve, play the evening, and return the exit status."""
    if arguments.latency:
        arguments.chats = NUM_RATED
    flags = [arguments.model, "--keep", "compare", "--train-after", arguments.chats, "--lr", arguments.lr]
    flags += ["--gate-prompts", 80, "--max-drop", 0.3] if arguments.latency else []
    served = Served([*flags, "--max-tokens", 24], arguments.out)
    try:
        if arguments.latency:
            is_good = latency(served, served, arguments)
        else:
            is_good = by_page(served, arguments) if arguments.page else evening(served, served, arguments)
    finally:
        served.stop()
    print("the evening went as it should" if is_good else "FAILED: see the table")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

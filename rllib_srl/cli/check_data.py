"""Check your own questions before training: prompts, grading and token lengths.

    srl check-data --data my.jsonl --model smollm2-135m
    srl check-data --data my.jsonl --reward my_rewards.py:f --model tiny --max_turn_tokens 64

Takes the settings of `srl train`. It shows prompts as the model will see them, grades right answers and wrong ones (the
answer of another row), and compares lengths with max_turn_tokens and max_episode_tokens. What a model solves before
training: srl evaluate MODEL --data my.jsonl --evaluation_pass_k 8.

Exit status: 1 if rows cannot be used, contradict each other, or leave nothing to train on, or if right answers do not
earn 1 or wrong ones as much; else 0, also if something needs a look.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_srl.cli.shared.cluster import command
from rllib_srl.cli.shared.display import one_line, printable_lines
from rllib_srl.cli.shared.flags import Program
from rllib_srl.cli.shared.settings import SettingsError, build_config, check, given_settings, words_of
from rllib_srl.common.loading import OWN_DATA
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model
from rllib_srl.envs.math.answer_text import plain
from rllib_srl.envs.math.classes import class_of
from rllib_srl.envs.math.question_file import QuestionFile
from rllib_srl.envs.math.row_prompts import CONTRADICTION
from rllib_srl.rollout.replies import reset
from rllib_srl.rollout.transcript import make_transcript
from rllib_srl.types import Prompt

if TYPE_CHECKING:
    from rllib_srl.algorithm.config import SRLConfig

NUM_SHOWN = 5  # prompts
NUM_MEASURED = 5000  # prompts whose tokens are counted
NUM_GRADED = 200  # right answers, and wrong ones
NUM_EXAMPLES = 3  # of what needs a look
WIDEST = 70  # characters of a question or an answer
_RULE = "─" * 12


@dataclass
class Findings:
    """The lines to print. Invariant: `to_look_at` has one line for each finding that training would suffer from."""

    to_look_at: list[str] = field(default_factory=list)
    has_wrong: bool = False

    def line(self, topic: str, text: str) -> None:
        print(f"{topic:<10}{text}")

    def look(self, text: str, examples: Sequence[str] | None = None, is_wrong: bool = False) -> None:
        """Keep a finding for the end, with the number of `examples` and the first few; without any it is none."""
        if examples is not None and not examples:
            return
        self.has_wrong |= is_wrong
        shown = "".join(f"\n    {each}" for each in (examples or ())[:NUM_EXAMPLES])
        self.to_look_at.append(text if examples is None else f"{text}: {len(examples)}{shown}")


@contextmanager
def without_warnings_of_rows() -> Iterator[None]:
    """Silence the environments' warnings about rows, which `rows` reports."""
    logger = logging.getLogger("rllib_srl.envs")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@without_warnings_of_rows()
def check_data(arguments: argparse.Namespace) -> int:
    settings = given_settings(arguments)
    if settings.get("env") != OWN_DATA:
        raise SettingsError("nothing to check; expected --data FILE, or --env question_file with its --env_config")
    left_out = {**settings, "env_config": {**settings["env_config"], "bad_rows": "skip"}}
    env = QuestionFile(left_out["env_config"])
    config = build_config(left_out)
    ids = {split: list(env.prompt_ids(split, seed=0)) for split in ("train", "heldout")}
    findings = Findings()
    rows(findings, env, ids, settings["env_config"])
    if ids["train"]:
        check(config)
        directory = local_model(config.model_config["model"])
        transcript = make_transcript(config.prompt_format, tokenizer := load_tokenizer(directory), config.max_turns)
        prompts(findings, env, ids["train"], config, transcript, tokenizer)
        grading(findings, env, [*ids["train"], *ids["heldout"]][:NUM_GRADED], tokenizer)
        lengths(findings, env, [*ids["train"], *ids["heldout"]], config, transcript, tokenizer)
    if not findings.to_look_at:
        if "lr" not in settings:
            print(f"\nno --lr is given: {config.lr:g} suits a model of billions of parameters, 2e-5 one of 135M")
        print(f"\nnothing needs a look; train with the same flags: {command('train', *words_of(arguments))}")
        return 0
    print(f"\n{len(findings.to_look_at)} to look at:")
    for text in findings.to_look_at:
        print(f"- {text}")
    return int(findings.has_wrong)


def rows(findings: Findings, env: QuestionFile, ids: Mapping[str, Sequence[str]], settings: Mapping[str, Any]) -> None:
    """Report the numbers of questions, repeated rows, rows left out, and contradictions."""
    num = {split: len(of_split) for split, of_split in ids.items()}
    method = "in heldout_path" if settings.get("heldout_path") else "by a hash of the question"
    place = " ".join(str(settings[name]) for name in ("hub_id", "path") if settings.get(name))
    shots = f", {env.settings.num_shots} shown as examples" if env.settings.num_shots else ""
    findings.line("data", f"{place}: {num['train']} questions to train on, {num['heldout']} held out {method}{shots}")
    contradictions = [error for error in env.row_errors if error.endswith(CONTRADICTION)]
    others = [error for error in env.row_errors if not error.endswith(CONTRADICTION)]
    counts = f"{env.num_repeated} repeated, counted once; {len(contradictions)} contradictory; {len(others)} unusable"
    findings.line("", f"rows: {counts}")
    findings.look("rows with the question of an earlier row, but another answer", contradictions, is_wrong=True)
    findings.look("rows that cannot be used (fix them, or set bad_rows to skip)", others, is_wrong=True)
    findings.look("rows that are used, but may be read otherwise than they are meant", env.row_notes)
    if not num["train"]:
        text = "all questions are held out, so none is left to train on; expected more rows, or another heldout_path"
        findings.look(text, is_wrong=True)
    if not num["heldout"]:
        findings.look("no question is held out, so a run cannot evaluate; expected more rows, or a heldout_path")


def prompts(
    findings: Findings, env: QuestionFile, ids: Sequence[str], config: SRLConfig, transcript: Any, tokenizer: Any
) -> None:
    """Show prompts as the model will see them, with the chat template."""
    seen = f"token for token as {config.model_config['model']} will see them (prompt_format = {config.prompt_format})"
    findings.line("prompts", f"the first {min(NUM_SHOWN, len(ids))}, {seen}")
    for number, prompt_id in enumerate(ids[:NUM_SHOWN], 1):
        print(f"{_RULE} prompt {number} {_RULE}")
        print(printable_lines(tokenizer.decode(_tokens(env, prompt_id, transcript), skip_special_tokens=False)))
        print(f"{_RULE} {_right_answer(env, prompt_id, tokenizer)}")


def grading(findings: Findings, env: QuestionFile, ids: Sequence[str], tokenizer: Any) -> None:
    """Grade right answers, and as wrong ones those of other rows."""
    answered = [prompt_id for prompt_id in ids if env.gold_turns(prompt_id)]
    if not answered:
        findings.line("grading", "not checked: the rows have no right answers (answer_field names their column)")
        return
    others = dict(zip(answered, _others(env, answered), strict=True))
    right = {row: _reward(env, row, env.gold_turns(row), tokenizer) for row in answered}
    wrong = {row: _reward(env, row, env.gold_turns(other), tokenizer) for row, other in others.items() if other}
    for name, graded, target in (("right answers", right, 1), ("wrong answers (of other rows)", wrong, 0)):
        earned = [reward for reward, _ in graded.values()]
        num = sum(reward == target for reward in earned)
        text = f"{num} of {len(earned)} earn {target}; mean reward {np.mean(earned):.2f}" if earned else "none"
        findings.line("grading" if target else "", f"{name}: {text}")
    if env.settings.reward != "":
        odd = [row for row, (reward, _) in wrong.items() if reward >= right[row][0]]
        examples = [f"{one_line(env.question(row).text, WIDEST)}: {wrong[row][0]:g}" for row in odd]
        findings.look("wrong answers that earn at least as much as the right one", examples, is_wrong=True)
        return
    unpaid = [_graded_line(env, row, *result) for row, result in right.items() if result[0] < 1]
    findings.look("right answers that do not earn 1 (docs/grading.md)", unpaid, is_wrong=True)
    paid = [_graded_line(env, row, *result) for row, result in wrong.items() if result[0] > 0]
    findings.look("answers of other rows that earn a reward (docs/grading.md)", paid, is_wrong=True)


def lengths(
    findings: Findings, env: QuestionFile, ids: Sequence[str], config: SRLConfig, transcript: Any, tokenizer: Any
) -> None:
    """Report percentiles of lengths in tokens, and how many exceed the limits."""
    measured = ids[:NUM_MEASURED]
    of_prompts = np.array([len(_tokens(env, prompt_id, transcript)) for prompt_id in measured])
    turns = ["".join(turn) for prompt_id in measured if (turn := env.gold_turns(prompt_id))]
    of_answers = np.array([len(tokenizer(turn, add_special_tokens=False)["input_ids"]) for turn in turns])
    turn, episode = config.max_turn_tokens, config.max_episode_tokens
    findings.line("tokens", f"prompts: {_percentiles(of_prompts)} (max_episode_tokens {episode})")
    if len(of_answers):
        findings.line("", f"right answers: {_percentiles(of_answers)} (max_turn_tokens {turn})")
    too_long, tight = int((of_prompts >= episode).sum()), int((of_prompts + turn > episode).sum())
    if too_long:
        text = f"prompts of {episode} tokens or more, which a run leaves out: {too_long}"
        findings.look(f"{text}; raise max_episode_tokens")
    if tight - too_long > 0:
        text = f"prompts that leave less than max_turn_tokens for the answer: {tight - too_long}"
        findings.look(f"{text}; raise max_episode_tokens to {int(of_prompts.max()) + turn}")
    if cut := int((of_answers > turn).sum()):
        longest = int(of_answers.max())
        findings.look(f"right answers of more than {turn} tokens: {cut}; raise max_turn_tokens to {longest}")


def _tokens(env: QuestionFile, prompt_id: str, transcript: Any) -> list[int]:
    from rllib_srl.rollout.player import first_ids

    return first_ids(transcript, reset(env, Prompt(OWN_DATA, prompt_id)))


def _right_answer(env: QuestionFile, prompt_id: str, tokenizer: Any) -> str:
    """Return the right answer of a row, with its class and the reward that it earns."""
    answer = env.question(prompt_id).answer
    if not answer:
        return "no right answer in the row"
    reward, _ = _reward(env, prompt_id, env.gold_turns(prompt_id), tokenizer)
    of_class = "" if env.settings.reward != "" else f"class: {class_of(*env.gold(prompt_id))}, "
    return f"right answer: {one_line(answer, WIDEST)} ({of_class}reward {reward:g})"


def _reward(env: QuestionFile, prompt_id: str, turns: Sequence[str], tokenizer: Any) -> tuple[float, dict[str, Any]]:
    """Return reward and info of an episode; reward functions get the tokens that the tokenizer makes of each turn."""
    env.reset(options={"prompt_id": prompt_id})
    total = 0.0
    for turn in turns:
        env.hear_turn(tokenizer(turn, add_special_tokens=False)["input_ids"], version=0)
        _, reward, terminated, truncated, info = env.step(turn)
        total += reward
        if terminated or truncated:
            return total, info
    return total, {}


def _others(env: QuestionFile, ids: Sequence[str]) -> Iterator[str | None]:
    """Yield for each prompt the next one with another answer, None without one."""
    answers = [" ".join(plain(env.question(prompt_id).answer).casefold().split()) for prompt_id in ids]
    for number, answer in enumerate(answers):
        later = ((number + step) % len(ids) for step in range(1, len(ids)))
        other = next((at for at in islice(later, 50) if answers[at] != answer), None)
        yield None if other is None else ids[other]


def _graded_line(env: QuestionFile, prompt_id: str, reward: float, info: Mapping[str, Any]) -> str:
    asked, parsed = one_line(env.question(prompt_id).text, WIDEST), one_line(str(info.get("parsed", "")), WIDEST)
    return f"{asked}: read {parsed!r}, expected {info.get('expected')!r}, reward {reward:g}"


def _percentiles(lengths: np.ndarray) -> str:
    shown = {"median": 50, "90 %": 90, "99 %": 99, "longest": 100}
    return ", ".join(f"{name} {math.ceil(np.percentile(lengths, share))}" for name, share in shown.items())


USAGE = "%(prog)s --data FILE [--reward FUNCTION] [--model MODEL] [--SETTING VALUE ...]"
main = Program(__doc__, lambda parser: None, check_data, usage=USAGE, without=())

"""Grade answers by a rubric: grades 1 to 4 on each criterion, given by a rule, a function or a judge model.

    Question: Write one sentence of 8 to 12 words with: lamp, river, cloud.
    Answer: The lamp and the river are below the cloud.     info  grade_words=4 grade_length=4 grade_form=4 grade=4
                                                                  passed=True; reward 1
    The grade of an answer is the mean over its criteria, and 3 or more is a pass.
        reward "graded": (grade - 1) / 3        reward "pass": 1 for a pass, else 0
In the replay memory, too, grade 3 is a pass (`pass_reward`: 2/3 if graded), regardless of `replay_pass_reward`.

Without settings it runs offline: the task and its rules are in envs/people/sentences.py. With a judge model:

    Rubric({"env": "question_file", "env_config": {...}, "criteria": {"clarity": "says it in plain words"},
            "judge": "http://localhost:8000/v1", "judge_model": "judge-8b"})

A judge on another machine, or one with a key, must be on the user's list: RLLIB_SRL_JUDGES="https://host/v1=KEY_NAME",
see envs/allowed.py. Settings alone, which may come from a checkpoint, cannot send anything.

An empty answer, or one longer than `max_characters`, gets grade 1 and is not sent to the judge. No grade within
`deadline_s` ends the episode as `env_timeout`. A judge that fails or returns no valid grade raises, and the episode
ends as `env_crashed`. Neither carries information about the policy: the runner drops such an episode from its group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from rllib_srl.envs import text
from rllib_srl.envs.people.judge import GRADES, PASS, Criterion, JudgeTimeoutError, checked, make_judge
from rllib_srl.envs.people.sentences import CRITERIA
from rllib_srl.envs.settings import OneOf, Settings, Within, read_settings
from rllib_srl.envs.wrappers.around import Around


@dataclass(frozen=True)
class RubricSettings(Settings):
    """Settings of `Rubric`. Invariant: as in `Settings`."""

    env: str = "rllib_srl.envs.people.sentences:Sentences"  # an entry point, or "package.module:Class"
    env_config: dict[str, Any] = field(default_factory=dict)
    criteria: dict[str, str] = field(  # name -> full grade
        default_factory=lambda: {each.name: each.text for each in CRITERIA}
    )
    judge: str = "rllib_srl.envs.people.sentences:grades"  # a function, or an endpoint "http://host:8000/v1"
    judge_model: str = ""  # at the endpoint
    judge_key_variable: str = ""  # environment variable with its key, allowed for it by the user
    deadline_s: Annotated[float, Within(0, 3600, is_open=True)] = 8.0  # for an endpoint to answer
    max_characters: Annotated[int, Within(1)] = 20_000  # of an answer that is shown to the judge
    reward: Annotated[str, OneOf("graded", "pass")] = "graded"

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        named = [*self.criteria, *self.criteria.values()]
        if named and all(isinstance(text, str) and text for text in named):
            return []
        return [f"criteria = {self.criteria!r}; expected a mapping: name -> description"]


class Rubric(Around):
    """An environment whose answers a judge grades, one turn an episode.

    Invariant: as in `Around`; observations are the inner environment's, and every reward is a function of the judge's
    grades.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        settings = read_settings(RubricSettings, env_config, type(self).__name__)
        super().__init__(settings.env, settings.env_config)
        self.settings = settings
        self.criteria = tuple(Criterion(name, text) for name, text in settings.criteria.items())
        # Grade 3 of 1 to 4 is a pass for every reward scheme.
        low, high = GRADES
        self.pass_reward = 1.0 if settings.reward == "pass" else (PASS - low) / (high - low)
        self.judge = make_judge(settings.judge, settings.judge_model, settings.deadline_s, settings.judge_key_variable)
        self._asked: str | None = None  # the prompt, until it is answered

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """State a prompt.

        Args:
            seed: of the generator that draws a training prompt when no prompt id is given
            options: "prompt_id", and with it an empty "history": the first turn ends an episode

        Raises:
            ValueError: for an unknown option or prompt id, or a history.
        """
        super().reset(seed=seed)
        prompt_id, history = text.reset_options(options)
        if history:
            raise ValueError(
                f"the history of {len(history)} turns ends the episode of prompt {prompt_id!r}; expected an empty one"
            )
        self._asked, info = self.env.reset(seed=seed, options=None if prompt_id is None else {"prompt_id": prompt_id})
        return self._asked, {"prompt_id": str(info["prompt_id"] if prompt_id is None else prompt_id)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Request the judge's grades; this ends the episode.

        Raises:
            JudgeError: the judge failed, or its reply is not a valid grade.
        """
        text.check_step(action, self._asked is not None)
        prompt, self._asked = str(self._asked), None
        answer = (action.split(self.stop_strings[0], 1)[0] if self.stop_strings else action).strip()
        low, high = GRADES
        try:
            grades = (
                checked(self.judge(prompt, answer, self.criteria), self.criteria)
                if 0 < len(answer) <= self.settings.max_characters
                else {criterion.name: low for criterion in self.criteria}
            )
        except JudgeTimeoutError:
            return "", 0.0, False, True, {"stop_reason": "env_timeout"}
        grade = sum(grades.values()) / len(grades)
        reward = float(grade >= PASS) if self.settings.reward == "pass" else (grade - low) / (high - low)
        each = {f"grade_{name}": value for name, value in grades.items()}
        return "", reward, True, False, {"grade": grade, "passed": grade >= PASS, **each}

"""Search a local corpus, then answer.

    Question: In which region was Karo Velmin born?
    <search>Karo Velmin</search>
    <information>(Karo Velmin) Karo Velmin is a baker, born in Tarosk in 1931. ...</information>
    <search>Tarosk</search>
    <information>(Tarosk) Tarosk is a city in the region of Ulvane, on the river Mide. ...</information>
    <answer>Ulvane</answer>                    reward 1 for the same words; with reward = "f1" for the words shared

The corpus is generated (facts.py: 10,800 questions of 1 to 3 hops about 900 people, each person in one split), or a
file of documents with a file of questions. It is searched by words (BM25). Answers are compared without case,
punctuation and articles.

Sources: Jin et al., 2025, arXiv 2503.09516 (Search-R1: tags, exact match); Rajpurkar et al., 2016, arXiv 1606.05250
(normalisation, F1).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rllib_srl.envs.question import Listed, Question
from rllib_srl.envs.search.corpus import Answered, Corpus, corpus_of_file, generated_corpus, questions_of_file
from rllib_srl.envs.search.facts import Chain, facts
from rllib_srl.envs.settings import OneOf, Within
from rllib_srl.envs.tools.calls import ToolCall
from rllib_srl.envs.tools.tool import Tool
from rllib_srl.envs.tools.tool_questions import ToolQuestionEnv, ToolSettings

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MAX_ANSWER_CHARS = 2000


@dataclass(frozen=True)
class RetrievalSettings(ToolSettings):
    """Settings of `Retrieval`. Invariant: as in `ToolSettings`."""

    call_format: str = "tags"
    num_shots: int = 2
    max_calls: int = 6
    num_results: Annotated[int, Within(1, 50)] = 3  # documents that a search shows
    num_hops: Annotated[int, Within(0, 3)] = 0  # of generated questions, 1 to 3; 0 = all
    facts_seed: int = 0  # of the generated corpus
    corpus_path: str = ""  # a file of documents instead
    questions_path: str = ""  # and one of questions
    bad_rows: Annotated[str, OneOf("refuse", "skip")] = "refuse"  # the file, or "skip" a broken row
    reward: Annotated[str, OneOf("exact", "f1")] = "exact"  # "exact" match, or "f1" of the words

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        errors = super().errors()
        if bool(self.corpus_path) != bool(self.questions_path):
            errors.append(
                f"corpus_path = {self.corpus_path!r}, questions_path = {self.questions_path!r}; expected both or none"
            )
        return errors


class Retrieval(Listed, ToolQuestionEnv):
    """Questions whose answers must be found in documents.

    Invariant: a prompt id is the text of its question.
    """

    domain = "retrieval"
    bare_tool = "search"
    result_tag = "information"
    settings_class = RetrievalSettings
    settings: RetrievalSettings

    def _prepare(self) -> None:
        super()._prepare()
        settings = self.settings
        self.row_errors: tuple[str, ...] = ()  # of the rows that were left out
        self._chains: dict[str, Chain] = {}
        self._rows: dict[str, Answered] = {}
        if settings.corpus_path:
            skip = settings.bad_rows == "skip"
            self._corpus, corpus_errors = corpus_of_file(settings.corpus_path, skip)
            rows, row_errors = questions_of_file(settings.questions_path, skip)
            self._rows = {row.question: row for row in rows}
            self.row_errors = corpus_errors + row_errors
        else:
            self._corpus = generated_corpus(settings.facts_seed)
            chains = facts(settings.facts_seed).chains()
            self._chains = {chain.question: chain for chain in chains if settings.num_hops in (0, chain.num_hops)}
        self._ids = list(self._rows or self._chains)

    @property
    def corpus(self) -> Corpus:
        """Return the corpus."""
        return self._corpus

    def question(self, prompt_id: str) -> Question:
        """Return the question of `prompt_id`."""
        answers = self._answers(prompt_id)
        chain = self._chains.get(prompt_id)
        # All questions about a person are in one split, so that no held-out document is needed in training.
        canonical = chain.subject if chain else prompt_id
        return Question(prompt_id, answers[0], wrong="nobody knows", canonical=canonical)

    def tools(self, prompt_id: str) -> Sequence[Tool]:
        """Return the search tool."""
        return [Tool.of(self.search, is_bounded=True)]

    def search(self, query: str) -> str:
        """Find documents.

        Args:
            query: names and words to look for
        """
        documents = self._corpus.search(query, self.settings.num_results)
        return "\n".join(f"({document.title}) {document.text}" for document in documents) or "Nothing was found."

    def gold_calls(self, prompt_id: str) -> list[ToolCall]:
        """Return one search for each document that the answer needs; for a question file they are unknown."""
        chain = self._chains.get(prompt_id)
        return [ToolCall("search", (), {"query": title}) for title in chain.looked_up] if chain else []

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return the best exact match or F1 over all right answers; None for no answer."""
        if not answer or len(answer) > _MAX_ANSWER_CHARS:
            return None
        measure = exact_match if self.settings.reward == "exact" else f1
        return max(measure(answer, right) for right in self._answers(prompt_id))

    def _answers(self, prompt_id: Any) -> tuple[str, ...]:
        if isinstance(prompt_id, str):
            if prompt_id in self._rows:
                return self._rows[prompt_id].answers
            if prompt_id in self._chains:
                return (self._chains[prompt_id].answer,)
        raise ValueError(f"prompt_id = {prompt_id!r}; expected a question of the corpus such as {self._ids[0]!r}")


def normalized(answer: str) -> list[str]:
    """Return the words of an answer without case, punctuation and articles. Source: Rajpurkar et al., 2016."""
    return _ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, right: str) -> float:
    """Return 1 if both have the same words in the same order, else 0."""
    return float(normalized(answer) == normalized(right))


def f1(answer: str, right: str) -> float:
    """Return 2k / (n + m), the harmonic mean of precision k/n and recall k/m: n words said, m right, k in both."""
    said, wanted = Counter(normalized(answer)), Counter(normalized(right))
    num_shared = sum((said & wanted).values())
    return 2 * num_shared / (said.total() + wanted.total()) if num_shared else float(said == wanted)

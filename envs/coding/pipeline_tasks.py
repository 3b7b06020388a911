"""Small classification tasks for a scikit-learn pipeline, each with its own data.

    period 4 2 17  ->  "Data set 17: rows of 4 numbers, where the class is told by the first number modulo 51 ..."

Each kind of data needs a step of its own, so no single pipeline solves all: features whose scales differ by a factor
of a million, missing values, a category as text, a period that the question states, and rows of plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_TRAIN, NUM_TEST = 160, 120
FULL_ACCURACY = 0.8  # earns reward 1
SEEDS = 1000
_FEATURES, _CLASSES = range(2, 7), range(2, 5)
_WORDS = {
    "scales": "rows of {features} numbers, on scales that differ by factors up to a million",
    "missing": "rows of {features} numbers, of which some are missing (None)",
    "category": "rows of {features} values: a category as text, and numbers whose meaning depends on it",
    "period": "rows of {features} numbers, where the class is told by the first number modulo {period} alone",
    "text": "rows that are texts of {features} words",
}
_KINDS = tuple(_WORDS)
_GOLD = {
    "scales": (
        "from sklearn.svm import SVC",
        "    model = make_pipeline(StandardScaler(), SVC(C=10))",
    ),
    "missing": (
        "from sklearn.impute import SimpleImputer\nfrom sklearn.svm import SVC\nimport numpy as np",
        "    X, X_test = np.array(X, dtype=float), np.array(X_test, dtype=float)\n"
        "    model = make_pipeline(SimpleImputer(add_indicator=True), StandardScaler(), SVC(C=10))",
    ),
    "category": (
        "from sklearn.tree import DecisionTreeClassifier\nimport numpy as np",
        "    names = sorted({row[0] for row in X})\n"
        "    def spread(rows):\n"
        "        return np.array([[v * (row[0] == n) for n in names for v in (1, *row[1:])] for row in rows])\n"
        "    X, X_test = spread(X), spread(X_test)\n"
        "    model = make_pipeline(StandardScaler(), DecisionTreeClassifier(random_state=0))",
    ),
    "period": (
        "from sklearn.tree import DecisionTreeClassifier",
        "    X, X_test = ([[row[0] % {period}] for row in rows] for rows in (X, X_test))\n"
        "    model = make_pipeline(StandardScaler(), DecisionTreeClassifier(random_state=0))",
    ),
    "text": (
        "from sklearn.feature_extraction.text import CountVectorizer\nfrom sklearn.linear_model import "
        "LogisticRegression",
        "    model = make_pipeline(CountVectorizer(), StandardScaler(with_mean=False), LogisticRegression())",
    ),
}
_SHAPES = [(kind, features, classes) for kind in _KINDS for features in _FEATURES for classes in _CLASSES]
_CITIES = ("Oslo", "Lima", "Kyiv")
_SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "zo")
NUM_IDS = len(_SHAPES) * SEEDS


@dataclass(frozen=True)
class PipelineTask:
    """Training rows and labels, test rows, and hidden test labels. Invariant: `y_test` never leaves this process."""

    words: str
    gold: str
    X: list[Any]
    y: list[int]
    X_test: list[Any]
    y_test: list[int]
    name: str = "fit_predict"

    def reward(self, labels: Any) -> float:
        """Return (accuracy - c) / (FULL_ACCURACY - c) within [0, 1], where c is the accuracy of the best constant."""
        if not isinstance(labels, Sequence) or isinstance(labels, str) or len(labels) != len(self.y_test):
            return 0.0
        num_right = sum(type(label) in (int, float) and label == truth for label, truth in zip(labels, self.y_test))
        accuracy: float = num_right / len(self.y_test)
        constant = max(self.y_test.count(label) for label in set(self.y_test)) / len(self.y_test)
        return min(1.0, max(0.0, (accuracy - constant) / (FULL_ACCURACY - constant)))


def prompt_id_of(number: int) -> str:
    """Return prompt id `number`, 0 <= number < NUM_IDS; all ids are different."""
    seed, which = divmod(number, len(_SHAPES))
    return " ".join(map(str, (*_SHAPES[which], seed)))


def task(prompt_id: str) -> PipelineTask:
    """Return the task of a prompt id.

    Raises:
        ValueError: there is no such task.
    """
    kind, features, classes, seed = _parsed(prompt_id)
    rng = np.random.default_rng([_KINDS.index(kind), features, classes, seed])
    labels = np.arange(NUM_TRAIN + NUM_TEST) % classes
    rng.shuffle(labels)
    period = int(rng.integers(11, 60))
    X, y = _DRAWN[kind](rng, labels, features, classes, period), [int(label) for label in labels]
    words = (
        f"Data set {seed}: {_WORDS[kind].format(features=features, period=period)}, of {classes} classes. Write "
        f"fit_predict(X, y, X_test) with scikit-learn. X is a list of {NUM_TRAIN} rows and y the list of their "
        f"classes, from 0 on; return the list of classes of the {NUM_TEST} rows of X_test. Full reward takes "
        f"{FULL_ACCURACY:.0%} of them right."
    )
    return PipelineTask(words, _gold(kind, period), X[:NUM_TRAIN], y[:NUM_TRAIN], X[NUM_TRAIN:], y[NUM_TRAIN:])


def _gold(kind: str, period: int) -> str:
    imports, body = _GOLD[kind]
    return (
        f"{imports}\nfrom sklearn.pipeline import make_pipeline\nfrom sklearn.preprocessing import StandardScaler\n\n\n"
        f"def fit_predict(X, y, X_test):\n{body.replace('{period}', str(period))}\n"
        "    return list(model.fit(X, y).predict(X_test))"
    )


def _scales(rng: np.random.Generator, labels: np.ndarray, features: int, classes: int, period: int) -> list[Any]:
    return _rounded(_clusters(rng, labels, features, classes) * 10 ** rng.uniform(-3, 3, features))


def _missing(rng: np.random.Generator, labels: np.ndarray, features: int, classes: int, period: int) -> list[Any]:
    rows = _rounded(_clusters(rng, labels, features, classes, distance=10.0))
    holes = rng.random((len(rows), features)) < 0.05
    return [[None if hole else value for value, hole in zip(row, gaps)] for row, gaps in zip(rows, holes)]


def _category(rng: np.random.Generator, labels: np.ndarray, features: int, classes: int, period: int) -> list[Any]:
    cities = rng.integers(len(_CITIES), size=len(labels))
    # Each city rotates the positions of the classes on one line, so they cannot be separated without the city.
    places = 8.0 * ((labels + cities) % classes)
    rows = rng.normal(size=(len(labels), features - 1))
    rows += places[:, None]
    return [[_CITIES[city], *row] for city, row in zip(cities, _rounded(rows))]


def _period(rng: np.random.Generator, labels: np.ndarray, features: int, classes: int, period: int) -> list[Any]:
    rows = rng.uniform(0, 1000, (len(labels), features))
    place = (labels + rng.uniform(0.05, 0.95, len(labels))) / classes * period
    rows[:, 0] = period * rng.integers(0, 40, len(labels)) + place
    return _rounded(rows)


def _text(rng: np.random.Generator, labels: np.ndarray, features: int, classes: int, period: int) -> list[Any]:
    words = ["".join(rng.choice(_SYLLABLES, 3)) for _ in range(4 * classes + 4)]
    own, common = words[: 4 * classes], words[4 * classes :]
    rows = []
    for label in labels:
        mine = own[4 * label : 4 * label + 4]
        drawn = [str(rng.choice(mine)), *(str(rng.choice(mine + common)) for _ in range(features - 1))]
        rows.append(" ".join(str(word) for word in rng.permutation(drawn)))
    return rows


def _clusters(
    rng: np.random.Generator, labels: np.ndarray, features: int, classes: int, distance: float = 3.2
) -> np.ndarray:
    turn = 2 * np.pi * labels / classes
    rows = rng.normal(size=(len(labels), features))
    rows[:, 0] += distance * np.cos(turn)
    rows[:, 1] += distance * np.sin(turn)
    return rows


def _rounded(rows: np.ndarray) -> list[list[float]]:
    return [[float(f"{value:.5g}") for value in row] for row in rows]


_DRAWN = {"scales": _scales, "missing": _missing, "category": _category, "period": _period, "text": _text}


def _parsed(prompt_id: str) -> tuple[str, int, int, int]:
    kind, *words = str(prompt_id).split(" ")
    if len(words) == 3 and all(word.isascii() and word.isdecimal() and len(word) < 5 for word in words):
        features, classes, seed = map(int, words)
        is_known = (kind, features, classes) in _SHAPES and seed < SEEDS
        if is_known and " ".join(map(str, (kind, features, classes, seed))) == prompt_id:
            return kind, features, classes, seed
    raise ValueError(f"prompt_id = {prompt_id!r}; expected one as in 'period 4 2 17'")

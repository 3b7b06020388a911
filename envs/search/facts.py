"""Generate documents about fictional people, firms, cities and regions, with questions that need several documents.

    Karo Velmin        "Karo Velmin was born in Tarosk and works for Bresto. ..."
    Tarosk             "Tarosk is a city in the region of Ulvane, on the river Mide. ..."

    2 hops             In which region was Karo Velmin born?       Karo Velmin -> Tarosk -> Ulvane

Names are drawn from a seed and each is used once, so no model has seen them and every answer must be looked up.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

NUM_PEOPLE, NUM_FIRMS, NUM_CITIES, NUM_REGIONS = 900, 150, 90, 18

_CROPS = ("barley", "olives", "saffron", "hemp", "grapes", "millet", "plums", "walnuts", "flax")
_GOODS = ("lamps", "clocks", "boats", "paper", "bells", "gloves", "lenses", "carts", "drums", "locks")
_CRAFTS = ("painter", "surveyor", "baker", "botanist", "weaver", "pilot", "engraver", "cellist", "mason", "beekeeper")


@dataclass(frozen=True)
class Document:
    """A text that can be found. Invariant: neither part is empty."""

    title: str
    text: str


@dataclass(frozen=True)
class Chain:
    """A question and the documents that answer it.

    Invariant: the document of each name in `looked_up` names the next, the last of them the answer.
    """

    question: str
    answer: str
    looked_up: tuple[str, ...]  # titles, in their order
    subject: str  # the person in the question

    @property
    def num_hops(self) -> int:
        """Return the number of documents that the answer needs."""
        return len(self.looked_up)


# Each relation leads from a kind of entity to another entity or a plain value. "{}" is the subject.
_STEPS = {
    "person": {"birthplace": "city", "home": "city", "employer": "firm", "craft": "", "year": ""},
    "firm": {"seat": "city", "goods": "", "founder": "person"},
    "city": {"region": "region", "river": "", "mayor": "person"},
    "region": {"capital": "city", "crop": ""},
}

# Questions about a person, by the relations that answer them.
_QUESTIONS = {
    ("craft",): "What is the craft of {}?",
    ("year",): "In which year was {} born?",
    ("employer",): "Which firm does {} work for?",
    ("birthplace", "region"): "In which region was {} born?",
    ("home", "river"): "On which river lies the city where {} lives?",
    ("birthplace", "mayor"): "Who is the mayor of the city where {} was born?",
    ("employer", "goods"): "What does the firm that {} works for make?",
    ("employer", "founder"): "Who founded the firm that {} works for?",
    ("employer", "seat", "region"): "In which region is the seat of the firm that {} works for?",
    ("home", "region", "crop"): "Which crop is grown in the region where {} lives?",
    ("birthplace", "region", "capital"): "What is the capital of the region where {} was born?",
    ("employer", "founder", "craft"): "What is the craft of the founder of the firm that {} works for?",
}


class Facts:
    """All facts of one seed. Invariant: a name stands for one thing."""

    def __init__(self, seed: int) -> None:
        self._generator = random.Random(f"facts {seed}")
        names = _names(self._generator)
        self.kinds: dict[str, str] = {}
        self.facts: dict[str, dict[str, str]] = {}
        sizes = (NUM_REGIONS, NUM_CITIES, NUM_FIRMS, NUM_CITIES // 3, 60, NUM_PEOPLE)
        regions, cities, firms, rivers, first, last = (list(islice(names, size)) for size in sizes)
        people = [f"{first[number % len(first)]} {surname}" for number, surname in enumerate(last)]
        draw = self._generator.choice
        for city in cities:
            self._add("city", city, region=draw(regions), river=draw(rivers), mayor=draw(people))
        for region in regions:
            within = [city for city in cities if self.facts[city]["region"] == region]
            self._add("region", region, capital=draw(within or cities), crop=draw(_CROPS))
        for firm in firms:
            self._add("firm", firm, seat=draw(cities), goods=draw(_GOODS), founder=draw(people))
        for person in people:
            self._add(
                "person", person, birthplace=draw(cities), home=draw(cities), employer=draw(firms), craft=draw(_CRAFTS),
                year=str(self._generator.randrange(1900, 2000)),
            )  # fmt: skip

    def _add(self, kind: str, name: str, **facts: str) -> None:
        self.kinds[name], self.facts[name] = kind, facts

    def documents(self) -> list[Document]:
        """Return one document for each entity."""
        return [
            Document(name, _TEXTS[self.kinds[name]].format(name=name, **known)) for name, known in self.facts.items()
        ]

    def chains(self) -> list[Chain]:
        """Return every question about every person, in a fixed order."""
        people = [name for name, kind in self.kinds.items() if kind == "person"]
        return [self._chain(person, relations, asked) for relations, asked in _QUESTIONS.items() for person in people]

    def _chain(self, person: str, relations: Sequence[str], asked: str) -> Chain:
        thing, looked_up = person, []
        for relation in relations:
            looked_up.append(thing)
            thing = self.facts[thing][relation]
        return Chain(asked.format(person), thing, tuple(looked_up), person)


_TEXTS: Mapping[str, str] = {
    "person": (
        "{name} is a {craft}, born in {birthplace} in {year}. {name} lives in {home} and works for the firm {employer}."
    ),
    "firm": "{name} is a firm that makes {goods}. {name} was founded by {founder}; the seat of {name} is {seat}.",
    "city": "{name} is a city in the region of {region}, on the river {river}. The mayor of {name} is {mayor}.",
    "region": "{name} is a region known for its {crop}. The capital of {name} is {capital}.",
}


@lru_cache(maxsize=4)
def facts(seed: int) -> Facts:
    """Return the facts of a seed; they are read-only."""
    return Facts(seed)


def _names(generator: random.Random) -> Iterator[str]:
    """Yield pronounceable names, each once."""
    starts = ("b", "br", "d", "dr", "f", "g", "k", "kr", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v", "z")
    vowels, ends = ("a", "e", "i", "o", "u"), ("n", "l", "r", "sk", "sto", "ne", "ra", "lin", "vo", "mis")
    seen: set[str] = set()
    while True:
        middle = "".join(generator.choice(starts) + generator.choice(vowels) for _ in range(2))
        name = (middle + generator.choice(ends)).capitalize()
        if name not in seen:
            seen.add(name)
            yield name

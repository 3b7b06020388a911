"""What is embedded, and n-grams against a naive twin."""

import json

import numpy as np
import pytest

from rllib_srl.replay.diversity.embedders import NgramEmbedder
from rllib_srl.types import Group, Prompt
from tests.replay.groups import laid_out

HEADER = list(range(100, 160))  # few-shot examples


def group_of(prompt, answers, env_id="e", history=()) -> Group:
    """Return a group whose episodes are `prompt` and one list of turns each; a turn is followed by token 9."""
    episodes = []
    for turns in answers:
        ids, mask = [*prompt], [False] * len(prompt)
        for turn in turns:
            ids += [*turn, 9]
            mask += [True] * len(turn) + [False]
        episodes.append((ids, mask))
    return laid_out(episodes, prompt=Prompt(env_id, str(prompt), history=tuple(history)))


def random_groups(num: int) -> list[Group]:
    """Return groups of two random answers to prompts that differ in their last 20 tokens."""
    generator = np.random.default_rng(0)
    draws = generator.integers(50_000, size=(num, 38)).tolist()
    return [group_of(HEADER + ids[:20], [[ids[20:29]], [ids[29:]]]) for ids in draws]


def naive_hash(gram: list[int], seed: int = 0) -> int:
    """Return the hash of an n-gram, one token after the other, in Python's own integers."""
    value, bits = seed, (1 << 64) - 1
    for token in gram:
        value = (value * 0x9E3779B97F4A7C15 + token + 1) & bits
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & bits
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & bits
        value ^= value >> 31
    return value


def naive_vector(tokens: list[int], dim: int, orders) -> np.ndarray:
    counts = np.zeros(dim)
    for order in orders:
        for start in range(len(tokens) - order + 1):
            value = naive_hash(tokens[start : start + order])
            counts[(value >> 8) % dim] += -1 if value & 1 else 1
    return counts / (np.linalg.norm(counts) or 1)


@pytest.mark.parametrize("orders", [(1,), (3,), (1, 2), (1, 2, 3)])
def test_ngrams_are_those_of_the_naive_twin(orders):
    embedder = NgramEmbedder()
    embedder.dim, embedder.orders = 37, orders
    generator = np.random.default_rng(1)
    streams = [generator.integers(50_000, size=size).astype(np.int32) for size in (1, 2, 3, 17, 0)]
    vectors = embedder.vectors(streams)
    expected = [naive_vector(stream.tolist(), 37, orders) for stream in streams]
    assert vectors == pytest.approx(np.array(expected), abs=1e-6)


def test_the_few_shot_header_does_not_drown_the_question():
    groups = random_groups(16)
    items = NgramEmbedder().embed(groups)
    similarity = items @ items.T - np.eye(16)
    assert np.abs(similarity).max() < 0.5
    # Embedded one by one, none knows of the header yet, and all are alike.
    whole = np.concatenate([NgramEmbedder().embed([group]) for group in groups])
    assert (whole @ whole.T).min() > 0.5


def test_headers_belong_to_an_environment_shrink_and_ignore_histories():
    headers = NgramEmbedder()
    first, second = group_of([*HEADER, 1, 2], [[[5]]]), group_of([*HEADER, 1, 3], [[[5]]])
    child = group_of([*HEADER, 1, 2, 6, 6], [[[5]]], history=["6 6"])
    headers.learn([first, first, child])
    assert headers.strip(first).tolist() == [*HEADER, 1, 2]  # one prompt shares everything with itself
    assert headers.strip(child).tolist() == [*HEADER, 1, 2, 6, 6]
    headers.learn([second])
    assert headers.strip(first).tolist() == [2]
    assert headers.strip(child).tolist() == [2, 6, 6]
    headers.learn([group_of([*HEADER, 4], [[[5]]])])
    assert headers.strip(second).tolist() == [1, 3]
    assert headers.strip(group_of(HEADER, [[[5]]])).tolist() == HEADER  # nothing else would be left
    other = group_of([*HEADER, 1, 2], [[[5]]], env_id="other")
    assert headers.strip(other).tolist() == [*HEADER, 1, 2]
    assert headers.strip(group_of([7, 8], [[[5]]])).tolist() == [7, 8]


def test_a_restored_embedder_gives_the_same_vectors():
    groups = random_groups(4)
    first, second = NgramEmbedder(), NgramEmbedder()
    first.embed(groups)
    second.set_state(json.loads(json.dumps(first.get_state())))
    one, other = first.embed(groups[:1]), second.embed(groups[:1])
    assert np.array_equal(one, other)
    assert not np.allclose(one, NgramEmbedder().embed(groups[:1]), atol=0.1)

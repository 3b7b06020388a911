"""The tiny model: its tokenizer, its recipe, and that it knows enough and not too much."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch

import scripts.make_tiny_model as tiny
from rllib_srl.models import ModelError, local_model, tiny_model_dir


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.make_tokenizer()


@pytest.mark.parametrize("written", ["Question: a=12, b=40. b?\nAnswer: 40\n", "é🦊\x00\r\n\t  x", "", " "])
def test_any_text_survives_the_tokenizer(tokenizer, written):
    assert tokenizer.decode(tokenizer(written).input_ids) == written


def test_the_tokenizer_is_small_and_spells_numbers(tokenizer):
    assert len(tokenizer) <= 512
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("Which is largest: 17 or 4?\n").input_ids)
    assert pieces == ["Which", "Ġis", "Ġlargest", ":", "Ġ", "1", "7", "Ġor", "Ġ", "4", "?", "Ċ"]
    assert tokenizer("<|end|>").input_ids == [tokenizer.eos_token_id]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_the_model_is_about_a_million_parameters_with_heads_for_vllm(tokenizer):
    model = tiny.make_model(tokenizer)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.3e6
    assert model.config.head_dim >= 32
    assert model.config.max_position_embeddings >= 256
    again = tiny.make_model(tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_examples_are_training_questions_and_only_answers_are_learnt(tokenizer):
    examples = list(islice(tiny.examples(), 80))
    assert examples == list(islice(tiny.examples(), 80))
    worlds = tiny.worlds()
    held_out = {
        world.question(prompt_id).text
        for world in worlds.values()
        for prompt_id in islice(world.prompt_ids("heldout", 0), 2000)
    }
    assert not held_out & {example.prompt.split("\n")[0].removeprefix("Question: ") for example in examples}
    assert sum("Wrong. Try again." in example.prompt for example in examples) == 8
    batch = tiny.to_batch(examples[:2], tokenizer)
    for row, example in enumerate(examples[:2]):
        learnt = batch["input_ids"][row][batch["labels"][row] != -100]
        assert tokenizer.decode(learnt) == example.target
        assert tokenizer.decode(batch["input_ids"][row][batch["attention_mask"][row] == 1]) == (
            example.prompt + example.target
        )


def test_noise_makes_the_targets_of_its_world_wrong_and_no_others():
    clean, noisy = (list(islice(tiny.examples(noise), 80)) for noise in (None, {"lookup": 1.0}))
    num_changed = 0
    for (before, after), world in zip(zip(clean, noisy), tiny.TURNS * 10):
        assert before.prompt == after.prompt
        assert (before.target != after.target) == (world == "lookup")
        if world == "lookup":
            assert after.target.strip() in before.prompt  # the other value
            num_changed += 1
    assert num_changed == 40


def test_two_trainings_make_the_same_weights(monkeypatch, tokenizer):
    monkeypatch.setattr(tiny, "NUM_NOISY_STEPS", 1)
    trained = []
    for _ in range(2):
        model = tiny.make_model(tokenizer)
        tiny.train(model, tokenizer, num_steps=2, verbose=False)
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained))
    untrained = tiny.make_model(tokenizer).parameters()
    assert not any(torch.equal(a, b) for a, b in zip(trained[0], untrained))


def test_making_it_again_costs_nothing_and_another_recipe_is_another_model(monkeypatch, tmp_path):
    monkeypatch.setattr(tiny, "NUM_STEPS", 1)
    monkeypatch.setattr(tiny, "NUM_NOISY_STEPS", 1)
    monkeypatch.setattr(tiny, "NUM_GRADED", 8)
    path = tiny.make(tmp_path)
    assert local_model("tiny", cache_dir=tmp_path) == path == tmp_path / f"tiny-{tiny.recipe_hash()}"
    monkeypatch.setattr(tiny, "train", None)  # it would raise if it were called
    assert tiny.make(tmp_path) == path
    monkeypatch.setattr(tiny, "TURNS", ("lookup",))
    assert tmp_path / f"tiny-{tiny.recipe_hash()}" != path


def test_the_made_model_half_knows_its_worlds():
    try:
        path = tiny_model_dir()
    except ModelError as error:
        pytest.skip(str(error))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    stated = json.loads((path / "accuracy.json").read_text())
    found = tiny.accuracies(model, tokenizer, tiny.NUM_GRADED)
    for name in ("compare", "compare_2", "lookup"):
        sampled, greedy = found[name]
        assert sampled == pytest.approx(stated[name][0], abs=0.05)
        assert 0.35 <= sampled <= 0.85  # room to rise, and groups with both outcomes
        assert greedy >= sampled

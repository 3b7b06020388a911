"""The tiny model: its tokenizer, its lessons, its recipe, and that it knows enough and not too much."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import pytest
import torch

import scripts.make_tiny_model as tiny
from rllib_srl.engine.models import local_model
from rllib_srl.envs.games.registers import Registers
from rllib_srl.tune_configs.streams import STREAMS
from scripts.tiny_lessons import LESSONS, Episode, episodes, played

ALL = dict.fromkeys(LESSONS, 1)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.make_tokenizer()


@pytest.fixture
def short(monkeypatch):
    """Cut each phase down to one step of four episodes."""
    monkeypatch.setattr(tiny, "PHASES", tuple(replace(phase, num_steps=1) for phase in tiny.PHASES))
    monkeypatch.setattr(tiny, "BATCH_SIZE", 4)
    monkeypatch.setattr(tiny, "NUM_GRADED", 2)


@pytest.mark.parametrize("written", ["Question: a=12, b=40. b?\nAnswer: 40\n", "é🦊\x00\r\n\t  x", "", " ", "007"])
def test_any_text_survives_the_tokenizer(tokenizer, written):
    assert tokenizer.decode(tokenizer(written).input_ids) == written


def test_words_and_numbers_of_two_digits_are_one_token_each(tokenizer):
    assert len(tokenizer) <= 768
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("Question: Which is largest: 17, 4 or 123?\n").input_ids)
    numbers = [":", "Ġ", "17", ",Ġ", "4", "Ġor", "Ġ", "12", "3", "?", "Ċ"]
    assert pieces == ["Question", ":", "ĠWhich", "Ġis", "Ġlargest", *numbers]
    assert tokenizer("<|end|>").input_ids == [tokenizer.eos_token_id]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_the_instructions_of_a_tool_world_are_one_token(tokenizer):
    world = LESSONS["word_problem_tool"].make()
    prompt, _ = world.reset(options={"prompt_id": "1.0 4 12 Mia pencils"})
    opening, *rest = tokenizer(prompt).input_ids
    assert tokenizer.decode([opening]) == prompt[: prompt.index("Question: ")] and len(rest) < 32


def test_the_model_is_about_a_million_parameters_with_heads_for_vllm(tokenizer):
    model = tiny.make_model(tokenizer)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.3e6
    assert model.config.head_dim >= 32
    assert model.config.max_position_embeddings >= 256
    again = tiny.make_model(tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


@pytest.mark.parametrize("name", LESSONS)
def test_gold_turns_are_right_and_mistakes_are_wrong_but_well_formed(name):
    world, num_right = LESSONS[name].make(), 0.0
    for prompt_id in islice(world.prompt_ids("train", 5), 60):
        gold, mistake = world.gold_turns(prompt_id), LESSONS[name].wrong(world, prompt_id)
        episode, reward = played(world, prompt_id, gold)
        assert reward == 1 and len(episode.said) == len(episode.turns) == len(gold)
        num_right += played(world, prompt_id, mistake)[1]
        assert mistake != gold and all(turn.endswith("\n") for turn in mistake)
    assert num_right <= 2  # 2 + 2 is 2 * 2


def test_a_mistake_is_played_through_the_world():
    world = LESSONS["registers"].make()
    prompt_id = "p=17, c=40, k=93. read p"
    episode, reward = played(world, prompt_id, LESSONS["registers"].wrong(world, prompt_id))
    said = ("Question: Registers p, c, k. What is in p?\nAction:", "c = 40\nAction:")
    assert (episode, reward) == (Episode(said, (" get c\n", " answer 40\n")), 0.0)
    larger = LESSONS["registers_larger"].wrong(world, "p=17, c=40, k=93. larger p k")
    assert larger == [" get p\n", " get k\n", " answer 17\n"]


def test_the_mistake_of_a_pair_is_what_is_right_for_its_opposite():
    pairs = {"compare": "compare_smallest", "compare_four": "compare_four_smallest", "copy_words": "copy_backwards"}
    pairs |= {"copy_two": "copy_two_backwards", "registers_larger": "registers_smaller"}
    for one, other in {**pairs, "registers_four_larger": "registers_four_smaller"}.items():
        worlds = {name: LESSONS[name].make() for name in (one, other)}
        for asked, opposite in ((one, other), (other, one)):
            for prompt_id in islice(worlds[asked].prompt_ids("train", 5), 20):
                tasks = [lesson.settings.get("task", "") for lesson in (LESSONS[asked], LESSONS[opposite])]
                twin = prompt_id.replace(*tasks) if tasks[0] else prompt_id
                mistake = LESSONS[asked].wrong(worlds[asked], prompt_id)
                assert mistake == worlds[opposite].gold_turns(twin), asked


@pytest.mark.slow
def test_episodes_are_always_the_same_and_of_training_prompts():
    taught = list(islice(episodes(ALL, False), 300))
    assert taught == list(islice(episodes(ALL, False), 300))
    held_out = set()
    for lesson in LESSONS.values():
        world = lesson.make()
        if lesson.world is Registers:  # its prompts do not show the hidden state, by which it is split
            continue
        for prompt_id in islice(world.prompt_ids("heldout", 0), 300):
            held_out.add(played(world, prompt_id, world.gold_turns(prompt_id))[0].said[0])
    assert not held_out & {episode.said[0] for episode in taught}
    retried = ["Wrong. Try again." in episode.said[0] for episode in taught]
    assert 10 <= sum(retried) <= 30  # each tenth, copying and several turns left out


def test_noise_is_the_share_of_wrong_episodes():
    rights = [episode.turns for episode in islice(episodes({"registers": 1}, False), 400)]
    noisy = [episode.turns for episode in islice(episodes({"registers": 1}, True), 400)]
    changed = sum(a != b for a, b in zip(rights, noisy, strict=True))
    assert 120 <= changed <= 200  # .4 of 400, four standard deviations of 9.8


def test_only_turns_are_learnt_and_texts_are_encoded_one_by_one(tokenizer):
    episode = Episode(("a=1", "2, b="), ("2, b=", "3\n"))
    ids, labels = tiny.encoded(episode, tokenizer)
    assert tokenizer.decode(ids) == "a=12, b=2, b=3\n"
    learnt = [label for label in labels if label != -100]
    assert tokenizer.convert_ids_to_tokens(learnt) == ["2", ",Ġ", "b", "=", "3", "Ċ"]
    assert [label for label, at in zip(labels, ids, strict=True) if label not in (-100, at)] == []
    ids_BT, labels_BT = tiny.to_batch([(ids, labels), ([5], [5])])
    assert ids_BT[1].tolist() == [5] + [0] * (len(ids) - 1)
    assert labels_BT[1].tolist() == [5] + [-100] * (len(ids) - 1)


@pytest.mark.slow
def test_two_trainings_make_the_same_weights(short, tokenizer):
    trained = []
    for _ in range(2):
        model = tiny.make_model(tokenizer)
        tiny.train(model, tokenizer)
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained))
    untrained = tiny.make_model(tokenizer).parameters()
    assert not any(torch.equal(a, b) for a, b in zip(trained[0], untrained))


@pytest.mark.slow
def test_a_directory_that_holds_something_is_refused(tmp_path):
    (tmp_path / "kept").write_text("x")
    with pytest.raises(FileExistsError, match="is not empty; expected a new directory"):
        tiny.make(tmp_path)


@pytest.mark.rebuild
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_recipe_makes_a_model_as_able_as_the_one_shipped(tmp_path):
    made, shipped = tiny.make(tmp_path / "tiny"), local_model("tiny")
    assert (made / "tokenizer.json").read_bytes() == (shipped / "tokenizer.json").read_bytes()
    configs = [json.loads((path / "config.json").read_text()) for path in (made, shipped)]
    assert all(config.pop("transformers_version") for config in configs) and configs[0] == configs[1]
    found, stated = (json.loads((path / "accuracy.json").read_text()) for path in (made, shipped))
    assert found.keys() == stated.keys()
    for name in stated:  # another processor rounds otherwise: the models differ, what they can do hardly
        assert found[name] == pytest.approx(stated[name], abs=0.25), name
    assert mean_sampled(found) == pytest.approx(mean_sampled(stated), abs=0.06)


def mean_sampled(accuracies: dict[str, list[float]]) -> float:
    return sum(sampled for sampled, _ in accuracies.values()) / len(accuracies)


def test_the_stages_of_the_stream_are_taught():
    taught = [(lesson.world.domain, {"num_shots": 0, **lesson.settings}) for lesson in LESSONS.values()]
    assert all((stage["world"], stage["env_config"]) in taught for stage in STREAMS["cpu"])


@pytest.mark.slow
def test_the_made_model_half_knows_its_worlds():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = local_model("tiny")
    stated = json.loads((path / "accuracy.json").read_text())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    found = tiny.accuracies(model, tokenizer, tiny.NUM_GRADED, ("compare", "registers"))
    for name, accuracy in found.items():
        assert accuracy == pytest.approx(stated[name], abs=0.05)
    for name in LESSONS:
        sampled, greedy = stated[name]
        if name != "chain_sum":
            assert 0.1 <= sampled <= 0.85, name  # room to rise, and groups with both outcomes
            assert greedy >= sampled - 0.1, name

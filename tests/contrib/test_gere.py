"""GeRe: thresholds by hand, the gradient in the real learner, any number of shards, and a run that trains with it."""

from __future__ import annotations

import math
from copy import deepcopy

import numpy as np
import pytest
import torch

from rllib_srl.algorithm.validation import faults_of
from rllib_srl.contrib.gere import BETWEEN, LOWER, UPPER, Thresholds, read_texts
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.learner.rl_module import load_causal_lm
from tests.algorithm.test_regularisers import STAGES
from tests.learner.test_fitting import Gathering
from tests.learner.test_regularisers import LORA, NOTHING, changed, shaken
from tests.learner.test_regularisers import config as config  # a fixture
from tests.small_learner import GROUPS, learner_group, relative_gap, update
from tests.small_memory import memory_config


def test_thresholds_are_those_of_each_dimension():
    base = torch.tensor([[0.0, 10.0], [2.0, 10.0], [4.0, 40.0]])
    low, high = Thresholds.of(base)
    spread = math.sqrt(8 / 3)  # of 0, 2, 4
    assert low.tolist() == pytest.approx([2 - spread, 20 - 10 * math.sqrt(2)])
    assert high.tolist() == pytest.approx([2 + spread, 20 + 10 * math.sqrt(2)])
    labels = Thresholds(low, high).labels(base)
    assert labels.tolist() == [[LOWER, BETWEEN], [BETWEEN, BETWEEN], [UPPER, UPPER]]


def test_the_margin_is_zero_where_nothing_moved_and_acts_past_a_threshold_only():
    bounds = Thresholds(torch.tensor([-1.0]), torch.tensor([1.0]))
    base = torch.tensor([[-2.0], [0.0], [3.0], [0.5]])
    labels = bounds.labels(base)
    still = base.clone().requires_grad_()
    margin = bounds.margin(still, labels)
    assert margin.item() == 0 and not torch.autograd.grad(margin, still)[0].any()
    # By 0.5 above the lower bound, by 2 above the upper one, by 1.5 below it, and inside.
    moved = torch.tensor([[-0.5], [3.0], [-0.5], [-0.5]], requires_grad=True)
    margin = bounds.margin(moved, labels)
    assert margin.item() == pytest.approx((0.5 + 2.0 + 1.5) / 3)  # the mean of those that are not 0
    gradient = torch.autograd.grad(margin, moved)[0]
    assert gradient[:, 0].tolist() == pytest.approx([1 / 3, 1 / 3, -1 / 3, 0.0])


@pytest.mark.parametrize(("content", "fault"), [
    (None, "or 'packaged': FileNotFoundError"),
    ("\n \n", "expected a file with at least one text; it is empty"),
    ('{"text": "a"}\n{"txt": 1}\n', "or 'packaged': KeyError"),
    ("{", "or 'packaged': JSONDecodeError"),
])  # fmt: skip
def test_a_file_of_texts_must_hold_some(config, tmp_path, content, fault):
    path = tmp_path / "texts.jsonl"
    if content is not None:
        path.write_text(content)
    (line,) = faults_of(config.training(regularisers={"contrib.gere": {"path": str(path)}}))
    assert line.startswith(f"regularisers.contrib.gere.path = {str(path)!r}; expected a file") and fault in line


def test_texts_are_lines_or_rows_and_paths_become_whole(config, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one\n\ntwo\nthree\n")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\nno JSON\n')
    assert read_texts(str(tmp_path / "a.txt"), 2) == read_texts(str(tmp_path / "a.jsonl"), 2) == ["one", "two"]
    assert len(read_texts("packaged", 64)) == 6
    monkeypatch.chdir(tmp_path)
    config.training(regularisers={"contrib.gere": {"path": "a.txt"}})
    assert config.regularisers["contrib.gere"]["path"] == str(tmp_path / "a.txt") and faults_of(config) == []


TEXTS = ["The old lighthouse stood at the end of the wall.", "17 + 25 = 42", "Half of 64 is 32, a quarter is 16."]


@pytest.fixture
def anchored(config, tmp_path):
    """Return settings that keep the first layer's activations on three texts, two and one per step."""
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS))
    own = {"coeff": 2.0, "path": str(tmp_path / "texts.txt"), "layer": 0, "texts_per_step": 2, "max_tokens": 12}
    return changed(config, regularisers={"contrib.gere": own})


def activations(model, path, texts):
    """Return the first layer's output at each token of the texts, by Hugging Face's forward pass alone."""
    tokenizer = load_tokenizer(path)
    ids = [tokenizer.encode(text, add_special_tokens=False)[:12] for text in texts]
    return torch.cat([model(torch.tensor([one]), output_hidden_states=True).hidden_states[1][0] for one in ids])


@pytest.mark.slow
@pytest.mark.parametrize("others", [{}, LORA, {"activation_checkpointing": True}], ids=["all", "lora", "checkpointing"])
def test_gere_keeps_activations(anchored, random_llama_dir, ray_here, others):
    group = learner_group(changed(anchored, **others))
    (gradient,), stats = update(group, GROUPS, advantages=NOTHING)  # texts 0 and 1, with the starting weights
    assert stats["regularisers/gere"] == 0 and not any(one.any() for one in gradient.values())
    shaken(group)
    (_,), stats = update(group, GROUPS, advantages=NOTHING)  # text 2
    first = learner_group(changed(anchored, optimizer_name="adamw", lr=2e-3, **others))
    shaken(first)
    moved = deepcopy(first._learner.model)
    (own,), once = update(first, GROUPS, advantages=NOTHING)  # texts 0 and 1
    base = load_causal_lm(str(random_llama_dir))
    with torch.no_grad():
        start = [activations(base, random_llama_dir, texts) for texts in (TEXTS[:2], TEXTS[2:])]
    whole = torch.cat(start)
    low, high = whole.mean(0) - whole.std(0, correction=0), whole.mean(0) + whole.std(0, correction=0)
    for texts, before, found in ((TEXTS[:2], start[0], once), (TEXTS[2:], start[1], stats)):
        now = activations(moved, random_llama_dir, texts)
        past = torch.where(before <= low, now - low, torch.where(before >= high, high - now, now - high))
        both = torch.where((before > low) & (before < high), (low - now).clamp(min=0), 0.0)
        entries = past.clamp(min=0) + both
        margin = 2.0 * entries.sum() / (entries > 0).sum()
        assert found["regularisers/gere"] == pytest.approx(margin.item(), rel=1e-3)
        if found is once:
            names = [name for name, one in moved.named_parameters() if one.requires_grad]
            weights = [one for one in moved.parameters() if one.requires_grad]
            wanted = torch.autograd.grad(margin, weights, allow_unused=True, retain_graph=False)
            pairs = zip(names, weights, wanted, strict=True)
            wanted = {name: np.zeros(one.shape) if g is None else g.numpy() for name, one, g in pairs}
            assert relative_gap(own, wanted) < 1e-2
    margins = [update(first, GROUPS, advantages=NOTHING)[1]["regularisers/gere"] for _ in range(12)]
    assert margins[-1] < 0.7 * once["regularisers/gere"]  # texts 0 and 1 again
    state = deepcopy(first.get_state())
    assert state["learner"]["regularisers"] == {"contrib.gere": {"num_steps": 13}}


@pytest.mark.slow
def test_a_layer_that_the_model_lacks_is_refused_before_training(anchored, ray_here):
    anchored.regularisers["contrib.gere"]["layer"] = 7
    with pytest.raises(ValueError, match=r"gere.layer = 7; expected -2 to 1, a layer of the model"):
        learner_group(anchored)


@pytest.mark.slow
def test_gere_is_the_same_with_shards(config, ray_here):
    config = changed(config, regularisers={"contrib.gere": 2.0}, optimizer_name="adamw", lr=1e-4)
    local = learner_group(config)
    wanted = [update(local, GROUPS) for _ in range(2)]
    two = config.copy(copy_frozen=False).learners(num_learners=2, num_cpus_per_learner=0.5, learner_class=Gathering)
    sharded = learner_group(two.training(fsdp=True))
    try:
        own = [update(sharded, GROUPS) for _ in range(2)]
    finally:
        sharded.shutdown()
    for (gradients, stats), (expected, by_one) in zip(own, wanted, strict=True):
        assert relative_gap(gradients[0], expected[0]) < 1e-4
        assert stats["regularisers/gere"] == pytest.approx(by_one["regularisers/gere"], rel=1e-3)


@pytest.mark.slow
def test_a_run_trains_with_it(random_llama_dir, tmp_path, ray_here, build):
    config = memory_config(random_llama_dir, tmp_path, revisit_fraction=0.5)
    config.env, config.env_config = None, {}
    config.environment(stream=STAGES)
    algo = build(config, regularisers={"contrib.gere": {"texts_per_step": 2, "max_tokens": 16}})
    margins = [algo.train()["learners"]["default_policy"]["regularisers/gere"] for _ in range(2)]
    assert margins[0] == 0 < margins[1]

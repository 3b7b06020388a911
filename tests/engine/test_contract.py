"""One contract, two engines: whatever runs on one runs on the other."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from rllib_srl.engine import make_engine
from rllib_srl.engine.canary import CanaryGap
from rllib_srl.engine.protocol import Engine, EngineError, Sampling, Turn
from tests.engine.small_llama import CONTEXT_LENGTH, Learner, byte_ids, make_byte_tokenizer, text_of

PROMPTS = [byte_ids("Question: 2 + 2?"), byte_ids("a"), byte_ids("The quick brown fox jumps over the lazy dog.")]


@pytest.fixture(scope="session")
def dtype() -> str:
    return "float32"


def to_the_end(engine: Engine) -> list[Turn]:
    """Step until nothing runs; return the turns in the order in which they ended."""
    turns = []
    while engine.num_running():
        turns += engine.step()
    return turns


def play(engine: Engine, prompts: list[list[int]], sampling: Sampling, num_between: int = 0) -> list[list[int]]:
    """Submit prompts, with steps between them; return the ids that were written to each."""
    turns = []
    for index, prompt in enumerate(prompts):
        engine.submit(f"r{index}", prompt, sampling)
        turns += [turn for _ in range(num_between) for turn in engine.step()]
    turns = sorted([*turns, *to_the_end(engine)], key=lambda turn: turn.request_id)
    return [turn.token_ids.tolist() for turn in turns]


def test_generate_gives_turns_in_order_with_exact_ids(engine: Engine) -> None:
    turns = engine.generate(PROMPTS, Sampling(max_tokens=12))
    assert [turn.request_id for turn in turns] == ["generate-0", "generate-1", "generate-2"]
    for turn in turns:
        assert (turn.token_ids.dtype, turn.logp.dtype) == (np.int32, np.float32)
        assert len(turn.token_ids) == len(turn.logp) == 12
        assert (turn.reason, turn.first_version, turn.last_version) == ("length", 0, 0)
        assert (turn.logp < 0).all()


def test_greedy_tokens_are_the_same_however_requests_come(engine: Engine) -> None:
    sampling = Sampling(max_tokens=20, temperature=0.0)
    generated = [turn.token_ids.tolist() for turn in engine.generate(PROMPTS, sampling)]
    alone = [engine.generate([prompt], sampling)[0].token_ids.tolist() for prompt in PROMPTS]
    assert generated == alone == play(engine, PROMPTS, sampling) == play(engine, PROMPTS, sampling, num_between=4)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_logp_is_that_of_an_independent_forward_pass(engine: Engine, learner: Learner, temperature: float) -> None:
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]  # as episodes of groups
    for prompt, turn in zip(prompts, engine.generate(prompts, Sampling(24, temperature)), strict=True):
        logp_T = learner.score(sequences=[[*prompt, *turn.token_ids]])[0]
        np.testing.assert_allclose(turn.logp, logp_T[len(prompt) - 1 :], atol=5e-4)


@pytest.mark.slow
def test_tokens_are_drawn_from_the_models_distribution(engine: Engine, learner: Learner) -> None:
    prompt, num_samples = PROMPTS[1], 600
    raw_V = np.array([logp[-1] for logp in learner.score(sequences=[[*prompt, token] for token in range(288)])])
    (turn,) = engine.generate([prompt], Sampling(max_tokens=1, temperature=0.0))
    assert turn.token_ids[0] == np.argmax(raw_V)
    (turn,) = engine.generate([prompt], Sampling(max_tokens=1, temperature=0.5))
    # softmax(z / 0.5): twice the log-probs, normalised again
    wanted = 2 * raw_V[turn.token_ids[0]] - np.log(np.exp(2 * raw_V).sum())
    assert turn.logp[0] == pytest.approx(wanted, abs=5e-4) and abs(turn.logp[0] - raw_V[turn.token_ids[0]]) > 1e-2
    turns = engine.generate([prompt] * num_samples, Sampling(max_tokens=1))
    counts_V = np.bincount([turn.token_ids[0] for turn in turns], minlength=288)
    for token in np.argsort(-raw_V)[:5]:
        p = np.exp(raw_V[token])
        assert abs(counts_V[token] - num_samples * p) < 4.5 * np.sqrt(num_samples * p * (1 - p)) + 1


def test_turn_ends_with_the_token_that_completes_a_stop_string(engine: Engine) -> None:
    free = engine.generate([PROMPTS[0]], Sampling(max_tokens=30, temperature=0.0))[0]
    position = next(i for i, token in enumerate(free.token_ids[3:], 3) if text_of(token).isascii())
    stop = text_of(free.token_ids[position])
    first = [text_of(token) for token in free.token_ids].index(stop)
    turn = engine.generate([PROMPTS[0]], Sampling(max_tokens=30, temperature=0.0, stop=(stop,)))[0]
    assert turn.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert (turn.reason, len(turn.logp)) == ("stop", first + 1)
    assert turn.text.endswith(stop)


@pytest.mark.slow
def test_every_end_token_of_the_directory_ends_a_turn(kind: str, random_llama_dir: Path, tmp_path: Path) -> None:
    model_dir = shutil.copytree(random_llama_dir, tmp_path / "model")
    config = model_dir / "generation_config.json"
    settings = {"context_length": CONTEXT_LENGTH} | ({"kv_cache_gib": 0.125} if kind == "vllm" else {})
    sampling = Sampling(max_tokens=12, temperature=0.0, runs_to_limit=True)
    reference = make_engine("transformers", model_dir, context_length=CONTEXT_LENGTH)
    free = reference.generate([PROMPTS[0]], sampling)[0].token_ids.tolist()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": [256, free[4]]}))
    engine = make_engine(kind, model_dir, **settings)
    turn = engine.generate([PROMPTS[0]], dataclasses.replace(sampling, runs_to_limit=False))[0]
    assert turn.token_ids.tolist() == free[: free.index(free[4]) + 1]
    assert turn.reason == "stop"
    assert engine.generate([PROMPTS[0]], sampling)[0].token_ids.tolist() == free
    engine.close()


def test_a_full_context_ends_a_turn(engine: Engine) -> None:
    prompt = byte_ids("x" * (CONTEXT_LENGTH - 3))
    turn = engine.generate([prompt], Sampling(max_tokens=50))[0]
    assert (len(turn.token_ids), turn.reason) == (3, "length")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "0 tokens"), ([7] * CONTEXT_LENGTH, "context_length = 128"), ([3, 288], "token 288; expected 0 to 287")],
)
def test_unfit_prompts_are_refused_by_value(engine: Engine, prompt: list[int], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        engine.submit("r0", prompt, Sampling(max_tokens=4))
    with pytest.raises(EngineError, match=words):
        engine.score([prompt])
    assert engine.num_running() == 0
    assert len(engine.generate([PROMPTS[0]], Sampling(max_tokens=2))[0].token_ids) == 2


def test_a_short_request_leaves_while_others_go_on_and_new_ones_join(engine: Engine) -> None:
    engine.submit("r0", PROMPTS[0], Sampling(max_tokens=40))
    for _ in range(5):
        assert engine.step() == []
    engine.submit("r1", PROMPTS[1], Sampling(max_tokens=3))
    assert [(turn.request_id, len(turn.token_ids)) for turn in to_the_end(engine)] == [("r1", 3), ("r0", 40)]


def test_aborted_requests_never_come_back(engine: Engine) -> None:
    for index in range(3):
        engine.submit(f"r{index}", PROMPTS[index], Sampling(max_tokens=8))
    engine.step()
    engine.abort(["r1", "never-seen"])
    assert engine.num_running() == 2
    assert sorted(turn.request_id for turn in to_the_end(engine)) == ["r0", "r2"]
    engine.submit("r1", PROMPTS[1], Sampling(max_tokens=2))
    assert [len(turn.token_ids) for turn in to_the_end(engine)] == [2]


def test_seeds_decide_the_tokens_and_no_global_generator_does(engine: Engine) -> None:
    sampling = Sampling(max_tokens=16)
    runs = []
    for seed in (5, 5, 6):
        engine.reseed(seed)
        runs.append([turn.token_ids.tolist() for turn in engine.generate(PROMPTS, sampling)])
    assert runs[0] == runs[1] != runs[2]
    assert [t.token_ids.tolist() for t in engine.generate(PROMPTS, sampling)] != runs[2]
    import random

    import torch

    engine.reseed(1)
    first = play(engine, PROMPTS, Sampling(max_tokens=8))
    engine.reseed(1)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    wanted = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert play(engine, PROMPTS, Sampling(max_tokens=8)) == first
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == wanted


def test_transformers_computes_the_common_beginning_of_a_group_once(random_llama_dir: Path, monkeypatch) -> None:
    engine = make_engine("transformers", random_llama_dir, dtype="float32", seed=0, context_length=CONTEXT_LENGTH)
    num_rows, forward = [], engine._forward

    def noted(ids_BT, *others):
        num_rows.append(len(ids_BT))
        return forward(ids_BT, *others)

    monkeypatch.setattr(engine, "_forward", noted)
    play(engine, [prompt for prompt in PROMPTS[:2] for _ in range(4)], Sampling(6))
    assert num_rows == [2, 8, 8, 8, 8, 8]  # two prompts, then each episode's own tokens
    engine.close()


def test_a_sleeping_engine_refuses_and_wakes_unchanged(engine: Engine, learner: Learner) -> None:
    before = engine.score(learner.sequences)
    engine.sleep()
    for call in (
        lambda: engine.submit("r0", PROMPTS[0], Sampling(max_tokens=2)),
        engine.step,
        lambda: engine.score([PROMPTS[0]]),
        lambda: engine.load_weights(learner.pack(1)),
    ):
        with pytest.raises(EngineError, match="sleeping"):
            call()
    engine.wake()
    assert CanaryGap.between(engine.score(learner.sequences), before).max == 0


def test_a_busy_engine_refuses_what_would_disturb_its_requests(engine: Engine) -> None:
    engine.submit("r0", PROMPTS[0], Sampling(max_tokens=4))
    for call, words in (
        (lambda: engine.submit("r0", PROMPTS[1], Sampling(max_tokens=4)), "'r0' is already running"),
        (lambda: engine.generate(PROMPTS, Sampling(max_tokens=2)), "1 requests run"),
        (engine.sleep, "1 requests run"),
    ):
        with pytest.raises(EngineError, match=words):
            call()


def test_load_weights_changes_version_policy_and_cached_prefixes(engine: Engine, learner: Learner) -> None:
    long = byte_ids("shared words " * 8)  # longer than a block, so that it is in the prefix cache
    sampling = Sampling(max_tokens=8, temperature=0.0)
    engine.generate([long], sampling)
    engine.load_weights(learner.pack(version=3, scale=0.2))
    assert engine.version == 3
    turn = engine.generate([long], sampling)[0]
    assert (turn.first_version, turn.last_version) == (3, 3)
    logp_T = learner.score(scale=0.2, sequences=[[*long, *turn.token_ids]])[0]
    np.testing.assert_allclose(turn.logp, logp_T[len(long) - 1 :], atol=5e-4)


def test_an_update_in_mid_turn_is_in_the_turns_versions_and_log_probs(engine: Engine, learner: Learner) -> None:
    engine.submit("r0", PROMPTS[0], Sampling(max_tokens=10))
    for _ in range(4):
        assert engine.step() == []
    engine.load_weights(learner.pack(version=7, scale=0.2))
    (turn,), start = to_the_end(engine), len(PROMPTS[0]) - 1
    assert (turn.first_version, turn.last_version, len(turn.token_ids)) == (0, 7, 10)
    stream = [[*PROMPTS[0], *turn.token_ids]]
    old, new = (learner.score(scale, stream)[0][start:] for scale in (0.0, 0.2))
    is_old = np.isclose(turn.logp, old, atol=5e-4)
    switch = int(is_old.sum())
    assert 1 <= switch <= 5
    assert is_old[:switch].all()
    # keys and values of the earlier tokens were computed again with the new weights
    np.testing.assert_allclose(turn.logp[switch:], new[switch:], atol=5e-4)


def test_the_engine_keeps_no_reference_to_the_bundle(engine: Engine, learner: Learner) -> None:
    bundle = learner.pack(version=1, scale=0.1)
    engine.load_weights(bundle)
    before = engine.score(learner.sequences)
    bundle.buffer[:] = 0
    assert CanaryGap.between(engine.score(learner.sequences), before).max == 0


def test_score_is_that_of_the_learner_and_leaves_running_turns_alone(engine: Engine, learner: Learner) -> None:
    sampling = Sampling(max_tokens=10, temperature=0.0)
    wanted = engine.generate([PROMPTS[0]], sampling)[0].token_ids.tolist()
    engine.submit("r0", PROMPTS[0], sampling)
    engine.step()
    gap = CanaryGap.between(engine.score(learner.sequences), learner.score())
    assert gap.max < 5e-4
    assert [turn.token_ids.tolist() for turn in to_the_end(engine)] == [wanted]
    assert engine.score([[5]])[0].shape == (0,)


def test_a_context_beyond_the_models_positions_is_refused_before_anything_starts(kind: str, random_llama_dir) -> None:
    with pytest.raises(ValueError, match="at most 1024, the max_position_embeddings"):
        make_engine(kind, random_llama_dir, context_length=4096)


def test_unfit_sampling_is_refused_with_all_errors() -> None:
    with pytest.raises(ValueError, match=r"max_tokens = 0.*temperature = -1.*stop = 'x'"):
        Sampling(max_tokens=0, temperature=-1, stop="x")


def test_an_unknown_kind_and_a_missing_vllm_say_what_to_do(random_llama_dir: Path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="engine = 'tgi'; expected one of vllm, transformers"):
        make_engine("tgi", random_llama_dir, context_length=64)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match=r"pip install rllib_srl\[cpu\]"):
        make_engine("vllm", random_llama_dir, context_length=64)


@pytest.mark.engine
def test_a_package_that_vllm_lacks_at_its_start_is_named(random_llama_dir: Path, monkeypatch) -> None:
    """vLLM imports some packages only while it starts, such as FlashInfer on a GPU."""
    from vllm.v1.engine.llm_engine import LLMEngine

    def fail(args):
        raise ModuleNotFoundError("No module named 'flashinfer'")

    monkeypatch.setattr(LLMEngine, "from_engine_args", fail)
    with pytest.raises(EngineError, match="^vLLM did not start on .*: No module named 'flashinfer'$"):
        make_engine("vllm", random_llama_dir, context_length=64)


def test_a_turn_ends_with_the_ids_that_the_request_names(engine: Engine) -> None:
    """As in a chat, whose template closes turns with another token than the model's own."""
    (whole,) = engine.generate([PROMPTS[0]], Sampling(max_tokens=12, temperature=0.0))
    ids = whole.token_ids.tolist()
    end = next(token for n, token in enumerate(ids) if n > 2 and token not in ids[:n])
    place = ids.index(end)
    (turn,) = engine.generate([PROMPTS[0]], Sampling(12, temperature=0.0, end_ids=(287, end)))
    assert (turn.token_ids.tolist(), turn.reason) == (ids[: place + 1], "stop")
    assert turn.text == make_byte_tokenizer().decode(ids[:place]) and len(turn.logp) == place + 1
    (forced,) = engine.generate([PROMPTS[0]], Sampling(12, temperature=0.0, end_ids=(end,), runs_to_limit=True))
    assert (forced.token_ids.tolist(), forced.reason) == (ids, "length")

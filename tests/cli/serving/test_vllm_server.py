"""vLLM's own server: an adapter is loaded while it runs, and the canary tells it from the model."""

import asyncio
from pathlib import Path

import httpx
import pytest
import torch

from rllib_srl.cli.serving import vllm_server
from rllib_srl.cli.serving.job import ServedSettings
from rllib_srl.cli.serving.version_files import Continuation, check_served, write_adapter
from rllib_srl.cli.serving.vllm_server import ANSWER_TIMEOUT_S, BASE, ServerError, VLLMServer
from rllib_srl.cli.shared.stopping import ENDING
from rllib_srl.engine.adapters import AdapterSpec, add_adapters
from rllib_srl.engine.models import local_model
from rllib_srl.engine.sync import WeightSyncError

SETTINGS = ServedSettings(model=str(local_model("tiny")), rank=4, context=128, temperature=1.0)
PROMPTS = [[361, 27, 492, 570, 578, 27, 222, 276, 258, 352, 596, 222, 299, 32, 200, 360, 27], [222, 352, 200, 360, 27]]


def tiny_with_adapters(seed):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(local_model("tiny"), dtype=torch.float32)
    add_adapters(model, AdapterSpec(4, 8.0, ("q_proj", "v_proj", "down_proj")), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def continued(model, prompt, num=8):
    ids, logps = list(prompt), []
    for _ in range(num):
        with torch.no_grad():
            logp_V = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(logp_V.argmax()))
        logps.append(float(logp_V.max()))
    return Continuation(list(prompt), ids[len(prompt) :], logps)


def test_a_key_that_the_user_has_for_another_server_does_not_lock_the_gateway_out(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of-another-server")
    environment = VLLMServer(SETTINGS, tmp_path / "engine.log", has_template=False)._environment()
    assert "VLLM_API_KEY" not in environment and environment["PATH"]


def test_an_answer_that_comes_in_one_piece_may_take_as_long_as_any(tmp_path):
    limits = []

    def engine(request):
        limits.append(request.extensions["timeout"]["read"])
        return httpx.Response(200, json={})

    server = VLLMServer(SETTINGS, tmp_path / "engine.log", has_template=False)
    server._client = httpx.AsyncClient(transport=httpx.MockTransport(engine), base_url="http://engine")
    asyncio.run(server.chat({}))
    assert limits == [ANSWER_TIMEOUT_S]


def test_sigterm_while_it_starts_leaves_no_directory(tmp_path, monkeypatch):
    server, homes = VLLMServer(SETTINGS, tmp_path / "engine.log", has_template=False), []

    def ended(*_, **__):
        homes.extend(Path("/tmp").glob(f"{server._home.name}/template.jinja"))
        ENDING.clean_up()  # what SIGTERM does before it ends the process
        raise InterruptedError

    monkeypatch.setattr(vllm_server, "start_kept", ended)
    with pytest.raises(InterruptedError):
        asyncio.run(server.start())
    assert len(homes) == 1 and not homes[0].parent.exists()
    asyncio.run(server.stop())


@pytest.mark.engine
@pytest.mark.slow
def test_the_server_computes_an_adapter_as_its_trainer_does(tmp_path):
    model = tiny_with_adapters(1)
    write_adapter(model, tmp_path, 4, 8.0, "tiny")
    expected = [continued(model, prompt) for prompt in PROMPTS]

    async def body():
        server = VLLMServer(SETTINGS, tmp_path / "engine.log", has_template=False)
        await server.start()
        try:
            await server.load("v1", tmp_path)
            gap = check_served(expected, await server.continuations("v1", expected), 1)
            assert gap.max < 1e-4
            with pytest.raises(WeightSyncError):  # the model itself is another policy
                check_served(expected, await server.continuations(BASE, expected), 1)
            await server.unload("v1")
            with pytest.raises(ServerError, match="404"):
                await server.continuations("v1", expected)
            assert not server.has_ended()
        finally:
            await server.stop()
        assert server.has_ended()

    asyncio.run(asyncio.wait_for(body(), 280))

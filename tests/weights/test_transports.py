"""The handshake of vLLM's transport, driven with stand-ins for its trainer side; the transport itself needs GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch

from rllib_srl.engine import EngineBrokenError
from rllib_srl.engine.vllm_trainer import CastSource, trainer_info
from rllib_srl.learner import weight_sender
from rllib_srl.learner.weight_sender import WeightSender
from rllib_srl.types import ProcessBrokenError
from rllib_srl.weights.transports import RunnersClient, VLLMTransport


class Recorder:
    """A remote method that notes its arguments."""

    def __init__(self):
        self.calls = []

    def remote(self, *arguments):
        self.calls.append(arguments)
        return ray.put(None)


def runner():
    return SimpleNamespace(init_transfer=Recorder(), receive_weights=Recorder())


def test_each_runner_gets_its_own_place_in_the_process_group(ray_here):
    runners = [runner(), runner(), runner()]
    client = RunnersClient(runners, tensor_parallel_size=2, timeout_s=10)
    assert client.world_size == 7  # the learner and three engines of two workers each
    client.init_weight_transfer_engine({"master_port": 1, "rank_offset": 1})
    offsets = [one.init_transfer.calls[0][0]["rank_offset"] for one in runners]
    assert offsets == [1, 3, 5]
    client.init_weight_transfer_engine({"packed": False})  # "ipc" has no process group
    assert runners[2].init_transfer.calls[1] == ({"packed": False},)


def test_one_update_reaches_every_runner_with_its_version(ray_here):
    runners = [runner(), runner()]
    client = RunnersClient(runners, tensor_parallel_size=1, timeout_s=10)
    client.version = 12
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.finish_weight_update()
    assert [one.receive_weights.calls for one in runners] == [[({"names": ["w"]}, 12)]] * 2


@ray.remote(num_cpus=0)
class Broken:
    def receive_weights(self, update_info, version):
        raise EngineBrokenError("vLLM lost a worker")


def test_a_broken_engine_is_not_blamed_on_the_learner_that_calls_it(ray_here):
    client = RunnersClient([Broken.remote()], tensor_parallel_size=1, timeout_s=60)
    with pytest.raises(RuntimeError, match=r"^an engine failed in a weight transfer: ") as caught:
        client.update_weights({})
    assert not isinstance(caught.value, ProcessBrokenError)


def test_the_source_casts_and_describes_in_the_same_order():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    source = CastSource(model, torch.bfloat16, lambda name, dtype, shape: (name, dtype, shape))
    sent = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert source.metadata() == sent and len(sent) == 4
    torch.testing.assert_close(next(iter(source))[1].float(), model[0].weight.detach(), atol=4e-3, rtol=1e-2)


def test_weights_are_sent_directly_with_their_version(monkeypatch, ray_here):
    model, client, sums = torch.nn.Linear(2, 2), SimpleNamespace(version=None), []

    def sum_now(*_):
        return float(model.weight.detach().sum())

    def open_trainer(kind, own, dtype, to, address):
        assert (kind, own, dtype, to) == ("nccl", model, "float32", client)
        return SimpleNamespace(send_weights=lambda: sums.append(sum_now()))

    monkeypatch.setattr(weight_sender, "open_trainer", open_trainer)
    sender = WeightSender(model, "float32", lambda sequences: [np.array([sum_now()])], is_first=True)
    sender.connect("nccl", client)
    scored = sender.send_direct(5, [[1, 2]])
    assert client.version == 5 and sums == [scored[0][0]]


def test_a_lost_runner_means_a_new_rendezvous():
    asked = []
    learners = SimpleNamespace(
        connect=lambda *arguments: asked.append("connect"), send_direct=lambda *arguments: asked.append("send_direct")
    )
    runners = SimpleNamespace(actors=lambda: [runner()], score_loaded=lambda *arguments: {1: "loaded"})
    transport = VLLMTransport(learners, runners, [[1, 2]], 10, "nccl", 1)
    assert transport.update(1, [1]).answers == {1: "loaded"}
    transport.update(2, [1])
    transport.forget()
    transport.update(3, [1])
    assert asked == ["connect", "send_direct", "send_direct", "connect", "send_direct"]


@pytest.mark.engine
def test_vllm_knows_the_settings_we_send(ray_here):
    """The fields are those of the installed vLLM; a renamed one fails here and not on a cluster."""
    assert trainer_info("ipc", 2, "127.0.0.1").backend == "ipc"
    info = trainer_info("nccl", 3, "127.0.0.1")
    assert (info.backend, info.world_size, info.rank, info.packed) == ("nccl", 3, 0, True)


@pytest.mark.engine
def test_packed_weights_are_one_update_of_every_runner(monkeypatch, ray_here):
    """vLLM's own trainer with our client and source; only the broadcast itself is replaced."""
    from vllm.distributed.weight_transfer import nccl_engine
    from vllm.distributed.weight_transfer.base import ParamMeta

    sent = []

    def broadcast(iterator, group, src, post_iter_func, buffer_size_bytes, num_buffers):
        sent.extend((name, tensor.dtype) for name, tensor in iterator)

    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", broadcast)
    runners, model = [runner(), runner()], torch.nn.Linear(3, 2)
    client = RunnersClient(runners, tensor_parallel_size=1, timeout_s=10)
    client.version = 4
    source = CastSource(model, torch.bfloat16, ParamMeta)
    trainer = nccl_engine.NCCLTrainerWeightTransferEngine(
        client=client, source=source, packed=trainer_info("nccl", 3, "127.0.0.1").packed
    )
    trainer.model_update_group = object()
    trainer.send_weights()
    assert sent == [("weight", torch.bfloat16), ("bias", torch.bfloat16)]
    info = {"names": ["weight", "bias"], "dtype_names": ["bfloat16"] * 2, "shapes": [[2, 3], [2]]}
    assert [one.receive_weights.calls for one in runners] == [[(info, 4)]] * 2

"""The learner's side of vLLM's own weight transfer between GPUs: "nccl" between GPUs, "ipc" within one.

    trainer = open_trainer("nccl", model, "bfloat16", client, address)       rendezvous with every engine
    trainer.send_weights()                                                    one whole update, through `client`

Not tested without GPUs, except for the fields of vLLM's settings (tests/weights/test_transports.py).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import torch

from rllib_srl.engine.sync import torch_dtype


def open_trainer(kind: str, model: torch.nn.Module, dtype: str, client: Any, address: str) -> Any:
    """Rendezvous with the engines and return vLLM's trainer.

    Args:
        kind: "nccl" or "ipc".
        model: its current parameters are sent at each update.
        dtype: of the engines; tensors are cast before they are sent.
        client: vLLM's weight-sync client, with `world_size`.
        address: of this node, reachable from every engine.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    source = CastSource(model, torch_dtype(dtype), ParamMeta)
    info = trainer_info(kind, client.world_size, address)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def trainer_info(kind: str, world_size: int, address: str) -> Any:
    """Return vLLM's settings of a transfer; see `open_trainer`."""
    if kind == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    # Packed: one broadcast per gigabyte, not one per tensor. The client still gets one update call per round.
    return NCCLTrainerInitInfo(
        rank=0, master_address=address, master_port=_free_port(), world_size=world_size, packed=True
    )


class CastSource:
    """vLLM's `WeightSource` (duck-typed) over a model: its parameters in the engine's number format."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, describe: Any) -> None:
        """Store the model, the dtype that is sent, and vLLM's `ParamMeta`."""
        self._model, self._dtype, self._describe = model, dtype, describe

    def metadata(self) -> list[Any]:
        """Describe every parameter, in the order of iteration."""
        return [self._describe(name, self._dtype, tuple(p.shape)) for name, p in self._model.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach().to(self._dtype)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port

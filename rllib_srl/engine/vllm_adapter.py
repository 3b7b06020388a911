"""The worker's side of adapters in vLLM: load one from memory in place of the old one, without files.

    receive_adapter (parts) -> keep_adapter -> load_adapter(spec)          A and B of each layer, one slot
    layers_without_adapter(names)                                          those that vLLM cannot adapt
    multiply_by_one_adapter()                                              two plain products per layer, on a CPU
    adapter_fingerprint(spec)                                              digests of the matrices in its kernels

The adapter replaces the old one under the same id, as whole weights replace old ones: running requests continue
with the new adapter, after the engine has dropped their keys and values.

Trap (vLLM 0.32): it scales B in place when an adapter is loaded. It gets copies; the bundle may be read-only shared
memory, or the learner's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from rllib_srl.engine.adapters import AdapterSpec
from rllib_srl.engine.canary import noise
from rllib_srl.engine.fingerprint import digests
from rllib_srl.engine.sync import torch_dtype

ADAPTER = ("policy", 1, "memory")  # name, id and path of vLLM's request; it reads no file, since the id is loaded
_ID = ADAPTER[1]


class AdapterWorker:
    """Methods of a worker. Invariant: between two calls of `load_adapter` the slot 0 holds the adapter."""

    model_runner: Any  # vLLM's

    def layers_without_adapter(self, names: Sequence[str]) -> list[str]:
        """Return those of the layers, by the names of Hugging Face, that vLLM cannot adapt."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        manager, mapper = self._adapters, self._mapper()
        layers = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
        return [name for name in names if parse_fine_tuned_lora_name(f"{name}.lora_A.weight", mapper)[0] not in layers]

    def multiply_by_one_adapter(self) -> None:
        """Use plain products: vLLM's code for CPUs copies the matrices of the adapter once for each token."""
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        class OneAdapter(PunicaWrapperCPU):
            """Products with the adapter of slot 0, which every request carries."""

            def add_lora_linear(self, y: torch.Tensor, x: torch.Tensor, *stacked: Any, **_: Any) -> None:
                """Add scale B A x to each part of y."""
                a_parts, b_parts, scale, sizes = stacked
                start = 0
                for a, b, size in zip(a_parts, b_parts, sizes, strict=True):
                    y[:, start : start + size].addmm_(x @ a[0, 0].T, b[0, 0].T, alpha=scale)
                    start += size

        manager = self._adapters
        size = {"max_batches": manager.max_num_seqs, "device": manager.device}
        for key in manager.punica_wrapper_mapping:
            wrapper = OneAdapter(manager.max_num_batched_tokens, **size)
            old, manager.punica_wrapper_mapping[key] = manager.punica_wrapper_mapping[key], wrapper
            for module in manager.modules.values():
                if module.punica_wrapper is old:
                    module.set_mapping(wrapper)

    def keep_adapter(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy some of the tensors, for `load_adapter`."""
        kept = self.__dict__.setdefault("_kept_adapter", {})
        kept.update((name, tensor.clone()) for name, tensor in named)

    @torch.inference_mode()
    def load_adapter(self, spec: AdapterSpec) -> None:
        """Replace the previous adapter by the tensors that were kept."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager, tensors = self._adapters, self.__dict__.pop("_kept_adapter")
        about = {"r": spec.rank, "lora_alpha": spec.alpha, "target_modules": list(spec.targets)}
        form = {"device": "cpu", "dtype": manager.lora_config.lora_dtype, "weights_mapper": self._mapper()}
        adapter = LoRAModel.from_lora_tensors(_ID, tensors, PEFTHelper.from_dict(about), **form)
        manager.remove_adapter(_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(_ID)

    def adapter_noise(self, shapes: dict[str, tuple[int, ...]], dtype: str, spec: AdapterSpec) -> None:
        """Load an adapter of noise."""
        self.keep_adapter(noise(shapes, torch_dtype(dtype)))
        self.load_adapter(spec)

    @torch.inference_mode()
    def adapter_fingerprint(self, spec: AdapterSpec) -> dict[str, tuple[int, ...]]:
        """Return digests of A and B of each layer as the kernels read them, without the rows that pad the rank."""
        prints = {}
        for name, part, a, b in self._stacked():
            prints[f"{name}.{part}.lora_A"] = digests(a[: spec.rank])
            prints[f"{name}.{part}.lora_B"] = digests(b[:, : spec.rank])
        return prints

    def _stacked(self) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
        """Yield layer, part of it, A and B for each part that the adapter has."""
        manager = self._adapters
        adapter, slot = manager.get_adapter(_ID), manager.lora_index_to_id.index(_ID)
        for name, module in manager.modules.items():
            weights = manager._get_lora_layer_weights(adapter, name)
            if weights is None:
                continue
            slices = weights.lora_b if isinstance(weights.lora_b, list) else [weights.lora_b]
            parts = [part.rpartition(".")[2] for part in manager.packed_modules.get(name, [name])]
            for index, (a, b) in enumerate(zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)):
                if len(slices) != module.n_slices or slices[index] is not None:
                    part = parts[index] if len(parts) == module.n_slices else str(index)
                    yield name, part, a[slot, 0], b[slot, 0]

    @property
    def _adapters(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager

    def _mapper(self) -> Any:
        mapper = getattr(self._adapters.model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()

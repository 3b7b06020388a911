"""Wrap a Hugging Face causal language model as an RLModule that returns log-probs of given tokens.

Only the learner runs it. The engine samples, so the inference-only state is empty, and weights reach the engine
through the verified transfer (`engine.sync`), never through RLlib's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.learner.scoring import load_causal_lm, token_logps
from rllib_srl.learner.sharding import assign, is_sharded, whole
from rllib_srl.storage.weight_file import WEIGHTS, read_weights, write_weights

IN_FILE = f"in {WEIGHTS}"  # only key of the state that RLlib pickles; the weights are in that file


class CausalLMModule(TorchRLModule):
    """Holds the fp32 master weights of the policy.

    Invariant: `parameters()` yields each tied weight once; exactly the trained ones require a gradient.
    """

    model: Any  # a Hugging Face causal language model
    gathered: dict[str, np.ndarray] | None = None  # whole weights for `get_state`, from `gather` to the next update
    _layers: tuple[Any, ...] = ()  # decoder layers with activation checkpointing

    def setup(self) -> None:
        """Load the model named by `model_config["model"]` in fp32."""
        self.model = load_causal_lm(self.model_config["model"])

    def train(self, mode: bool = True) -> CausalLMModule:
        """Stay in eval mode: dropout off, so that log-probs match the engine's. Gradients are not affected."""
        super().train(False)
        for layer in self._layers:  # transformers checkpoints only layers with this flag; submodules keep False
            layer.training = True
        return self

    def checkpoint_activations(self, offload: bool = False) -> None:
        """Keep only each decoder layer's input, with `offload` in host memory; the backward recomputes the rest."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._layers = tuple(m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer))
        if offload:
            for layer in self._layers:
                layer._gradient_checkpointing_func = _saving_on_cpu(layer._gradient_checkpointing_func)
        self.train()

    def gather(self, keeps: bool) -> None:
        """Gather the sharded weights; a collective. RLlib calls `get_state` on the learner that keeps them."""
        weights = {}
        for name, tensor in whole(self.saved_parameters()):
            if keeps:
                weights[name] = tensor.cpu().float().numpy()
        self.gathered = weights if keeps else None

    def saved_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the trained parameters; the others are read from the model's own files."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def _forward_train(self, batch: MicroBatch[torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
        return self._forward(batch, **kwargs)

    def _forward(self, batch: MicroBatch[torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
        return token_logps(self.model, batch)

    def get_state(self, components: Any = None, *, inference_only: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Return the trained parameters by name, fp32 numpy arrays; {} with `inference_only` (see the module).

        Raises:
            RuntimeError: the weights are sharded and `gather` was not called.
        """
        if inference_only:
            return {}
        if is_sharded(self.model):
            if self.gathered is None:
                raise RuntimeError("the weights are spread over learners; call gather on all of them first")
            return self.gathered
        return {name: parameter.detach().cpu().float().numpy() for name, parameter in self.saved_parameters()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Load a state from `get_state`.

        Raises:
            ValueError: parameters are missing, unknown or of another shape; the message names them.
        """
        if not state:
            return
        parameters = dict(self.saved_parameters())
        errors = [f"{name}: missing" for name in parameters if name not in state]
        errors += [f"{name}: unknown" for name in state if name not in parameters]
        errors += [
            f"{name}: shape {tuple(state[name].shape)}; expected {tuple(parameters[name].shape)}"
            for name in parameters
            if name in state and tuple(state[name].shape) != tuple(parameters[name].shape)
        ]
        if errors:
            raise ValueError(f"the state does not fit model {self.model_config['model']!r}: " + "; ".join(errors[:8]))
        for name, parameter in parameters.items():
            assign(parameter, torch.tensor(np.asarray(state[name])))  # a copy: arrays of the object store are read-only

    def save_to_path(self, path: Any = None, *, state: Any = None, **kwargs: Any) -> str:
        """Write RLlib's module files, with the weights as safetensors instead of a pickle."""
        weights = state or self.get_state()
        saved: str = super().save_to_path(path, state={IN_FILE: np.empty(0)}, **kwargs)
        write_weights(Path(saved) / WEIGHTS, weights)
        return saved

    def restore_from_path(self, path: Any, **kwargs: Any) -> None:
        """Load the files of `save_to_path`; a pickle is opened only if there is no safetensors file.

        Raises:
            CheckpointError: the file cannot be read.
            ValueError: the weights belong to another model.
        """
        file = Path(path) / WEIGHTS
        if file.is_file():
            self.set_state(read_weights(file))
        else:
            super().restore_from_path(path, **kwargs)


def _saving_on_cpu(checkpoint: Any) -> Callable[..., Any]:
    """Return a layer's checkpointing function that keeps the layer's inputs in host memory.

    torch saves the inputs of a non-reentrant checkpoint through the hooks outside of it; what the layer itself saves
    is computed again, and meets the checkpoint's own hooks.
    """

    def run(*args: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=args[-1].device.type == "cuda"):
            return checkpoint(*args)

    return run

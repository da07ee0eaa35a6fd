"""Memory of a training pass, by arithmetic: the pass runs on tensors that have a shape and nothing else.

What is alive is added up as torch makes and frees it.  Fragmentation of the allocator comes on top.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conf.update import UpdateConfig
from kernels.sampling.token_logprob import CHUNK_ELEMENTS
from tlt_core.grpo.lora import inject_adapters
from tlt_core.grpo.policy import PolicyModel
from tlt_core.machine.precision import as_torch
from tlt_core.model.config import DecoderConfig
from tlt_core.model.load import empty_decoder

_META = torch.device("meta")


class LiveBytes(TorchDispatchMode):
    """While entered, counts the bytes of all tensors of one kind of device that operations have made."""

    def __init__(self, device: torch.device = _META) -> None:
        super().__init__()
        self.now: int = 0
        self.peak: int = 0
        self._device, self._sizes = device, dict[int, int]()

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and count the memory that is new."""
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device.type == self._device.type:
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def trained_parameters(config: DecoderConfig, update: UpdateConfig) -> tuple[int, int]:
    """Parameters of the model in training, and how many of them are trained."""
    parameters = list(_model(config, update).parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def pass_bytes(config: DecoderConfig, update: UpdateConfig, *, sequence: int) -> int:
    """Most bytes that a forward and backward pass of `update.tokens_per_micro_batch` tokens takes besides weights,
    gradients' sums and optimizer.  sequence: tokens of the longest sequence; a longer one is a pass of its own."""
    if config.foreign:  # about as much as a Llama of these sizes
        config = replace(config, foreign="", family="llama")
        update = update.model_copy(update={"lora": update.lora.model_copy(update={"enabled": False})})
    tokens = max(update.tokens_per_micro_batch, sequence)
    head = _head_bytes(config, update, tokens)
    live = LiveBytes()
    with live:
        model = _model(config, update)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_forget_gradient)
        weights = live.now
        ids_U = torch.arange(tokens, device=_META)
        hidden_UD = model.decoder(ids_U, ids_U, lambda layer, *heads: _Attention.apply(*heads)).last_TD
        completions_CD = hidden_UD.index_select(0, ids_U)
        at_the_head = live.now + head
        # The gradient of a head that is the embedding, too, waits for the embedding's.
        is_one = config.tie_word_embeddings and not update.lora.enabled
        waits = torch.empty_like(model.decoder.head_weight) if is_one else None
        live.peak = live.now
        completions_CD.backward(torch.empty_like(completions_CD))
        del waits
    return max(at_the_head, live.peak) - weights


def _model(config: DecoderConfig, update: UpdateConfig) -> PolicyModel:
    decoder = empty_decoder(config).to(as_torch(update.dtype))
    if update.lora.enabled:
        inject_adapters(decoder, update.lora)
    return PolicyModel(decoder, temperature=1.0, activation_checkpointing=update.activation_checkpointing)


class _Attention(torch.autograd.Function):
    """Keeps what every fused attention keeps; the sums of a few rows on the way are nothing beside it."""

    @staticmethod
    def forward(ctx: Any, q_UHd: Tensor, k_UKd: Tensor, v_UKd: Tensor) -> Tensor:
        out_UHd = torch.empty_like(q_UHd, memory_format=torch.contiguous_format)
        ctx.save_for_backward(q_UHd, k_UKd, v_UKd, out_UHd)
        return out_UHd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in ctx.saved_tensors[:3])


def _head_bytes(config: DecoderConfig, update: UpdateConfig, tokens: int) -> int:
    """Logits of a chunk, and the gradient of the head: two in the weights' type while they are added up in float32."""
    item = as_torch(update.dtype).itemsize
    gradient = 0 if update.lora.enabled else config.vocab_size * config.hidden_size * (4 + 2 * item)
    return min(CHUNK_ELEMENTS, tokens * config.vocab_size) * item + gradient


def _forget_gradient(parameter: Tensor) -> None:
    """Back ends add a gradient up as soon as it exists."""
    assert isinstance(parameter, nn.Parameter)
    parameter.grad = None

"""Log-probability of given tokens from hidden states: LM head, log-softmax and gather in one op.

Math.  z_t = W h_t / temperature, log p_t = z_t[id_t] - logsumexp(z_t), entropy H_t = logsumexp(z_t) - sum_v p_tv z_tv.
Gradient: d log p_t / d z_t = onehot(id_t) - p_t, so backward keeps only logsumexp (one float per token) and recomputes
the logits, a chunk of tokens at a time (as in Hsu et al., "Liger Kernel", arXiv 2410.10989).

The vocabulary matrix product runs in the dtype of its inputs, softmax in float32 on a few tokens at a time.  No tensor
has the size [T, V] where it is more than a chunk; the last chunk's logits are kept for backward.

On a CPU C works on a token's logits (`native/logprob.c`).  On a GPU the chunk's logits keep their dtype, and a Triton
kernel reads a token's logits once, in blocks of the vocabulary, for their maximum m, s = sum exp(z - m) and
e = sum exp(z - m) (z - m); when m grows by d, e becomes e^-d (e - d s) and s becomes e^-d s.  At the end
logsumexp = m + log s and H = log s - e / s.  Another kernel overwrites the logits with their gradient.

Shapes: T tokens, V vocabulary, D hidden size, C tokens of one chunk, B tokens of one cached block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import jit, native_library, tl, uses_triton

Impl = Literal["auto", "torch", "chunked", "native", "triton"]

CHUNK_ELEMENTS = 1 << 26  # logits of one chunk: 128 MiB in bf16
_CACHED_ELEMENTS = 1 << 18  # float32 logits worked on at once on CPU: 1 MiB, a core's second-level cache


class TokenLogprobs(NamedTuple):
    """Log-probabilities of the given tokens, and entropies of their distributions, in nats."""

    logprob_T: Tensor  # float32, differentiable
    entropy_T: Tensor  # float32, without gradient


def linear_token_logprob(
    hidden_TD: Tensor, weight_VD: Tensor, ids_T: Tensor, *, temperature: float = 1.0, impl: Impl = "auto"
) -> TokenLogprobs:
    """log softmax(hidden W^T / temperature)[ids] and its entropy, both [T] float32.

    hidden_TD, weight_VD: same float dtype; ids_T: integer token ids.  `impl`: torch is the specification and
    materialises [T, V] in float32; chunked does not; native (auto on a CPU with a compiler) and triton (auto on a GPU)
    are chunked with fused kernels.  A NaN in a token's logits makes its log-probability and entropy NaN.  Raises
    ValueError on a temperature that is not positive, and where native or triton cannot run.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: log-probabilities need a positive temperature")
    if impl == "torch":
        return token_logprob_reference(hidden_TD, weight_VD, ids_T, temperature=temperature)
    return TokenLogprobs(
        *_ChunkedLogprob.apply(hidden_TD, weight_VD, ids_T.long().contiguous(), temperature, _kernels(hidden_TD, impl))
    )


def _kernels(hidden_TD: Tensor, impl: Impl) -> _Kernels:
    if impl == "chunked":
        return _TORCH
    library = native_library(impl, hidden_TD, op="token_logprob")
    if library is not None and hidden_TD.dtype in (torch.bfloat16, torch.float32):
        return _native(library)
    return _TRITON if uses_triton(impl, hidden_TD, op="token_logprob") else _TORCH


def token_logprob_reference(
    hidden_TD: Tensor, weight_VD: Tensor, ids_T: Tensor, *, temperature: float
) -> TokenLogprobs:
    """The specification: materialises [T, V] log-probabilities in float32."""
    logits_TV = torch.nn.functional.linear(hidden_TD, weight_VD).float() / temperature
    logp_TV = logits_TV.log_softmax(-1)
    logprob_T = logp_TV.gather(-1, ids_T.long()[:, None]).squeeze(-1)
    return TokenLogprobs(logprob_T, -(logp_TV.exp() * logp_TV).sum(-1).detach())


class _Kernels(NamedTuple):
    """What is done to a chunk of logits."""

    measure: Callable[[Tensor, Tensor, float, Tensor, Tensor, Tensor], None]  # logits_CV, ids_C, temperature -> results
    to_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, float], None]  # logits_CV, in place


class _ChunkedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, ids_T: Tensor, temperature: float, kernels: _Kernels
    ) -> Any:
        logprob_T = hidden_TD.new_empty(len(hidden_TD), dtype=torch.float32)
        lse_T, entropy_T = torch.empty_like(logprob_T), torch.empty_like(logprob_T)
        chunks, buffer_CV = _chunks(hidden_TD, weight_VD)
        for chunk in chunks:
            logits_CV = _logits(hidden_TD, weight_VD, chunk, buffer_CV)
            kernels.measure(logits_CV, ids_T[chunk], temperature, logprob_T[chunk], lse_T[chunk], entropy_T[chunk])
        ctx.save_for_backward(hidden_TD, weight_VD, ids_T, lse_T)
        ctx.temperature, ctx.kernels, ctx.chunks = temperature, kernels, chunks
        ctx.last_logits = buffer_CV  # backward begins with the last chunk, and needs such a buffer anyway
        ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden_TD, weight_VD, ids_T, lse_T = ctx.saved_tensors
        grad_hidden_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        grad_VD: Tensor | None = None
        kept_CV, ctx.last_logits = ctx.last_logits, None
        buffer_CV = _chunks(hidden_TD, weight_VD)[1] if kept_CV is None else kept_CV
        for chunk in reversed(ctx.chunks):
            if kept_CV is not None and chunk is ctx.chunks[-1]:
                logits_CV = kept_CV[: chunk.stop - chunk.start]
            else:
                logits_CV = _logits(hidden_TD, weight_VD, chunk, buffer_CV)
            ctx.kernels.to_gradient(logits_CV, ids_T[chunk], lse_T[chunk], grads[0][chunk], ctx.temperature)
            if grad_hidden_TD is not None:
                torch.mm(logits_CV, weight_VD, out=grad_hidden_TD[chunk])
            if ctx.needs_input_grad[1]:
                part_VD = torch.mm(logits_CV.t(), hidden_TD[chunk])
                # several bf16 parts are summed in float32; one part is the gradient
                grad_VD = part_VD if grad_VD is None else grad_VD.float().add_(part_VD)
        if ctx.needs_input_grad[1]:
            grad_VD = torch.zeros_like(weight_VD) if grad_VD is None else grad_VD.to(weight_VD.dtype)
        return grad_hidden_TD, grad_VD, None, None, None


def _chunks(hidden_TD: Tensor, weight_VD: Tensor) -> tuple[list[slice], Tensor]:
    """Tokens of each chunk, of equal size but for the last, and a buffer for a chunk's logits [C, V]."""
    num_tokens, vocab_size = len(hidden_TD), len(weight_VD)
    count = -(-num_tokens // max(16, CHUNK_ELEMENTS // vocab_size))
    size = -(-num_tokens // max(1, count))
    chunks = [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, max(1, size))]
    return chunks, hidden_TD.new_empty(size, vocab_size)


def _logits(hidden_TD: Tensor, weight_VD: Tensor, chunk: slice, buffer_CV: Tensor) -> Tensor:
    return torch.mm(hidden_TD[chunk], weight_VD.t(), out=buffer_CV[: chunk.stop - chunk.start])


# ---------------------------------------------------------------------------------------------- torch's operations


def _measure(
    logits_CV: Tensor, ids_C: Tensor, temperature: float, logprob_C: Tensor, lse_C: Tensor, entropy_C: Tensor
) -> None:
    for rows, z_BV, p_BV in _float_blocks(logits_CV, temperature):
        picked = z_BV.gather(-1, ids_C[rows, None]).squeeze(-1)
        top = z_BV.amax(-1)
        torch.exp(z_BV.sub_(top[:, None]), out=p_BV)
        total = p_BV.sum(-1)
        lse = total.log()
        # z is relative to its row's maximum here, and p not yet divided by its total
        entropy_C[rows] = lse - torch.linalg.vecdot(p_BV, z_BV).div_(total)
        lse_C[rows] = lse.add_(top)
        logprob_C[rows] = picked - lse


def _to_gradient(logits_CV: Tensor, ids_C: Tensor, lse_C: Tensor, grad_C: Tensor, temperature: float) -> None:
    """Overwrite a chunk's logits with (onehot(ids) - p) * grad / temperature."""
    scaled_C1 = (grad_C / temperature)[:, None]
    for block, z_BV, p_BV in _float_blocks(logits_CV, temperature):
        torch.exp(z_BV.sub_(lse_C[block, None]), out=p_BV)
        p_BV.mul_(-scaled_C1[block]).scatter_add_(-1, ids_C[block, None], scaled_C1[block])
        logits_CV[block] = p_BV


def _float_blocks(logits_CV: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Block by block the tokens, their float32 logits over the temperature, and a work buffer of the same shape; both
    are reused for the next block.  On a CPU a block fits the cache; on a GPU it is the whole chunk."""
    num_rows, vocab_size = logits_CV.shape
    size = max(1, _CACHED_ELEMENTS // vocab_size) if logits_CV.device.type == "cpu" else num_rows
    buffers = logits_CV.new_empty(2, min(size, num_rows), vocab_size, dtype=torch.float32)
    for start in range(0, num_rows, size):
        block = slice(start, min(start + size, num_rows))
        z_BV, p_BV = buffers[:, : block.stop - block.start]
        z_BV.copy_(logits_CV[block])
        yield block, z_BV if temperature == 1 else z_BV.div_(temperature), p_BV


_TORCH = _Kernels(_measure, _to_gradient)


# ---------------------------------------------------------------------------------------------- C


def _native(library: ctypes.CDLL) -> _Kernels:
    def measure(
        logits_CV: Tensor, ids_C: Tensor, temperature: float, logprob_C: Tensor, lse_C: Tensor, entropy_C: Tensor
    ) -> None:
        library.tlt_logprob(
            logits_CV.data_ptr(), logits_CV.dtype == torch.bfloat16, ids_C.data_ptr(), *logits_CV.shape, temperature,
            logprob_C.data_ptr(), lse_C.data_ptr(), entropy_C.data_ptr(),
        )  # fmt: skip

    def to_gradient(logits_CV: Tensor, ids_C: Tensor, lse_C: Tensor, grad_C: Tensor, temperature: float) -> None:
        grad_C = grad_C.contiguous()
        library.tlt_logprob_gradient(
            logits_CV.data_ptr(), logits_CV.dtype == torch.bfloat16, ids_C.data_ptr(), lse_C.data_ptr(),
            grad_C.data_ptr(), *logits_CV.shape, temperature,
        )  # fmt: skip

    return _Kernels(measure, to_gradient)


# ---------------------------------------------------------------------------------------------- Triton

_BLOCK = 4096  # logits that a program holds in registers


def _measure_fused(
    logits_CV: Tensor, ids_C: Tensor, temperature: float, logprob_C: Tensor, lse_C: Tensor, entropy_C: Tensor
) -> None:
    """What `_measure` does, one program per token."""
    _statistics_kernel[(len(logits_CV),)](
        logits_CV, ids_C, logprob_C, lse_C, entropy_C, logits_CV.shape[1], float(temperature), BLOCK=_BLOCK
    )


def _to_gradient_fused(logits_CV: Tensor, ids_C: Tensor, lse_C: Tensor, grad_C: Tensor, temperature: float) -> None:
    """What `_to_gradient` does, one program per token."""
    _gradient_kernel[(len(logits_CV),)](
        logits_CV, ids_C, lse_C, grad_C.contiguous(), logits_CV.shape[1], float(temperature), BLOCK=_BLOCK
    )


_TRITON = _Kernels(_measure_fused, _to_gradient_fused)


@jit()
def _statistics_kernel(logits, ids, logprob, lse, entropy, vocab, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    top, total, weighted = float("-inf"), 0.0, 0.0
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        z = tl.load(logits + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        z = tl.math.div_rn(z, temperature + tl.zeros_like(z))
        new_top = tl.maximum(top, tl.max(z, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        grown = tl.where(top == float("-inf"), 0.0, shift - top)
        decay = tl.exp(-grown)
        p = tl.exp(z - shift)
        weighted = decay * (weighted - grown * total) + tl.sum(tl.where(p > 0.0, p * (z - shift), p), axis=0)
        total = decay * total + tl.sum(p, axis=0)
        top = new_top
    log_total = tl.log(total)
    picked = tl.load(logits + tl.load(ids + row)).to(tl.float32)
    picked = tl.math.div_rn(picked, temperature + tl.zeros_like(picked))
    tl.store(logprob + row, picked - top - log_total)
    tl.store(lse + row, top + log_total)
    tl.store(entropy + row, log_total - weighted / total)


@jit()
def _gradient_kernel(logits, ids, lse, grad, vocab, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    scaled, log_norm, chosen = tl.load(grad + row) / temperature, tl.load(lse + row), tl.load(ids + row)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        z = tl.load(logits + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        p = tl.exp(tl.math.div_rn(z, temperature + tl.zeros_like(z)) - log_norm)
        result = (tl.where(columns == chosen, 1.0, 0.0) - p) * scaled
        tl.store(logits + columns, result.to(logits.dtype.element_ty), mask=columns < vocab)

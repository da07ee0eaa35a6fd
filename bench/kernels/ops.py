"""Rates of kernels beside the ceilings of the device: a large copy and a large bf16 product.

`bytes` is the least that an op must move (inputs read once, outputs written once), `flop` the operations of its matrix
products.  So a rate is a lower bound of what the hardware did.  Shapes are those of Qwen2.5-7B on a GPU; on a CPU they
are small, and the torch implementations run.

Before every call a buffer larger than the caches is overwritten, so that the operands come from memory.

Shapes: B requests, N rows, V vocabulary, D hidden size, T tokens, K key/value heads, G query heads on each, C cache
positions, d head size, J draft vocabulary, Y layers, A tokens of a path.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.verdicts import summarise
from kernels.attention.kv_commit import kv_commit
from kernels.attention.packed_attention import packed_causal_attention
from kernels.attention.slot_attention import SlotMask, slot_attention
from kernels.dispatch import Impl
from kernels.loss.distill_loss import distill_loss
from kernels.sampling.coupled_sample import coupled_sample
from kernels.sampling.spec_verify import accepted_path
from kernels.sampling.token_logprob import linear_token_logprob
from kernels.tree.tree_attention import tree_attention

_CALLS = 7  # their median counts; one more before them compiles and allocates


class Shapes(NamedTuple):
    """Sizes of everything measured."""

    vocab: int
    hidden: int
    kv_heads: int
    grouped: int
    head_dim: int
    layers: int
    draft_vocab: int
    tokens: int  # trained at once
    contexts: tuple[tuple[int, int, int], ...]  # requests, tokens of each, cache positions
    copy_mib: int
    product: int  # edge of the matrices


QWEN_7B = Shapes(152_064, 3584, 4, 7, 128, 28, 32_000, 4096, ((1, 1, 32_768), (16, 8, 4096), (64, 1, 2048)), 1024, 8192)
SMALL = Shapes(8192, 256, 3, 3, 64, 4, 1024, 64, ((1, 1, 512), (4, 8, 256)), 64, 512)


class Work(NamedTuple):
    """One measured op."""

    name: str
    shape: str
    bytes: int
    flop: int
    call: Callable[[Impl], object]
    impls: tuple[Impl, ...]  # implementations that are compared on a GPU


class Ceilings(NamedTuple):
    """Rates of the device on the simplest work."""

    bytes_per_s: float  # copy: bytes read and written
    flop_per_s: float


class Clock:
    """Measures the seconds of a call whose operands are in no cache."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty((256 if device.type == "cuda" else 64) << 20, dtype=torch.uint8, device=device)

    def seconds(self, call: Callable[[], object], *, calls: int = _CALLS) -> float:
        """Median over `calls`."""
        call()
        timed = self._on_gpu if self._device.type == "cuda" else self._on_cpu
        return statistics.median(timed(call) for _ in range(calls))

    def _on_gpu(self, call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _on_cpu(self, call: Callable[[], object]) -> float:
        self._flush.zero_()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began


def run(device: torch.device, shapes: Shapes, *, repeats: int) -> list[dict[str, Any]]:
    """Rows of a report: the ceilings, then every op with each of its implementations."""
    clock = Clock(device)
    top = [ceilings(clock, device, shapes) for _ in range(repeats)]
    best = Ceilings(max(c.bytes_per_s for c in top), max(c.flop_per_s for c in top))
    rows: list[dict[str, Any]] = [
        {"configuration": "ceilings", "device": device.type, **summarise([c._asdict() for c in top])}
    ]
    for work in works(device, shapes):
        measured = [measure(clock, device, work, best) for _ in range(repeats)]
        for impl in measured[0]:
            figures = summarise([m[impl] for m in measured])
            rows.append({"configuration": work.name, "impl": impl, "shape": work.shape, **figures})
    return rows


def ceilings(clock: Clock, device: torch.device, shapes: Shapes) -> Ceilings:
    """Measure the ceilings."""
    source, target = torch.randint(256, (2, shapes.copy_mib << 20), dtype=torch.uint8, device=device)
    copy_s = clock.seconds(lambda: target.copy_(source))
    edge = shapes.product
    a, b = torch.randn(2, edge, edge, dtype=torch.bfloat16, device=device)  # of zeros it would be faster
    return Ceilings(2 * source.numel() / copy_s, 2 * edge**3 / clock.seconds(lambda: torch.mm(a, b)))


def measure(clock: Clock, device: torch.device, work: Work, against: Ceilings) -> dict[str, dict[str, float]]:
    """Figures of each implementation that the device runs, by name."""
    impls: tuple[Impl, ...] = work.impls if device.type == "cuda" else ("auto",)
    return {impl: _figures(clock.seconds(functools.partial(work.call, impl)), work, against) for impl in impls}


def _figures(seconds: float, work: Work, against: Ceilings) -> dict[str, float]:
    return {
        "seconds": seconds,
        "bytes_per_s": work.bytes / seconds,
        "flop_per_s": work.flop / seconds,
        "of_copy": work.bytes / seconds / against.bytes_per_s,
        "of_product": work.flop / seconds / against.flop_per_s,
    }


def works(device: torch.device, shapes: Shapes) -> Iterator[Work]:
    """All ops.  Each one's operands are freed before those of the next are made."""
    generator = torch.Generator(device).manual_seed(0)
    yield from _sampling(device, shapes, generator)
    yield _logprob(device, shapes, generator)
    yield from (_slots(device, shapes, generator, *context) for context in shapes.contexts)
    yield from (_trees(device, shapes, generator, *context) for context in shapes.contexts)
    yield _packed(device, shapes, generator)
    yield _walk(device, generator)
    yield _commit(device, shapes, generator)
    yield _distill(device, shapes, generator)


def _normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)


def _sampling(device: torch.device, shapes: Shapes, generator: torch.Generator) -> Iterator[Work]:
    for rows in (1, 64):
        logits_NV = _normal(generator, rows, shapes.vocab)
        keys_N2 = torch.arange(2 * rows, dtype=torch.int32, device=device).view(rows, 2)

        def call(impl: Impl, logits_NV: Tensor = logits_NV, keys_N2: Tensor = keys_N2) -> object:
            return coupled_sample(logits_NV, keys_N2, temperature=0.7, impl=impl)

        yield Work("coupled_sample", f"{rows} x {shapes.vocab}", 2 * logits_NV.numel(), 0, call, ("triton", "torch"))


def _logprob(device: torch.device, shapes: Shapes, generator: torch.Generator) -> Work:
    tokens, vocab, hidden = shapes.tokens, shapes.vocab, shapes.hidden
    hidden_TD = _normal(generator, tokens, hidden).requires_grad_()
    weight_VD = _normal(generator, vocab, hidden).div_(hidden**0.5).requires_grad_()
    ids_T = torch.arange(tokens, device=device) % vocab

    def call(impl: Impl) -> object:
        # the torch implementation of this op holds [T, V] in float32: the chunked one is what to compare with
        chosen = "chunked" if impl == "torch" else impl
        out = linear_token_logprob(hidden_TD, weight_VD, ids_T, impl=chosen)  # type: ignore[arg-type]
        return torch.autograd.grad(out.logprob_T.sum(), (hidden_TD, weight_VD))

    size = f"{tokens} x {hidden} x {vocab}, forward and backward"
    # logits, logits again, and two gradients: four products; weights read three times, their gradient written once
    return Work("token_logprob", size, 8 * weight_VD.numel(), 8 * tokens * vocab * hidden, call, ("triton", "torch"))


def _slots(device: torch.device, shapes: Shapes, generator: torch.Generator, live: int, width: int, seen: int) -> Work:
    heads, grouped, size = shapes.kv_heads, shapes.grouped, shapes.head_dim
    keys_BKCd, values_BKCd = _normal(generator, 2, live, heads, seen + 64, size)[..., :seen, :]
    q_BKNd = _normal(generator, live, heads, width * grouped, size)
    visible_BWC = torch.ones(live, width, seen, dtype=torch.bool, device=device)
    mask = SlotMask.of(visible_BWC, num_kv=heads, grouped=grouped, dtype=q_BKNd.dtype)
    return Work(
        "slot_attention",
        f"{live} requests, {width} tokens, {seen} keys",
        4 * live * heads * seen * size,
        4 * q_BKNd.numel() * seen,
        lambda impl: slot_attention(q_BKNd, keys_BKCd, values_BKCd, mask),
        ("torch",),
    )


def _trees(device: torch.device, shapes: Shapes, generator: torch.Generator, live: int, width: int, seen: int) -> Work:
    """The same work with lengths on the device, in a cache of twice the length."""
    heads, grouped, size = shapes.kv_heads, shapes.grouped, shapes.head_dim
    keys_BKCd, values_BKCd = _normal(generator, 2, live, heads, 2 * seen, size)
    q_BKNd = _normal(generator, live, heads, width * grouped, size)
    bases_B = torch.full((live,), seen - width, device=device)
    sees_BWW = torch.ones(live, width, width, dtype=torch.bool, device=device).tril()
    return Work(
        "tree_attention",
        f"{live} requests, {width} tokens, {seen} keys",
        4 * live * heads * seen * size,
        4 * q_BKNd.numel() * seen,
        lambda impl: tree_attention(q_BKNd, keys_BKCd, values_BKCd, bases_B, sees_BWW, impl=impl),
        ("triton", "torch"),
    )


def _packed(device: torch.device, shapes: Shapes, generator: torch.Generator) -> Work:
    tokens, heads = shapes.tokens, shapes.kv_heads
    q_THd = _normal(generator, tokens, heads * shapes.grouped, shapes.head_dim)
    k_TKd, v_TKd = _normal(generator, 2, tokens, heads, shapes.head_dim)
    offsets_S1 = torch.tensor([0, tokens // 2, tokens])
    return Work(
        "packed_attention",
        f"2 sequences of {tokens // 2}",
        2 * (2 * q_THd.numel() + 2 * k_TKd.numel()),
        q_THd.numel() * tokens,  # 4 products' operations a pair, of which causality leaves half, of two half lengths
        lambda _: packed_causal_attention(q_THd, k_TKd, v_TKd, offsets_S1),
        ("auto",),
    )


def _walk(device: torch.device, generator: torch.Generator) -> Work:
    """Chains of 8 that are all accepted."""
    live, depth = 64, 8
    rows_N = torch.arange(live, device=device).repeat_interleave(depth)
    parents_N = torch.arange(live * depth, device=device) - 1
    parents_N[::depth] = -1
    tokens_N, choice_T = torch.zeros_like(rows_N), torch.zeros(live + live * depth, dtype=torch.int64, device=device)
    return Work(
        "spec_verify",
        f"{live} chains of {depth}",
        8 * (choice_T.numel() + 3 * len(rows_N) + live * (depth + 2)),
        0,
        lambda impl: accepted_path(choice_T, tokens_N, parents_N, rows_N, num_rows=live, depth=depth, impl=impl),
        ("triton", "torch"),
    )


def _commit(device: torch.device, shapes: Shapes, generator: torch.Generator) -> Work:
    live, longest = 16, 6
    shape = (shapes.layers, live, shapes.kv_heads, 512, shapes.head_dim)
    keys, values = _normal(generator, 2, *shape)
    targets_BA = torch.arange(100, 100 + longest, device=device).repeat(live, 1)
    moved_BA = torch.ones_like(targets_BA, dtype=torch.bool)
    moved = shapes.layers * live * shapes.kv_heads * longest * shapes.head_dim

    def call(impl: Impl) -> object:
        kv_commit(keys, values, targets_BA + longest, targets_BA, moved_BA, impl=impl)
        return keys, values

    return Work(
        "kv_commit",
        f"{shapes.layers} layers, {live} paths of {longest}",
        2 * 2 * 2 * moved,
        0,
        call,
        ("triton", "torch"),
    )


def _distill(device: torch.device, shapes: Shapes, generator: torch.Generator) -> Work:
    rows, size = shapes.tokens, shapes.draft_vocab
    logits_NJ = _normal(generator, rows, size).requires_grad_()
    probs_NJ = _normal(generator, rows, size, dtype=torch.float32).softmax(-1)

    def call(impl: Impl) -> object:
        return torch.autograd.grad(distill_loss(logits_NJ, probs_NJ, kind="tv", impl=impl).loss, logits_NJ)

    # forward reads logits and probabilities and writes the gradient, backward scales it
    traffic = rows * size * (2 + 4 + 2 + 2 + 2)
    return Work("distill_loss", f"{rows} x {size}, forward and backward", traffic, 0, call, ("triton", "torch"))

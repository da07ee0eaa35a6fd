"""Plain data parallelism in torch: each worker holds all weights, gradients are summed over workers.  Fastest on CPU.

    backward:  grad (compute dtype) --added by `exact_sum`, then freed--> flat sum in float64
    step:      all-reduce in buckets, round to fp32, clip by global norm, fused AdamW on flat fp32 masters, copy to
               compute weights

Deterministic: the sum of gradients depends neither on their order nor on how passes are divided among workers.
"""

import functools
import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf.optimizer import AdamWConfig
from tlt_core.grpo.exact_sum import add_exactly
from tlt_core.grpo.optimizer import decay_groups
from tlt_core.grpo.policy import PolicyModel

_BUCKET_ELEMENTS = 1 << 22  # 32 MiB of float64 per all-reduce
_NORM_ELEMENTS = 1 << 16


class TorchBackend:
    """Holds model and optimizer, as `DeepSpeedBackend` does.  All workers call every method together."""

    needs_equal_passes = False  # True: forward and backward are collectives
    sums_exactly = True  # the sum of gradients does not depend on order and workers, and `step` scales it

    def __init__(self, model: PolicyModel, cfg: AdamWConfig, *, world_size: int) -> None:
        self.model = model
        self._cfg, self._world_size = cfg, world_size
        matrices, vectors = decay_groups(model.named_parameters())
        self._groups = [_FlatGroup(params) for params in (matrices, vectors) if params]
        decays = [cfg.weight_decay] * bool(matrices) + [0.0] * bool(vectors)
        self._optimizer = torch.optim.AdamW(
            [{"params": [g.master], "weight_decay": d} for g, d in zip(self._groups, decays, strict=True)],
            lr=cfg.learning_rate,
            betas=cfg.betas,
            eps=cfg.eps,
            fused=True,
        )
        for group in self._groups:  # made here rather than in the first step, so that a checkpoint always has them
            self._optimizer.state[group.master] = {
                "step": torch.zeros((), device=group.master.device),
                "exp_avg": torch.zeros_like(group.master),
                "exp_avg_sq": torch.zeros_like(group.master),
            }

    def forward(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        logprob_C, entropy_C = self.model(*inputs)
        return logprob_C, entropy_C

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, lr: float, scale: float = 1.0) -> float:
        """One optimizer step on `scale` times the gradients added since the last one; returns the global norm of that
        before clipping.  Gradients that are not finite are dropped, and nothing else changes."""
        sums = [group.sum for group in self._groups]
        if self._world_size > 1:
            buckets = [b for s in sums for b in s.split(_BUCKET_ELEMENTS)]
            for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
                work.wait()
        for group in self._groups:
            group.master.grad = group.sum.mul_(scale).float()
            group.sum.zero_()
        gradients = [group.master.grad for group in self._groups if group.master.grad is not None]
        norm = float(torch.stack([flat_norm(g) for g in gradients]).norm())
        if math.isfinite(norm):
            if norm > self._cfg.max_grad_norm:
                for gradient in gradients:
                    gradient.mul_(self._cfg.max_grad_norm / norm)
            for settings in self._optimizer.param_groups:
                settings["lr"] = lr
            self._optimizer.step()
            for group in self._groups:
                group.publish_master()
        for group in self._groups:
            group.master.grad = None
        return norm

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by its name in the model, compute dtype, full."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Masters and moments of the trainable parameters, by name, full, one at a time; here views."""
        for group in self._groups:
            state = {"master": group.master, **self._optimizer.state[group.master]}
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                for name, view in group.views(state[kind].detach()):
                    yield f"{kind}/{name}", view

    def state_shapes(self) -> dict[str, torch.Size]:
        return {name: view.shape for name, view in self.named_state()}

    def load_state(self, state: Mapping[str, Tensor], *, step: int) -> None:
        for name, view in self.named_state():
            view.copy_(state[name])
        for group in self._groups:
            self._optimizer.state[group.master]["step"].fill_(step)
            group.publish_master()

    def close(self) -> None:
        """Nothing to release."""


class _FlatGroup:
    """Parameters laid end to end in one float32 master (and, if they compute in bf16, one bf16 buffer)."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._slices: dict[str, tuple[int, torch.Size]] = {}
        offset = 0
        for name, parameter in parameters.items():
            self._slices[name] = (offset, parameter.shape)
            offset += parameter.numel()
        first = next(iter(parameters.values()))
        self._compute = torch.cat([p.detach().flatten() for p in parameters.values()])
        self.master = nn.Parameter(self._compute if first.dtype == torch.float32 else self._compute.float())
        self.sum = torch.zeros_like(self.master, dtype=torch.float64)  # of gradients since the last step
        sums, weights = dict(self.views(self.sum)), dict(self.views(self._compute))
        for name, parameter in parameters.items():
            parameter.data = weights[name]
            parameter.register_post_accumulate_grad_hook(functools.partial(_add_and_free, sums[name]))

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's part of a flat buffer, in its shape."""
        for name, (offset, shape) in self._slices.items():
            yield name, flat[offset : offset + shape.numel()].view(shape)

    def publish_master(self) -> None:
        """Round the masters into the weights that the model computes with."""
        if self._compute.dtype != torch.float32:
            self._compute.copy_(self.master.detach())


def _add_and_free(total: Tensor, parameter: Tensor) -> None:
    """Add the gradient of each backward pass as soon as it exists, and free it."""
    assert parameter.grad is not None, "it was just accumulated"
    add_exactly(total, parameter.grad)
    parameter.grad = None


def flat_norm(values: Tensor) -> Tensor:
    """L2 norm of a long float32 vector, from the norms of short pieces.  On a CPU torch adds up all squares one after
    the other, which loses 5 % of the norm of 134 million elements; a GPU adds them up in a tree."""
    pieces = (values,) if values.is_cuda else values.split(_NORM_ELEMENTS)
    norm: Tensor = torch.stack([torch.linalg.vector_norm(piece) for piece in pieces]).norm()
    return norm

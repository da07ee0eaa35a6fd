"""What `update` needs of the holder of model and optimizer: `torch_backend` and `deepspeed_backend`."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

# Sizes of DeepSpeed's buffers, in elements; its own defaults are made for large GPUs alone.
ZERO_BUCKET = 1 << 27  # gradients that are reduced together; also weights that are gathered together
ZERO_LIVE = 1_000_000_000  # stage 3: parameters that are whole at the same time


class Backend(Protocol):
    """Holds model and optimizer.  All workers call every method together."""

    needs_equal_passes: bool  # forward and backward are collectives, so every worker must make equally many passes
    sums_exactly: bool  # the sum of gradients does not depend on order and workers, and `step` scales it

    def forward(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor]: ...
    def backward(self, loss: Tensor) -> None: ...
    def step(self, lr: float, scale: float = 1.0) -> float:
        """One optimizer step on `scale` times the gradients added since the last one; returns the global norm of that
        before clipping.  Other scales than 1 only where the back end sums exactly.

        Gradients that are not finite are dropped, and nothing else changes."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]: ...
    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Masters and moments of the trainable parameters, by name, full, one at a time.  Items may be views."""
        ...

    def state_shapes(self) -> dict[str, torch.Size]:
        """Of what `named_state` yields."""
        ...

    def load_state(self, state: Mapping[str, Tensor], *, step: int) -> None:
        """Set masters, moments and weights.  step: optimizer steps made so far."""
        ...

    def close(self) -> None: ...

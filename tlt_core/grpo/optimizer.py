"""What every back end shares: learning-rate schedule, weight-decay groups, and the sizes of DeepSpeed's buffers."""

import math
from collections.abc import Iterable

from torch import nn

from conf.optimizer import AdamWConfig, ConstantSchedule

# In elements; DeepSpeed's own defaults are made for large GPUs alone.
ZERO_BUCKET = 1 << 27  # gradients that are reduced together; also weights that are gathered together
ZERO_LIVE = 1_000_000_000  # stage 3: parameters that are whole at the same time


def learning_rate(cfg: AdamWConfig, step: int, *, total_steps: int) -> float:
    """Of optimizer step `step` (0-based).  Linear warm-up reaches the peak at step warmup_steps - 1.  Then the rate is
    constant, or decays linearly or as a cosine to final_fraction of the peak at step total_steps and stays there."""
    schedule = cfg.schedule
    if step < schedule.warmup_steps:
        return cfg.learning_rate * (step + 1) / schedule.warmup_steps
    if isinstance(schedule, ConstantSchedule):
        return cfg.learning_rate
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps))
    remaining = 1 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return cfg.learning_rate * (schedule.final_fraction + (1 - schedule.final_fraction) * remaining)


def decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Trainable parameters that get weight decay (matrices) and that do not (norm weights, biases), by name."""
    matrices: dict[str, nn.Parameter] = {}
    vectors: dict[str, nn.Parameter] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            # a ZeRO-3 shard is one-dimensional; its full shape is kept in ds_shape
            ndim = len(getattr(parameter, "ds_shape", parameter.shape))
            (matrices if ndim > 1 else vectors)[name] = parameter
    return matrices, vectors

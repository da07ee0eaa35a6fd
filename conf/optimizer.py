"""Configuration: optimizer and learning-rate schedules."""

from typing import Annotated, Literal

from pydantic import Field

from conf.section import MOST_STEPS, Section


class ConstantSchedule(Section):
    """Constant learning rate after warm-up."""

    kind: Literal["constant"] = "constant"
    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """Steps of linear warm-up from 0."""


class DecaySchedule(Section):
    """Linear or cosine decay from the peak to `final_fraction` of it over the run."""

    kind: Literal["linear", "cosine"]
    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """Steps of linear warm-up from 0."""
    final_fraction: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


Schedule = Annotated[ConstantSchedule | DecaySchedule, Field(discriminator="kind")]


Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(Section):
    """AdamW (decoupled weight decay) with gradient clipping."""

    learning_rate: float = Field(1e-6, gt=0, le=1)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay on matrices (norm weights and biases are exempt)."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The global gradient is scaled down to this L2 norm."""
    schedule: Schedule = ConstantSchedule()
    """Learning-rate schedule over the optimizer steps of the stage."""

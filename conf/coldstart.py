"""Configuration: the short supervised training before RL."""

from pydantic import Field

from conf.optimizer import AdamWConfig
from conf.section import MANY, MOST_TOKENS, Dtype, Section


class ColdStartConfig(Section):
    """Supervised warm-up on worked solutions made for the training tasks, before RL."""

    enabled: bool = False
    """Train on worked solutions first.  false: RL starts from the model as it is."""
    num_examples: int = Field(600, ge=1, le=MANY)
    """Number of worked solutions.  They are generated separately; none is a validation question."""
    num_epochs: int = Field(1, ge=1, le=1000)
    """Passes over the worked solutions."""
    tokens_per_step: int = Field(2048, ge=64, le=MOST_TOKENS)
    """Packed tokens per optimizer step, over all workers."""
    optimizer: AdamWConfig = AdamWConfig(learning_rate=1e-4)
    """Optimizer of this stage."""
    dtype: Dtype = "auto"
    """Type of the computation and of the saved weights.  auto: as update.dtype.  A resumed run keeps its type."""

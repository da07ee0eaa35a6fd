"""Configuration: which model is trained."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from conf.section import MOST_CHANNELS, Section


class PretrainedModel(Section):
    """A Llama-, Qwen2- or Qwen3-family checkpoint in Hugging Face layout."""

    kind: Literal["pretrained"] = "pretrained"
    path: str = "smollm2-135m-instruct"
    """A local folder, a hub name (`owner/name@COMMIT` pins it), or `smollm2-135m-instruct`, the model that is installed
    with the package."""


class RandomModel(Section):
    """A tiny Llama with random weights and the embedded model's tokenizer, for smoke tests.  It learns nothing."""

    kind: Literal["random"]
    hidden_size: int = Field(64, ge=16, le=MOST_CHANNELS, multiple_of=16)
    """Width of the residual stream."""
    num_layers: int = Field(2, ge=1, le=1000)
    """Number of decoder layers."""
    num_heads: int = Field(4, ge=1, le=1000)
    """Query heads; each has hidden_size / num_heads channels."""
    num_kv_heads: int = Field(2, ge=1, le=1000)
    """Key/value heads (grouped-query attention)."""
    intermediate_size: int = Field(128, ge=16, le=MOST_CHANNELS)
    """Width of the gated MLP."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "RandomModel":
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}: "
                "hidden_size must be a multiple of num_heads, and num_heads of num_kv_heads"
            )
        return self


ModelConfig = Annotated[PretrainedModel | RandomModel, Field(discriminator="kind")]

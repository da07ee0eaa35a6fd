"""Rules for every section of the configuration."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

Dtype = Literal["auto", "bfloat16", "float32"]

# Bounds of counts: far above what any run needs, and below what a machine would take as a reason to hang.
MANY = 1_000_000  # prompts, groups, files
MOST_STEPS = 10_000_000
MOST_TOKENS = 10_000_000  # of one text, or in one pass
MOST_LIVE = 4096  # responses that one worker decodes at once
MOST_CHANNELS = 65_536  # of a layer
MOST_MB = 10_000_000
MOST_SEED = 2**31 - 1


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, numbers are finite, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, given: Any) -> Any:
        """pydantic accepts true as 1."""
        for name, value in given.items() if isinstance(given, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and field.annotation in (int, float):
                raise ValueError(f"{name} must be a number, found {str(value).lower()}")
        return given

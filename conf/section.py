"""Rules for every section of the configuration."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

Dtype = Literal["auto", "bfloat16", "float32"]


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

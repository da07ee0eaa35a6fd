"""A question from any source, before it has an id."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class DataError(ValueError):
    """Data that cannot be used.  The text names file, line or task, and the remedy."""


class Question(NamedTuple):
    """One question.  Question(task="chain_sum", question="2 + 3 =", answer="5", metadata={"expression": "2 + 3"})"""

    task: str  # reasoning-gym name, or "file"
    question: str
    answer: str
    metadata: Mapping[str, Any]  # what the task's scorer needs, and `mixture`: its index in `data.tasks`

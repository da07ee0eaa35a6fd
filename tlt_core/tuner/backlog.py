"""What it costs to come back to a drafter: it first catches up with what was decoded without it.

    seconds = pace x tokens                     tokens: of the live requests, decoded since they had a draft of it

The pace follows what such returns took.  Prompts are left out: siblings share them, and a drafter that comes late
has as many to read as one that comes early.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tlt_core.speculation import RoundReport

_GAIN = 0.3  # of the moving average
_ENOUGH = 4  # tokens a request has to be behind for the time to tell the pace


class Backlog:
    """Of each drafter."""

    def __init__(self, drafters: Iterable[str]) -> None:
        self._behind: dict[str, dict[int, int]] = {name: {} for name in drafters}  # tokens, by row
        self._pace: dict[str, float] = {}  # seconds a token; absent: never seen

    @property
    def drafters(self) -> Iterable[str]:
        """Names."""
        return self._behind.keys()

    def seconds(self, drafter: str, rows: Sequence[int]) -> float:
        """Until it has caught up with these rows; 0 while its pace is not known."""
        pace = self._pace.get(drafter)
        return pace * self._tokens(drafter, rows) if pace else 0.0

    def observe(self, rows: Sequence[int], report: RoundReport) -> None:
        """A round was made: its drafter has caught up, the others are behind by what was emitted."""
        name = report.strategy.drafter
        if name in self._behind and any(report.offered):
            tokens = self._tokens(name, rows)
            if tokens >= _ENOUGH * len(rows):
                pace = report.backlog_s / tokens
                before = self._pace.setdefault(name, pace)
                self._pace[name] += _GAIN * (pace - before)
            self._behind[name] = {}
        for other, behind in self._behind.items():
            if other != name:
                for row, accepted in zip(rows, report.accepted, strict=True):
                    behind[row] = behind.get(row, 0) + 1 + accepted

    def forget(self, row: int) -> None:
        """A request has ended."""
        for behind in self._behind.values():
            behind.pop(row, None)

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        behind = {name: {str(row): n for row, n in own.items()} for name, own in self._behind.items()}
        return {"behind": behind, "pace": dict(self._pace)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drafters that are not on the menu are dropped."""
        for name in self._behind:
            self._behind[name] = {int(row): n for row, n in state["behind"].get(name, {}).items()}
        self._pace = {name: pace for name, pace in state["pace"].items() if name in self._behind}

    def _tokens(self, drafter: str, rows: Sequence[int]) -> int:
        behind = self._behind[drafter]
        return sum(behind.get(row, 0) for row in rows)

"""Puts a newly published drafter out of use when its first drafts are all wrong.

Speculation changes no token, so broken drafter weights show in the speed alone.  This check makes them visible.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from tlt_core.items.speculation import RoundReport

log = logging.getLogger(__name__)

# Drafts of one request each.  Of a drafter whose first token is right one time in ten, all are wrong once in 900.
_FIRST_DRAFTS = 64


class CollapseCheck:
    """Watches the drafters of one engine.  Call `published` after each publish and `observe` after each round."""

    def __init__(self, drafters: Iterable[str]) -> None:
        """drafters: those that have weights."""
        self._known = set(drafters)
        self._wrong: dict[str, int] = {}  # drafts since the publish, of drafters that had nothing accepted yet
        self._suspended: set[str] = set()

    @property
    def suspended(self) -> tuple[str, ...]:
        """Drafters that are out of use until their next publish."""
        return tuple(sorted(self._suspended))

    def published(self, drafter: str) -> bool:
        """New weights of a drafter are in use.  True: it was suspended, and is so no more."""
        self._wrong[drafter] = 0
        was_suspended = drafter in self._suspended
        self._suspended.discard(drafter)
        return was_suspended

    def observe(self, report: RoundReport) -> str | None:
        """Learn from a round.  Returns the drafter that is to be suspended now, which is logged."""
        drafter = report.strategy.drafter
        if drafter not in self._wrong:
            return None
        if any(report.accepted):
            del self._wrong[drafter]
            return None
        self._wrong[drafter] += sum(depth > 0 for depth in report.offered)
        if self._wrong[drafter] < _FIRST_DRAFTS:
            return None
        log.warning(
            "drafter %r has collapsed: none of its first %d drafts since the latest publish was right; it is not used "
            "until the next one",
            drafter,
            self._wrong.pop(drafter),
        )
        self._suspended.add(drafter)
        return drafter

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"wrong": self._wrong, "suspended": self.suspended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned; drafters that are not watched are dropped."""
        self._wrong = {name: count for name, count in state["wrong"].items() if name in self._known}
        self._suspended = self._known & set(state["suspended"])

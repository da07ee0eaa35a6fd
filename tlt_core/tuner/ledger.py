"""What the rounds did, for metrics: the same figures for every policy."""

from collections.abc import Mapping
from typing import Any

from tlt_core.speculation import RoundReport, Strategy


class Ledger:
    """Counts rounds by arm and number of live requests (1, 2, 3-4, 5-8, ..), and time against plain decoding."""

    def __init__(self) -> None:
        self.rounds: dict[str, dict[str, int]] = {}
        self.switches = 0
        self.seconds = 0.0
        self.plain_seconds = 0.0
        self._last = ""

    def record(self, report: RoundReport, plain_s: float) -> None:
        """plain_s: seconds that a plain round of this batch would take."""
        bucket = self.rounds.setdefault(live_bucket(report.live), {})
        arm = str(report.strategy)
        bucket[arm] = bucket.get(arm, 0) + 1
        self.switches += self._last not in ("", arm)
        self._last = arm
        self.seconds += report.draft_s + report.backlog_s + report.verify_s
        self.plain_seconds += plain_s * (report.live + sum(report.accepted)) / report.live

    def snapshot(self, current: Strategy) -> dict[str, Any]:
        """`arm/LIVE/ARM` is the arm's share of the rounds with so many live requests."""
        shares = {
            f"arm/{live}/{arm}": count / sum(arms.values())
            for live, arms in self.rounds.items()
            for arm, count in arms.items()
        }
        rounds = sum(sum(arms.values()) for arms in self.rounds.values())
        plain = sum(arms.get("off", 0) for arms in self.rounds.values())
        return {
            "current": str(current),
            "switches": self.switches,
            "rounds": rounds,
            "active_frac": 1.0 - plain / rounds if rounds else 0.0,
            "speedup_est": self.plain_seconds / self.seconds if self.seconds else 1.0,
            **shares,
        }

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        rounds = {live: dict(arms) for live, arms in self.rounds.items()}
        numbers = [self.switches, self.seconds, self.plain_seconds]
        return {"rounds": rounds, "numbers": numbers, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.rounds = {live: dict(arms) for live, arms in state["rounds"].items()}
        self.switches, self.seconds, self.plain_seconds = state["numbers"]
        self._last = state["last"]


def live_bucket(live: int) -> str:
    """1 -> "1", 2 -> "2", 3 -> "3-4", 20 -> "17-32"."""
    top = 1 << (live - 1).bit_length()
    return str(top) if top <= 2 else f"{top // 2 + 1}-{top}"

"""Time that the rounds took, against plain decoding; the same account for every policy."""

from collections.abc import Mapping
from typing import Any

from tlt_core.items.speculation import RoundReport


class Ledger:
    """Sums over all rounds since the start of the run."""

    def __init__(self) -> None:
        self.rounds = 0
        self.seconds = 0.0
        self.plain_seconds = 0.0

    def record(self, report: RoundReport, plain_s: float) -> None:
        """plain_s: seconds that a plain round of this batch would take."""
        self.rounds += 1
        self.seconds += report.draft_s + report.backlog_s + report.verify_s
        self.plain_seconds += plain_s * (report.live + sum(report.accepted)) / report.live

    def snapshot(self) -> dict[str, Any]:
        """speedup_est: seconds that plain decoding would have taken for the same tokens, over the seconds taken."""
        return {
            "rounds": self.rounds,
            "speedup_est": self.plain_seconds / self.seconds if self.seconds else 1.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"rounds": self.rounds, "seconds": self.seconds, "plain_seconds": self.plain_seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.rounds, self.seconds, self.plain_seconds = state["rounds"], state["seconds"], state["plain_seconds"]


def live_bucket(live: int) -> str:
    """Label of a number of live requests, by powers of two: 1 -> "1", 2 -> "2", 3 -> "3-4", 20 -> "17-32"."""
    top = 1 << (live - 1).bit_length()
    return str(top) if top <= 2 else f"{top // 2 + 1}-{top}"

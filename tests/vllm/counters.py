"""vLLM's counters of speculative decoding."""

from typing import NamedTuple


class SpecCounters(NamedTuple):
    """SpecCounters(2, 6, 4, (2, 1, 1)): two chains of three, four tokens accepted"""

    drafts: int  # chains drafted, one per request and round
    draft_tokens: int
    accepted: int
    accepted_per_pos: tuple[int, ...]  # entry i: chains of which at least i + 1 tokens were accepted

    def __sub__(self, earlier: "SpecCounters") -> "SpecCounters":
        """What was counted since."""
        before = earlier.accepted_per_pos or (0,) * len(self.accepted_per_pos)
        return SpecCounters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            tuple(now - then for now, then in zip(self.accepted_per_pos, before, strict=True)),
        )

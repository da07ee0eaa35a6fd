"""Which workers share a rollout engine: so many consecutive ranks, of which the first, its host, runs it.

With tensor parallelism an engine is spread over the GPUs of several workers.  Only its host decodes and trains a
drafter.  The others lend their GPU while the host has requests; then they are idle like the host, and all of them
update the policy.
"""

from typing import NamedTuple


class Engines(NamedTuple):
    """`Engines(8, 2)`: ranks 0 and 1 share an engine, 2 and 3 the next, ..."""

    num_workers: int
    workers_each: int = 1

    @property
    def hosts(self) -> range:
        """Ranks that run an engine."""
        return range(0, self.num_workers, self.workers_each)

    def host_of(self, rank: int) -> int:
        """Rank that runs this worker's engine."""
        return rank - rank % self.workers_each

    def is_host(self, rank: int) -> bool:
        return self.host_of(rank) == rank

    def workers_of(self, rank: int) -> range:
        """Ranks that share this worker's engine."""
        return range(self.host_of(rank), self.host_of(rank) + self.workers_each)

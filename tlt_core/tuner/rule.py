"""Which strategy decodes the next round: the rule of the default tuner.

1. Estimated for each strategy: rate = tokens emitted / seconds, of a round with the requests that live now.
   Tokens come from the acceptance measured so far (`acceptance.py`), seconds from a cost model (`cost_model.py`).
   Plain decoding (OFF) is a strategy like the others: one token a request, no draft.
2. The tuner starts with OFF.  It changes to the strategy with the highest rate when that is `_MARGIN` above the
   current strategy's rate, and at least `KNOWN_AFTER` drafts of its shape were tried (`acceptance.py`).
3. A strategy that the current one keeps from being measured is probed: used for `_PROBE_DRAFTS` drafts, in
   `_PROBE_ROUNDS` rounds at most.  After the probe, point 2 decides.
4. Every `_LOOK_EVERY` rounds the next probe is looked for, among strategies whose shape was not used for `_WAIT`
   rounds and whose optimistic rate is `_MARGIN` above the current rate.  The shape that was unused the longest comes
   first, and of that shape the strategy that can lose least.
5. Probes have a budget: the time that they lost against the current strategy stays below `_PROBE_SHARE` of all time,
   plus `_ALLOWANCE` plain rounds of one request.  A probe starts only if it would stay within the budget even if no
   draft token were accepted.  So a useless drafter costs about 1 %, whatever it does.
6. A published drafter may be probed at once, and the allowance grows by `_GRANT` of itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tlt_core.items.speculation import OFF, Strategy
from tlt_core.tuner.acceptance import KNOWN_AFTER, shape_of

_MARGIN = 0.03  # the noise of an estimate: a smaller gain may be none, and each change of drafter costs a little
_LOOK_EVERY = 4  # rounds: estimates of plain decoding change slowly, and a look costs time
_WAIT = 16  # rounds: a drafter that turned good is found soon, and drafters take turns
_PROBE_SHARE = 0.008  # what a user would not notice
_ALLOWANCE = 2.0  # plain rounds of one request: one probe of a small batch, before any time has passed
_GRANT = 0.5  # of the allowance, for each publish: news is worth another probe
_OFF_HOPE = 1.25  # optimistic over estimated rate of plain decoding: its cost may drift while it is not used


class Estimate(NamedTuple):
    """What a strategy promises for the next round."""

    rate: float  # tokens a second
    seconds: float


class _Probe(NamedTuple):
    strategy: Strategy
    rounds_left: int


class Rule:
    """Holds the current strategy.  Call `choose` before each round and `account` after it."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self.current = OFF
        self.lost_s = 0.0  # to probes
        self.total_s = 0.0
        self._granted_s = 0.0
        self._single_s = 0.0  # a plain round of one request
        self._strategies = (OFF, *strategies)
        self._round = 0
        self._look_at = 2  # plain rounds come first: they show what has to be beaten
        self._probe: _Probe | None = None
        self._used_at = {shape_of(s): -_WAIT for s in self._strategies}  # round of the latest use
        self._estimates: Mapping[Strategy, Estimate] = {}

    def choose(
        self,
        live: int,
        estimates: Mapping[Strategy, Estimate],
        *,
        known: Callable[[Strategy], bool],
        hopes: Callable[[], Mapping[Strategy, Estimate]],
        single_s: float,
    ) -> Strategy:
        """The next round's strategy.

        estimates: of OFF and each strategy; known(strategy): whether its estimate rests on evidence; hopes():
        optimistic estimates, asked for only when needed; single_s: seconds of a plain round of one request.
        """
        self._estimates, self._single_s = estimates, single_s
        self._granted_s = self._granted_s or _ALLOWANCE * single_s
        self._round += 1
        if self._probe is not None and self._probe.rounds_left:
            self._probe = _Probe(self._probe.strategy, self._probe.rounds_left - 1)
            return self._probe.strategy
        self._probe = None
        best = max(filter(known, self._strategies), key=lambda s: estimates[s].rate)
        if estimates[best].rate > (1.0 + _MARGIN) * estimates[self.current].rate:
            self.current = best
        if self._round >= self._look_at:
            self._look_at = self._round + _LOOK_EVERY
            rounds = -(-KNOWN_AFTER // live)
            target = self._worth_a_probe(live, rounds, hopes)
            if target is not None:
                self._probe = _Probe(target, rounds - 1)
                return target
        return self.current

    def skip_look(self) -> bool:
        """Whether plain decoding simply goes on.  If so this is the next round's choice: do not call `choose`."""
        skips = self.current.is_off and self._probe is None and self._round + 1 < self._look_at
        self._round += skips
        return skips

    def account(self, strategy: Strategy, tokens: int, seconds: float) -> None:
        """The round was made."""
        self.total_s += seconds
        self._used_at[shape_of(strategy)] = self._round
        if self._probe is not None and strategy == self._probe.strategy and self._estimates:
            self.lost_s += max(seconds - tokens / self._estimates[self.current].rate, 0.0)

    def reset(self, drafter: str | None) -> None:
        """The drafter (None: each) has changed: it may be probed at once."""
        self._granted_s += _GRANT * _ALLOWANCE * self._single_s
        self._make_due(s for s in self._strategies if drafter in (None, s.drafter))

    def leave(self, drafter: str) -> None:
        """The drafter's estimates are 0 from now on: plain decoding takes over, and others may be probed at once."""
        if self._probe is not None and self._probe.strategy.drafter == drafter:
            self._probe = None
        if self.current.drafter == drafter:
            self.current = OFF
            self._make_due(s for s in self._strategies if s.drafter != drafter)

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "current": str(self.current),
            "seconds": [self.lost_s, self.total_s, self._granted_s, self._single_s],
            "rounds": [self._round, self._look_at],
            "probe": None if self._probe is None else [str(self._probe.strategy), self._probe.rounds_left],
            "used_at": dict(self._used_at),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Strategies that no longer exist are dropped; if one was the current one, OFF takes its place."""
        by_name = {str(s): s for s in self._strategies}
        self.current = by_name.get(state["current"], OFF)
        self.lost_s, self.total_s, self._granted_s, self._single_s = state["seconds"]
        self._round, self._look_at = state["rounds"]
        probe = state["probe"]
        self._probe = _Probe(by_name[probe[0]], probe[1]) if probe and probe[0] in by_name else None
        self._used_at.update({shape: at for shape, at in state["used_at"].items() if shape in self._used_at})

    def _worth_a_probe(
        self, live: int, rounds: int, hopes: Callable[[], Mapping[Strategy, Estimate]]
    ) -> Strategy | None:
        """The strategy whose turn it is, once the budget has been saved up."""
        used_at = {s: self._used_at[shape_of(s)] for s in self._strategies if shape_of(s) != shape_of(self.current)}
        due = [s for s, at in used_at.items() if self._round >= at + _WAIT]
        if not due:
            return None
        hoped = {s: estimate.rate * (_OFF_HOPE if s.is_off else 1.0) for s, estimate in hopes().items()}
        due = [s for s in due if hoped[s] > (1.0 + _MARGIN) * self._estimates[self.current].rate]
        target = min(due, key=lambda s: (used_at[s], self._most_lost_s(s, live)), default=None)
        budget_s = _PROBE_SHARE * self.total_s + self._granted_s - self.lost_s
        if target is None or rounds * self._most_lost_s(target, live) > budget_s:
            return None
        return target

    def _most_lost_s(self, strategy: Strategy, live: int) -> float:
        """Seconds that a round loses if no draft token is accepted."""
        return max(self._estimates[strategy].seconds - live / self._estimates[self.current].rate, 0.0)

    def _make_due(self, strategies: Iterable[Strategy]) -> None:
        self._used_at.update({shape_of(s): self._round - _WAIT for s in strategies})
        self._look_at = self._round + 1

"""When to change the strategy, and what trying another one may cost.

Hysteresis: each arm's gains over the current one are summed round by round, less a margin and never below nothing, and
the switch is made when a sum is worth a tenth of a round: at once for a clear gain, after ten rounds for one of 2.5 %.
A drafter that first has to catch up with what was decoded without it must have promised that much besides: so what a
batch that ends soon could not earn back is not spent, and at most as much is lost as waiting could have gained.

Probing: an arm whose optimistic rate beats the current one's is run for a few rounds when it is due.  It is due again
after an interval that doubles while it fails, and at once when the batch has shrunk below its last probe's (then each
draft token costs less) or after `reset`.  The same holds for OFF, whose optimistic rate grows while it is not seen.

Probing is paid from a budget: what probe rounds took longer than the current arm needs for as many tokens, summed over
all time, stays below share x (all time) + allowance.  A probe starts only if a round of it that accepts nothing fits.
The allowance is a few plain rounds of one request, and half as much again at each `reset`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tlt_core.speculation import OFF, Strategy

_SWITCH_AT = 0.1  # rounds' worth of summed gain
_MARGIN = 0.015
_FIRST_INTERVAL = 16
_LOOK_EVERY = 4  # rounds between two looks for an arm worth a probe
_BURST_TRIALS = 8  # draws of a probe, all rows together
_BURST_ROUNDS = (1, 6)
_BURST_SHARE = 0.5  # of the budget that is left; the first round of a probe may take it all
_OFF_DOUBT = (0.02, 0.002, 1.0)  # how wrong plain's rate may be: at least, per round unseen, at most


class Offer(NamedTuple):
    """What an arm promises for the next round."""

    rate: float  # tokens a second
    seconds: float
    entry_s: float = 0.0  # besides, once, if the current arm has another drafter: to catch up


class _Probe(NamedTuple):
    arm: Strategy
    rounds_left: int
    most_lost_s: float  # value of `lost_s` that ends it: another drafter's turn


class Gate:
    """Holds the current arm.  `choose`, then `settle` with what the round did."""

    def __init__(self, menu: Sequence[Strategy], *, share: float, allowance_rounds: float, max_interval: int) -> None:
        """share: of all time that may be lost to probing; allowance_rounds: what may be lost at once, in plain rounds
        of one request."""
        self._share, self._allowance_rounds, self._max_interval = share, allowance_rounds, max_interval
        self.current = OFF
        self.lost_s = 0.0
        self.total_s = 0.0
        self._allowance_s = 0.0
        self._grant_s = 0.0
        self._arms = (OFF, *menu)
        self._round = 0
        self._probe: _Probe | None = None
        self._look_at = 2  # two plain rounds come first
        self._plain_at = 0
        self._gains = dict.fromkeys(self._arms, 0.0)
        self._due = dict.fromkeys(self._arms, 0)
        self._interval = dict.fromkeys(self._arms, _FIRST_INTERVAL)
        self._probed_at = dict.fromkeys(self._arms, -1)
        self._probed_live = dict.fromkeys(self._arms, 0)  # bit length of the live count
        self._offers: Mapping[Strategy, Offer] = {}

    def choose(
        self,
        live: int,
        offers: Mapping[Strategy, Offer],
        trusted: Callable[[Strategy], bool],
        hopes: Callable[[], Mapping[Strategy, float]],
        single_s: float,
    ) -> Strategy:
        """Next round's arm.  offers: of OFF and each arm; trusted(arm): whether its offer rests on evidence;
        hopes(): optimistic rates, asked for only when needed; single_s: a plain round of one request."""
        self._offers = offers
        self._grant_s = self._allowance_rounds * single_s
        self._allowance_s = self._allowance_s or self._grant_s
        self._round += 1
        if self._probe is not None:
            arm, left, most_lost_s = self._probe
            rate = offers[self.current].rate
            fits = self.lost_s + self._worst_loss_s(arm, live) <= most_lost_s
            if left and fits and max(hopes()[arm], offers[arm].rate) > rate:
                self._probe = _Probe(arm, left - 1, most_lost_s)
                return arm
            self._finish(arm, live, won=trusted(arm) and offers[arm].rate > rate)
        self._exploit(offers, trusted)
        if self._round >= self._look_at:
            self._look_at = self._round + _LOOK_EVERY
            target = self._worth_a_probe(live, offers, hopes)
            if target is not None:
                low, high = _BURST_ROUNDS
                rounds = min(max(-(-_BURST_TRIALS // live), low), high)
                self._probe = _Probe(target, rounds - 1, self.lost_s + _BURST_SHARE * (self._budget_s - self.lost_s))
                return target
        return self.current

    def rests(self) -> bool:
        """Whether plain decoding goes on without a look at the offers: nothing is tried, no gain is being summed, and
        it is not yet time to look for an arm worth a probe.  If so, the round is made: `choose` is not to be asked."""
        resting = (
            self.current.is_off
            and self._probe is None
            and self._round + 1 < self._look_at
            and not any(self._gains.values())
        )
        self._round += resting
        return resting

    def settle(self, arm: Strategy, tokens: int, seconds: float) -> None:
        """Account for the round that was made."""
        self.total_s += seconds
        if arm.is_off:
            self._plain_at = self._round
        if self._probe is not None and arm == self._probe.arm and self.current in self._offers:
            self.lost_s += max(seconds - tokens / self._offers[self.current].rate, 0.0)

    def reset(self, drafter: str | None) -> None:
        """The drafter (None: each) has changed: probe it soon, for half the first allowance more."""
        self._allowance_s += 0.5 * self._grant_s
        for arm in self._arms:
            if drafter in (None, arm.drafter):
                self._due[arm], self._interval[arm] = self._round, _FIRST_INTERVAL
        self._look_at = self._round + 1

    def leave(self, drafter: str) -> None:
        """The drafter's arms promise nothing from now on: plain decoding takes over, the others are probed soon."""
        if self._probe is not None and self._probe.arm.drafter == drafter:
            self._probe = None
        if self.current.drafter == drafter:
            self.current, self._gains = OFF, dict.fromkeys(self._arms, 0.0)
            self._due.update({arm: self._round for arm in self._arms if arm.drafter != drafter})
            self._look_at = self._round + 1

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "current": str(self.current),
            "numbers": [self.lost_s, self.total_s, self._allowance_s],
            "rounds": [self._round, self._look_at, self._plain_at],
            "probe": None if self._probe is None else [str(self._probe.arm), *self._probe[1:]],
            "gains": {str(arm): gain for arm, gain in self._gains.items()},
            "arms": {
                str(arm): [record[arm] for record in (self._due, self._interval, self._probed_at, self._probed_live)]
                for arm in self._arms
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """An arm that is not on the menu is dropped; if it was the current one, OFF takes its place."""
        by_name = {str(arm): arm for arm in self._arms}
        self.current = by_name.get(state["current"], OFF)
        self.lost_s, self.total_s, self._allowance_s = state["numbers"]
        self._round, self._look_at, self._plain_at = state["rounds"]
        probe = state["probe"]
        self._probe = _Probe(by_name[probe[0]], *probe[1:]) if probe and probe[0] in by_name else None
        for name in by_name.keys() & state["arms"].keys():
            arm = by_name[name]
            self._gains[arm] = state["gains"][name]
            self._due[arm], self._interval[arm], self._probed_at[arm], self._probed_live[arm] = state["arms"][name]

    def _exploit(self, offers: Mapping[Strategy, Offer], trusted: Callable[[Strategy], bool]) -> None:
        rate = offers[self.current].rate
        for arm in self._arms:
            gain = offers[arm].rate / rate - 1.0 - _MARGIN if trusted(arm) else -1.0
            self._gains[arm] = max(self._gains[arm] + gain, 0.0)
        round_s = offers[self.current].seconds
        ripe = [arm for arm in self._arms if self._gains[arm] >= _SWITCH_AT + self._entry_s(arm) / round_s]
        if ripe:
            self._switch(max(ripe, key=lambda arm: offers[arm].rate))

    def _switch(self, arm: Strategy) -> None:
        for other in self._arms:
            if other.drafter == self.current.drafter != arm.drafter:
                self._due[other], self._interval[other] = self._round + _FIRST_INTERVAL, _FIRST_INTERVAL
        self.current, self._gains = arm, dict.fromkeys(self._arms, 0.0)

    def _worth_a_probe(
        self, live: int, offers: Mapping[Strategy, Offer], hopes: Callable[[], Mapping[Strategy, float]]
    ) -> Strategy | None:
        due = [arm for arm in self._arms if arm != self.current and self._is_due(arm, live)]
        due = [arm for arm in due if self._affordable(arm, live)]
        if not due:
            return None
        unseen, per_round, most = _OFF_DOUBT
        doubt = min(unseen + per_round * (self._round - self._plain_at), most)
        hoped = dict(hopes()) | {OFF: offers[OFF].rate * (1.0 + doubt)}
        rate = offers[self.current].rate
        due = [arm for arm in due if hoped[arm] > rate * (1.0 + _MARGIN)]
        last = {arm.drafter: max(self._probed_at[a] for a in self._arms if a.drafter == arm.drafter) for arm in due}
        return min(due, key=lambda arm: (last[arm.drafter], self._worst_loss_s(arm, live)), default=None)

    def _is_due(self, arm: Strategy, live: int) -> bool:
        return self._round >= self._due[arm] or live.bit_length() < self._probed_live[arm]

    def _worst_loss_s(self, arm: Strategy, live: int) -> float:
        """Seconds lost by one round of the arm that accepts nothing."""
        return max(self._entry_s(arm) + self._offers[arm].seconds - live / self._offers[self.current].rate, 0.0)

    def _entry_s(self, arm: Strategy) -> float:
        """To catch up, on a change to the arm."""
        return 0.0 if arm.drafter == self.current.drafter else self._offers[arm].entry_s

    def _affordable(self, arm: Strategy, live: int) -> bool:
        return self.lost_s + self._worst_loss_s(arm, live) <= self._budget_s

    @property
    def _budget_s(self) -> float:
        return self._share * self.total_s + self._allowance_s

    def _finish(self, arm: Strategy, live: int, *, won: bool) -> None:
        self._probe = None
        alike = [a for a in self._arms if a == arm or (a.drafter == arm.drafter != self.current.drafter)]
        for other in alike:
            if self._round >= self._due[other] or other == arm:
                grown = min(2 * self._interval[other], self._max_interval)
                self._due[other] = self._round + self._interval[other]
                self._interval[other] = _FIRST_INTERVAL if won else grown
            self._probed_at[other], self._probed_live[other] = self._round, live.bit_length()
        if won:
            self._switch(arm)

"""The tuner's policies, all of them `tlt_core.speculation.Tuner`.

    cost_model   the arm with the most expected tokens per second, through a gate with hysteresis and paid probes
    beg_mab      TLT's bucketed epsilon-greedy bandit
    threshold    one arm for small batches, OFF for large ones
    fixed, off   always the same

Each keeps the same ledger and cost model, so their metrics compare.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from tlt_core.speculation import NO_FLOORS, OFF, Floors, RoundReport, Strategy, Tuner
from tlt_core.tuner.acceptance import Acceptance
from tlt_core.tuner.backlog import Backlog
from tlt_core.tuner.bandit import BucketedGreedy
from tlt_core.tuner.cost_model import CostModel, Measure
from tlt_core.tuner.gate import Gate, Offer
from tlt_core.tuner.ledger import Ledger

Kind = Literal["cost_model", "beg_mab", "threshold", "fixed", "off"]

_TIE_BREAK = 0.97  # the best of several estimates is an overestimate, and plain decoding's is the surest
_LOWEST_FLOOR = 0.02  # below, hardly anything would be cut, and a GPU would have to be waited for at each level
_UNDERESTIMATE = 0.1  # of EAGLE-3 drafts said to be right with 0.1-0.2, 0.26 were, with 0.4-0.5, 0.59
_HIGHEST_FLOOR = 0.8  # a cost that is overestimated must not end all drafting: nothing would be learnt
UNKNOWN = float("inf")  # share of the acceptance length by which a new drafter may differ
_NOTABLE = 0.05  # a smaller change calls for no probe: what was learnt is as good as ever
_MOST_BLAMED = 1.2  # a probe answers for what its drafter takes, but not for a stall of the target's pass


class RecordedTuner:
    """What the policies share: the ledger, and the cost of plain decoding to compare with."""

    floors = NO_FLOORS

    def __init__(self, menu: Sequence[Strategy]) -> None:
        self.cost = CostModel(dict.fromkeys(s.drafter for s in menu))
        self.ledger = Ledger()
        self._chosen = OFF
        self._suspended: set[str] = set()

    def choose(self, rows: Sequence[int], context: int) -> Strategy:
        """See `Tuner`."""
        raise NotImplementedError

    def observe(self, rows: Sequence[int], report: RoundReport) -> None:
        """See `Tuner`."""
        self.ledger.record(report, self.cost.plain_seconds(report.live, report.context))
        self.cost.observe(report)

    def forget(self, row: int) -> None:
        """See `Tuner`."""

    def calibrate(self, measure: Measure, *, max_live: int, max_tokens: int, budget_s: float = 3.0) -> None:
        """Time a few passes of the target before the first round, see `CostModel.calibrate`."""
        self.cost.calibrate(measure, max_live=max_live, max_tokens=max_tokens, budget_s=budget_s)

    def notify_change(self, drafter: str | None = None, *, change: float = UNKNOWN) -> None:
        """A new version of the drafter, or of the policy (None), was published: what was learnt weighs less.

        change: by which share its acceptance length may differ.  One that was measured is of the same shape, and costs
        what it did.
        """
        if change == UNKNOWN:
            self.cost.forget_drafts(drafter)

    def suspend(self, drafter: str) -> None:
        """Choose none of the drafter's arms, not for a probe either, until `resume`."""
        self._suspended.add(drafter)

    def resume(self, drafter: str) -> None:
        """The drafter may be chosen again.  Of one that was not suspended: nothing."""
        self._suspended.discard(drafter)

    def snapshot(self) -> dict[str, Any]:
        """Metrics since the start, see `Ledger.snapshot`."""
        return self.ledger.snapshot(self._chosen)

    def state_dict(self) -> dict[str, Any]:
        """See `Tuner`."""
        own = {"cost": self.cost.state_dict(), "ledger": self.ledger.state_dict()}
        return own | {"suspended": sorted(self._suspended)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Tuner`."""
        self.cost.load_state_dict(state["cost"])
        self.ledger.load_state_dict(state["ledger"])
        self._suspended = set()
        for drafter in state.get("suspended", ()):  # absent from states written before there was a canary
            self.suspend(drafter)


class CostModelTuner(RecordedTuner):
    """The default."""

    def __init__(
        self, menu: Sequence[Strategy], *, probe_share: float, probe_allowance_rounds: float, max_probe_interval: int
    ) -> None:
        super().__init__(menu)
        self._menu = tuple(menu)
        self._seen: tuple[int, ...] = ()  # the rows at the last look at the offers
        self._rests = False  # no look was taken before the round under way
        self._plain_s = 0.0  # seconds of a plain round, at that look
        self._acceptance = Acceptance(self._menu)
        self._backlog = Backlog(dict.fromkeys(s.drafter for s in self._menu))
        self._gate = Gate(
            self._menu, share=probe_share, allowance_rounds=probe_allowance_rounds, max_interval=max_probe_interval
        )

    def choose(self, rows: Sequence[int], context: int) -> Strategy:
        """See `Tuner`."""
        self._rests = tuple(rows) == self._seen and self._gate.rests()
        if self._rests:
            self._chosen, self.floors = OFF, NO_FLOORS
            return OFF
        self._seen = tuple(rows)
        offers = self.offers(rows, context)
        self._plain_s = offers[OFF].seconds
        self._chosen = self._gate.choose(
            len(rows),
            offers,
            self._acceptance.trusted,
            lambda: {arm: offer.rate for arm, offer in self.offers(rows, context, optimistic=True).items()},
            self.cost.plain_seconds(1, context // len(rows)),
        )
        # A draft token pays if its chance is worth more tokens than the batch would emit while it is verified.
        best = max(offer.rate for offer in offers.values())
        token = 0.0
        if not self._chosen.is_off:
            token = best * self.cost.token_seconds(len(rows), self._chosen.tokens, context) - _UNDERESTIMATE
        self.floors = NO_FLOORS
        if token >= _LOWEST_FLOOR:
            level = best * self.cost.level_seconds(self._chosen.drafter)
            self.floors = Floors(min(token, _HIGHEST_FLOOR), level)
        return self._chosen

    def observe(self, rows: Sequence[int], report: RoundReport) -> None:
        """See `Tuner`."""
        if self._rests:  # learning takes time too, and plain rounds between two looks teach nothing new
            self._gate.settle(OFF, report.live, min(report.verify_s, _MOST_BLAMED * self._plain_s))
            self.ledger.record(report, self._plain_s)
            self.cost.pass_over()
        else:
            expected_s = self.cost.pass_seconds(report.live, report.live + sum(report.drafted), report.context)
            blamed_s = report.draft_s + report.backlog_s + min(report.verify_s, _MOST_BLAMED * expected_s)
            self._gate.settle(report.strategy, report.live + sum(report.accepted), blamed_s)
            super().observe(rows, report)
        self._acceptance.observe(rows, report)
        self._backlog.observe(rows, report)

    def forget(self, row: int) -> None:
        """See `Tuner`."""
        self._acceptance.forget(row)
        self._backlog.forget(row)

    def notify_change(self, drafter: str | None = None, *, change: float = UNKNOWN) -> None:
        """As in `RecordedTuner`; a drafter that may differ notably is probed soon."""
        super().notify_change(drafter, change=change)
        self._acceptance.discount(drafter, change=change)
        if change >= _NOTABLE:
            self._gate.reset(drafter)

    def suspend(self, drafter: str) -> None:
        """As in `RecordedTuner`; plain decoding takes over, and what else there is is probed soon."""
        super().suspend(drafter)
        self._gate.leave(drafter)

    def resume(self, drafter: str) -> None:
        """As in `RecordedTuner`; the drafter is probed soon."""
        if drafter in self._suspended:
            self._gate.reset(drafter)
        super().resume(drafter)

    def offers(self, rows: Sequence[int], context: int, *, optimistic: bool = False) -> dict[Strategy, Offer]:
        """Expected tokens per second, and seconds, of a round with OFF and with each arm."""
        live = len(rows)
        plain_s = self.cost.plain_seconds(live, context)
        result = {OFF: Offer(live / plain_s, plain_s)}
        entry_s = {name: self._backlog.seconds(name, rows) for name in self._backlog.drafters}
        for arm, outlook in self._acceptance.outlook(rows, optimistic=optimistic).items():
            seconds = self.cost.round_seconds(arm, live, outlook.drafted, context, optimistic=optimistic)
            promised = 0.0 if arm.drafter in self._suspended else _TIE_BREAK * (live + outlook.accepted)
            result[arm] = Offer(promised / seconds, seconds, entry_s[arm.drafter])
        return result

    def snapshot(self) -> dict[str, Any]:
        """As in `RecordedTuner`, and the share of all time lost to probing."""
        lost = self._gate.lost_s / self._gate.total_s if self._gate.total_s else 0.0
        return super().snapshot() | {"probe_share": lost}

    def state_dict(self) -> dict[str, Any]:
        """See `Tuner`."""
        own = {"acceptance": self._acceptance.state_dict(), "gate": self._gate.state_dict()}
        return super().state_dict() | own | {"backlog": self._backlog.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Tuner`."""
        self._acceptance.load_state_dict(state["acceptance"])
        self._gate.load_state_dict(state["gate"])
        if "backlog" in state:  # absent from older states
            self._backlog.load_state_dict(state["backlog"])
        super().load_state_dict(state)


class BanditTuner(RecordedTuner):
    """`beg_mab`."""

    def __init__(self, menu: Sequence[Strategy], bandit: BucketedGreedy) -> None:
        super().__init__(menu)
        self._bandit = bandit

    def choose(self, rows: Sequence[int], context: int) -> Strategy:
        """See `Tuner`."""
        self._chosen = self._bandit.pick(len(rows), without=self._suspended)
        return self._chosen

    def observe(self, rows: Sequence[int], report: RoundReport) -> None:
        """See `Tuner`."""
        super().observe(rows, report)
        self._bandit.reward(report)

    def notify_change(self, drafter: str | None = None, *, change: float = UNKNOWN) -> None:
        """As in `RecordedTuner`; rewards of a drafter that may differ notably are forgotten."""
        super().notify_change(drafter, change=change)
        if change >= _NOTABLE:
            self._bandit.clear(drafter)

    def state_dict(self) -> dict[str, Any]:
        """See `Tuner`."""
        return super().state_dict() | {"bandit": self._bandit.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Tuner`."""
        super().load_state_dict(state)
        self._bandit.load_state_dict(state["bandit"])


class ThresholdTuner(RecordedTuner):
    """One arm while at most `max_live` requests live (None: always), plain decoding above."""

    def __init__(self, arms: Sequence[Strategy], *, max_live: int | None) -> None:
        """arms: the first whose drafter is not suspended is the one; none: always plain."""
        super().__init__(arms)
        self._arms, self._max_live = tuple(arms), max_live

    def choose(self, rows: Sequence[int], context: int) -> Strategy:
        """See `Tuner`."""
        arm = next((arm for arm in self._arms if arm.drafter not in self._suspended), OFF)
        self._chosen = arm if self._max_live is None or len(rows) <= self._max_live else OFF
        return self._chosen


class AgreedTuner:
    """One rank decides, the others follow; `choose` is a collective call.  Only the leader learns and keeps state."""

    def __init__(self, tuner: Tuner | None, broadcast: Callable[[object], object]) -> None:
        """tuner: on the leader, None elsewhere.  broadcast(value): the leader's value, on each rank."""
        self._tuner, self._broadcast = tuner, broadcast
        self.floors = NO_FLOORS

    def choose(self, rows: Sequence[int], context: int) -> Strategy:
        """See `Tuner`."""
        chosen = None if self._tuner is None else (tuple(self._tuner.choose(rows, context)), tuple(self._tuner.floors))
        strategy, floors = cast(tuple[tuple[str, int, int, int], tuple[float, float]], self._broadcast(chosen))
        self.floors = Floors(*floors)
        return Strategy(*strategy)

    def observe(self, rows: Sequence[int], report: RoundReport) -> None:
        """See `Tuner`."""
        if self._tuner is not None:
            self._tuner.observe(rows, report)

    def forget(self, row: int) -> None:
        """See `Tuner`."""
        if self._tuner is not None:
            self._tuner.forget(row)

    def suspend(self, drafter: str) -> None:
        """See `RecordedTuner`."""
        if isinstance(self._tuner, RecordedTuner):
            self._tuner.suspend(drafter)

    def resume(self, drafter: str) -> None:
        """See `RecordedTuner`."""
        if isinstance(self._tuner, RecordedTuner):
            self._tuner.resume(drafter)

    def state_dict(self) -> Mapping[str, Any]:
        """See `Tuner`; empty on followers."""
        return {} if self._tuner is None else self._tuner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Tuner`."""
        if self._tuner is not None:
            self._tuner.load_state_dict(state)


def make_tuner(
    kind: Kind,
    menu: Sequence[Strategy] = (),
    *,
    arm: Strategy | None = None,
    max_live: int = 32,
    probe_share: float = 0.008,
    probe_allowance_rounds: float = 2.0,
    max_probe_interval: int = 64,
    thresholds: Sequence[int] = (1, 2, 3, 5, 9, 17, 33),
    epsilon: float = 0.1,
    window: int = 300,
    seed: int = 0,
) -> RecordedTuner:
    """A tuner over OFF and the menu.

    arm: of `fixed` and `threshold`, the menu's first by default; max_live: of `threshold`; probe_*: of `cost_model`,
    see `Gate`; thresholds, epsilon, window, seed: of `beg_mab`.  Raises ValueError on a menu that names an arm twice,
    on an unknown kind, and when `fixed` or `threshold` has no arm.
    """
    arms = [s for s in menu if not s.is_off]
    if len(set(arms)) < len(arms):
        raise ValueError(f"the menu {', '.join(map(str, arms))} names an arm twice: remove one of them")
    if kind == "cost_model":
        return CostModelTuner(
            arms,
            probe_share=probe_share,
            probe_allowance_rounds=probe_allowance_rounds,
            max_probe_interval=max_probe_interval,
        )
    if kind == "beg_mab":
        bandit = BucketedGreedy(arms, thresholds=thresholds, epsilon=epsilon, window=window, seed=seed)
        return BanditTuner(arms, bandit)
    if kind == "off":
        return ThresholdTuner([], max_live=None)
    if kind not in ("fixed", "threshold"):
        raise ValueError(f"unknown tuner {kind}: choose cost_model, beg_mab, threshold, fixed or off")
    chosen = arm or next(iter(arms), None)
    if chosen is None:
        raise ValueError(f"the tuner {kind} needs an arm: name one, or give it a menu")
    others = [s for s in arms if s.drafter != chosen.drafter]
    return ThresholdTuner([chosen, *others], max_live=max_live if kind == "threshold" else None)

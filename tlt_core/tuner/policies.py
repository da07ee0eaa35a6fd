"""The tuner's policies, all of them `tlt_core.items.speculation.Tuner`.

    cost_model   the strategy with the most expected tokens a second; `rule.py` has the rule on one page
    beg_mab      TLT's bucketed epsilon-greedy bandit
    fixed, off   always the same

Each keeps the same ledger and cost model, so that their metrics compare.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tlt_core.items.speculation import NO_MIN_DRAFT_PROBS, OFF, MinDraftProbs, RoundReport, Strategy
from tlt_core.tuner.acceptance import Acceptance
from tlt_core.tuner.bandit import EPSILON, BucketedGreedy
from tlt_core.tuner.cost_model import CostModel, Measure
from tlt_core.tuner.ledger import Ledger
from tlt_core.tuner.rule import Estimate, Rule

Kind = Literal["cost_model", "beg_mab", "fixed", "off"]

UNKNOWN = float("inf")  # change of a drafter that was not measured
_NOTABLE = 0.05  # change of the acceptance length that is worth a probe; a smaller one loses less than a probe costs
_TIE_BREAK = 0.97  # drafts' rates are discounted: the best of several noisy estimates is too high on average
_LONGEST_STALL = 1.2  # times the expected pass: longer ones are stalls of the machine, not a cost of the strategy
_LEAST_MIN_PROB = 0.02  # below, hardly a token would be cut, but a GPU would wait for the comparison at each level
_MOST_MIN_PROB = 0.8  # a cost that is overestimated must not end all drafting: nothing would be learnt
_UNDERESTIMATE = 0.1  # drafters understate low chances of acceptance by about this much


class RecordedTuner:
    """What the policies share: the ledger, and the cost of plain decoding to compare with."""

    min_draft_probs = NO_MIN_DRAFT_PROBS

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        self.cost = CostModel(dict.fromkeys(s.drafter for s in strategies))
        self.ledger = Ledger()
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

        change: the share by which its acceptance length may differ.  A drafter whose change was measured has the same
        shape as before, so its cost stays known.
        """
        if change == UNKNOWN:
            self.cost.forget_drafts(drafter)

    def suspend(self, drafter: str) -> None:
        """Choose no strategy of this drafter until `resume`."""
        self._suspended.add(drafter)

    def resume(self, drafter: str) -> None:
        """The drafter may be chosen again.  Does nothing if it was not suspended."""
        self._suspended.discard(drafter)

    def snapshot(self) -> dict[str, Any]:
        """Figures since the start, see `Ledger.snapshot`."""
        return self.ledger.snapshot()

    def state_dict(self) -> dict[str, Any]:
        """See `Tuner`."""
        own = {"cost": self.cost.state_dict(), "ledger": self.ledger.state_dict()}
        return own | {"suspended": sorted(self._suspended)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Tuner`."""
        self.cost.load_state_dict(state["cost"])
        self.ledger.load_state_dict(state["ledger"])
        self._suspended = set()
        for drafter in state["suspended"]:
            self.suspend(drafter)


class CostModelTuner(RecordedTuner):
    """The default: measured acceptance and cost make estimates, and the rule chooses by them."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        super().__init__(strategies)
        self._acceptance = Acceptance(strategies)
        self._rule = Rule(strategies)
        self._seen: tuple[int, ...] = ()  # rows at the latest estimate
        self._idle = False  # the round under way is plain, and was chosen without an estimate
        self._plain_s = 0.0  # seconds of a plain round, at the latest estimate

    def choose(self, rows: Sequence[int], context: int) -> Strategy:
        """See `Tuner`."""
        self.min_draft_probs = NO_MIN_DRAFT_PROBS
        self._idle = tuple(rows) == self._seen and self._rule.skip_look()
        if self._idle:
            return OFF
        self._seen = tuple(rows)
        estimates = self.estimates(rows, context)
        self._plain_s = estimates[OFF].seconds
        chosen = self._rule.choose(
            len(rows),
            estimates,
            known=self._acceptance.known,
            hopes=lambda: self.estimates(rows, context, optimistic=True),
            single_s=self.cost.plain_seconds(1, context // len(rows)),
        )
        if not chosen.is_off:
            best = max(estimate.rate for estimate in estimates.values())
            self.min_draft_probs = self._min_draft_probs_of(chosen, len(rows), context, best)
        return chosen

    def observe(self, rows: Sequence[int], report: RoundReport) -> None:
        """See `Tuner`."""
        if self._idle:  # learning takes time too, and a plain round like the last one teaches nothing new
            self._rule.account(OFF, report.live, min(report.verify_s, _LONGEST_STALL * self._plain_s))
            self.ledger.record(report, self._plain_s)
            self.cost.pass_over()
        else:
            expected_s = self.cost.pass_seconds(report.live, report.live + sum(report.drafted), report.context)
            seconds = report.draft_s + report.backlog_s + min(report.verify_s, _LONGEST_STALL * expected_s)
            self._rule.account(report.strategy, report.live + sum(report.accepted), seconds)
            super().observe(rows, report)
        self._acceptance.observe(rows, report)

    def forget(self, row: int) -> None:
        """See `Tuner`."""
        self._acceptance.forget(row)

    def notify_change(self, drafter: str | None = None, *, change: float = UNKNOWN) -> None:
        """As in `RecordedTuner`; a drafter that may differ notably is probed soon."""
        super().notify_change(drafter, change=change)
        self._acceptance.discount(drafter, change=change)
        if change >= _NOTABLE:
            self._rule.reset(drafter)

    def suspend(self, drafter: str) -> None:
        """As in `RecordedTuner`; plain decoding takes over, and the other drafters are probed soon."""
        super().suspend(drafter)
        self._rule.leave(drafter)

    def resume(self, drafter: str) -> None:
        """As in `RecordedTuner`; the drafter is probed soon."""
        if drafter in self._suspended:
            self._rule.reset(drafter)
        super().resume(drafter)

    def estimates(self, rows: Sequence[int], context: int, *, optimistic: bool = False) -> dict[Strategy, Estimate]:
        """Tokens a second, and seconds, of a round with OFF and with each strategy; a suspended drafter promises 0."""
        live = len(rows)
        plain_s = self.cost.plain_seconds(live, context)
        result = {OFF: Estimate(live / plain_s, plain_s)}
        for strategy, expected in self._acceptance.expected(rows, optimistic=optimistic).items():
            seconds = self.cost.round_seconds(strategy, live, expected.drafted, context, optimistic=optimistic)
            tokens = 0.0 if strategy.drafter in self._suspended else _TIE_BREAK * (live + expected.accepted)
            result[strategy] = Estimate(tokens / seconds, seconds)
        return result

    def snapshot(self) -> dict[str, Any]:
        """As in `RecordedTuner`, and the share of all time lost to probes."""
        lost = self._rule.lost_s / self._rule.total_s if self._rule.total_s else 0.0
        return super().snapshot() | {"probe_share": lost}

    def state_dict(self) -> dict[str, Any]:
        """See `Tuner`."""
        return super().state_dict() | {"acceptance": self._acceptance.state_dict(), "rule": self._rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Tuner`."""
        self._acceptance.load_state_dict(state["acceptance"])
        self._rule.load_state_dict(state["rule"])
        super().load_state_dict(state)

    def _min_draft_probs_of(self, strategy: Strategy, live: int, context: int, best: float) -> MinDraftProbs:
        """A draft token, or a level, must promise the tokens that the best strategy emits while it is computed."""
        token = best * self.cost.token_seconds(live, strategy.tokens, context) - _UNDERESTIMATE
        if token < _LEAST_MIN_PROB:
            return NO_MIN_DRAFT_PROBS
        return MinDraftProbs(min(token, _MOST_MIN_PROB), best * self.cost.level_seconds(strategy.drafter))


class BanditTuner(RecordedTuner):
    """`beg_mab`."""

    def __init__(self, strategies: Sequence[Strategy], bandit: BucketedGreedy) -> None:
        super().__init__(strategies)
        self._bandit = bandit

    def choose(self, rows: Sequence[int], context: int) -> Strategy:
        """See `Tuner`."""
        return self._bandit.pick(len(rows), without=self._suspended)

    def observe(self, rows: Sequence[int], report: RoundReport) -> None:
        """See `Tuner`."""
        super().observe(rows, report)
        self._bandit.reward(report)

    def notify_change(self, drafter: str | None = None, *, change: float = UNKNOWN) -> None:
        """As in `RecordedTuner`; the rewards of a drafter that may differ notably are forgotten."""
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


class FixedTuner(RecordedTuner):
    """The first strategy whose drafter is not suspended; without any, plain decoding."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        super().__init__(strategies)
        self._strategies = tuple(strategies)

    def choose(self, rows: Sequence[int], context: int) -> Strategy:
        """See `Tuner`."""
        return next((strategy for strategy in self._strategies if strategy.drafter not in self._suspended), OFF)


def make_tuner(
    kind: Kind, strategies: Sequence[Strategy] = (), *, epsilon: float = EPSILON, seed: int = 0
) -> RecordedTuner:
    """A tuner over OFF and the strategies.

    epsilon, seed: of `beg_mab`.  Raises ValueError when a strategy is named twice, when the kind is unknown, and
    when `fixed` has no strategy.
    """
    strategies = [s for s in strategies if not s.is_off]
    if len(set(strategies)) < len(strategies):
        raise ValueError(f"the strategies {', '.join(map(str, strategies))} name a strategy twice: remove one of them")
    if kind == "cost_model":
        return CostModelTuner(strategies)
    if kind == "beg_mab":
        return BanditTuner(strategies, BucketedGreedy(strategies, epsilon=epsilon, seed=seed))
    if kind == "off":
        return FixedTuner([])
    if kind != "fixed":
        raise ValueError(f"unknown tuner {kind}: choose cost_model, beg_mab, fixed or off")
    if not strategies:
        raise ValueError(f"the tuner {kind} has no strategy: name one")
    return FixedTuner(strategies)

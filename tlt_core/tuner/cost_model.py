"""Seconds of a round, learnt from a few measurements at the start and from the rounds.

    target pass   s = base + slope_1 ramp_1(T) + .. + slope_k ramp_k(T) + alpha L + beta L (T / R - 1) + gamma [verify]
    draft         s = a + b depth + c R + d depth R width                             one set (a, b, c, d) per drafter

R live requests, T tokens of the pass (R and all draft tokens), L tokens of context of all requests together.  ramp_i(T)
is the part of T in the i-th interval of `_ANCHORS`, so the curve is piecewise linear.  It never falls, because slopes
are at least 0, and it continues with its last slope: unseen batch sizes get estimates from their neighbours.

Both models are linear in their coefficients theta.  `RobustFilter` tracks theta: a Kalman filter with clipped
innovations, so a round that takes three times as long moves theta no more than an ordinary slow round.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import mul
from statistics import median
from typing import Any

from tlt_core.items.speculation import RoundReport, Strategy

Measure = Callable[[int, int, int], float]
"""measure(live, tokens, context) -> seconds of a target pass; tokens and context of all requests together."""

_ANCHORS = (1.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)  # tokens: kernels change their pace at powers of two
_INTERVALS = tuple(zip(_ANCHORS, (*_ANCHORS[1:], float("inf")), strict=True))
_PASS_PRIOR = (10e-3, *(0.5e-3,) * len(_ANCHORS), 3e-6, 1e-6, 0.5e-3)  # a 135M model on a few cores
_CLIP = 2.5  # standard deviations: larger errors are stalls of the machine, not news about the model
_HALF_HOPE = 64  # rounds unused after which an optimistic draft cost is half the estimate: a stall may have spoilt it
_LEAST_GAIN = 0.05  # share of an error that is always corrected: the machine may slow down after a long steady time
_LEVEL_GAIN = 0.05  # of the moving average of a level's seconds: about twenty rounds
_DRIFT = 2e-4  # share of the prior's variance that returns each round: what is rarely seen stays open to correction
_LEAST_SHARE = 0.1  # of the cheapest round ever seen: no estimate is lower


class RobustFilter:
    """y ~ phi . theta with theta >= 0: a Kalman filter with clipped innovations.

    Rounds of one kind can push the coefficients of another kind to 0.  So no prediction is lower than a small share of
    the smallest y seen.
    """

    def __init__(self, theta: Sequence[float], spread: Sequence[float], *, one_sided: bool = False) -> None:
        """theta: the prior's mean; spread: its standard deviations.  one_sided: a y far below the prediction shows
        that the model has learnt from stalls, and counts as a first observation.  For a model that was not
        calibrated: its first observations may have been slow."""
        self.theta = list(theta)
        self.noise = 0.1  # of y, relative
        self.one_sided = one_sided
        self._fresh = True  # the first observation sets the scale
        self._least = 0.0  # y seen; 0: none yet
        self.ceiling = [s * s for s in spread]
        self._widen()

    def _widen(self) -> None:
        self.covariance = [[v if i == j else 0.0 for j in range(len(self.theta))] for i, v in enumerate(self.ceiling)]

    def predict(self, phi: Sequence[float]) -> float:
        """Expected y; above 0 once any y was seen."""
        expected: float = sum(map(mul, phi, self.theta))
        return max(expected, _LEAST_SHARE * self._least)

    def update(self, phi: Sequence[float], y: float) -> None:
        """Learn from one observation."""
        expected = max(self.predict(phi), 1e-7)
        self._least = min(self._least or y, max(y, 1e-7))
        if self.one_sided and y < expected * (1.0 - 3 * self.noise):
            self._widen()
        gain = [sum(map(mul, row, phi)) for row in self.covariance]
        own = (self.noise * expected) ** 2
        model = max(sum(map(mul, gain, phi)), 1e-30)
        total = model + own
        limit = y if self._fresh else min(_CLIP * total**0.5, 0.5 * expected)
        self._fresh = False
        error = min(max(y - expected, -limit), limit)
        # the mean of |e| is 0.8 standard deviations
        surprise = min(abs(y - expected), 3 * self.noise * expected) / expected
        self.noise = min(max(self.noise + 0.05 * (1.25 * surprise - self.noise), 0.02), 0.25)
        gain, total = self._move(phi, error, own)
        for i, (row, g, top) in enumerate(zip(self.covariance, gain, self.ceiling, strict=True)):
            scale = g / total
            row[:] = [c - scale * h for c, h in zip(row, gain, strict=True)]
            row[i] += min(_DRIFT * top, max(top - row[i], 0.0))  # a lower value could make the matrix indefinite

    def _move(self, phi: Sequence[float], error: float, own: float) -> tuple[list[float], float]:
        """Correct theta, keeping it at 0 or above; returns the gain and the variance of the innovation.

        A coefficient that would become negative is set to 0, and the step is repeated for the others.  To clip it after
        a joint step instead would leave the others' opposite moves in place, and predictions could move away from y.
        """
        free = list(phi)
        while True:
            gain = [sum(map(mul, row, free)) for row in self.covariance]
            model = max(sum(map(mul, gain, free)), 1e-30)
            step = error * max(1.0 / (model + own), _LEAST_GAIN / model)
            moved = [t + g * step for t, g in zip(self.theta, gain, strict=True)]
            below = [i for i, value in enumerate(moved) if value < 0]
            if not below:
                self.theta = moved
                return gain, model + own
            for i in below:
                error += free[i] * self.theta[i]
                self.theta[i] = free[i] = 0.0
                for j, row in enumerate(self.covariance):
                    if j != i:
                        row[i] = self.covariance[i][j] = 0.0

    def state(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "theta": list(self.theta),
            "noise": self.noise,
            "least": self._least,
            "fresh": self._fresh,
            "ceiling": list(self.ceiling),
            "covariance": [list(row) for row in self.covariance],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.theta, self.ceiling = list(state["theta"]), list(state["ceiling"])
        self.covariance, self.noise = [list(row) for row in state["covariance"]], float(state["noise"])
        self._least, self._fresh = state["least"], state["fresh"]


class CostModel:
    """Estimates for any strategy, batch and context."""

    def __init__(self, drafters: Iterable[str]) -> None:
        self._pass = RobustFilter(_PASS_PRIOR, [2 * t for t in _PASS_PRIOR], one_sided=True)
        self._drafts: dict[str, RobustFilter | None] = dict.fromkeys(drafters)
        self._round = 0
        self._used_at: dict[str, int] = {}  # round of each drafter's last use
        self._level_s: dict[str, float] = {}

    def pass_seconds(self, live: int, tokens: float, context: float, *, verify: float = 1.0) -> float:
        """A target pass over `tokens` tokens, with sampling and commit.  verify: 0 for a plain pass."""
        return self._pass.predict(_pass_features(live, tokens, context, verify))

    def plain_seconds(self, live: int, context: int) -> float:
        """A plain round."""
        return self.pass_seconds(live, live, context, verify=0.0)

    def token_seconds(self, live: int, tokens: int, context: float) -> float:
        """What each draft token adds to a pass in which every request has `tokens` of them."""
        most = self.pass_seconds(live, live * (1 + tokens), context)
        return (most - self.pass_seconds(live, live, context)) / (live * tokens)

    def level_seconds(self, drafter: str) -> float:
        """Moving average of the seconds of one level of drafting; 0 for OFF and for a drafter not yet used."""
        return self._level_s.get(drafter, 0.0)

    def draft_seconds(self, strategy: Strategy, live: int) -> float:
        """Drafting; for a drafter not yet used, a small share of a plain pass."""
        known = self._drafts.get(strategy.drafter)
        model = known if known is not None else self._new_draft_model()
        return model.predict(_draft_features(strategy, live))

    def round_seconds(
        self, strategy: Strategy, live: int, drafted: float, context: int, *, optimistic: bool = False
    ) -> float:
        """A round that verifies `drafted` tokens, all requests together.

        optimistic: a drafter that was not used for long costs less than measured; the machine may have stalled then.
        """
        if strategy.is_off:
            return self.plain_seconds(live, context)
        verify_s = self.pass_seconds(live, live + drafted, context, verify=min(drafted, 1.0))
        idle = self._round - self._used_at.get(strategy.drafter, self._round) if optimistic else 0
        return self.draft_seconds(strategy, live) * _HALF_HOPE / (_HALF_HOPE + idle) + verify_s

    def observe(self, report: RoundReport) -> None:
        """Learn from a round."""
        strategy, drafted = report.strategy, sum(report.drafted)
        features = _pass_features(report.live, report.live + drafted, report.context, min(drafted, 1.0))
        self._pass.update(features, report.verify_s)
        self._round += 1
        name = strategy.drafter
        if name not in self._drafts:
            return
        returning = self._used_at.get(name) != self._round - 1
        self._used_at[name] = self._round
        model, features, draft_s = self._drafts[name], _draft_features(strategy, report.live), report.draft_s
        if model is None:
            model = self._drafts[name] = self._new_draft_model()
        elif returning:
            draft_s = min(draft_s, model.predict(features))
        model.update(features, draft_s)
        level_s = draft_s / (1 + max(report.offered))  # the first pass costs about as much as a level
        before_s = self._level_s.setdefault(name, level_s)
        self._level_s[name] += _LEVEL_GAIN * (min(level_s, 3 * before_s) - before_s)

    def pass_over(self) -> None:
        """Count a round without learning from it, which saves time."""
        self._round += 1

    def calibrate(self, measure: Measure, *, max_live: int, max_tokens: int, budget_s: float = 3.0) -> None:
        """Time target passes for about budget_s seconds, each shape at least once, and learn from the medians.

        max_live, max_tokens: the largest batch and pass that may occur.  Requests have contexts of 64 and of 1,024
        tokens.
        """
        sizes = sorted({min(int(anchor), max_tokens) for anchor in _ANCHORS} | {max_live, max_tokens})
        few = min(4, max_live)
        rows = sorted({1, few, max_live})
        points = [(min(t, max_live), t, 64 * min(t, max_live)) for t in sizes]
        points += [(few, min(n * few, max_tokens), 64 * few) for n in (3, 5)]
        points += [(r, t, 1024 * r) for r in rows for t in (r, min(5 * r, max_tokens))]
        taken: dict[tuple[int, int, int], list[float]] = {point: [] for point in dict.fromkeys(points)}
        spent = 0.0
        for sweep in range(7):
            for point, times in taken.items():
                if sweep and spent >= budget_s:
                    break
                times.append(measure(*point))
                spent += times[-1]
        self._pass.noise, self._pass.one_sided = 0.05, False  # medians vary less than single rounds
        for _ in range(2):
            for (live, tokens, context), times in taken.items():
                self._pass.update(_pass_features(live, tokens, context, float(tokens > live)), median(times))
        floors = [0.1 * prior for prior in _PASS_PRIOR]
        self._pass.ceiling = [max(0.3 * t, f) ** 2 for t, f in zip(self._pass.theta, floors, strict=True)]

    def forget_drafts(self, drafter: str | None) -> None:
        """A new version of a drafter (None: of all) may cost more or less: what was learnt becomes its prior."""
        for name, model in self._drafts.items():
            if model is not None and drafter in (None, name):
                self._drafts[name] = RobustFilter(model.theta, [v**0.5 for v in model.ceiling], one_sided=True)

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        drafts = {name: model.state() for name, model in self._drafts.items() if model is not None}
        return {
            "pass": self._pass.state(),
            "drafts": drafts,
            "round": self._round,
            "used_at": dict(self._used_at),
            "level_s": dict(self._level_s),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drafters of no strategy are dropped."""
        self._pass.restore(state["pass"])
        self._round, self._used_at = state["round"], dict(state["used_at"])
        self._level_s = dict(state["level_s"])
        for name in self._drafts.keys() & state["drafts"].keys():
            model = self._drafts[name] = self._new_draft_model()
            model.restore(state["drafts"][name])

    def _new_draft_model(self) -> RobustFilter:
        step = self.plain_seconds(1, 64)
        return RobustFilter(
            [0.01 * step, 0.02 * step, 0.002 * step, 0.0005 * step],
            [0.05 * step, step, 0.2 * step, 0.05 * step],  # nearly all of the time goes to the levels
            one_sided=True,
        )


def _pass_features(live: int, tokens: float, context: float, verify: float) -> list[float]:
    features = [1.0, *(0.0,) * len(_ANCHORS), context, context * (tokens / live - 1.0), verify]
    for i, (low, high) in enumerate(_INTERVALS, start=1):
        if tokens <= low:
            break
        features[i] = (tokens if tokens < high else high) - low
    return features


def _draft_features(strategy: Strategy, live: int) -> list[float]:
    return [1.0, float(strategy.depth), float(live), float(strategy.depth * live * strategy.width)]

"""Seconds of a round, from a few measurements at start-up and from every round since.

    target pass   s = base + slope_1 ramp_1(T) + .. + slope_k ramp_k(T) + alpha L + beta L (T / R - 1) + gamma [verify]
    draft         s = a + b depth + c R + d depth R width                             one set (a, b, c, d) per drafter

T tokens of the pass (R live rows, and the draft tokens), L tokens of context of all rows together.  ramp_i(T) is the
part of T in the i-th interval between anchors, so the curve is piecewise linear, never falls (slopes are held at 0 or
more), and goes on with its last slope: batch sizes that were never seen are answered by their neighbours.

Both are linear in their coefficients theta, which `RobustFilter` tracks: a Kalman filter whose innovations are clipped,
so that a round that took three times as long moves theta by no more than an ordinary bad round.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import mul
from statistics import median
from typing import Any

from tlt_core.speculation import RoundReport, Strategy

Measure = Callable[[int, int, int], float]
"""measure(live, tokens, context) -> seconds of a target pass over so many tokens, all rows together."""

_ANCHORS = (1.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_INTERVALS = tuple(zip(_ANCHORS, (*_ANCHORS[1:], float("inf")), strict=True))
_PASS_PRIOR = (
    10e-3,
    *(0.5e-3,) * len(_ANCHORS),
    3e-6,
    1e-6,
    0.5e-3,
)  # of a 135M model on few cores, to begin with
_CLIP = 2.5  # standard deviations of an innovation that are believed
_HALF_HOPE = 64  # rounds without a drafter after which an optimist halves its cost
_LEAST_GAIN = 0.05  # share of an error that is corrected however sure the filter is
_LEVEL_GAIN = 0.05  # of a moving average
_DRIFT = 2e-4  # share of the prior's variance that each round gives back
_LEAST_SHARE = 0.1  # of the cheapest pass ever seen: no pass is expected to cost less


class RobustFilter:
    """y ~ phi . theta with theta >= 0, by a Kalman filter on clipped innovations.

    Observations of some kinds alone can bring the coefficients of another kind to 0; so what is expected is held above
    a small share of the least y seen.
    """

    def __init__(self, theta: Sequence[float], spread: Sequence[float], *, one_sided: bool = False) -> None:
        """theta: the prior's mean; spread: its standard deviations.  one_sided: y far below the expected shows that
        what was learnt were stalls, and counts like a first observation; for models that start from few of them."""
        self.theta = list(theta)
        self.noise = 0.1  # of y, relative
        self._one_sided = one_sided
        self._fresh = True  # the first observation sets the scale
        self._least = 0.0  # y seen; 0: none yet
        self.ceiling = [s * s for s in spread]
        self._widen()

    def _widen(self) -> None:
        self.covariance = [[v if i == j else 0.0 for j in range(len(self.theta))] for i, v in enumerate(self.ceiling)]

    def predict(self, phi: Sequence[float]) -> float:
        """Expected y, never 0 once any y was seen."""
        expected: float = sum(map(mul, phi, self.theta))
        return max(expected, _LEAST_SHARE * self._least)

    def update(self, phi: Sequence[float], y: float) -> None:
        """Learn from one observation.  Raises ValueError when phi is not as long as theta."""
        if len(phi) != len(self.theta):
            raise ValueError(f"{len(phi)} features for {len(self.theta)} coefficients: give one each")
        expected = max(self.predict(phi), 1e-7)
        self._least = min(self._least or y, max(y, 1e-7))
        if self._one_sided and y < expected * (1.0 - 3 * self.noise):
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
            row[i] += min(_DRIFT * top, max(top - row[i], 0.0))  # never lowered: that could make it indefinite

    def _move(self, phi: Sequence[float], error: float, own: float) -> tuple[list[float], float]:
        """Correct theta within its bound; returns the gain, and the variance of the innovation.

        A coefficient that would fall below 0 is set to it and takes no further part, and the others correct the rest
        alone: cutting it off after a joint step would leave the others' counter-moves, away from y.
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
            "ceiling": list(self.ceiling),
            "covariance": [list(row) for row in self.covariance],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`.  One of another size, from another version of the model, is left alone."""
        if len(state["theta"]) == len(self.theta):
            self.theta, self.ceiling = list(state["theta"]), list(state["ceiling"])
            self.covariance, self.noise = [list(row) for row in state["covariance"]], float(state["noise"])
            self._least = state.get("least", 0.0)  # absent from older states
            self._fresh = False


class CostModel:
    """Answers for any strategy, batch and context; learns from every round."""

    def __init__(self, drafters: Iterable[str]) -> None:
        self._pass = RobustFilter(_PASS_PRIOR, [2 * t for t in _PASS_PRIOR])
        self._drafts: dict[str, RobustFilter | None] = dict.fromkeys(drafters)
        self._round = 0
        self._used_at: dict[str, int] = {}  # round of each drafter's last use
        self._level_s: dict[str, float] = {}

    def pass_seconds(self, live: int, tokens: float, context: float, *, verify: float = 1.0) -> float:
        """A target pass over `tokens` tokens, sampling and commit included.  verify: 0 for a plain pass."""
        return self._pass.predict(_pass_features(live, tokens, context, verify))

    def plain_seconds(self, live: int, context: int) -> float:
        """A plain round."""
        return self.pass_seconds(live, live, context, verify=0.0)

    def token_seconds(self, live: int, tokens: int, context: float) -> float:
        """What a draft token adds to a pass on average, with `tokens` of them in each row."""
        most = self.pass_seconds(live, live * (1 + tokens), context)
        return (most - self.pass_seconds(live, live, context)) / (live * tokens)

    def level_seconds(self, drafter: str) -> float:
        """What one level of drafting took of late; 0 for OFF or a drafter not yet seen."""
        return self._level_s.get(drafter, 0.0)

    def draft_seconds(self, strategy: Strategy, live: int) -> float:
        """Drafting.  Of a drafter not yet seen: a small share of a plain pass."""
        known = self._drafts.get(strategy.drafter)
        model = known if known is not None else self._new_draft_model()
        return model.predict(_draft_features(strategy, live))

    def round_seconds(
        self, strategy: Strategy, live: int, drafted: float, context: int, *, optimistic: bool = False
    ) -> float:
        """A round that verifies `drafted` tokens, all rows together.  Optimistic: a drafter that was not used for long
        is taken to be faster than it was, it may have been unlucky."""
        if strategy.is_off:
            return self.plain_seconds(live, context)
        verify_s = self.pass_seconds(live, live + drafted, context, verify=min(drafted, 1.0))
        idle = self._round - self._used_at.get(strategy.drafter, self._round) if optimistic else 0
        return self.draft_seconds(strategy, live) * _HALF_HOPE / (_HALF_HOPE + idle) + verify_s

    def observe(self, report: RoundReport) -> None:
        """Learn from a round.  A drafter that comes back first catches up with what was decoded without it; that is
        no part of its steady cost."""
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
        level_s = draft_s / (1 + max(report.offered))  # the first pass, which catches up, is about a level too
        before_s = self._level_s.setdefault(name, level_s)
        self._level_s[name] += _LEVEL_GAIN * (min(level_s, 3 * before_s) - before_s)

    def pass_over(self) -> None:
        """Count a round without learning from it."""
        self._round += 1

    def calibrate(self, measure: Measure, *, max_live: int, max_tokens: int, budget_s: float = 3.0) -> None:
        """Time passes until budget_s is spent; each point once even if that takes longer, and then medians.

        max_live, max_tokens: the largest batch and pass that may occur.  Contexts measured are 64 and 1,024 tokens a
        row.
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
        self._pass.noise = 0.05  # of medians
        for _ in range(2):
            for (live, tokens, context), times in taken.items():
                self._pass.update(_pass_features(live, tokens, context, float(tokens > live)), median(times))
        floors = [0.1 * prior for prior in _PASS_PRIOR]
        self._pass.ceiling = [max(0.3 * t, f) ** 2 for t, f in zip(self._pass.theta, floors, strict=True)]

    def forget_drafts(self, drafter: str | None) -> None:
        """A new version of the drafter (None: of each) may cost something else; what was learnt becomes its prior."""
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
        """Drafters that are not on the menu are dropped."""
        self._pass.restore(state["pass"])
        self._round, self._used_at = state["round"], dict(state["used_at"])
        self._level_s = dict(state.get("level_s", {}))  # absent from older states
        for name in self._drafts.keys() & state["drafts"].keys():
            model = self._drafts[name] = self._new_draft_model()
            model.restore(state["drafts"][name])

    def _new_draft_model(self) -> RobustFilter:
        step = self.plain_seconds(1, 64)
        return RobustFilter(
            [0.01 * step, 0.02 * step, 0.002 * step, 0.0005 * step],
            [0.05 * step, step, 0.2 * step, 0.05 * step],  # hardly anything of a draft is not its levels'
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

"""How many draft tokens each live request will accept.

    E[accepted] = c h_1 + c h_1 h_2 + ...            c = P(the drafter proposes), h_j = P(accepts j | accepted j - 1)

From j = 2 on a draft that ends early counts as a miss, so h_j holds the drafter's own stopping too.  Each h exists
twice.  For all requests together, per *form* (drafter and tree shape; chains of all depths are one form) and position:
a mean and the weight of its evidence.  For each request a multiplier of the odds:

    odds(h_row) = m_j odds(h_form),     m_j from decayed counts, shrunk to m_{j-1}, and m_0 = 1

so a new request begins at the common estimate, one that differs is known after a few rounds, and what was seen with one
form serves the others.  An untried form starts from a tried one of the same drafter by h' = 1 - (1 - h)^(b'/b)^0.67, b
the breadth: wider is at least as good.  (Coupled drafts of SmolLM2 accept 0.17, 0.26, 0.37 at widths 1, 2, 4.)

Evidence that is not renewed loses weight, not its mean.  The optimistic estimate moves to 0.9 as weight is lost.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tlt_core.speculation import RoundReport, Strategy
from tlt_core.tuner.evidence import MOST_WEIGHT, OPTIMIST, Rate, RowBelief

_PRIOR_HIT = 0.5
_PRIOR_WEIGHT = 2.0
_SMOOTH_WEIGHT = 12.0  # trials that the position before is worth
_TRANSFER_WEIGHT = 10.0
_AGE_EVERY = 8  # rounds; what was not tested in them loses weight
_AGE_FACTOR = 0.82  # exp(-8 / 40)
_TRUSTED_TRIALS = 4
_WEIGHT_AFTER_CHANGE = 5.0  # trials that a common estimate is worth when the drafter may be another altogether
_LARGE_CHANGE = 0.2  # standard deviation of a share of so few trials
_ROWS_AFTER_CHANGE = 0.05  # share of the evidence on a request that is left then


class _Form(NamedTuple):
    """Tree shapes that share their hit rates."""

    drafter: str
    key: str
    breadth: float  # children of a node, roughly


class Outlook(NamedTuple):
    """What one arm would do in the next round, all rows together."""

    accepted: float
    drafted: float


class Acceptance:
    """Estimates for a menu of strategies (no OFF among them)."""

    def __init__(self, menu: Sequence[Strategy]) -> None:
        self._menu = tuple(menu)
        self._depths = {s: min(s.depth, s.tokens) for s in self._menu}
        self._forms = {s: _form(s) for s in self._menu}
        self._reach: dict[_Form, int] = {}
        for s, form in self._forms.items():
            self._reach[form] = max(self._reach.get(form, 0), self._depths[s])
        names = dict.fromkeys(s.drafter for s in self._menu)
        self._deepest = {name: max(d for s, d in self._depths.items() if s.drafter == name) for name in names}
        self._hits = {form: [Rate(_PRIOR_HIT) for _ in range(reach)] for form, reach in self._reach.items()}
        self._covers = {name: Rate(OPTIMIST) for name in names}
        self._fills = {s: Rate(1.0) for s in self._menu}  # drafted tokens as a share of those asked for
        self._trials = dict.fromkeys(names, 0)
        self._round = 0
        self._tested = dict.fromkeys(self._reach, 0)  # deepest position since evidence was aged
        self._rows: dict[str, dict[int, RowBelief]] = {name: {} for name in names}
        self._means: dict[_Form, list[float]] = {}
        self._cache: dict[tuple[_Form, bool], tuple[tuple[int, ...], list[float]]] = {}  # rows and their totals
        self._refresh(names)

    def trusted(self, strategy: Strategy) -> bool:
        """Whether enough was seen of its drafter to choose it by its mean.  OFF needs no evidence."""
        return strategy.is_off or self._trials[strategy.drafter] >= _TRUSTED_TRIALS

    def outlook(self, rows: Sequence[int], *, optimistic: bool = False) -> dict[Strategy, Outlook]:
        """Expected draft tokens accepted and verified of each strategy."""
        live = tuple(rows)
        totals = {}
        for form in self._reach:
            known = self._cache.get((form, optimistic))
            if known is None or known[0] != live:
                known = self._cache[form, optimistic] = live, self._totals(form, live, optimistic)
            totals[form] = known[1]
        result = {}
        for s, form in self._forms.items():
            covered, *survivors = totals[form]
            drafted = covered * self._fills[s].mean * _asked(s)
            result[s] = Outlook(sum(survivors[: self._depths[s]]), drafted)
        return result

    def observe(self, rows: Sequence[int], report: RoundReport) -> None:
        """Learn from a round; one that was plain only ages the evidence."""
        strategy = report.strategy
        self._round += 1
        if self._round % _AGE_EVERY == 0:
            self._age()
        if strategy not in self._forms:
            return
        form, depth, name = self._forms[strategy], self._depths[strategy], strategy.drafter
        trials, hits = [0] * (depth + 1), [0] * (depth + 1)
        beliefs, means, cover = self._rows[name], self._means[form], _inside(self._covers[name].mean)
        for row, offered, accepted in zip(rows, report.offered, report.accepted, strict=True):
            belief = beliefs.get(row)
            if belief is None:
                belief = beliefs[row] = RowBelief(self._deepest[name])
            belief.add(0, offered > 0, cover)
            trials[0] += 1
            hits[0] += offered > 0
            for position in range(1, min(accepted + 1, depth) + 1 if offered else 1):
                belief.add(position, position <= accepted, means[position - 1])
                trials[position] += 1
                hits[position] += position <= accepted
            belief.refresh()
        self._tested[form] = max(self._tested[form], depth)
        self._covers[name].add(hits[0], trials[0])
        for rate, hit, trial in zip(self._hits[form], hits[1:], trials[1:], strict=False):
            if trial:
                rate.add(hit, trial)
        if hits[0]:
            self._fills[strategy].add(sum(report.drafted) / _asked(strategy), hits[0])
        self._trials[name] += len(rows)
        self._refresh([name])

    def forget(self, row: int) -> None:
        """A request has ended."""
        for beliefs in self._rows.values():
            beliefs.pop(row, None)

    def discount(self, drafter: str | None, *, change: float = math.inf) -> None:
        """What is known of a drafter (None: of each) no longer weighs much; its means stay.

        change: by which share of itself its acceptance may differ.  Evidence is held to as many trials as leave such a
        doubt about a share, so that of a small change costs nothing.  Again before anything was learnt: nothing
        changes.  A step publishes a drafter and a policy.
        """
        most = _WEIGHT_AFTER_CHANGE * max(_LARGE_CHANGE / max(change, 1e-9), 1.0) ** 2
        rows = min(max(most / MOST_WEIGHT, _ROWS_AFTER_CHANGE), 1.0)
        for name in self._covers:
            if drafter in (None, name):
                rates = [rate for form, own in self._hits.items() if form.drafter == name for rate in own]
                for rate in (self._covers[name], *rates):
                    rate.weight = min(rate.weight, most)
                self._fade_rows(name, 0, rows)
        self._refresh(self._covers)

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "hits": {form.key: [rate.state() for rate in rates] for form, rates in self._hits.items()},
            "covers": {name: rate.state() for name, rate in self._covers.items()},
            "fills": {str(s): rate.state() for s, rate in self._fills.items()},
            "trials": dict(self._trials),
            "round": self._round,
            "tested": {form.key: tested for form, tested in self._tested.items()},
            "rows": {
                name: {str(row): [b.trials, b.hits, b.expected] for row, b in beliefs.items()}
                for name, beliefs in self._rows.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forms and drafters that are not on the menu are dropped."""
        for form, rates in self._hits.items():
            for rate, values in zip(rates, state["hits"].get(form.key, []), strict=False):
                rate.restore(values)
            self._tested[form] = state["tested"].get(form.key, 0)
        self._round = state["round"]
        for s, fill in self._fills.items():
            fill.restore(state["fills"].get(str(s), fill.state()))
        for name in self._covers.keys() & state["covers"].keys():
            self._covers[name].restore(state["covers"][name])
            self._trials[name] = state["trials"][name]
            self._rows[name] = {}
            for row, counts in state["rows"][name].items():
                belief = self._rows[name][int(row)] = RowBelief(self._deepest[name])
                for own, saved in zip((belief.trials, belief.hits, belief.expected), counts, strict=True):
                    own[: len(saved)] = saved[: len(own)]
                belief.refresh()
        self._refresh(self._covers)

    def _totals(self, form: _Form, rows: Sequence[int], optimistic: bool) -> list[float]:
        """Rows expected to be offered a draft, then those expected to accept 1, 2, .. of it."""
        name, means = form.drafter, self._means[form]
        cover = self._covers[name]
        lead = _inside(cover.optimistic() if optimistic else cover.mean)
        if optimistic:
            means = [_inside(m) for m in self._form_means(form, optimistic=True)]
        odds = [lead / (1.0 - lead), *(m / (1.0 - m) for m in means)]
        totals = [0.0] * len(odds)
        beliefs = self._rows[name]
        new_rows = 0
        for row in rows:
            belief = beliefs.get(row)
            if belief is None:
                new_rows += 1
                continue
            survival = 1.0
            for position, (o, m) in enumerate(zip(odds, belief.multipliers, strict=False)):
                x = o * m
                survival *= x / (1.0 + x)
                if survival < 0.001:
                    break
                totals[position] += survival
        survival = float(new_rows)
        for position, o in enumerate(odds):
            survival *= o / (1.0 + o)
            totals[position] += survival
        return totals

    def _form_means(self, form: _Form, *, optimistic: bool) -> list[float]:
        means: list[float] = []
        for position, own in enumerate(self._hits[form]):
            best, best_rate = None, None
            for other, rates in self._hits.items():
                usable = other != form and other.drafter == form.drafter and position < len(rates)
                if usable and rates[position].weight > (best_rate.weight if best_rate else 0.5):
                    best, best_rate = other, rates[position]
            start, weight = (means[-1], _SMOOTH_WEIGHT) if means else (_PRIOR_HIT, _PRIOR_WEIGHT)
            evidence, weight_own = own.weight, own.seen  # a prior does not come back with age, but a sibling may know
            if best is not None and best_rate is not None:
                ratio = (form.breadth / best.breadth) ** 0.67
                start, weight = 1.0 - (1.0 - min(best_rate.mean, 0.99)) ** ratio, _TRANSFER_WEIGHT
                evidence, weight_own = max(own.weight, 0.5 * best_rate.weight), own.weight
            mean = (weight_own * own.mean + weight * start) / (weight_own + weight)
            means.append(Rate(mean, evidence).optimistic() if optimistic else mean)
        return means

    def _refresh(self, names: Iterable[str]) -> None:
        wanted = set(names)
        for form in self._reach:
            if form.drafter in wanted:
                self._means[form] = [_inside(m) for m in self._form_means(form, optimistic=False)]
                self._cache.pop((form, False), None)
                self._cache.pop((form, True), None)

    def _age(self) -> None:
        deepest = dict.fromkeys(self._covers, 0)
        for form, tested in self._tested.items():
            deepest[form.drafter] = max(deepest[form.drafter], tested)
            for rate in self._hits[form][tested:]:
                rate.weight *= _AGE_FACTOR
        for name, tested in deepest.items():
            if not tested:
                self._covers[name].weight *= _AGE_FACTOR
            if tested < self._deepest[name]:
                self._fade_rows(name, tested + 1 if tested else 0, _AGE_FACTOR)
        self._tested = dict.fromkeys(self._tested, 0)
        self._refresh(self._covers)

    def _fade_rows(self, name: str, start: int, factor: float) -> None:
        for belief in self._rows[name].values():
            for counts in (belief.trials, belief.hits, belief.expected):
                counts[start:] = [count * factor for count in counts[start:]]
            belief.refresh()


def _asked(strategy: Strategy) -> int:
    """Draft tokens of a request when the drafter proposes all that it may."""
    return min(strategy.depth, strategy.tokens) if strategy.width == 1 else strategy.tokens


def _form(strategy: Strategy) -> _Form:
    if strategy.width == 1:
        return _Form(strategy.drafter, f"{strategy.drafter}:chain", 1.0)
    return _Form(strategy.drafter, str(strategy), max(strategy.width * strategy.tokens / strategy.depth, 1.0) ** 0.5)


def _inside(p: float) -> float:
    return min(max(p, 0.005), 0.98)

"""The law of `WindowSampler`: shares, bounded gaps, joins and leaves, resume."""

import json
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_core.drafter.eagle3.windows import Window
from tlt_core.idle_training.curriculum import WindowSampler


class Response(NamedTuple):
    """What the sampler knows of one, all of whose rows are trained."""

    id: str
    rows: int
    step: int
    earliest: int = 0

    @property
    def tokens_L(self) -> range:
        return range(self.rows + 2)


def places(windows: list[Window]) -> list[tuple[str, int, int]]:
    return [(w.sequence.id, w.start, w.end) for w in windows]


def rows_of(windows: list[Window]) -> Counter[str]:
    rows: Counter[str] = Counter()
    for window in windows:
        rows[window.sequence.id] += window.end - window.start
    return rows


def draw(sampler: WindowSampler, *, rows: int, max_rows: int = 64) -> list[Window]:
    windows: list[Window] = []
    while sum(w.end - w.start for w in windows) < rows:
        windows += sampler.next(max_rows)
    return windows


def test_shares_follow_the_law():
    """Of the step before, an equally long one gets half; four times the rows get eight times the share."""
    sampler = WindowSampler(window_rows=16)
    sampler.refresh(
        [
            Response("long", 400, step=3),
            Response("short", 100, step=3),
            Response("old", 400, step=2),
            Response("ancient", 400, step=-100),  # counts as six steps old
        ],
        step=3,
    )
    weights = {"long": 8000.0, "short": 1000.0, "old": 4000.0, "ancient": 125.0}
    rows = rows_of(draw(sampler, rows=200_000))
    for name, weight in weights.items():
        share = rows[name] / rows.total()
        assert share == pytest.approx(weight / 13125, rel=0.02), name


def test_picks_by_hand():
    """Weights 4 and 1 (no bias): a window of 4 rows and one of 1 row are due equally often."""
    sampler = WindowSampler(window_rows=4, length_bias=0.0)
    sampler.refresh([Response("b", 1, step=0), Response("a", 4, step=0)], step=0)
    assert places(sampler.next(5)) == [("a", 0, 4), ("b", 0, 1)]
    assert places(sampler.next(100)) == [("a", 0, 4), ("b", 0, 1)]  # ends where one would come twice
    assert places(sampler.next(3)) == [("a", 0, 3)]  # too large: in parts
    assert places(sampler.next(3)) == [("b", 0, 1), ("a", 3, 4)]  # due at 2 and 2.75


def test_a_new_step_by_hand():
    """Weights 4, 4 and, for the new one, 8.  "a" keeps waiting for its 8 rows, which is 2 in its new virtual time."""
    sampler = WindowSampler(window_rows=8, length_bias=0.0)
    old = [Response("a", 8, step=0), Response("b", 8, step=0)]
    sampler.refresh(old, step=0)
    assert [w.sequence.id for w in sampler.next(8)] == ["a"]
    sampler.refresh(old, step=1)
    sampler.refresh([*old, Response("c", 8, step=1)], step=1)
    assert [sampler.next(8)[0].sequence.id for _ in range(7)] == ["c", "b", "c", "c", "a", "b", "c"]


responses = st.builds(
    lambda number, *of: Response(f"s{number}", *of), st.integers(0, 12), st.integers(1, 300), st.integers(0, 4)
)
pools = st.lists(responses, min_size=1, max_size=10, unique_by=lambda c: c.id)
samplers = st.builds(
    WindowSampler,
    window_rows=st.integers(1, 80),
    length_bias=st.sampled_from([0.0, 0.5, 1.0]),
    recency=st.sampled_from([0.3, 0.5, 1.0]),
)


def weight(sampler: WindowSampler, name: str, step: int) -> float:
    return sampler._weight(sampler._flows[name], step)


@settings(max_examples=60, deadline=None)
@given(sampler=samplers, pool=pools, max_rows=st.integers(1, 200))
def test_no_window_is_starved(sampler, pool, max_rows):
    """Every window comes again within the number of rows that `WindowSampler` states, also the first time."""
    sampler.refresh(pool, step=4)
    weights = {c.id: weight(sampler, c.id, 4) for c in pool}
    largest = sum(min(c.rows, sampler._window_rows) for c in pool)
    bounds = {c.id: c.rows * sum(weights.values()) / weights[c.id] + largest for c in pool}
    trained, last_visit = 0, {}
    target = 3 * max(bounds.values())
    while trained < min(target, 30_000):
        for window in sampler.next(max_rows):
            for row in (window.start, window.end - 1):
                gap = trained - last_visit.get((window.sequence.id, row), 0)
                assert gap <= bounds[window.sequence.id] + 1e-6
            trained += window.end - window.start
            last_visit |= {(window.sequence.id, window.start): trained, (window.sequence.id, window.end - 1): trained}
    for c in pool:
        if trained > bounds[c.id]:
            assert (c.id, 0) in last_visit
            assert (c.id, c.rows - 1) in last_visit


@settings(max_examples=60, deadline=None)
@given(sampler=samplers, pool=pools, max_rows=st.integers(1, 200))
def test_law_holds_at_every_moment(sampler, pool, max_rows):
    sampler.refresh(pool, step=4)
    weights = {c.id: weight(sampler, c.id, 4) for c in pool}
    window = {c.id: min(c.rows, sampler._window_rows) for c in pool}
    rows: Counter[str] = Counter({c.id: 0 for c in pool})
    for _ in range(200):
        rows.update(rows_of(sampler.next(max_rows)))
        normalised = {name: rows[name] / weights[name] for name in rows}
        for i in rows:
            for j in rows:
                slack = window[i] / weights[i] + window[j] / weights[j]
                assert abs(normalised[i] - normalised[j]) <= slack * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(sampler=samplers, pool=pools, cut=st.integers(0, 30))
def test_resume_gives_the_same_picks(sampler, pool, cut):
    sampler.refresh(pool[:-1], step=3)
    sampler.next(77)
    sampler.refresh(pool, step=4)
    for _ in range(cut):
        sampler.next(77)
    resumed = WindowSampler(
        window_rows=sampler._window_rows,
        length_bias=sampler._length_bias,
        recency=sampler._recency,
    )
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    resumed.refresh(list(reversed(pool)), step=4)
    for turn in range(40):
        if turn == 20:
            newer = [*pool, Response("newer", 50, 5)]
            sampler.refresh(newer, step=5)
            resumed.refresh(newer, step=5)
        assert places(resumed.next(77)) == places(sampler.next(77))

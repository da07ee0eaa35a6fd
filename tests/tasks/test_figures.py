"""Figures show the numbers they are given."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tasks import figures
from tests.tasks.scored_batches import scored_batch
from tlt_core.items.speculation import OFF, RoundReport, Strategy
from tlt_core.items.types import WorkerSpan, WorkerState
from tlt_core.rollout.engine import RoundTrace


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that would have been written."""
    kept: list[Figure] = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: kept.append(figure))
    return kept


def _bars(figure: Figure, label: str) -> list[tuple[float, float, float]]:
    """(from, to, height of the lane) of every bar with this label."""
    bars = []
    for collection in figure.axes[0].collections:
        if collection.get_label() == label:
            for path in collection.get_paths():
                box = path.get_extents()
                bars.append((box.x0, box.x1, (box.y0 + box.y1) / 2))
    return sorted(bars)


def test_the_timeline_has_a_lane_per_worker_and_one_for_scoring(drawn: list[Figure]) -> None:
    spans = [
        WorkerSpan(0, WorkerState.BUSY, 1000.0, 1009.0),
        WorkerSpan(1, WorkerState.BUSY, 1000.0, 1003.0),
        WorkerSpan(1, WorkerState.IDLE, 1003.0, 1009.0),
        WorkerSpan(0, WorkerState.UPDATING, 1010.0, 1012.0),
    ]
    figures.timeline(spans, scored_batch(), step=3, path=Path("unused"))
    (figure,) = drawn
    assert _bars(figure, "generating") == [pytest.approx((0.0, 3.0, 2.0)), pytest.approx((0.0, 9.0, 1.0))]
    assert _bars(figure, "idle") == [pytest.approx((3.0, 9.0, 2.0))]
    assert _bars(figure, "updating policy") == [pytest.approx((10.0, 12.0, 1.0))]
    assert _bars(figure, "scoring") == [pytest.approx((t, t + 0.25, 0.0)) for t in (1.0, 2.0, 3.0, 9.0)]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["reward", "worker 0", "worker 1"]
    # 6 idle of 6 + 12 worker seconds
    assert figure.axes[0].get_title() == "step 3: workers idle for 33% of the rollout"


def _round(strategy: Strategy, live: int, end_s: float, *, accepted: int = 0) -> RoundTrace:
    """A tenth of a second."""
    zeros, hits = (0,) * live, (accepted,) * live
    report = RoundReport(strategy, live, 10, zeros, zeros, hits, 0.0, 0.1)
    return RoundTrace(report, tuple(range(live)), live * (1 + accepted), end_s, 0.1)


def test_the_speculation_figure_shows_strategies_over_time_and_by_live_requests(drawn: list[Figure]) -> None:
    chain = Strategy("ngram", 3, 1, 3)
    first = [_round(OFF, 6, 100.1), _round(OFF, 5, 100.2), _round(chain, 5, 100.3, accepted=1)]
    second = [_round(chain, 1, 100.1, accepted=3)]
    figures.speculation([first, second], step=2, path=Path("unused"))
    (figure,) = drawn
    lives = [axes for axes in figure.axes if axes.get_ylabel().endswith("live requests")]
    assert [axes.get_ylabel().split("\n")[0] for axes in lives] == ["worker 0", "worker 1"]
    bars = {str(c.get_label()): [p.get_extents() for p in c.get_paths()] for c in lives[0].collections}
    assert [(b.x0, b.x1, b.y1) for b in bars[str(chain)]] == [pytest.approx((0.2, 0.3, 5))]
    (gain,) = (axes.lines[0] for axes in figure.axes if axes.lines and len(axes.lines[0].get_xdata()) == 3)
    assert list(gain.get_ydata()) == [1.0, 1.0, 2.0]
    (shares,) = (axes for axes in figure.axes if axes.get_ylabel() == "share of rounds")
    assert [t.get_text() for t in shares.get_xticklabels()] == ["1\n1 rounds", "5-8\n3 rounds"]
    heights = {str(c.get_label()): [bar.get_height() for bar in c] for c in shares.containers}
    assert heights == {"off": [0, pytest.approx(2 / 3)], str(chain): [1.0, pytest.approx(1 / 3)]}

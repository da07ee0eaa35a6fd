"""Figures show the numbers they are given."""

from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from tasks import figures
from tests.tasks.scored_batches import scored_batch
from tlt_core.types import WorkerSpan, WorkerState


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


def test_the_length_histogram_marks_the_quantiles_and_the_limit(drawn: list[Figure]) -> None:
    lens = torch.arange(1, 102)  # 1 .. 101: p50 = 51, p90 = 91, p99 = 100
    figures.lengths(lens, step=1, max_new_tokens=120, path=Path("unused"))
    lines: dict[str, Any] = {str(line.get_label()): line.get_xdata() for line in drawn[0].axes[0].lines}
    assert {k: v[0] for k, v in lines.items()} == {
        "p50 = 51": pytest.approx(51.0),
        "p90 = 91": pytest.approx(91.0),
        "p99 = 100": pytest.approx(100.0),
        "limit = 120": 120,
    }
    assert sum(patch.get_height() for patch in drawn[0].axes[0].patches) == 101


def test_the_reward_curve_shows_training_and_validation(drawn: list[Figure]) -> None:
    figures.reward_curve([(1, 0.25), (2, 0.5)], [(0, 0.1)], path=Path("unused"))
    training, validation = drawn[0].axes[0].lines
    assert training.get_xydata().tolist() == [[1.0, 0.25], [2.0, 0.5]]
    assert validation.get_xydata().tolist() == [[0.0, 0.1]]


def test_figures_are_written_as_png(tmp_path: Path) -> None:
    path = tmp_path / "figures" / "lengths.png"
    figures.lengths(torch.tensor([3]), step=1, max_new_tokens=8, path=path)
    assert path.read_bytes().startswith(b"\x89PNG")

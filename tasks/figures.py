"""Figures of a run, drawn from its numbers: worker timeline, response lengths, reward curve.

matplotlib's figure objects are used directly, without pyplot: no global state, no window, and quick (about 0.1 s each).
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from tlt_core.types import ScoredBatch, WorkerSpan, WorkerState

_STATES = {
    WorkerState.BUSY: ("generating", "#3b75af"),
    WorkerState.IDLE: ("idle", "#d9d9d9"),
    WorkerState.TRAINING: ("training drafter", "#529e3f"),
    WorkerState.UPDATING: ("updating policy", "#ee8636"),
}
_SCORING = "#8d69b8"


def timeline(spans: Sequence[WorkerSpan], scored: ScoredBatch, *, step: int, path: Path) -> None:
    """Gantt chart of one step: a lane per worker, and one for the scoring of responses as they end."""
    origin_s = min((s.start_s for s in spans), default=0.0)
    workers = sorted({s.worker for s in spans})
    figure, axes = _figure(height=min(1.4 + 0.45 * len(workers), 10.0))
    scoring_s = [
        (end - origin_s, max(seconds, 0.02))
        for end, seconds in zip(scored.rollouts.finished_s_R.tolist(), scored.reward_s_R.tolist(), strict=True)
    ]
    axes.broken_barh(scoring_s, (-0.35, 0.7), color=_SCORING, label="scoring")
    for state, (label, color) in _STATES.items():
        for lane, worker in enumerate(workers, start=1):
            bars = [
                (s.start_s - origin_s, s.end_s - s.start_s) for s in spans if (s.worker, s.state) == (worker, state)
            ]
            if bars:
                axes.broken_barh(bars, (lane - 0.35, 0.7), color=color, label=label)
    axes.set_yticks(range(len(workers) + 1), ["reward", *(f"worker {w}" for w in workers)])
    axes.set_xlabel("seconds since the step began")
    axes.set_xlim(left=0)
    idle, busy = (sum(s.end_s - s.start_s for s in spans if s.state == k) for k in (WorkerState.IDLE, WorkerState.BUSY))
    axes.set_title(f"step {step}: workers idle for {idle / max(idle + busy, 1e-9):.0%} of the rollout")
    labels = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(labels.values(), labels.keys(), loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    _save(figure, path)


def lengths(response_lens_R: Tensor, *, step: int, max_new_tokens: int, path: Path) -> None:
    """Histogram of response lengths with the quantiles that show the tail."""
    values = response_lens_R.double()
    figure, axes = _figure(height=3.0)
    axes.hist(values.tolist(), bins=min(40, max(10, len(values) // 4)), color=_STATES[WorkerState.BUSY][1])
    for q, style in ((0.5, "-"), (0.9, "--"), (0.99, ":")):
        at = torch.quantile(values, q).item()
        axes.axvline(at, linestyle=style, color="black", label=f"p{q * 100:.0f} = {at:.0f}")
    axes.axvline(max_new_tokens, color="#c23b3b", linewidth=1, label=f"limit = {max_new_tokens}")
    axes.set_xlabel("tokens")
    axes.set_ylabel("responses")
    axes.set_title(f"step {step}: response lengths")
    axes.legend(frameon=False)
    _save(figure, path)


def reward_curve(points: Sequence[tuple[int, float]], accuracy: Sequence[tuple[int, float]], *, path: Path) -> None:
    """Mean reward of the rollouts, and validation accuracy where it was measured, over the steps."""
    figure, axes = _figure(height=3.0)
    axes.plot(
        [s for s, _ in points], [r for _, r in points], marker="o", color="#3b75af", label="mean reward, training"
    )
    if accuracy:
        axes.plot(
            [s for s, _ in accuracy],
            [a for _, a in accuracy],
            marker="s",
            linestyle="--",
            color="#ee8636",
            label="greedy accuracy, validation",
        )
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("reward")
    axes.legend(frameon=False)
    _save(figure, path)


def _figure(*, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)

"""Figures of a run: worker timeline, response lengths, speculation, reward curve.

They use matplotlib's figure objects without pyplot: no global state and no window.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from tlt_core.items.types import ScoredBatch, WorkerSpan, WorkerState
from tlt_core.rollout.engine import RoundTrace
from tlt_core.tuner.ledger import live_bucket

_STATES = {
    WorkerState.BUSY: ("generating", "#3b75af"),
    WorkerState.IDLE: ("idle", "#d9d9d9"),
    WorkerState.TRAINING: ("training drafter", "#529e3f"),
    WorkerState.UPDATING: ("updating policy", "#ee8636"),
    WorkerState.STREAMING: ("updating policy in idle time", "#f5b971"),
}
_SCORING = "#8d69b8"
_OFF = "#d9d9d9"
_ARMS = ("#529e3f", "#3b75af", "#ee8636", "#c23b3b", "#8d69b8", "#84584e", "#d57dbe", "#b3bb3a")


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
    """Histogram of response lengths, with quantiles."""
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


def speculation(rounds_by_worker: Sequence[Sequence[RoundTrace]], *, step: int, path: Path) -> None:
    """Live requests of each worker over time, coloured by strategy, with tokens per request and round.  Below: each
    strategy's share of the rounds, by live requests."""
    origin_s = min((r[0].end_s - r[0].seconds for r in rounds_by_worker if r), default=0.0)
    arms = sorted({str(t.report.strategy) for rounds in rounds_by_worker for t in rounds})
    colors = {arm: _OFF if arm == "off" else _ARMS[index % len(_ARMS)] for index, arm in enumerate(arms)}
    count = len(rounds_by_worker)
    figure = Figure(figsize=(8.0, 3.0 + 1.8 * count), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(count + 1, 1, squeeze=False)[:, 0]
    for worker, (axes, rounds) in enumerate(zip(panels, rounds_by_worker, strict=False)):
        axes.sharex(panels[0])
        for arm in arms:
            own = [t for t in rounds if str(t.report.strategy) == arm]
            bars = [_rectangle(t.end_s - t.seconds - origin_s, t.end_s - origin_s, t.report.live) for t in own]
            axes.add_collection(PolyCollection(bars, facecolors=colors[arm], label=arm))  # one artist, not thousands
        axes.autoscale_view()
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"worker {worker}\nlive requests")
        gain = axes.twinx()
        span = max(1, len(rounds) // 100)
        parts = [rounds[i : i + span] for i in range(0, len(rounds), span)]
        gain.plot(
            [p[0].end_s - origin_s for p in parts],
            [sum(t.tokens for t in p) / sum(t.report.live for t in p) for p in parts],
            color="black",
            linewidth=1,
            label="tokens a round",
        )
        gain.set_ylim(bottom=0)
        gain.set_ylabel("tokens per request\nand round")
    panels[0].set_title(f"step {step}: strategy of each round")
    panels[0].legend(loc="upper right", frameon=False, fontsize="small")
    panels[count - 1].set_xlabel("seconds since rollout began")
    _strategy_shares(panels[-1], [t for rounds in rounds_by_worker for t in rounds], colors)
    _save(figure, path)


def _strategy_shares(axes: Axes, rounds: Sequence[RoundTrace], colors: Mapping[str, str]) -> None:
    """One bar of height 1 for each range of live requests."""
    by_live: dict[str, Counter[str]] = defaultdict(Counter)
    for report in sorted((t.report for t in rounds), key=lambda report: report.live):
        by_live[live_bucket(report.live)][str(report.strategy)] += 1
    bottoms = [0.0] * len(by_live)
    for arm, color in colors.items():
        shares = [counts[arm] / counts.total() for counts in by_live.values()]
        axes.bar(range(len(by_live)), shares, bottom=bottoms, color=color, label=arm)
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    axes.set_xticks(range(len(by_live)), [f"{live}\n{counts.total()} rounds" for live, counts in by_live.items()])
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of rounds")
    axes.set_xlabel("live requests of a worker")


def _rectangle(left: float, right: float, height: float) -> list[tuple[float, float]]:
    return [(left, 0.0), (left, height), (right, height), (right, 0.0)]


def reward_curve(points: Sequence[tuple[int, float]], accuracy: Sequence[tuple[int, float]], *, path: Path) -> None:
    """Mean reward of the rollouts, and greedy validation reward, over the steps."""
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
            label="greedy reward, validation",
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

"""Figures of a run.  PNG files of a step: worker timeline, response lengths, speculation.  SVG text of curves over the
steps, for the report: reward, step time, acceptance, idle time, response lengths.

They use matplotlib's figure objects without pyplot: no global state and no window.
"""

import io
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from tlt_core.items.types import ScoredBatch, WorkerSpan, WorkerState
from tlt_core.rollout.engine import RoundTrace
from tlt_core.run.savings import Row
from tlt_core.tuner.ledger import live_bucket

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _GREY = "#3b75af", "#ee8636", "#529e3f", "#c23b3b", "#8d69b8", "#d9d9d9"
_STREAMED = "#f5b971"
_STATES = {
    WorkerState.BUSY: ("generating", _BLUE),
    WorkerState.IDLE: ("idle", _GREY),
    WorkerState.TRAINING: ("training drafter", _GREEN),
    WorkerState.UPDATING: ("updating policy", _ORANGE),
    WorkerState.STREAMING: ("updating policy in idle time", _STREAMED),
}
_ARMS = (_GREEN, _BLUE, _ORANGE, _RED, _PURPLE, "#84584e", "#d57dbe", "#b3bb3a")
_MARKED = 40  # steps up to which points have a marker


def timeline(spans: Sequence[WorkerSpan], scored: ScoredBatch, *, step: int, path: Path) -> None:
    """Gantt chart of one step: a lane per worker, and one for the scoring of responses as they end."""
    origin_s = min((s.start_s for s in spans), default=0.0)
    workers = sorted({s.worker for s in spans})
    figure, axes = _figure(height=min(1.4 + 0.45 * len(workers), 10.0))
    scoring_s = [
        (end - origin_s, max(seconds, 0.02))
        for end, seconds in zip(scored.rollouts.finished_s_R.tolist(), scored.reward_s_R.tolist(), strict=True)
    ]
    axes.broken_barh(scoring_s, (-0.35, 0.7), color=_PURPLE, label="scoring")
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
    axes.hist(values.tolist(), bins=min(40, max(10, len(values) // 4)), color=_BLUE)
    for q, style in ((0.5, "-"), (0.9, "--"), (0.99, ":")):
        at = torch.quantile(values, q).item()
        axes.axvline(at, linestyle=style, color="black", label=f"p{q * 100:.0f} = {at:.0f}")
    axes.axvline(max_new_tokens, color=_RED, linewidth=1, label=f"limit = {max_new_tokens}")
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
    colors = {arm: _GREY if arm == "off" else _ARMS[index % len(_ARMS)] for index, arm in enumerate(arms)}
    count = len(rounds_by_worker)
    figure = Figure(figsize=(8.0, 3.0 + 1.8 * count), layout="constrained")
    panels = figure.subplots(count + 1, 1, squeeze=False)[:, 0]
    for worker, (axes, rounds) in enumerate(zip(panels, rounds_by_worker, strict=False)):
        axes.sharex(panels[0])
        for arm in arms:
            own = [t for t in rounds if str(t.report.strategy) == arm]
            ends = [(t.end_s - t.seconds - origin_s, t.end_s - origin_s, t.report.live) for t in own]
            bars = [[(left, 0), (left, live), (right, live), (right, 0)] for left, right, live in ends]
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


_UNITS = {"reward": "reward", "acceptance": "tokens a request and round", "lengths": "tokens"}
_CURVES = {  # label, metric, color and style of each line
    "reward": [
        ("mean reward, training", "critic/rewards/mean", _BLUE, "-"),
        ("greedy reward, validation", "val-core/all/reward/greedy", _ORANGE, "--"),
        ("mean reward, validation", "val-core/all/reward/mean_at_", _GREEN, "--"),
    ],
    "acceptance": [
        ("in rollouts", "rollout/spec_accept_length", _BLUE, "-"),
        ("new drafter, held-back responses", "drafter/heldout_accept_length", _GREEN, "--"),
        ("drafter before it, same responses", "drafter/heldout_accept_length_before", _GREY, "--"),
    ],
    "lengths": [
        ("longest", "response_length/max", _RED, ":"),
        ("p99", "response_length/p99", _RED, "-"),
        ("p90", "response_length/p90", _ORANGE, "-"),
        ("median", "response_length/p50", _BLUE, "-"),
    ],
}


def reward_curve(rows: Sequence[Row], *, path: Path) -> None:
    """Mean reward in training, greedy and mean reward in validation, over the steps."""
    _save(_lines("reward", rows), path)


def curve(name: str, rows: Sequence[Row]) -> str:
    """reward, acceptance or lengths as SVG.  Like `step_time` and `idle_use`, empty where there is nothing to draw."""
    return _svg(_lines(name, rows))


def step_time(rows: Sequence[Row]) -> str:
    """Seconds of each step by phase, stacked up to the whole step."""
    phases = {
        "rollout": ("timing_s/gen", _BLUE),
        "update": ("timing_s/update_actor", _ORANGE),
        "validation": ("timing_s/testing", _PURPLE),
        "checkpoint": ("timing_s/save_checkpoint", _GREEN),
    }
    steps = [row for row in rows if "timing_s/step" in row]
    parts = {label: ([row.get(name, 0.0) for row in steps], color) for label, (name, color) in phases.items()}
    known = [sum(values) for values in zip(*(seconds for seconds, _ in parts.values()), strict=True)]
    rest = [max(row["timing_s/step"] - value, 0.0) for row, value in zip(steps, known, strict=True)]
    return _svg(_stacked(steps, {**parts, "everything else": (rest, _GREY)}, "seconds of a step"))


def idle_use(rows: Sequence[Row]) -> str:
    """Idle worker seconds of each step: used for the update, for the drafter, not used."""
    steps = [row for row in rows if "idle/idle_s" in row]
    streamed = [row.get("idle/streamed_s", 0.0) for row in steps]
    harvested = [max(row.get("idle/harvested_s", 0.0), s) for row, s in zip(steps, streamed, strict=True)]
    parts = {
        "for the update": (streamed, _STREAMED),
        "for the drafter": ([h - s for h, s in zip(harvested, streamed, strict=True)], _GREEN),
        "not used": ([max(row["idle/idle_s"] - h, 0.0) for row, h in zip(steps, harvested, strict=True)], _GREY),
    }
    return _svg(_stacked(steps, parts, "idle worker seconds"))


def _is(name: str, metric: str) -> bool:
    """metric: whole, or up to a number."""
    return name == metric or (metric.endswith("_") and name.removeprefix(metric).isdigit())


def _lines(name: str, rows: Sequence[Row]) -> Figure:
    figure, axes = _over_steps(_UNITS[name])
    for label, metric, color, style in _CURVES[name]:
        named = ((row["step"], name, row[name]) for row in rows for name in row if name.startswith(metric))
        points = [(step, value) for step, name, value in named if _is(name, metric) and math.isfinite(value)]
        if points:
            marker = "o" if len(points) <= _MARKED else None
            axes.plot(
                *zip(*points, strict=True), linestyle=style, marker=marker, markersize=4, color=color, label=label
            )
    return _with_legend(figure, axes)


def _stacked(rows: Sequence[Row], parts: Mapping[str, tuple[list[float], str]], unit: str) -> Figure:
    """Bars of the parts on each other; a part without seconds is left out."""
    figure, axes = _over_steps(unit)
    bottoms = [0.0] * len(rows)
    for label, (seconds, color) in parts.items():
        if any(seconds):
            axes.bar([row["step"] for row in rows], seconds, bottom=bottoms, width=0.8, color=color, label=label)
            bottoms = [bottom + value for bottom, value in zip(bottoms, seconds, strict=True)]
    return _with_legend(figure, axes)


def _figure(*, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.0, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _over_steps(unit: str) -> tuple[Figure, Axes]:
    figure, axes = _figure(height=2.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    return figure, axes


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    if axes.has_data():
        axes.set_ylim(bottom=min(axes.get_ylim()[0], 0.0))
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def _svg(figure: Figure) -> str:
    if not figure.axes[0].has_data():
        return ""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "tlt"}):  # the same run gives the same page
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()

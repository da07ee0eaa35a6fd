"""Curves of a run over its steps, as SVG: reward, step time, acceptance, idle time, response lengths.

In: rows of `metrics.jsonl`.  Out: SVG text; empty where no row has a value to draw.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tlt_core.run.savings import Row

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _GREY = "#3b75af", "#ee8636", "#529e3f", "#c23b3b", "#8d69b8", "#d9d9d9"
_REST = "everything else"
_MARKED = 40  # steps up to which points have a marker


class Line(NamedTuple):
    """Line("p99", "response_length/p99", "#c23b3b")"""

    label: str
    metric: str
    color: str
    style: str = "-"


def reward(rows: Sequence[Row]) -> str:
    """Mean reward in training, and greedy reward in validation."""
    found = (
        Line("mean reward, training", "critic/rewards/mean", _BLUE),
        Line("greedy reward, validation", "val-core/all/reward/greedy", _ORANGE, "--"),
    )
    return _lines(rows, found, "reward")


def acceptance(rows: Sequence[Row]) -> str:
    """Acceptance length in rollouts, and of new drafters on held-back responses."""
    found = (
        Line("in rollouts", "rollout/spec_accept_length", _BLUE),
        Line("new drafter, held-back responses", "drafter/heldout_accept_length", _GREEN, "--"),
        Line("drafter before it, same responses", "drafter/heldout_accept_length_before", _GREY, "--"),
    )
    return _lines(rows, found, "tokens a request and round")


def lengths(rows: Sequence[Row]) -> str:
    """Quantiles of the response lengths."""
    found = (
        Line("longest", "response_length/max", _RED, ":"),
        Line("p99", "response_length/p99", _RED),
        Line("p90", "response_length/p90", _ORANGE),
        Line("median", "response_length/p50", _BLUE),
    )
    return _lines(rows, found, "tokens")


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
    return _stacked(steps, {**parts, _REST: (rest, _GREY)}, "seconds of a step")


def idle_use(rows: Sequence[Row]) -> str:
    """Idle worker seconds of each step: used for the update, for the drafter, not used."""
    steps = [row for row in rows if "idle/idle_s" in row]
    streamed = [row.get("idle/streamed_s", 0.0) for row in steps]
    harvested = [max(row.get("idle/harvested_s", 0.0), s) for row, s in zip(steps, streamed, strict=True)]
    parts = {
        "for the update": (streamed, "#f5b971"),
        "for the drafter": ([h - s for h, s in zip(harvested, streamed, strict=True)], _GREEN),
        "not used": ([max(row["idle/idle_s"] - h, 0.0) for row, h in zip(steps, harvested, strict=True)], _GREY),
    }
    return _stacked(steps, parts, "idle worker seconds")


def _lines(rows: Sequence[Row], lines: Sequence[Line], unit: str) -> str:
    figure, axes = _figure()
    for label, metric, color, style in lines:
        points = [(row["step"], row[metric]) for row in rows if metric in row and math.isfinite(row[metric])]
        if points:
            marker = "o" if len(points) <= _MARKED else None
            axes.plot(
                *zip(*points, strict=True), linestyle=style, marker=marker, markersize=4, color=color, label=label
            )
    axes.set_ylabel(unit)
    return _svg(figure, axes) if axes.lines else ""


def _stacked(rows: Sequence[Row], parts: Mapping[str, tuple[list[float], str]], unit: str) -> str:
    """Bars of the parts on each other; a part without seconds is left out."""
    if not any(any(seconds) for seconds, _ in parts.values()):
        return ""
    figure, axes = _figure()
    bottoms = [0.0] * len(rows)
    for label, (seconds, color) in parts.items():
        if any(seconds):
            axes.bar([row["step"] for row in rows], seconds, bottom=bottoms, width=0.8, color=color, label=label)
            bottoms = [bottom + value for bottom, value in zip(bottoms, seconds, strict=True)]
    axes.set_ylabel(unit)
    return _svg(figure, axes)


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.0, 2.8), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    return figure, axes


def _svg(figure: Figure, axes: Axes) -> str:
    axes.set_ylim(bottom=min(axes.get_ylim()[0], 0.0))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "tlt"}):  # the same run gives the same page
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()

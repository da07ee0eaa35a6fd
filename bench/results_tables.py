"""The rows of a report as Markdown tables, for `bench.results`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]

_LIVE = ("1 live", "2 live", "3-4 live", "5-8 live", "above")
_CHOSEN: dict[str, tuple[str, ...]] = {  # of rows with more figures than a page has room for
    "rollout": (
        "tokens_per_s",
        "ratio",
        "tail_tokens_per_s",
        "tokens_per_request_round",
        "active_frac",
        *(f"{live}: tokens_per_s" for live in _LIVE),
        "differing",
    ),
    "e2e": (
        "timing_s/gen",
        "timing_s/update_actor",
        "timing_s/step",
        "over_plain_in_all",
        "perf/rollout_share",
        "rollout/spec_accept_length",
        "idle/idle_s",
        "idle/harvested_s",
        "idle/streamed_s",
        "idle/streamed_share",
        "same_steps",
    ),
    "idle": (
        "static_by_round",
        "static_by_round_error",
        "trained_by_round",
        "trained_by_round_error",
        "base_by_round",
        "base_trained_by_round",
        "ngram_by_round",
        "static_or_ngram_by_round",
        "over_static/timing_s/gen",
        "over_static/timing_s/step",
    ),
}


def alike(report: Report) -> list[list[Mapping[str, Any]]]:
    """Rows that share a table: those with the chosen figures, and those with the same fields."""
    chosen = set(_CHOSEN.get(kind(report), ()))
    tables: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in report.get("rows", ()):
        is_chosen = len(chosen & row.keys()) >= 3
        tables.setdefault(("chosen",) if is_chosen else tuple(row), []).append(row)
    return list(tables.values())


def markdown(rows: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    """A Markdown table.  What is the same in all rows stands in a line above it.  A lone row stands upright."""
    if len(rows) == 1:
        return ["| figure | value |", "|---|---|", *(f"| {escape(f)} | {cell(v)} |" for f, v in rows[0].items())]
    fields = list(dict.fromkeys(field for row in rows for field in row))
    labels = [field for field in fields if any(isinstance(row.get(field), str) for row in rows)]
    chosen = [field for field in _CHOSEN.get(kind, ()) if field in fields]
    figures = chosen if len(chosen) >= 3 else [field for field in fields if field not in labels]
    same = [field for field in labels + figures if all(row.get(field) == rows[0].get(field) for row in rows)]
    columns = [field for field in labels + figures if field not in same]
    lines = [f"In all rows: {', '.join(f'`{f}` {cell(rows[0].get(f))}' for f in same)}.", ""] if same else []
    lines += [f"| {' | '.join(map(escape, columns))} |", "|---" * len(columns) + "|"]
    return [*lines, *(f"| {' | '.join(cell(row.get(field)) for field in columns)} |" for row in rows)]


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping) and "median" in value:
        median, low, high = (number(value[name]) for name in ("median", "min", "max"))
        return median if low == high else f"{median} ({low}-{high})"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return escape(str(value))


def number(value: float) -> str:
    """Three digits behind the point of ratios, fewer of larger numbers."""
    size = abs(value)
    text = f"{value:.3f}" if size < 10 else f"{value:.1f}" if size < 1000 else f"{value:.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def kind(report: Report) -> str:
    """The word behind `tlt bench`, or a deployment's parameter."""
    found = re.search(r"tlt bench (\w+)|benchmark=(\w+)", report["command"])
    return "" if found is None else found[1] or found[2]


def escape(text: str) -> str:
    return text.replace("|", "\\|")

"""A run in a few figures, to compare runs: last values, curves over the steps, response lengths.

In: a run's folder (`metrics.jsonl`, `steps/`).  Out: dictionaries and rows for JSON and CSV.
"""

import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tlt_core.items import store
from tlt_core.items.metrics import present_name

CURVES = {  # column: metric
    "accept_length": "rollout/spec_accept_length",
    "accept_length_requests": "rollout/spec_accept_length_requests",
    "spec_active_frac": "rollout/spec_active_frac",
    "heldout_accept_length": "drafter/heldout_accept_length",
    "reward": "critic/rewards/mean",
    "validation": "val-core/all/reward/greedy",
    "length_p50": "response_length/p50",
    "length_p99": "response_length/p99",
    "tokens_per_s": "perf/rollout_tokens_per_s",
    "idle_ratio": "idle/idle_ratio",
    "step_s": "timing_s/step",
}
_AT_THE_END = ("reward", "validation", "accept_length", "accept_length_requests", "length_p50", "length_p99")
_OVER_STEPS = ("accept_length", "spec_active_frac", "tokens_per_s", "idle_ratio", "step_s")
_NUM_BINS = 20


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    """What the run logged, one row a step; empty before its first step.  Raises StoreError."""
    rows = store.read_json_lines(run_dir / "metrics.jsonl")
    return [{present_name(name): value for name, value in row.items()} for row in rows]


def last_step(run_dir: Path) -> int | None:
    """The last RL step that the run logged; None: it logged none."""
    rows = rows_of(run_dir)
    return int(rows[-1]["step"]) if rows else None


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """`last`: latest values of the figures that a run is judged by.  `median`: over the steps, of the others."""
    trained = [row for row in rows if row["step"] > 0]
    known = {column: [row[name] for row in rows if name in row] for column, name in CURVES.items()}
    over = {column: [row[CURVES[column]] for row in trained if CURVES[column] in row] for column in _OVER_STEPS}
    return {
        "steps": len(trained),
        "last": {column: known[column][-1] for column in _AT_THE_END if known[column]},
        "median": {column: statistics.median(values) for column, values in over.items() if values},
    }


def curves(rows: Sequence[Mapping[str, float]]) -> list[dict[str, float | str]]:
    return [
        {"step": int(row["step"])} | {column: row.get(name, "") for column, name in CURVES.items()}
        for row in rows
        if row["step"] > 0
    ]


def learning(rows: Sequence[Mapping[str, float]], *, samples: int) -> str:
    """How the validation reward has changed, in one line; empty before the second validation.  samples: of a prompt, 0:
    greedy.  The errors of both ends count in full, though they are of the same prompts."""
    mean = f"val-core/all/reward/mean_at_{samples}" if samples else "val-core/all/reward/greedy"
    error = f"val-core/all/reward/error_at_{samples}"
    found = [row for row in rows if mean in row]
    if len(found) < 2:
        return ""
    first, last = found[0], found[-1]
    sure = f" +-{math.hypot(first[error], last[error]):.3f}" if error in first and error in last else ""
    change = f"{first[mean]:.3f} -> {last[mean]:.3f} ({last[mean] - first[mean]:+.3f}{sure})"
    return f"validation reward {change}, {'sampled' if samples else 'greedy'}, step {first['step']} to {last['step']}"


def length_histogram(run_dir: Path, *, max_new_tokens: int) -> list[dict[str, int]]:
    """Responses by length, for the first and the last step whose rollouts are kept.

    Columns: tokens, the upper end of a bin; first and last, how many responses of these steps are in it.  The bins
    depend on `max_new_tokens` alone, so runs can be compared.
    """
    width = -(-max_new_tokens // _NUM_BINS)
    num_bins = -(-max_new_tokens // width)
    kept = sorted((run_dir / "steps").glob("*/scored.safetensors"))
    if not kept:
        return []
    counts_B = []
    for path in (kept[0], kept[-1]):
        bins_R = (store.load_scored(path).rollouts.response_lens_R - 1).clamp(min=0) // width
        counts_B.append(torch.bincount(bins_R, minlength=num_bins).tolist())
    return [
        {"tokens": (index + 1) * width, "first": first, "last": last}
        for index, (first, last) in enumerate(zip(*counts_B, strict=True))
    ]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=1) + "\n"
    store.write_atomically(path, lambda partial: partial.write_text(text))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:

    def write(partial: Path) -> None:
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    store.write_atomically(path, write)

"""Costs of a run's steps, from what it recorded: response times, metrics.

Rates: a response of L tokens was live while its worker had n(t) live requests, so L = sum over bins of (seconds in the
bin) x (rate of the bin).  All responses together determine the rates, by least squares.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tlt_core.items.store import load_scored
from tlt_core.items.types import RolloutBatch
from tlt_core.run.plan.simulate import BINS, Costs, Rates, bin_of

_LEAST_S = 1.0  # of a bin over all responses: with less, the neighbour's rate is taken


class PlanError(ValueError):
    """A run that cannot be planned from.  The text says what is missing."""


class Recorded(NamedTuple):
    """A run's own work and costs."""

    groups: list[list[list[int]]]  # response lengths, by step and prompt, in the order of sampling
    rates: Rates
    costs: Costs
    step_s: float  # means over the steps
    rollout_s: float


def recorded(run_dir: Path, rows: Sequence[Mapping[str, float]], *, workers: int) -> Recorded:
    """rows: of `metrics.jsonl`.  The first step of each attempt warms up and is left out where others remain.

    Raises PlanError.
    """
    rows = [row for row in rows if row["step"] > 0 and "timing_s/step" in row]
    firsts = {
        min(int(r["step"]) for r in rows if r["training/resume_attempt"] == attempt) for attempt in _attempts(rows)
    }
    rows = [row for row in rows if int(row["step"]) not in firsts] or rows
    batches = {}
    for row in rows:
        file = run_dir / "steps" / f"{int(row['step']):06d}" / "scored.safetensors"
        if file.is_file():
            batches[int(row["step"])] = load_scored(file).rollouts
    rows = [row for row in rows if int(row["step"]) in batches]
    if not rows:
        raise PlanError(f"{run_dir}/steps has no scored responses of a recorded step: name a run whose folder is whole")
    groups = [_groups(batches[int(row["step"])]) for row in rows]
    return Recorded(
        groups,
        rates=fit_rates(list(batches.values()), workers=workers),
        costs=_costs(rows, list(batches.values()), workers=workers),
        step_s=statistics.fmean(row["timing_s/step"] for row in rows),
        rollout_s=statistics.fmean(row["timing_s/gen"] for row in rows),
    )


def fit_rates(batches: Sequence[RolloutBatch], *, workers: int) -> Rates:
    """Tokens a second of a request by the number of live ones."""
    seconds_RB: list[list[float]] = []
    lengths_R: list[float] = []
    for batch in batches:
        for worker in range(workers):
            own = (batch.worker_R == worker).nonzero().flatten().tolist()
            spans = [(float(batch.started_s_R[i]), float(batch.finished_s_R[i])) for i in own]
            seconds_RB += _seconds_by_bin(spans)
            lengths_R += [float(batch.response_lens_R[i]) for i in own]
    seconds, lengths = torch.tensor(seconds_RB, dtype=torch.float64), torch.tensor(lengths_R, dtype=torch.float64)
    known = [b for b in range(len(BINS)) if float(seconds[:, b].sum()) >= _LEAST_S] or [int(seconds.sum(0).argmax())]
    merged = torch.zeros(len(seconds), len(known), dtype=torch.float64)
    nearest = [min(range(len(known)), key=lambda k: abs(known[k] - b)) for b in range(len(BINS))]
    for b in range(len(BINS)):
        merged[:, nearest[b]] += seconds[:, b]
    fitted = torch.linalg.lstsq(merged, lengths[:, None]).solution[:, 0]
    floor = float(lengths.sum() / seconds.sum()) / 10  # noise must not make a rate zero or negative
    return Rates(tuple(max(float(fitted[k]), floor) for k in nearest))


def _seconds_by_bin(spans: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Of each response: its live seconds by the number of live responses on its worker."""
    times = sorted({t for span in spans for t in span})
    result = [[0.0] * len(BINS) for _ in spans]
    for begin_s, end_s in itertools.pairwise(times):
        live = [i for i, (start, end) in enumerate(spans) if start <= begin_s and end >= end_s]
        for i in live:
            result[i][bin_of(len(live))] += end_s - begin_s
    return result


def _costs(rows: Sequence[Mapping[str, float]], batches: Sequence[RolloutBatch], *, workers: int) -> Costs:
    """Update: seconds over tokens that were not streamed, by least squares with a constant where steps differ."""
    tokens = [float(b.response_lens_R.sum()) for b in batches]
    left = [n * (1 - row.get("bubble/streamed_share", 0.0)) for n, row in zip(tokens, rows, strict=True)]
    update_s = [row["timing_s/update_actor"] for row in rows]
    fixed_s = statistics.fmean(row.get("timing_s/update_weights", 0.0) for row in rows)
    decoded_s = [float(b.finished_s_R.max() - b.started_s_R.min()) for b in batches]
    gen_s = [row["timing_s/gen"] for row in rows]
    rest_s = [row["timing_s/step"] - row["timing_s/gen"] - row["timing_s/update_actor"] for row in rows]
    return Costs(
        update_token_s=workers * sum(update_s) / max(sum(left), 1.0),
        update_fixed_s=fixed_s,
        rollout_fixed_s=max(statistics.fmean(g - d for g, d in zip(gen_s, decoded_s, strict=True)), 0.0),
        other_s=max(statistics.fmean(rest_s) - fixed_s, 0.0),
    )


def _groups(batch: RolloutBatch) -> list[list[int]]:
    """Response lengths by prompt, in the order in which prompts began."""
    by_prompt: dict[int, list[int]] = {}
    began: dict[int, float] = {}
    for prompt, length, start in zip(
        batch.prompt_ids_R.tolist(), batch.response_lens_R.tolist(), batch.started_s_R.tolist(), strict=True
    ):
        by_prompt.setdefault(prompt, []).append(length)
        began[prompt] = min(start, began.get(prompt, start))
    return [by_prompt[prompt] for prompt in sorted(by_prompt, key=lambda p: began[p])]


def _attempts(rows: Sequence[Mapping[str, float]]) -> set[float]:
    return {row["training/resume_attempt"] for row in rows}

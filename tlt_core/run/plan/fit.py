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
from tlt_core.items.types import RolloutBatch, ScoredBatch
from tlt_core.run.plan.errors import PlanError
from tlt_core.run.plan.simulate import BINS, Costs, Group, Rates, bin_of, work

_LEAST_S = 1.0  # of a bin over all responses: with less, the neighbour's rate is taken


class Recorded(NamedTuple):
    """A run's own work and costs."""

    groups: list[list[Group]]  # by step, in the order of sampling
    rates: Rates
    costs: Costs
    step_s: float  # means over the steps
    rollout_s: float


def recorded(run_dir: Path, rows: Sequence[Mapping[str, float]], *, workers: int, skips: bool) -> Recorded:
    """rows: of `metrics.jsonl`.  The first step of each attempt warms up and is left out where others remain.
    skips: responses with advantage 0 get no gradient.

    Raises PlanError.
    """
    rows = [row for row in rows if row["step"] > 0 and "timing_s/step" in row]
    firsts = {
        min(int(r["step"]) for r in rows if r["training/resume_attempt"] == attempt) for attempt in _attempts(rows)
    }
    rows = [row for row in rows if int(row["step"]) not in firsts] or rows
    steps: dict[int, ScoredBatch] = {}
    for row in rows:
        file = run_dir / "steps" / f"{int(row['step']):06d}" / "scored.safetensors"
        if file.is_file():
            steps[int(row["step"])] = load_scored(file)
    rows = [row for row in rows if int(row["step"]) in steps]
    if not rows:
        raise PlanError(f"{run_dir}/steps has no scored responses of a recorded step: name a run whose folder is whole")
    groups, batches = [_groups(step, skips=skips) for step in steps.values()], [s.rollouts for s in steps.values()]
    return Recorded(
        groups,
        rates=fit_rates(batches, workers=workers),
        costs=_costs(rows, batches, groups, workers=workers),
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


def _costs(
    rows: Sequence[Mapping[str, float]],
    batches: Sequence[RolloutBatch],
    groups: Sequence[Sequence[Group]],
    *,
    workers: int,
) -> Costs:
    """Update: seconds over the work that was not streamed."""
    streamed = [
        row.get("bubble/streamed_share", 0.0) * sum(g.trained for g in own)
        for row, own in zip(rows, groups, strict=True)
    ]
    left = [work(own) - done for own, done in zip(groups, streamed, strict=True)]
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


def _groups(step: ScoredBatch, *, skips: bool) -> list[Group]:
    """In the order in which prompts began."""
    batch = step.rollouts
    rows: dict[int, list[int]] = {}
    for row, prompt in enumerate(batch.prompt_ids_R.tolist()):
        rows.setdefault(prompt, []).append(row)
    began_s, lengths = batch.started_s_R.tolist(), batch.response_lens_R.tolist()
    is_trained = [not skips or advantage != 0 for advantage in step.advantages_R.tolist()]

    def group(own: list[int]) -> Group:
        prompt = int(batch.prompt_lens_R[own[0]])  # once in each pass: siblings share it
        trained = sum(lengths[r] for r in own if is_trained[r])
        measured = sum(lengths[r] for r in own if not is_trained[r])
        return Group(
            tuple(lengths[r] for r in own),
            trained=trained + prompt * bool(trained),
            measured=measured + prompt * bool(measured),
        )

    return [group(own) for own in sorted(rows.values(), key=lambda own: min(began_s[r] for r in own))]


def _attempts(rows: Sequence[Mapping[str, float]]) -> set[float]:
    return {row["training/resume_attempt"] for row in rows}

"""Driver's side of drafter training: which of the workers' candidates is published, and what is reported of it.

Workers train apart, from the weights in use.  A candidate is what a worker has trained and measured on its canary.

    none measured            nothing happens
    one, not worse           it is published as it is
    several                  their average, weighted by the tokens they trained on, is measured on all canaries first
    worse than in use        refused, with the reason

Worse is what accepts less on held-back responses by more than chance explains (`spot/comparison`).  The other error,
to refuse what is as good, is the costlier one: the next steps train on from there, and a drafter that is refused for
nothing goes stale.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tlt_core.cluster.worker import DrafterPublished, GenerateReport
from tlt_core.rollout.engine import RoundTrace
from tlt_core.spot.bubble import bubble
from tlt_core.spot.comparison import Comparison
from tlt_core.spot.coordinator import PhaseReport
from tlt_core.spot.payoff import PhaseOutcome
from tlt_core.spot.slowdown import TimedRound, beside_s, pace
from tlt_core.spot_training import SpotResult
from tlt_core.types import WorkerState


class Decision(NamedTuple):
    """What is done with the candidates."""

    shares: tuple[float, ...]  # of each worker in what is published; all 0: nothing is
    measured: Comparison | None  # of what is published; None: nobody has measured the sum yet
    refused: bool  # there were candidates, all worse than the drafter in use
    reason: str


def decide(results: Sequence[SpotResult], *, errors: float) -> Decision:
    """results: of all workers, by rank.  errors: see `Comparison.is_worse`."""
    nothing = (0.0,) * len(results)
    canaries = [r.canary for r in results if r.canary is not None]
    if not canaries:
        trained = sum(r.rows for r in results)
        return Decision(
            nothing,
            None,
            False,
            "not trained" if not trained else "no candidate was measured: too little time, or nothing held back",
        )
    fit = [r.canary is not None and not r.canary.is_worse(errors=errors) for r in results]
    fitting = [r.canary for r, fits in zip(results, fit, strict=True) if fits]
    if not fitting:
        return Decision(nothing, None, True, why_refused(max(canaries, key=lambda c: c.gain)))
    weights = [max(r.rows, 1) if fits else 0 for r, fits in zip(results, fit, strict=True)]
    shares = tuple(weight / sum(weights) for weight in weights)
    return Decision(shares, fitting[0] if len(fitting) == 1 else None, False, "published")


def published_dir(run_dir: Path, step: int) -> Path:
    """Folder of the drafter that was published in a step, where `drafter.spot.keep_published` keeps it."""
    return run_dir / "drafters" / f"{step:06d}-eagle3"


def why_refused(canary: Comparison) -> str:
    """One line for the log."""
    return (
        f"refused: acceptance length {canary.candidate_length:.3f} on {canary.starts:.0f} held-back tokens of "
        f"{canary.groups:.0f} prompts, {canary.used_length:.3f} in use; the difference is {canary.gain:.3f} "
        f"+- {canary.error:.3f}"
    )


def spot_metrics(
    results: Sequence[SpotResult], *, decision: Decision, published: Sequence[DrafterPublished], version: int, lag: int
) -> dict[str, float]:
    """`drafter/*` of one step.  published: empty when nothing was.  lag: policy versions since the one whose responses
    the drafter in use has learnt from last."""
    rows = sum(r.rows for r in results)
    metrics = {
        "drafter/trained_tokens": float(rows),
        "drafter/optimizer_steps": float(sum(r.steps for r in results)),
        "drafter/optimizer_steps_total": float(sum(r.steps_total for r in results)),
        "drafter/buffer_tokens": float(sum(r.buffer_tokens for r in results)),
        "drafter/buffer_sequences": float(sum(r.buffer_sequences for r in results)),
        "drafter/version": float(version),
        "drafter/policy_version_lag": float(lag),
        "drafter/rejected": float(decision.refused or any(not p.accepted for p in published)),
    }
    if rows:
        metrics["drafter/loss"] = sum(r.loss * r.rows for r in results) / rows
        metrics["drafter/overlap"] = sum(r.overlap * r.rows for r in results) / rows
        metrics["drafter/acc_top1"] = sum(r.top1 * r.rows for r in results) / rows
    verified = published[0].canary if published else None
    canary = _total(r.canary for r in results) if verified is None else verified
    if canary.starts:
        metrics["drafter/canary_accept_length"] = canary.candidate_length
        metrics["drafter/canary_accept_length_before"] = canary.used_length
        metrics["drafter/canary_tokens"] = canary.starts
        if canary.groups > 1:
            metrics["drafter/canary_error"] = canary.error
    return metrics


def _total(canaries: Iterable[Comparison | None]) -> Comparison:
    total = Comparison()
    for canary in canaries:
        total = total if canary is None else total.plus(canary)
    return total


def bubble_metrics(phases: Sequence[PhaseReport]) -> dict[str, float]:
    """`bubble/*` of a step's rollout phases (dynamic sampling makes several); the times add up."""
    parts = [
        bubble(p.spans, over_s=p.over_s, preempt_s=p.preempt_s, idle_by_reason_s=p.idle_by_reason_s) for p in phases
    ]
    return merge(parts, sum(s.end_s - s.start_s for p in phases for s in p.spans))


def merge(parts: Sequence[Mapping[str, float]], worker_s: float) -> dict[str, float]:
    """Sums of seconds; the worst pre-emption; ratios anew.  worker_s: of all workers in the phases."""
    names = dict.fromkeys(name for part in parts for name in part)
    totals = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    if "bubble/preempt_ms_p95" in totals:
        totals["bubble/preempt_ms_p95"] = max(part.get("bubble/preempt_ms_p95", 0.0) for part in parts)
    if "bubble/harvested_ratio" in totals:
        totals["bubble/harvested_ratio"] = 1 - totals["bubble/overlap_headroom_s"] / totals["bubble/long_idle_s"]
    return totals | {"bubble/idle_ratio": totals["bubble/idle_s"] / max(worker_s, 1e-9)}


def outcome_of(
    phase: PhaseReport, rounds: Sequence[Sequence[RoundTrace]], results: Sequence[SpotResult]
) -> PhaseOutcome:
    """What `payoff` learns from one rollout phase.  rounds: by worker."""
    canary = _total(r.canary for r in results)
    known = canary.starts > 0
    timed = {
        worker: [TimedRound((r.report.strategy, r.report.live), r.end_s, r.seconds) for r in own]
        for worker, own in enumerate(rounds)
    }
    return PhaseOutcome(
        rollout_s=phase.over_s - min(s.start_s for s in phase.spans),
        idle_s=beside_s(phase.spans, (WorkerState.IDLE, WorkerState.TRAINING), until_s=phase.over_s),
        trained_s=beside_s(phase.spans, (WorkerState.TRAINING,), until_s=phase.over_s),
        pace=pace(timed, phase.spans),
        used_length=canary.used_length if known else None,
        gain=canary.gain / canary.used_length if known else None,
    )


def results_of(reports: Sequence[GenerateReport]) -> list[SpotResult]:
    """The workers' training, by rank; empty when none trains a drafter."""
    return [report.spot for report in reports if report.spot is not None]


def origin_of(first: Path, *, run: str, steps: int) -> dict[str, Any]:
    """What is written beside a drafter that was trained in idle time: its run, and what is known of the first one.

    That one's own measurements do not hold for it any more, so they stay below `first`.
    """
    told = first / "drafter.json"
    known = json.loads(told.read_text(encoding="utf-8")) if told.is_file() else {}
    return {"run": run, "steps": steps, "first": known.get("first", known)}

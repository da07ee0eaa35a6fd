"""Driver's side of drafter training: which of the workers' candidates is published, and what is reported of it.

Workers train apart, from the weights in use.  Each tries its candidate on its own held-back responses
(`idle_training/candidate`).

    no trial                 nothing happens
    one, not worse           it is published as it is
    several                  their average, weighted by the tokens they trained on, is tried on all workers first
    worse than in use        refused, with the reason

A candidate is worse when it gets fewer tokens accepted on held-back responses, by more than chance explains
(`idle_training/comparison`).  Wrong refusals cost more than wrong releases, because a drafter that is not replaced goes
stale.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tlt_core.cluster.drafting import DrafterPublished
from tlt_core.cluster.messages import GenerateReport
from tlt_core.idle_training.comparison import Comparison
from tlt_core.idle_training.coordinator import PhaseReport, bubble
from tlt_core.idle_training.training import IdleTrainingResult
from tlt_core.items.store import read_json


class Decision(NamedTuple):
    """What is done with the candidates."""

    shares: tuple[float, ...]  # of each worker in what is published; all 0: nothing is
    measured: Comparison | None  # trial of what is published; None: nobody has tried the sum yet
    refused: bool  # there were candidates, all worse than the drafter in use
    reason: str


def decide(results: Sequence[IdleTrainingResult], *, errors: float) -> Decision:
    """results: of all workers, by rank.  errors: see `Comparison.is_worse`."""
    nothing = (0.0,) * len(results)
    trials = [r.trial for r in results if r.trial is not None]
    if not trials:
        trained = sum(r.rows for r in results)
        return Decision(
            nothing,
            None,
            False,
            "not trained" if not trained else "no candidate was measured: too little time, or nothing held back",
        )
    fit = [r.trial is not None and not r.trial.is_worse(errors=errors) for r in results]
    fitting = [r.trial for r, fits in zip(results, fit, strict=True) if fits]
    if not fitting:
        return Decision(nothing, None, True, why_refused(max(trials, key=lambda t: t.gain)))
    weights = [max(r.rows, 1) if fits else 0 for r, fits in zip(results, fit, strict=True)]
    shares = tuple(weight / sum(weights) for weight in weights)
    return Decision(shares, fitting[0] if len(fitting) == 1 else None, False, "published")


def published_dir(run_dir: Path, step: int) -> Path:
    """Folder of the drafter that was published in a step, where `drafter.idle_training.keep_published` keeps it."""
    return run_dir / "drafters" / f"{step:06d}-eagle3"


def why_refused(trial: Comparison) -> str:
    """One line for the log."""
    return (
        f"refused: acceptance length {trial.candidate_length:.3f} on {trial.starts:.0f} held-back tokens of "
        f"{trial.groups:.0f} prompts, {trial.used_length:.3f} in use; the difference is {trial.gain:.3f} "
        f"+- {trial.error:.3f}"
    )


def idle_training_metrics(
    results: Sequence[IdleTrainingResult],
    *,
    decision: Decision,
    published: Sequence[DrafterPublished],
    version: int,
    lag: int,
) -> dict[str, float]:
    """`drafter/*` of one step.  published: empty when nothing was.  lag: `drafter/policy_version_lag`."""
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
    of_average = published[0].trial if published else None
    trial = _total(r.trial for r in results) if of_average is None else of_average
    if trial.starts:
        metrics["drafter/heldout_accept_length"] = trial.candidate_length
        metrics["drafter/heldout_accept_length_before"] = trial.used_length
        metrics["drafter/heldout_tokens"] = trial.starts
        if trial.groups > 1:
            metrics["drafter/heldout_error"] = trial.error
    return metrics


def _total(trials: Iterable[Comparison | None]) -> Comparison:
    total = Comparison()
    for trial in trials:
        total = total if trial is None else total.plus(trial)
    return total


def bubble_metrics(phases: Sequence[PhaseReport]) -> dict[str, float]:
    """`idle/*` of a step: its rollout phases, several with dynamic sampling, and waiting for rewards."""
    return merge([bubble(p) for p in phases], sum(s.end_s - s.start_s for p in phases for s in p.spans))


def merge(parts: Sequence[Mapping[str, float]], worker_s: float) -> dict[str, float]:
    """Add the seconds of several phases up; recompute the ratios.  worker_s: of all workers in the phases."""
    names = dict.fromkeys(name for part in parts for name in part)
    totals = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    if "idle/preempt_ms_p95" in totals:
        totals["idle/preempt_ms_p95"] = max(part.get("idle/preempt_ms_p95", 0.0) for part in parts)
    if "idle/harvested_ratio" in totals:
        used_s = (part["idle/long_idle_s"] * part.get("idle/harvested_ratio", 0.0) for part in parts)
        totals["idle/harvested_ratio"] = sum(used_s) / totals["idle/long_idle_s"]
    return totals | {"idle/idle_ratio": totals["idle/idle_s"] / max(worker_s, 1e-9)}


def results_of(reports: Sequence[GenerateReport]) -> list[IdleTrainingResult]:
    """The workers' training, by rank; empty when none trains a drafter."""
    return [report.idle_training for report in reports if report.idle_training is not None]


def origin_of(first: Path, *, run: str, steps: int) -> dict[str, Any]:
    """Content of `drafter.json` for a drafter that was trained in idle time: its run, and the first drafter's file.

    The first drafter's measurements do not hold for the trained one, so they stay under `first`.  Raises StoreError.
    """
    told = first / "drafter.json"
    remedy = "remove it: only the first drafter's origin is lost"
    known = read_json(told, remedy=remedy) if told.is_file() else {}
    return {"run": run, "steps": steps, "first": known.get("first", known)}

"""The metrics of one step, and the worker timeline.  `items/metrics` declares each name, its unit and its meaning."""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tlt_core.cluster.messages import GenerateReport
from tlt_core.grpo.advantage import informative
from tlt_core.items.types import FinishReason, RolloutBatch, ScoredBatch, ScoreStatus, WorkerSpan

_DEEPEST = 8  # draft positions whose acceptance is reported
_DRIVER_PHASES = ("publish_drafter", "reward", "ref", "update_weights", "save_checkpoint", "testing", "gen_plain")


class StepMetrics:
    """Collects the metrics and worker spans of one step, in the driver; `clear` begins the next step."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self.spans: list[WorkerSpan] = []

    def clear(self) -> None:
        self._values, self.spans = {}, []

    def log(self, metrics: Mapping[str, float]) -> None:
        self._values.update({name: float(value) for name, value in metrics.items()})

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's wall time to `timing_s/name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            total_s = self._values.get(f"timing_s/{name}", 0.0) + time.perf_counter() - started
            self._values[f"timing_s/{name}"] = total_s

    def values(self) -> dict[str, float]:
        return dict(self._values)


def rollout_metrics(batch: RolloutBatch, *, seconds: float) -> dict[str, float]:
    """Response lengths (the tail), finish reasons and throughput of one step's rollouts."""
    lengths = batch.response_lens_R.double()
    p50, p90, p99 = (torch.quantile(lengths, q).item() for q in (0.5, 0.9, 0.99))
    total = batch.sampled_T.sum().item()
    digest = hashlib.sha256(batch.tokens_T.numpy().tobytes() + batch.offsets_R1.numpy().tobytes())
    begins_T = batch.sampled_T & ~torch.cat([torch.zeros(1, dtype=torch.bool), batch.sampled_T[:-1]])
    turns = (
        {}
        if bool((batch.sampled_lens_R == batch.response_lens_R).all())
        else {"num_turns/mean": begins_T.sum().item() / len(batch)}
    )
    return turns | {
        "response_length/mean": lengths.mean().item(),
        "response_length/max": lengths.max().item(),
        "response_length/p50": p50,
        "response_length/p90": p90,
        "response_length/p99": p99,
        "response_length/clip_ratio": (batch.finish_R == FinishReason.LENGTH).double().mean().item(),
        "rollout/tail_ratio": p99 / p50,
        "rollout/checksum": float(int.from_bytes(digest.digest()[:6], "big")),  # a float64 holds 48 bits exactly
        "perf/rollout_tokens_per_s": total / seconds,
        "perf/total_num_tokens": float(batch.offsets_R1[-1]),
        "rollout/entropy_est": -(batch.logprobs_T.sum().item() / total),
    }


def score_metrics(scored: ScoredBatch, names: Sequence[str]) -> dict[str, float]:
    """Rewards, their components, and how scoring went.  names: of the reward functions."""
    status, ids_R = scored.status_R, scored.rollouts.prompt_ids_R
    groups, varied = len(ids_R.unique()), len(ids_R[informative(scored.scores_R, ids_R)].unique())
    metrics = {
        "critic/score/mean": scored.scores_R.mean().item(),
        "critic/rewards/mean": scored.rewards_R.mean().item(),
        "training/frac_reward_zero_std": (groups - varied) / groups,
        "reward/sample_s_max": scored.reward_s_R.max().item(),
    }
    metrics |= {f"reward/{n}/mean": scored.components_RF[:, i].mean().item() for i, n in enumerate(names)}
    return metrics | {f"reward/num_{s.name.lower()}": (status == s).sum().item() for s in ScoreStatus}


def spec_metrics(reports: Sequence[GenerateReport]) -> dict[str, float]:
    """Speculation in one rollout phase, from the workers' rounds.  Empty when no worker speculates."""
    if not any(report.tuner for report in reports):
        return {}
    drafted = accepted = rounds = active = 0
    reached, passed = [0] * (_DEEPEST + 1), [0] * (_DEEPEST + 1)
    lengths: dict[tuple[int, int], list[int]] = defaultdict(list)  # by (worker, request): tokens of its rounds
    for worker, report in enumerate(reports):
        for trace in report.rounds:
            told = trace.report
            rounds += 1
            if told.strategy.is_off:
                continue
            active += 1
            drafted += sum(told.drafted)
            accepted += sum(told.accepted)
            for number, offer, hits in zip(trace.numbers, told.offered, told.accepted, strict=True):
                lengths[worker, number].append(1 + hits)
                for depth in range(1, min(offer, _DEEPEST) + 1):
                    reached[depth] += hits >= depth - 1
                    passed[depth] += hits >= depth
    per_round = [length for of_request in lengths.values() for length in of_request]
    per_request = [sum(of_request) / len(of_request) for of_request in lengths.values()]
    speedups = [report.tuner["speedup_est"] for report in reports if report.tuner]
    metrics = {
        "rollout/spec_active_frac": active / max(rounds, 1),
        "rollout/spec_speedup_est": sum(speedups) / len(speedups),
        "rollout/spec_drafter_failures": float(sum(report.drafter_failures for report in reports)),
        "rollout/spec_accept_length": sum(per_round) / len(per_round) if per_round else 1.0,
        "rollout/spec_accept_length_requests": sum(per_request) / len(per_request) if per_request else 1.0,
        "rollout/spec_accept_rate": accepted / drafted if drafted else 0.0,
    }
    for depth in range(1, _DEEPEST + 1):
        if reached[depth]:
            metrics[f"rollout/spec_accept_rate_pos_{depth}"] = passed[depth] / reached[depth]
    return metrics


def validation_metrics(tasks: Sequence[str], *, samples: int) -> list[str]:
    """Names of all figures of a validation with prompts of these tasks.  samples: of a prompt; 0: only greedy ones."""
    names = greedy_metrics(torch.zeros(len(tasks)), tasks)
    if samples:
        names |= sampled_metrics(torch.zeros(len(tasks), samples), torch.zeros(len(tasks), samples) > 0, tasks)
    return list(names)


def greedy_metrics(scores_P: Tensor, tasks: Sequence[str]) -> dict[str, float]:
    """Mean score of one greedy response per prompt, over all prompts and per task."""
    return {
        f"val-core/{task}/reward/greedy": scores_P[rows].double().mean().item()
        for task, rows in _rows_by_task(tasks).items()
    }


def sampled_metrics(scores_PS: Tensor, passed_PS: Tensor, tasks: Sequence[str]) -> dict[str, float]:
    """mean@k and pass@k of k samples per prompt, over all prompts and per task."""
    metrics, k = {}, scores_PS.shape[1]
    for task, rows in _rows_by_task(tasks).items():
        means_P = scores_PS[rows].double().mean(dim=1)
        metrics[f"val-core/{task}/reward/mean_at_{k}"] = means_P.mean().item()
        if len(rows) > 1:
            metrics[f"val-core/{task}/reward/error_at_{k}"] = means_P.std().item() / len(rows) ** 0.5
        metrics[f"val-core/{task}/reward/pass_at_{k}"] = passed_PS[rows].any(dim=1).double().mean().item()
    return metrics


def _rows_by_task(tasks: Sequence[str]) -> dict[str, list[int]]:
    names = ("all", *sorted(set(tasks)))
    return {name: [row for row, task in enumerate(tasks) if name in ("all", task)] for name in names}


def time_metrics(values: Mapping[str, float], spans: Sequence[WorkerSpan], *, step_s: float) -> dict[str, float]:
    """The step's wall time, its overhead (Prefect, Ray, MLflow, files between the tasks), and shares of it.

    values: the step's metrics, with `timing_s/*`; spans: its worker timeline; step_s: its wall time.
    """
    in_phases = sum(values.get(f"timing_s/{phase}", 0.0) for phase in _DRIVER_PHASES)
    overhead = max(step_s - in_phases - covered_s(spans), 0.0)
    return {
        "timing_s/step": step_s,
        "timing_s/overhead": overhead,
        "perf/overhead_share": overhead / step_s,
        "perf/rollout_share": values.get("timing_s/gen", 0.0) / step_s,
    }


def covered_s(spans: Sequence[WorkerSpan]) -> float:
    """Seconds in which at least one worker was in a state: the length of the union of the spans."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start_s):
        total += max(0.0, span.end_s - max(span.start_s, end))
        end = max(end, span.end_s)
    return total

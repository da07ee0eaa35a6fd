"""The metrics of one step, and the worker timeline.  `items/metrics` declares each name, its unit and its meaning.

A step's wall time is the time in which some worker is in a state (rollout, update), the driver's own phases, and
overhead: Prefect, Ray, MLflow, files between the tasks.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tlt_core.grpo.advantage import informative
from tlt_core.items.types import FinishReason, RolloutBatch, ScoredBatch, ScoreStatus, WorkerSpan

_DRIVER_PHASES = ("publish_drafter", "reward", "ref", "update_weights", "save_checkpoint", "testing")


class StepMetrics:
    """Collects the metrics and worker spans of one step, in the driver; `clear` begins the next step."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self.spans: list[WorkerSpan] = []

    def clear(self) -> None:
        """Forget all metrics and spans."""
        self._values, self.spans = {}, []

    def log(self, metrics: Mapping[str, float]) -> None:
        """Set metrics; a later value replaces an earlier one."""
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
        """All metrics so far."""
        return dict(self._values)


def rollout_metrics(batch: RolloutBatch, *, seconds: float) -> dict[str, float]:
    """Response lengths (the tail), finish reasons and throughput of one step's rollouts."""
    lengths = batch.response_lens_R.double()
    p50, p90, p99 = (torch.quantile(lengths, q).item() for q in (0.5, 0.9, 0.99))
    total = lengths.sum().item()
    return {
        "response_length/mean": lengths.mean().item(),
        "response_length/max": lengths.max().item(),
        "response_length/p50": p50,
        "response_length/p90": p90,
        "response_length/p99": p99,
        "response_length/clip_ratio": (batch.finish_R == FinishReason.LENGTH).double().mean().item(),
        "rollout/tail_ratio": p99 / p50,
        "rollout/checksum": float(_checksum(batch)),
        "perf/rollout_tokens_per_s": total / seconds,
        "perf/total_num_tokens": float(batch.offsets_R1[-1]),
        "rollout/entropy_est": -(batch.logprobs_T.sum().item() / total),
    }


def _checksum(batch: RolloutBatch) -> int:
    """48 bits of a digest of all tokens and offsets; a float64 holds them exactly."""
    digest = hashlib.sha256(batch.tokens_T.numpy().tobytes())
    digest.update(batch.offsets_R1.numpy().tobytes())
    return int.from_bytes(digest.digest()[:6], "big")


def score_metrics(scored: ScoredBatch, names: Sequence[str]) -> dict[str, float]:
    """Rewards, their components, and how scoring went.  names: of the reward functions."""
    status = scored.status_R
    metrics = {
        "critic/score/mean": scored.scores_R.mean().item(),
        "critic/rewards/mean": scored.rewards_R.mean().item(),
        "training/frac_reward_zero_std": _zero_spread_share(scored.scores_R, scored.rollouts.prompt_ids_R),
        "reward/sample_s_max": scored.reward_s_R.max().item(),
    }
    metrics |= {f"reward/{n}/mean": scored.components_RF[:, i].mean().item() for i, n in enumerate(names)}
    return metrics | {f"reward/num_{s.name.lower()}": (status == s).sum().item() for s in ScoreStatus}


def _zero_spread_share(scores_R: Tensor, prompt_ids_R: Tensor) -> float:
    """Share of the groups whose scores are all equal."""
    groups, varied = len(prompt_ids_R.unique()), len(prompt_ids_R[informative(scores_R, prompt_ids_R)].unique())
    return (groups - varied) / groups


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
        metrics[f"val-core/{task}/reward/mean_at_{k}"] = scores_PS[rows].double().mean().item()
        metrics[f"val-core/{task}/reward/pass_at_{k}"] = passed_PS[rows].any(dim=1).double().mean().item()
    return metrics


def _rows_by_task(tasks: Sequence[str]) -> dict[str, list[int]]:
    names = ("all", *sorted(set(tasks)))
    return {name: [row for row, task in enumerate(tasks) if name in ("all", task)] for name in names}


def time_metrics(values: Mapping[str, float], spans: Sequence[WorkerSpan], *, step_s: float) -> dict[str, float]:
    """The step's wall time, its overhead, and shares of it.

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

"""Numbers of one step under verl's names, and the worker timeline.

tlt_core measures; flows log.  Names are those of the README table; a name is legal in MLflow as it stands.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tlt_core.types import FinishReason, RolloutBatch, ScoredBatch, ScoreStatus, WorkerSpan


class StepMetrics:
    """Collects the metrics and worker spans of one step, in the driver."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self.spans: list[WorkerSpan] = []

    def log(self, metrics: Mapping[str, float]) -> None:
        """Set metrics; a later value replaces an earlier one."""
        self._values.update({name.replace("@", "_at_"): float(value) for name, value in metrics.items()})

    def add(self, name: str, seconds: float) -> None:
        """Add to a timing, in seconds."""
        self._values[name] = self._values.get(name, 0.0) + seconds

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's wall time to `timing_s/name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(f"timing_s/{name}", time.perf_counter() - started)

    def values(self) -> dict[str, float]:
        """All metrics so far."""
        return dict(self._values)


def rollout_metrics(batch: RolloutBatch, *, seconds: float, num_workers: int) -> dict[str, float]:
    """Response lengths (the tail), finish reasons and throughput of one step's rollouts."""
    lengths = batch.response_lens_R.double()
    p50, p90, p99 = (torch.quantile(lengths, q).item() for q in (0.5, 0.9, 0.99))
    total = lengths.sum().item()
    return {
        "response_length/mean": lengths.mean().item(),
        "response_length/min": lengths.min().item(),
        "response_length/max": lengths.max().item(),
        "response_length/p50": p50,
        "response_length/p90": p90,
        "response_length/p99": p99,
        "response_length/clip_ratio": (batch.finish_R == FinishReason.LENGTH).double().mean().item(),
        "rollout/tail_ratio": p99 / p50,
        "rollout/checksum": float(_checksum(batch)),
        "perf/rollout_tokens_per_s": total / seconds,
        "perf/total_num_tokens": float(batch.offsets_R1[-1]),
        "perf/throughput": total / seconds / num_workers,
        "rollout/entropy_est": -(batch.logprobs_T.sum().item() / total),
    }


def _checksum(batch: RolloutBatch) -> int:
    """Of all tokens and where responses begin, 48 bits, which a float64 holds: equal figures, equal rollouts."""
    digest = hashlib.sha256(batch.tokens_T.numpy().tobytes())
    digest.update(batch.offsets_R1.numpy().tobytes())
    return int.from_bytes(digest.digest()[:6], "big")


def score_metrics(scored: ScoredBatch, names: Sequence[str]) -> dict[str, float]:
    """Rewards, their parts, and how scoring went."""
    status = scored.status_R
    metrics = {
        "critic/score/mean": scored.scores_R.mean().item(),
        "critic/score/max": scored.scores_R.max().item(),
        "critic/score/min": scored.scores_R.min().item(),
        "critic/rewards/mean": scored.rewards_R.mean().item(),
        "critic/advantages/max": scored.advantages_R.max().item(),
        "critic/advantages/min": scored.advantages_R.min().item(),
        "training/frac_reward_zero_std": _zero_spread_share(scored.rewards_R, scored.rollouts.prompt_ids_R),
        "reward/sample_s_mean": scored.reward_s_R.mean().item(),
        "reward/sample_s_max": scored.reward_s_R.max().item(),
    }
    metrics |= {f"reward/{n}/mean": scored.components_RF[:, i].mean().item() for i, n in enumerate(names)}
    return metrics | {f"reward/num_{s.name.lower()}": (status == s).sum().item() for s in ScoreStatus}


def _zero_spread_share(rewards_R: Tensor, prompt_ids_R: Tensor) -> float:
    groups = prompt_ids_R.unique()
    flat = sum(bool((rewards_R[prompt_ids_R == g] == rewards_R[prompt_ids_R == g][0]).all()) for g in groups)
    return flat / len(groups)


def validation_metrics(scores_PS: Tensor, tasks: Sequence[str], *, greedy: bool) -> dict[str, float]:
    """Accuracy over all validation prompts and per task.

    scores_PS: P prompts, S samples each.  greedy: `greedy` is the mean of the one response; else `mean_at_S`, and
    `pass_at_S`: the share of prompts with at least one positive score.
    """
    metrics, samples = {}, scores_PS.shape[1]
    for name in ("all", *sorted(set(tasks))):
        chosen = scores_PS[[row for row, task in enumerate(tasks) if name in ("all", task)]].double()
        prefix = f"val-core/{name}/reward"
        if greedy:
            metrics[f"{prefix}/greedy"] = chosen.mean().item()
        else:
            metrics[f"{prefix}/mean_at_{samples}"] = chosen.mean().item()
            metrics[f"{prefix}/pass_at_{samples}"] = (chosen > 0).any(dim=1).double().mean().item()
    return metrics

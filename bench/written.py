"""What a policy writes, and how it is sampled: the shape of a workload.  From the scored responses of a run."""

import itertools
import statistics
from collections.abc import Sequence

import torch

from conf.run import RunConfig
from tlt_core.items.store import load_scored
from tlt_core.items.types import FinishReason, RolloutBatch, ScoredBatch

_FEW = 4  # live requests of all workers
_GRAM = 4  # tokens


def written(run: RunConfig) -> dict[str, float]:
    """Lengths, truncated share, share of the rollout with at most four live, repeated n-grams, reward by length."""
    batches = [load_scored(path) for path in sorted((run.run_dir / "steps").glob("*/scored.safetensors"))]
    lengths_R = torch.cat([b.rollouts.response_lens_R for b in batches]).double()
    rewards_R = torch.cat([b.scores_R for b in batches])
    finish_R = torch.cat([b.rollouts.finish_R for b in batches])
    result = {f"length p{q}": float(lengths_R.quantile(q / 100)) for q in (50, 90, 99)}
    result |= {"length max": float(lengths_R.max()), "sigma of log length": float(lengths_R.log().std())}
    result["truncated"] = float((finish_R == FinishReason.LENGTH).double().mean())
    result["rollout with at most 4 live"] = statistics.fmean(_few_live(b.rollouts) for b in batches)
    result[f"repeated {_GRAM}-grams"] = statistics.fmean(itertools.chain.from_iterable(map(_repeated, batches)))
    edges = lengths_R.quantile(torch.tensor([0.0, 0.5, 0.9, 1.0], dtype=torch.float64)).tolist()
    for name, low, high in zip(("shorter half", "p50 to p90", "longest tenth"), edges, edges[1:], strict=False):
        own = (lengths_R >= low) & ((lengths_R < high) | (high == edges[-1]))
        result[f"reward, {name}"] = float(rewards_R[own].mean())
    return result


def _few_live(rollouts: RolloutBatch) -> float:
    """Share of the rollout's time."""
    changes = sorted(
        [(s, 1) for s in rollouts.started_s_R.tolist()] + [(s, -1) for s in rollouts.finished_s_R.tolist()]
    )
    live, few_s = 0, 0.0
    for (at_s, change), (next_s, _) in itertools.pairwise(changes):
        live += change
        few_s += (next_s - at_s) * (0 < live <= _FEW)
    return few_s / (changes[-1][0] - changes[0][0])


def _repeated(batch: ScoredBatch) -> Sequence[float]:
    """Of each response long enough: share of its n-grams that stood in it before."""
    texts = [batch.rollouts.completion(index).tolist() for index in range(len(batch.rollouts))]
    grams = [[tuple(text[i : i + _GRAM]) for i in range(len(text) - _GRAM + 1)] for text in texts]
    return [1 - len(set(own)) / len(own) for own in grams if own]

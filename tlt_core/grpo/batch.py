"""From scored rollouts to what one worker trains on.

    ScoredBatch -> passes (`passes`) -> [optimizer step][worker] TrainBatch -> one pass at a time (`micro_batch`)

Sequences are packed back to back, never padded.  A group of responses stays in one minibatch, and in one pack of groups
(`packs`).  Passes are dealt to the workers so that each has about the same amount to compute.

Shapes: S sequences of a share, T their tokens, C their completion tokens; R responses of the rollout batch.  Completion
tokens that an environment said are no targets: they count nowhere below.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.update import AlgorithmConfig, UpdateConfig
from tlt_core.grpo.passes import Cost, Key, Pass, fill, kept, make_passes, packs, power_of_two
from tlt_core.items.types import FinishReason, NoiseKey, Rollout, RolloutBatch, ScoredBatch, offsets_of

Example = tuple[Tensor, Tensor]  # prompt tokens and completion tokens, int32


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One worker's share of one optimizer step.

    Sequences [5, 9, 2] and [7, 2] with prompts of one token: tokens_T=[5, 9, 2, 7, 2], offsets_S1=[0, 3, 5],
    prompt_lens_S=[1, 1], prompt_ids_S=[3, 8], rollout_logprobs_C=[-0.1, -1.2, -0.3].
    """

    tokens_T: Tensor  # int32
    offsets_S1: Tensor  # [S + 1] int64
    prompt_lens_S: Tensor  # int64
    prompt_ids_S: Tensor  # int64; sequences with the same id have the same prompt
    sources_S: Tensor  # int64, the sequence's index in the rollout batch (or in the list of examples)
    samples_S: Tensor  # int64, number of the response among those to its prompt
    advantages_S: Tensor  # float32
    rollout_logprobs_C: Tensor  # float32
    sampled_C: Tensor  # bool, False on tokens of an environment
    num_tokens: int  # sampled tokens of the optimizer step, all workers together
    num_sequences: int  # sequences of the optimizer step, all workers together
    planned_sequences: int = 1  # about num_sequences, a power of two that is known before the rollout
    passes_S: Tensor | None = None  # int64, rising: which pass computes the sequence; None: passes are filled in order
    old_logprobs_C: Tensor | None = None  # None: the policy has not changed since the RL step began
    ref_logprobs_C: Tensor | None = None  # None: no KL term

    def __post_init__(self) -> None:
        completion = int(self.response_lens_S.sum())
        for name in ("rollout_logprobs_C", "sampled_C", "old_logprobs_C", "ref_logprobs_C"):
            values = getattr(self, name)
            if values is not None and len(values) != completion:
                raise ValueError(f"{name} has {len(values)} entries for {completion} completion tokens")
        if len(self) and int(self.response_lens_S.min()) < 1:
            raise ValueError("a sequence without completion tokens")

    def __len__(self) -> int:
        return len(self.prompt_lens_S)

    @property
    def lengths_S(self) -> Tensor:
        """Prompt plus completion tokens, int64."""
        return self.offsets_S1.diff()

    @property
    def response_lens_S(self) -> Tensor:
        """Completion tokens, int64."""
        return self.lengths_S - self.prompt_lens_S

    @property
    def sampled_lens_S(self) -> Tensor:
        """Those of them that the policy sampled, int64."""
        return offsets_of(self.sampled_C.long())[offsets_of(self.response_lens_S)].diff()


def make_train_batches(
    scored: ScoredBatch,
    cfg: UpdateConfig,
    algorithm: AlgorithmConfig,
    *,
    num_workers: int,
    seed: int,
    step: int,
    ref_logprobs_T: Tensor | None = None,
    pack_of: Mapping[int, int] | None = None,
    planned_sequences: int | None = None,
    streamed: Set[Key] = frozenset(),
) -> list[list[TrainBatch]]:
    """Shares indexed [optimizer step][worker].

    Groups are dealt into `cfg.num_minibatches` in an order drawn from (seed, step), where step is the RL step.  Later
    epochs visit the same minibatches (the same objects) in another order.  With `mask_truncated`, responses that hit
    the length limit are left out, so some minibatches, or even all, may be missing from the result.
    ref_logprobs_T: reference log-probabilities aligned with the rollouts' tokens_T.  pack_of: see `packs`.
    planned_sequences: responses of an optimizer step as far as known before the rollout.  streamed: the passes whose
    gradient the workers have already.
    """
    rollouts = scored.rollouts
    kept_R = kept(rollouts, algorithm)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    groups = rollouts.prompt_ids_R.unique()
    groups = groups[torch.randperm(len(groups), generator=generator)]
    if not pack_of:  # nothing was planned before the rollout
        lens = dict(zip(rollouts.prompt_ids_R.tolist(), rollouts.prompt_lens_R.tolist(), strict=True))
        pack_of = packs(list(lens), list(lens.values()), groups_per_pack=cfg.groups_per_pack)
    planned = power_of_two(planned_sequences or -(-len(rollouts) // cfg.num_minibatches))
    minibatches = []
    for part in groups.tensor_split(cfg.num_minibatches):
        chosen = (torch.isin(rollouts.prompt_ids_R, part) & kept_R).nonzero().flatten()
        if len(chosen):
            passes = make_passes(scored, chosen.tolist(), cfg, algorithm, pack_of=pack_of)
            left = [p for p in passes if p.key not in streamed]
            counts = {"num_tokens": int(rollouts.sampled_lens_R[chosen].sum()), "num_sequences": len(chosen)}
            minibatches.append(
                [
                    train_batch(scored, share, **counts, planned_sequences=planned, ref_logprobs_T=ref_logprobs_T)
                    for share in _deal(rollouts, left, num_workers=num_workers)
                ]
            )
    orders = [list(range(len(minibatches)))]
    orders += [torch.randperm(len(minibatches), generator=generator).tolist() for _ in range(cfg.num_epochs - 1)]
    return [minibatches[index] for order in orders for index in order]


def make_forward_batches(rollouts: RolloutBatch, *, num_workers: int) -> list[TrainBatch]:
    """All responses, one share per worker, for log-probabilities only (of the reference model, for example)."""
    alone = [Pass((row, 0), [row], needs_grad=False) for row in range(len(rollouts))]
    tokens, count = int(rollouts.sampled_lens_R.sum()), len(rollouts)
    return [
        _take(rollouts, [r for p in share for r in p.rows], torch.zeros(count), num_tokens=tokens, num_sequences=count)
        for share in _deal(rollouts, alone, num_workers=num_workers)
    ]


def join_logprobs(shares: Sequence[TrainBatch], logprobs: Sequence[Tensor], rollouts: RolloutBatch) -> Tensor:
    """Log-probabilities of the shares' completion tokens, aligned with the rollouts' tokens; 0 on prompts.  [T]"""
    result_T = torch.zeros(len(rollouts.tokens_T))
    for share, logprobs_C in zip(shares, logprobs, strict=True):
        parts = logprobs_C.split(share.response_lens_S.tolist())
        for source, part in zip(share.sources_S.tolist(), parts, strict=True):
            end = int(rollouts.offsets_R1[source + 1])
            result_T[end - len(part) : end] = part
    return result_T


def make_supervised_batches(
    examples: Sequence[Example], *, tokens_per_step: int, num_workers: int, seed: int
) -> list[list[TrainBatch]]:
    """Shares indexed [optimizer step][worker]: one pass over (prompt, completion) pairs in an order drawn from seed.

    An optimizer step takes examples until the next would exceed tokens_per_step; a longer example gets its own step.
    """
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    texts = RolloutBatch.pack([_as_rollout(index, *example) for index, example in enumerate(examples)])
    lengths, ones = texts.lengths_R.tolist(), torch.ones(len(examples))
    steps = []
    for chosen in fill(order, lambda index, _: lengths[index], budget=tokens_per_step):
        tokens, count = sum(len(examples[index][1]) for index in chosen), len(chosen)
        shares = _lightest_first(chosen, lambda index, _: lengths[index], num_workers=num_workers)
        steps.append([_take(texts, share, ones, num_tokens=tokens, num_sequences=count) for share in shares])
    return steps


def _as_rollout(number: int, prompt: Tensor, completion: Tensor) -> Rollout:
    tokens, none = torch.cat([prompt, completion]), torch.zeros(len(completion))
    return Rollout(NoiseKey(0, 0, number, 0), tokens, len(prompt), none, FinishReason.STOP, policy_version=0)


def _lightest_first(order: Sequence[int], cost: Cost, *, num_workers: int) -> list[list[int]]:
    """Longest item first, each to the worker that has the least then; a share keeps the order of the items."""
    shares: list[list[int]] = [[] for _ in range(num_workers)]
    loads = [0] * num_workers
    for item in sorted(order, key=lambda i: -cost(i, ())):
        costs = [load + cost(item, share) for load, share in zip(loads, shares, strict=True)]
        worker = costs.index(min(costs))
        loads[worker] = costs[worker]
        shares[worker].append(item)
    place = {item: index for index, item in enumerate(order)}
    return [sorted(share, key=place.__getitem__) for share in shares]


def _deal(rollouts: RolloutBatch, passes: Sequence[Pass], *, num_workers: int) -> list[list[Pass]]:
    """Shares with about the same tokens to compute.  Backward counts as two forward passes."""
    prompts: list[int] = rollouts.prompt_ids_R.tolist()
    prompt_lens: list[int] = rollouts.prompt_lens_R.tolist()
    lens: list[int] = rollouts.response_lens_R.tolist()

    def cost(index: int, _: Sequence[int]) -> int:
        _, rows, needs_grad = passes[index]
        tokens = sum(lens[row] for row in rows) + sum({prompts[row]: prompt_lens[row] for row in rows}.values())
        return (3 if needs_grad else 1) * tokens

    shares = _lightest_first(range(len(passes)), cost, num_workers=num_workers)
    return [[passes[index] for index in share] for share in shares]


def train_batch(
    scored: ScoredBatch,
    passes: Sequence[Pass],
    *,
    planned_sequences: int,
    num_tokens: int = 0,
    num_sequences: int = 0,
    ref_logprobs_T: Tensor | None = None,
) -> TrainBatch:
    """What one worker computes.  The counts are those of the whole optimizer step, 0 while they are not known."""
    rows = [row for p in passes for row in p.rows]
    batch = _take(
        scored.rollouts,
        rows,
        scored.advantages_R,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        ref_logprobs_T=ref_logprobs_T,
    )
    passes_S = torch.tensor([index for index, p in enumerate(passes) for _ in p.rows], dtype=torch.int64)
    return replace(batch, passes_S=passes_S, planned_sequences=planned_sequences)


def _take(
    rollouts: RolloutBatch,
    rows: Sequence[int],
    advantages_R: Tensor,
    *,
    num_tokens: int,
    num_sequences: int,
    ref_logprobs_T: Tensor | None = None,
) -> TrainBatch:
    """These responses.  The counts are those of the whole optimizer step."""
    part, share = rollouts.take(list(rows)) if rows else None, torch.tensor(rows, dtype=torch.int64)
    return TrainBatch(
        tokens_T=rollouts.tokens_T[:0] if part is None else part.tokens_T,
        offsets_S1=torch.zeros(1, dtype=torch.int64) if part is None else part.offsets_R1,
        prompt_lens_S=rollouts.prompt_lens_R[share],
        prompt_ids_S=rollouts.prompt_ids_R[share],
        sources_S=share,
        samples_S=rollouts.samples_R[share],
        advantages_S=advantages_R[share],
        rollout_logprobs_C=_completions(rollouts, share, rollouts.logprobs_T),
        sampled_C=_completions(rollouts, share, rollouts.sampled_T),
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        ref_logprobs_C=None if ref_logprobs_T is None else _completions(rollouts, share, ref_logprobs_T),
    )


def _completions(rollouts: RolloutBatch, share: Tensor, values_T: Tensor) -> Tensor:
    """The entries of a per-token array that belong to the share's completion tokens."""
    starts = rollouts.offsets_R1[share] + rollouts.prompt_lens_R[share]
    parts = [values_T[int(s) : int(e)] for s, e in zip(starts, rollouts.offsets_R1[share + 1], strict=True)]
    return torch.cat(parts) if parts else values_T[:0]

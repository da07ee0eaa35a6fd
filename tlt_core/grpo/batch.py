"""From scored rollouts to what one worker trains on.

    ScoredBatch -> [optimizer step][worker] TrainBatch -> MicroBatch (one pass, see `micro_batch`)

Sequences are packed back to back, never padded.  A group of responses stays in one minibatch.  Within a minibatch,
sequences are dealt to the workers so that each has about the same amount to compute.  Every share carries the token
and sequence counts of its whole optimizer step, so losses are sums that need no division later.

Shapes: S sequences of a share, T their tokens, C their completion tokens; R responses of the rollout batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.update import AlgorithmConfig, UpdateConfig
from tlt_core.items.types import FinishReason, RolloutBatch, ScoredBatch

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
    advantages_S: Tensor  # float32
    rollout_logprobs_C: Tensor  # float32
    num_tokens: int  # completion tokens of the optimizer step, all workers together
    num_sequences: int  # sequences of the optimizer step, all workers together
    old_logprobs_C: Tensor | None = None  # None: the policy has not changed since the RL step began
    ref_logprobs_C: Tensor | None = None  # None: no KL term

    def __post_init__(self) -> None:
        completion = int(self.response_lens_S.sum())
        for name in ("rollout_logprobs_C", "old_logprobs_C", "ref_logprobs_C"):
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

    def with_old_logprobs(self, old_logprobs_C: Tensor) -> "TrainBatch":
        """The same share with the log-probabilities of the policy before the RL step's first optimizer step."""
        return replace(self, old_logprobs_C=old_logprobs_C)


def make_train_batches(
    scored: ScoredBatch,
    cfg: UpdateConfig,
    algorithm: AlgorithmConfig,
    *,
    num_workers: int,
    seed: int,
    step: int,
    ref_logprobs_T: Tensor | None = None,
) -> list[list[TrainBatch]]:
    """Shares indexed [optimizer step][worker].

    Groups are dealt into `cfg.num_minibatches` in an order drawn from (seed, step), where step is the RL step.  Later
    epochs visit the same minibatches (the same objects) in another order.  With `mask_truncated`, responses that hit
    the length limit are left out, so some minibatches, or even all, may be missing from the result.
    ref_logprobs_T: reference log-probabilities aligned with the rollouts' tokens_T.
    """
    rollouts = scored.rollouts
    kept_R = torch.ones(len(rollouts), dtype=torch.bool)
    if algorithm.mask_truncated:
        kept_R = rollouts.finish_R != FinishReason.LENGTH
    # cost of a sequence in forward passes: backward counts as two, and is skipped where the gradient is known to be 0
    passes_R = torch.where((scored.advantages_R != 0) | (not skips_zero_advantage(cfg, algorithm)), 3, 1)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    groups = rollouts.prompt_ids_R.unique()
    groups = groups[torch.randperm(len(groups), generator=generator)]
    minibatches = []
    for part in groups.tensor_split(cfg.num_minibatches):
        chosen = (torch.isin(rollouts.prompt_ids_R, part) & kept_R).nonzero().flatten()
        if len(chosen):
            shares = _deal(rollouts, chosen, passes_R, num_workers=num_workers)
            minibatches.append([_take(rollouts, s, chosen, scored.advantages_R, ref_logprobs_T) for s in shares])
    orders = [list(range(len(minibatches)))]
    orders += [torch.randperm(len(minibatches), generator=generator).tolist() for _ in range(cfg.num_epochs - 1)]
    return [minibatches[index] for order in orders for index in order]


def skips_zero_advantage(cfg: UpdateConfig, algorithm: AlgorithmConfig) -> bool:
    """Whether sequences with advantage 0 get no backward pass: their gradient is 0 when the loss is proportional to the
    advantage.  Never under DeepSpeed, where all workers must make the same passes."""
    kl_in_loss = algorithm.kl.coef > 0 and algorithm.kl.place == "loss"
    return cfg.backend.kind == "torch" and not kl_in_loss


def make_forward_batches(rollouts: RolloutBatch, *, num_workers: int) -> list[TrainBatch]:
    """All responses, one share per worker, for log-probabilities only (of the reference model, for example)."""
    chosen = torch.arange(len(rollouts))
    shares = _deal(rollouts, chosen, torch.ones_like(chosen), num_workers=num_workers)
    return [_take(rollouts, share, chosen, torch.zeros(len(rollouts)), None) for share in shares]


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
    lengths = [len(prompt) + len(completion) for prompt, completion in examples]
    steps = []
    for chosen in fill(order, lambda index, _: lengths[index], budget=tokens_per_step):
        num_tokens = sum(len(examples[index][1]) for index in chosen)
        shares = _lightest_first(chosen, lambda index, _: lengths[index], num_workers=num_workers)
        steps.append([_take_examples(examples, share, num_tokens, len(chosen)) for share in shares])
    return steps


def offsets_of(lengths: Tensor) -> Tensor:
    """[2, 3] -> [0, 2, 5]"""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


Cost = Callable[[int, Sequence[int]], int]
"""cost(item, run): tokens that an item adds to a run."""


def fill(order: Sequence[int], cost: Cost, *, budget: int) -> Iterator[list[int]]:
    """Split `order` into runs of at most `budget` tokens, at least one item each."""
    run: list[int] = []
    used = 0
    for item in order:
        if run and used + cost(item, run) > budget:
            yield run
            run, used = [], 0
        used += cost(item, run)
        run.append(item)
    if run:
        yield run


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


def _deal(rollouts: RolloutBatch, chosen: Tensor, passes_R: Tensor, *, num_workers: int) -> list[Tensor]:
    """Shares with about the same tokens to compute, times passes; a prompt counts once per worker."""
    prompts: list[int] = rollouts.prompt_ids_R.tolist()
    prompt_lens: list[int] = rollouts.prompt_lens_R.tolist()
    responses: list[int] = rollouts.response_lens_R.tolist()
    passes: list[int] = passes_R.tolist()

    def cost(index: int, share: Sequence[int]) -> int:
        shared = any(prompts[other] == prompts[index] for other in share)
        return passes[index] * (responses[index] + (0 if shared else prompt_lens[index]))

    shares = _lightest_first(chosen.tolist(), cost, num_workers=num_workers)
    return [torch.tensor(share, dtype=torch.int64) for share in shares]


def _take(
    rollouts: RolloutBatch, share: Tensor, chosen: Tensor, advantages_R: Tensor, ref_logprobs_T: Tensor | None
) -> TrainBatch:
    """The share's responses; `chosen` are those of the whole optimizer step."""
    part = rollouts.take(share.tolist()) if len(share) else None
    return TrainBatch(
        tokens_T=rollouts.tokens_T[:0] if part is None else part.tokens_T,
        offsets_S1=torch.zeros(1, dtype=torch.int64) if part is None else part.offsets_R1,
        prompt_lens_S=rollouts.prompt_lens_R[share],
        prompt_ids_S=rollouts.prompt_ids_R[share],
        sources_S=share,
        advantages_S=advantages_R[share],
        rollout_logprobs_C=_completions(rollouts, share, rollouts.logprobs_T),
        num_tokens=int(rollouts.response_lens_R[chosen].sum()),
        num_sequences=len(chosen),
        ref_logprobs_C=None if ref_logprobs_T is None else _completions(rollouts, share, ref_logprobs_T),
    )


def _completions(rollouts: RolloutBatch, share: Tensor, values_T: Tensor) -> Tensor:
    """The entries of a per-token array that belong to the share's completion tokens."""
    starts = rollouts.offsets_R1[share] + rollouts.prompt_lens_R[share]
    parts = [values_T[int(s) : int(e)] for s, e in zip(starts, rollouts.offsets_R1[share + 1], strict=True)]
    return torch.cat(parts) if parts else values_T[:0]


def _take_examples(examples: Sequence[Example], share: list[int], num_tokens: int, num_sequences: int) -> TrainBatch:
    tokens = [torch.cat(examples[index]) for index in share]
    prompt_lens = torch.tensor([len(examples[index][0]) for index in share], dtype=torch.int64)
    offsets = offsets_of(torch.tensor([len(t) for t in tokens], dtype=torch.int64))
    return TrainBatch(
        tokens_T=torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int32),
        offsets_S1=offsets,
        prompt_lens_S=prompt_lens,
        prompt_ids_S=torch.tensor(share, dtype=torch.int64),
        sources_S=torch.tensor(share, dtype=torch.int64),
        advantages_S=torch.ones(len(share)),
        rollout_logprobs_C=torch.zeros(int(offsets[-1] - prompt_lens.sum())),
        num_tokens=num_tokens,
        num_sequences=num_sequences,
    )

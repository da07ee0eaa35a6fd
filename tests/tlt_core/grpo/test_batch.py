"""Dealing of rollouts into shares and passes: nothing lost, nothing doubled, everything aligned."""

from dataclasses import replace

import torch

from conf.update import AlgorithmConfig, UpdateConfig
from tests.tlt_core.grpo.rollouts import scored, tiny_rollouts, tiny_scored
from tlt_core.grpo.batch import (
    TrainBatch,
    join_logprobs,
    make_forward_batches,
    make_supervised_batches,
    make_train_batches,
)
from tlt_core.grpo.micro_batch import micro_batches
from tlt_core.items.types import FinishReason, ScoredBatch

ALGORITHM = AlgorithmConfig()


def _make(batch: ScoredBatch, *, workers: int = 1, seed: int = 0, algorithm=ALGORITHM, **update) -> list:
    return make_train_batches(batch, UpdateConfig(**update), algorithm, num_workers=workers, seed=seed, step=1)


def test_every_response_is_in_one_share_with_its_own_data() -> None:
    batch = tiny_scored(seed=0, num_groups=5)
    steps = _make(batch, workers=2, num_minibatches=2)
    assert [len(step) for step in steps] == [2, 2]
    seen = []
    for step in steps:
        rows = [row for share in step for row in share.sources_S.tolist()]
        lens = batch.rollouts.response_lens_R[rows]
        for share in step:
            assert share.num_tokens == int(lens.sum())
            assert share.num_sequences == len(rows)
            _check_share(share, batch)
        # a group is never split over optimizer steps
        groups = batch.rollouts.prompt_ids_R[rows]
        assert all((groups == g).sum() == 3 for g in groups.unique())
        seen += rows
    assert sorted(seen) == list(range(15))


def _check_share(share: TrainBatch, batch: ScoredBatch) -> None:
    rollouts = batch.rollouts
    first = 0
    for index, row in enumerate(share.sources_S.tolist()):
        start, end = rollouts.offsets_R1[row : row + 2].tolist()
        prompt = int(rollouts.prompt_lens_R[row])
        own = share.tokens_T[share.offsets_S1[index] : share.offsets_S1[index + 1]]
        assert own.tolist() == rollouts.tokens_T[start:end].tolist()
        count = end - start - prompt
        assert (
            share.rollout_logprobs_C[first : first + count].tolist()
            == rollouts.logprobs_T[start + prompt : end].tolist()
        )
        assert share.advantages_S[index] == batch.advantages_R[row]
        first += count
    assert first == len(share.rollout_logprobs_C)


def test_order_depends_on_seed_and_epochs_revisit_the_same_minibatches() -> None:
    batch = tiny_scored(seed=0, num_groups=8)

    def first_rows(seed: int) -> list[list[int]]:
        return [step[0].sources_S.tolist() for step in _make(batch, num_minibatches=4, seed=seed)]

    assert first_rows(0) == first_rows(0)
    assert first_rows(0) != first_rows(1)
    steps = _make(batch, num_minibatches=4, num_epochs=3)
    assert len(steps) == 12
    for epoch in range(3):
        assert {id(step[0]) for step in steps[4 * epoch : 4 * epoch + 4]} == {id(step[0]) for step in steps[:4]}


def test_mask_truncated_leaves_cut_responses_out() -> None:
    batch = tiny_scored(seed=0, num_groups=4)
    share = _make(batch, algorithm=AlgorithmConfig(mask_truncated=True))[0][0]
    assert (batch.rollouts.finish_R[share.sources_S] == FinishReason.STOP).all()
    assert share.num_sequences == 8  # 2 of 3 in each group
    all_cut = tiny_rollouts(seed=0, num_groups=2, num_samples=1)  # a group's last response is cut
    assert _make(scored(all_cut, torch.ones(2)), algorithm=AlgorithmConfig(mask_truncated=True)) == []


def test_micro_batch_by_hand() -> None:
    """[5 9 | 2 4 6], [5 9 | 3] and [7 | 3 1] (prompt | completion).  The last token of each is not fed; the prompt
    that two responses share is fed once."""
    share = TrainBatch(
        tokens_T=torch.tensor([5, 9, 2, 4, 6, 5, 9, 3, 7, 3, 1]).int(),
        offsets_S1=torch.tensor([0, 5, 8, 11]),
        prompt_lens_S=torch.tensor([2, 2, 1]),
        prompt_ids_S=torch.tensor([4, 4, 8]),
        sources_S=torch.tensor([0, 1, 2]),
        samples_S=torch.tensor([0, 1, 0]),
        advantages_S=torch.tensor([1.0, 0.0, 1.0]),
        rollout_logprobs_C=torch.zeros(6),
        sampled_C=torch.ones(6, dtype=torch.bool),
        num_tokens=6,
        num_sequences=3,
    )
    (whole,) = micro_batches(share, token_budget=64, skip_zero_advantage=False)
    assert whole.tokens_U.tolist() == [5, 9, 2, 4, 7, 3]
    assert whole.positions_U.tolist() == [0, 1, 2, 3, 0, 1]
    assert whole.offsets_Q1.tolist() == [0, 2, 4, 6]  # prompt; first response; [7 | 3 1] with its prompt
    assert whole.keys.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert whole.key_offsets_Q1.tolist() == [0, 2, 6, 8]
    assert whole.outputs_C.tolist() == [1, 2, 3, 1, 4, 5]
    assert whole.targets_C.tolist() == [2, 4, 6, 3, 3, 1]
    assert whole.place_C.tolist() == [0, 1, 2, 3, 4, 5]
    assert whole.sequence_C.tolist() == [0, 0, 0, 1, 2, 2]
    live, still = micro_batches(share, token_budget=64, skip_zero_advantage=True)
    assert (live.needs_grad, live.targets_C.tolist(), live.place_C.tolist()) == (True, [2, 4, 6, 3, 1], [0, 1, 2, 4, 5])
    assert live.keys is None  # nothing is shared in this pass
    assert live.tokens_U.tolist() == [5, 9, 2, 4, 7, 3]
    assert (still.needs_grad, still.targets_C.tolist(), still.place_C.tolist()) == (False, [3], [3])


def test_passes_keep_to_the_token_budget() -> None:
    share = replace(_make(tiny_scored(seed=1, num_groups=6))[0][0], passes_S=None)
    passes = list(micro_batches(share, token_budget=60, skip_zero_advantage=False))
    assert len(passes) > 2
    assert all(len(m.tokens_U) <= 60 for m in passes)
    assert torch.cat([m.place_C for m in passes]).tolist() == list(range(len(share.rollout_logprobs_C)))
    longest = int(share.lengths_S.max())
    alone = list(micro_batches(share, token_budget=longest - 1, skip_zero_advantage=False))
    assert any(len(m.tokens_U) == longest - 1 and len(m.offsets_Q1) == 2 for m in alone)


def test_reference_logprobs_go_out_and_come_back() -> None:
    rollouts = tiny_rollouts(seed=2, num_groups=4)
    shares = make_forward_batches(rollouts, num_workers=3)
    joined = join_logprobs(shares, [share.rollout_logprobs_C for share in shares], rollouts)
    assert torch.equal(joined, rollouts.logprobs_T)
    batch = scored(rollouts, torch.ones(len(rollouts)))
    step = make_train_batches(
        batch, UpdateConfig(), ALGORITHM, num_workers=2, seed=0, step=0, ref_logprobs_T=rollouts.logprobs_T * 2
    )[0]
    for share in step:
        assert torch.equal(share.ref_logprobs_C, share.rollout_logprobs_C * 2)


def test_supervised_batches() -> None:
    lengths = [(3, 5), (2, 9), (4, 1), (8, 30), (1, 2), (5, 5)]
    examples = [(torch.full((p,), i).int(), torch.full((c,), i).int()) for i, (p, c) in enumerate(lengths)]
    steps = make_supervised_batches(examples, tokens_per_step=24, num_workers=2, seed=3)
    rows = [row for step in steps for share in step for row in share.sources_S.tolist()]
    assert sorted(rows) == list(range(6))
    for step in steps:
        tokens = sum(len(share.tokens_T) for share in step)
        assert tokens <= 24 or sum(len(share) for share in step) == 1
        assert {share.num_tokens for share in step} == {sum(len(share.rollout_logprobs_C) for share in step)}
        for share in step:
            assert share.tokens_T.tolist() == [r for r in share.sources_S.tolist() for _ in range(sum(lengths[r]))]
    other = make_supervised_batches(examples, tokens_per_step=24, num_workers=2, seed=4)
    one, two = ([share.sources_S.tolist() for step in made for share in step] for made in (steps, other))
    assert one != two

"""Packing, selecting and joining keep every column with its response."""

from dataclasses import replace

import pytest
import torch

from tests.tlt_core.grpo.rollouts import scored
from tlt_core.items.store import StoreError, is_finite, load_scored, save_scored
from tlt_core.items.types import FinishReason, NoiseKey, Rollout, RolloutBatch, ScoredBatch


def rollout(prompt_id: int, sample: int, completion: list[int]) -> Rollout:
    return Rollout(
        key=NoiseKey(0, 1, prompt_id, sample),
        tokens=torch.tensor([7, 8, *completion], dtype=torch.int32),
        prompt_len=2,
        logprobs=torch.tensor([-float(t) for t in completion]),
        finish=FinishReason.STOP,
        policy_version=4,
        worker=sample,
    )


BATCH = RolloutBatch.pack([rollout(2, 0, [5]), rollout(1, 1, [3, 4]), rollout(1, 0, [9, 9, 2])])
SCORED = scored(BATCH, torch.arange(3.0) - 1)


def test_pack_is_in_canonical_order_with_aligned_log_probs():
    assert list(zip(BATCH.prompt_ids_R.tolist(), BATCH.samples_R.tolist(), strict=True)) == [(1, 0), (1, 1), (2, 0)]
    assert BATCH.tokens_T.tolist() == [7, 8, 9, 9, 2, 7, 8, 3, 4, 7, 8, 5]
    assert BATCH.logprobs_T.tolist() == [0, 0, -9, -9, -2, 0, 0, -3, -4, 0, 0, -5]
    assert BATCH.response_lens_R.tolist() == [3, 2, 1]
    assert BATCH.completion(1).tolist() == [3, 4]


def test_take_and_join_are_inverse():
    joined = ScoredBatch.join([SCORED.take([0]), SCORED.take([1, 2])])
    assert torch.equal(joined.rollouts.tokens_T, BATCH.tokens_T)
    assert joined.rollouts.offsets_R1.tolist() == BATCH.offsets_R1.tolist()
    assert joined.rewards_R.tolist() == [-1, 0, 1]
    assert SCORED.take([2, 0]).rollouts.tokens_T.tolist() == [7, 8, 5, 7, 8, 9, 9, 2]


def test_a_saved_batch_comes_back_and_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "a" / "scored.safetensors"
    save_scored(SCORED, path)
    again = load_scored(path)
    for name in ("tokens_T", "logprobs_T", "finish_R", "worker_R", "offsets_R1"):
        assert torch.equal(getattr(again.rollouts, name), getattr(BATCH, name))
    assert again.advantages_R.tolist() == [-1, 0, 1]
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(StoreError, match=r"scored\.safetensors"):
        load_scored(path)


def test_a_reward_that_is_not_finite_names_its_response():
    spoilt = replace(SCORED, rewards_R=SCORED.rewards_R.clone())
    spoilt.rewards_R[1] = float("inf")
    with pytest.raises(ValueError, match=r"rewards_R is not finite for responses \[1\]"):
        spoilt.take([0, 1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_of_a_tensor_that_is_not_finite_is_found(bad):
    values = torch.ones(10_000)
    assert is_finite(values)
    assert is_finite(torch.arange(3))
    values[::2] = -3e38 / 10_000
    assert is_finite(values)
    for dtype in (torch.float32, torch.bfloat16):
        spoilt = values.to(dtype)
        spoilt[[7, 8]] = torch.tensor([bad, -bad], dtype=dtype)
        assert not is_finite(spoilt)

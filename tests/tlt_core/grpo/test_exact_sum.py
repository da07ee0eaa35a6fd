"""The update does not depend on order, division or time: gradients are summed exactly, and passes can be streamed."""

import itertools

import pytest
import torch
from torch import Tensor

from conf.update import AlgorithmConfig, UpdateConfig
from tests.decoders import lively
from tests.tlt_core.grpo.rollouts import make_trainer, scored, tiny_rollouts
from tlt_core.grpo import exact_sum
from tlt_core.grpo.batch import TrainBatch, make_train_batches, train_batch
from tlt_core.grpo.exact_sum import add_exactly
from tlt_core.grpo.passes import kept, make_passes, packs, power_of_two
from tlt_core.grpo.update import PolicyTrainer
from tlt_core.items.types import ScoredBatch

CFG = UpdateConfig(tokens_per_micro_batch=64, groups_per_pack=2, dtype="float32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-13, 1e-4, 0.7])
def test_the_bits_of_a_sum_do_not_depend_on_the_order(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    # long enough for two pieces
    values = [(torch.randn(70_001, generator=generator) * scale).to(dtype) for _ in range(40)]
    sums = []
    for order in (range(40), reversed(range(40)), torch.randperm(40, generator=generator).tolist()):
        total = torch.zeros(70_001, dtype=torch.float64)
        for index in order:
            add_exactly(total, values[index])
        sums.append(total)
    halves = [torch.zeros(70_001, dtype=torch.float64) for _ in range(2)]
    for index, value in enumerate(values):
        add_exactly(halves[index % 3 == 0], value)
    assert all(torch.equal(total, sums[0]) for total in [*sums, halves[0] + halves[1]])
    assert (sums[0] - torch.stack(values).double().sum(0)).abs().max() <= 40 * 2**-47
    forward, backward = torch.zeros(70_001), torch.zeros(70_001)
    for value, other in zip(values, reversed(values), strict=True):
        forward += value
        backward += other
    assert not torch.equal(forward, backward), "in float32 the order shows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_c_kernel_rounds_as_torch_does(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, 2.0**-47, 3 * 2.0**-47, 0.0])
    values = torch.cat([torch.randn(70_001, generator=generator) * 1e-9, special]).to(dtype)
    start = torch.randn(len(values), generator=generator, dtype=torch.float64)
    by_kernel, by_torch = start.clone(), start.clone()
    add_exactly(by_kernel, values)
    monkeypatch.setattr(exact_sum, "native_library", lambda *args, **kwargs: None)
    add_exactly(by_torch, values)
    assert torch.equal(by_kernel.nan_to_num(), by_torch.nan_to_num())
    assert torch.equal(by_kernel.isnan(), by_torch.isnan())


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1] * 12), (2, [1, 1, 2, 2, 2, 2, 2]), (3, [1, 1, 2, 2, 3, 3]), (9, [1, 1, 2, 2, 3, 3])]
)
def test_long_prompts_have_packs_of_their_own(most: int, sizes: list[int]) -> None:
    lens = [10 * (i % 12) for i in range(5, 17)]
    found = packs(list(range(12)), lens, groups_per_pack=most)
    assert [list(found.values()).count(pack) for pack in sorted(set(found.values()))] == sizes
    by_pack = [sorted(lens[p] for p in found if found[p] == pack) for pack in range(len(sizes))]
    assert all(a[0] >= b[-1] for a, b in itertools.pairwise(by_pack)), "longest first"


def _batch(seed: int, algorithm: AlgorithmConfig) -> ScoredBatch:
    """Six groups; a third of the responses has advantage 0."""
    rollouts = tiny_rollouts(seed=seed, num_groups=6, num_samples=4)
    advantages = torch.randn(len(rollouts), generator=torch.Generator().manual_seed(seed))
    advantages[::3] = 0
    return scored(rollouts, advantages)


def _streamable(batch: ScoredBatch, algorithm: AlgorithmConfig) -> list[tuple[tuple[int, int], TrainBatch]]:
    """Passes with a gradient, made pack by pack from nothing but that pack's responses, as during a rollout."""
    prompts = batch.rollouts.prompt_ids_R
    lens = {int(p): int(n) for p, n in zip(prompts, batch.rollouts.prompt_lens_R, strict=True)}
    pack_of = packs(list(lens), list(lens.values()), groups_per_pack=CFG.groups_per_pack)
    offered = []
    for pack in sorted(set(pack_of.values()), reverse=True):
        part = batch.take([row for row, p in enumerate(prompts.tolist()) if pack_of[p] == pack])
        rows = kept(part.rollouts, algorithm).nonzero().flatten().tolist()
        for own in make_passes(part, rows, CFG, algorithm, pack_of=pack_of):
            if own.needs_grad:
                share = train_batch(part, [own], planned_sequences=power_of_two(len(batch.rollouts)))
                offered.append((own.key, share))
    return offered


def _state(trainer: PolicyTrainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.state_dict().items()}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("streamed", ["first", "all", "reversed"])
def test_the_update_is_the_same_to_the_bit_whatever_was_streamed(streamed: str, aggregation: str) -> None:
    algorithm = AlgorithmConfig(loss_aggregation=aggregation, mask_truncated=True)
    whole, parts = (make_trainer(lively(), CFG, algorithm=algorithm) for _ in range(2))
    for seed in range(2):
        batch = _batch(seed, algorithm)
        offered = _streamable(batch, algorithm)
        assert len(offered) > 2
        chosen = {"first": offered[:1], "all": offered, "reversed": offered[::-1]}[streamed]
        done = []
        for key, share in chosen:
            parts.stream(share)
            done.append(key)
        shares = {"seed": 0, "step": seed, "num_workers": 1}
        metrics = whole.step(make_train_batches(batch, CFG, algorithm, **shares)[0][0])
        rest = make_train_batches(batch, CFG, algorithm, streamed=frozenset(done), **shares)[0][0]
        got = parts.step(rest)
        assert len(rest) < len(batch.rollouts)
        assert got == pytest.approx(metrics, rel=1e-9, abs=1e-12)
        assert got["actor/grad_norm"] == metrics["actor/grad_norm"] > 0
    assert all(torch.equal(value, _state(whole)[name]) for name, value in _state(parts).items())


def test_a_streamed_pass_that_is_not_finite_is_named_and_skips_the_step(caplog: pytest.LogCaptureFixture) -> None:
    algorithm = AlgorithmConfig()
    trainer = make_trainer(lively(), CFG, algorithm=algorithm)
    before = _state(trainer)
    batch = _batch(0, algorithm)
    offered = _streamable(batch, algorithm)
    spoilt = offered[0][1]
    spoilt.advantages_S[1] = torch.inf
    for _, share in offered:
        trainer.stream(share)
    done = frozenset(key for key, _ in offered)
    rest = make_train_batches(batch, CFG, algorithm, num_workers=1, seed=0, step=0, streamed=done)[0][0]
    assert trainer.step(rest) == {}
    name = f"sample {int(spoilt.samples_S[1])} of prompt {int(spoilt.prompt_ids_S[1])}"
    assert f"no finite loss for {name})" in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in _state(trainer).items())

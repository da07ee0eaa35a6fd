"""ZeRO-3 on two processes, with a model whose matrices are really sharded (DeepSpeed leaves those below 100,000
elements whole): the same step as plain torch, with and without off-load and recomputation; and its weights reach the
rollout replicas a bucket at a time.

The comparison is in float32, with eps = 1e-3 as in `test_deepspeed`.  Gradients of one step differ in the order of
their sums, so norms agree to 1e-5 of themselves and weights to 1e-6, a thousandth of what they move.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from conf.optimizer import AdamWConfig
from conf.update import AlgorithmConfig, DeepSpeedBackend, TorchBackend, UpdateConfig
from tests.decoders import TINY, lively
from tests.tlt_core.grpo.rollouts import make_trainer, tiny_scored
from tlt_core.grpo.batch import make_train_batches
from tlt_core.grpo.update import PolicyTrainer

LARGE = dataclasses.replace(TINY, vocab_size=512, hidden_size=256, intermediate_size=512, head_dim=64, num_layers=4)
MB = 1 << 20
MOVE = 1e-3  # at least, of some weight
VARIANTS: dict[str, dict[str, Any]] = {
    "torch": {"backend": TorchBackend()},
    "plain": {"backend": DeepSpeedBackend(kind="deepspeed", zero_stage=3)},
    "off-load and recompute": {
        "backend": DeepSpeedBackend(kind="deepspeed", zero_stage=3, offload_optimizer=True),
        "activation_checkpointing": True,
    },
}


class Streamed(NamedTuple):
    """What one worker saw while its weights went to a replica."""

    most_gathered: int  # bytes of sharded parameters that were whole at one moment
    sharded: int  # bytes of all of them, whole
    largest: int
    sharded_again: bool
    wrong: list[str]  # weights of the replica that are not the master's, rounded


def _trained(rank: int, dtype: torch.dtype, **settings: Any) -> tuple[PolicyTrainer, float]:
    """A trainer after one step, and the norm of its gradient."""
    optimizer = AdamWConfig(learning_rate=5e-3, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)
    algorithm = AlgorithmConfig(loss_aggregation="sequence_mean")
    cfg = UpdateConfig(optimizer=optimizer, tokens_per_micro_batch=64, **settings)
    decoder = lively(LARGE, dtype=dtype)
    trainer = make_trainer(decoder, cfg, algorithm=algorithm, temperature=0.8, total_steps=1, rank=rank, world_size=2)
    scored = tiny_scored(seed=0, num_groups=3)
    batches = make_train_batches(scored, UpdateConfig(), algorithm, num_workers=2, seed=0, step=0)
    return trainer, trainer.step(batches[0][rank])["actor/grad_norm"]


def _stream(trainer: PolicyTrainer) -> Streamed:
    """Hand the weights to a replica, and look at every parameter before each of them."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    sharded = [p for p in trainer._backend._engine.module.parameters() if not p.ds_persist]
    bytes_of = {id(p): p.ds_numel * p.element_size() for p in sharded}
    seen = []

    def whole() -> int:
        return sum(bytes_of[id(p)] for p in sharded if p.ds_status == ZeroParamStatus.AVAILABLE)

    def watched():
        for item in trainer.weights():
            seen.append(whole())
            yield item

    replica = lively(LARGE, dtype=torch.bfloat16)
    replica.load_weights(watched())
    state, own = trainer.state_dict(), dict(replica.named_parameters())
    wrong = [n for n, w in own.items() if not torch.equal(w, state[f"master/decoder.{n}"].bfloat16())]
    return Streamed(max(seen), sum(bytes_of.values()), max(bytes_of.values()), whole() == 0, wrong)


def _worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for name, settings in VARIANTS.items():
        trainer, norm = _trained(rank, torch.float32, **settings)
        weights = {key: weight.clone() for key, weight in trainer.weights()}
        torch.save((weights, norm), folder / f"{name}-{rank}.pt")
        dist.barrier()
        trainer.close()
    for bucket_mb in (1, 128):
        backend = DeepSpeedBackend(kind="deepspeed", zero_stage=3, gather_bucket_mb=bucket_mb)
        trainer, _ = _trained(rank, torch.bfloat16, backend=backend)
        torch.save(tuple(_stream(trainer)), folder / f"streamed{bucket_mb}-{rank}.pt")
        dist.barrier()
        trainer.close()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero3")
    mp.spawn(_worker, args=(folder,), nprocs=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "torch"])
def test_a_step_is_plain_torchs(results: Path, name: str) -> None:
    expected, norm = torch.load(results / "torch-0.pt")
    start = dict(lively(LARGE).requires_grad_(False).named_parameters())
    assert max(float((expected[n] - start[n]).abs().max()) for n in start) > MOVE
    assert norm > 0.5, "clipping is at work"
    for rank in (0, 1):
        weights, own_norm = torch.load(results / f"{name}-{rank}.pt")
        assert own_norm == pytest.approx(norm, rel=1e-5)
        assert weights.keys() == expected.keys()
        assert max(float((weights[n] - expected[n]).abs().max()) for n in expected) < MOVE / 1000


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_weights_are_gathered_a_bucket_at_a_time_and_reach_every_replica(results: Path, rank: int) -> None:
    small, large = (Streamed(*torch.load(results / f"streamed{mb}-{rank}.pt")) for mb in (1, 128))
    assert small.sharded > 2 * (MB + small.largest), "a model that fits into the bound proves nothing"
    assert 0 < small.most_gathered <= max(MB, small.largest)
    assert large.most_gathered == large.sharded, "the other bound is at work when it is larger than the model"
    for streamed in (small, large):
        assert streamed.sharded_again
        assert streamed.wrong == []

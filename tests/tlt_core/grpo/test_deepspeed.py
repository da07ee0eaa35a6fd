"""One process, torch data parallel and ZeRO 0-3 on two processes make the same update.

All in float32: DeepSpeed computes in float32 when bf16 is off, so differences are rounding in another order of sums.
AdamW divides a gradient by its own size, which turns rounding of a gradient near zero into a visible fraction of the
learning rate; eps = 1e-3 keeps that out of the comparison, and the tolerance (1e-6) is then 1/5000 of a weight's move.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from conf.optimizer import AdamWConfig
from conf.update import AlgorithmConfig, DeepSpeedBackend, KLConfig, TorchBackend, UpdateConfig
from tests.decoders import lively
from tests.tlt_core.grpo.rollouts import make_trainer, tiny_scored
from tlt_core.grpo.batch import make_train_batches
from tlt_core.grpo.update import PolicyTrainer

TOLERANCE = 1e-6
ALGORITHM = AlgorithmConfig(loss_aggregation="sequence_mean", kl=KLConfig(kind="k3", coef=0.1))
BACKENDS = {"torch": TorchBackend()} | {
    f"zero{stage}": DeepSpeedBackend(kind="deepspeed", zero_stage=stage) for stage in (0, 1, 2, 3)
}


def _train(backend, rank: int, world_size: int, resumed: Path | None = None) -> tuple[dict, dict, dict]:
    """Three optimizer steps on this worker's shares; returns weights, trainer state and the last metrics.

    resumed: the third step is made by a new trainer, from files in this folder."""

    def make() -> PolicyTrainer:
        optimizer = AdamWConfig(learning_rate=5e-3, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)
        cfg = UpdateConfig(backend=backend, optimizer=optimizer, tokens_per_micro_batch=64)
        decoder = lively()
        return make_trainer(
            decoder, cfg, algorithm=ALGORITHM, temperature=0.8, total_steps=3, rank=rank, world_size=world_size
        )

    trainer, metrics = make(), {}
    for step in range(3):
        if step == 2 and resumed is not None:
            trainer.save(resumed)
            dist.barrier()
            trainer.close()
            trainer = make()
            trainer.load(resumed)
        scored = tiny_scored(seed=step, num_groups=3)
        reference = scored.rollouts.logprobs_T - 0.1
        batches = make_train_batches(
            scored, UpdateConfig(), ALGORITHM, num_workers=world_size, ref_logprobs_T=reference, seed=0, step=step
        )
        share = batches[0][rank]
        if step == 1:
            assert trainer.step(replace(share, advantages_S=share.advantages_S * torch.nan)) == {}, "it is skipped"
        metrics = trainer.step(share)
    weights = {name: weight.clone() for name, weight in trainer.weights()}
    state = {name: value.clone() for name, value in trainer.state_dict().items()}
    if world_size > 1:
        dist.barrier()
    trainer.close()
    return weights, state, metrics


def _worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for name, backend in BACKENDS.items():
        torch.save(_train(backend, rank, 2), folder / f"{name}-{rank}.pt")
    for name in ("zero2", "zero3"):
        (folder / name).mkdir(exist_ok=True)
        torch.save(_train(BACKENDS[name], rank, 2, resumed=folder / name), folder / f"{name}-resumed-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    mp.spawn(_worker, args=(folder,), nprocs=2)
    torch.save(_train(TorchBackend(), 0, 1), folder / "single.pt")
    return folder


def _largest_difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


@pytest.mark.parametrize("name", list(BACKENDS))
def test_two_processes_make_the_update_of_one(results: Path, name: str) -> None:
    weights, state, metrics = torch.load(results / "single.pt")
    start = dict(lively().named_parameters())
    assert min((weights[n] - start[n]).abs().max().item() for n in weights) > 5e-3  # every tensor has moved
    for rank in (0, 1):
        other_weights, other_state, other_metrics = torch.load(results / f"{name}-{rank}.pt")
        most = 0.0 if name == "torch" else TOLERANCE  # its sum of gradients is exact
        assert _largest_difference(weights, other_weights) <= most
        assert _largest_difference(state, other_state) <= most
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert metrics["actor/grad_norm"] > 0.5  # clipping was at work


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_zero_resumes_bit_for_bit(results: Path, name: str) -> None:
    for rank in (0, 1):
        straight, resumed = (torch.load(results / f"{name}{kind}-{rank}.pt") for kind in ("", "-resumed"))
        assert _largest_difference(straight[0], resumed[0]) == 0
        assert _largest_difference(straight[1], resumed[1]) == 0

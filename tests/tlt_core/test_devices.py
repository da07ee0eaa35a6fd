"""Stations of the pipeline on a pretended GPU: no operation mixes devices, and the CPU's results come out.

Results differ by rounding, since the references that stand in for a GPU's kernels add up in another order than the
CPU's: by at most 1e-5 in trained drafters, 2e-6 in weights, 4e-8 in gradients (Xeon with AMX).
"""

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from conf.drafter import DrafterConfig, IdleTrainingConfig
from conf.load import load
from conf.optimizer import AdamWConfig
from conf.rollout import SpeculationConfig
from conf.system import ClusterConfig
from conf.update import AlgorithmConfig, UpdateConfig
from tests.decoders import lively
from tests.pretended_gpu import GpuTensor, pretended_gpu
from tests.tlt_core.drafter.eagle3.training_texts import lively_decoder, texts
from tests.tlt_core.grpo.rollouts import make_trainer, tiny_scored
from tlt_core.cluster.drafting import Drafting
from tlt_core.cluster.messages import TrainerSpec
from tlt_core.cluster.policy_shard import PolicyShard
from tlt_core.cluster.rendezvous import backend_of, host_store, join_group
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.train import Eagle3Trainer, TrainSettings
from tlt_core.drafter.eagle3.weights import flat
from tlt_core.grpo.batch import TrainBatch, make_train_batches
from tlt_core.items.types import FinishReason, NoiseKey, Rollout, ScoredBatch
from tlt_core.machine.driver import driver_device
from tlt_core.model.edge_weights import EdgeWeights
from tlt_core.model.load import load_decoder, save_hf
from tlt_core.rollout.vllm.drafts import VllmDrafts
from tlt_core.run import drafter_warmup

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SPOT = IdleTrainingConfig(micro_step_s=1e6, rows_per_step=32, window_rows=16, canary_tokens=60)


@pytest.fixture(scope="module")
def decoder(tiny_config):
    return lively_decoder(tiny_config)


@pytest.fixture(scope="module")
def folder(decoder, tmp_path_factory) -> Path:
    """A policy and a drafter for it."""
    root = tmp_path_factory.mktemp("devices")
    weights = [(name, w.detach()) for name, w in decoder.named_parameters()]
    save_hf(weights, decoder.config, root / "policy", tokenizer_from=root, dtype=torch.float32)
    drafter = eagle3_from_target(decoder, torch.arange(64), scales=(1.0,) * 3, seed=1)
    save_eagle3(drafter, root / "drafter", dtype=torch.float32)
    return root


@pytest.fixture(scope="module")
def sequences(decoder):
    """Of enough prompts that some are held back."""
    drafter = eagle3_from_target(decoder, torch.arange(64), scales=(1.0,) * 3, seed=1)
    lengths = (9, 13, 14, 16) * 12
    found = observe(decoder, texts(lengths), drafter, firsts=[4] * len(lengths), dtype=torch.float32)
    return [dataclasses.replace(s, key=NoiseKey(0, 1, n, 0)) for n, s in enumerate(found)]


def published(device: torch.device, folder: Path, kept: Path, sequences) -> list[torch.Tensor]:
    """Train in idle time as a worker beside vLLM does; returns the candidate, and what was sent to vLLM."""
    sent: list[torch.Tensor] = []

    def ask(question):
        return {"answer": {}}

    speculation = SpeculationConfig(drafter_path=str(folder / "drafter"))
    edge_weights = EdgeWeights.load(folder / "policy", dtype=torch.float32, device=device)
    kept.mkdir()
    drafting = Drafting(VllmDrafts(ask, speculation, edge_weights, folder=kept), rank=0, hosts=(0,))
    for resume in (False, True):  # the second time from its own files
        drafting.train_in_idle_time(
            DrafterConfig(idle_training=SPOT),
            speculation,
            temperature=1.0,
            compute_dtype=torch.float32,
            folder=kept,
            resume=resume,
        )
        idle_training = drafting.idle_training
        assert idle_training is not None
        idle_training.begin(1 + resume, 0)
        for sequence in sequences:
            idle_training.collect(dataclasses.replace(sequence, key=sequence.key._replace(step=1 + resume)))
        for _ in range(200):
            if idle_training.result().steps >= 4:
                idle_training.candidate._trained_s = 1e9  # the next candidate is due, whatever the clock says
            if idle_training.result().trial is not None:
                break
            idle_training.micro_step()
        assert idle_training.result().trial is not None
        while not any(name.startswith("grad.") for name in idle_training._trainer.state_dict()):
            idle_training.micro_step()  # a gradient that is not applied yet is saved, too
        assert {head.device for head in idle_training._heads.values()} == {device}, (
            "the teacher's products take place there"
        )
        idle_training.end()
        idle_training.save()
        drafting.close()
        assert (kept / "worker_0" / "training.safetensors").is_file(), "a failed save is only a warning"
        sent.append(idle_training.candidate.contribution(1.0).clone())
    assert drafting.publish([1.0], measured=idle_training.result().trial).accepted
    drafting.export(kept / "export", dtype=torch.float32)
    return [flat(idle_training.candidate.used), *sent]


def test_idle_time_training_beside_vllm(folder, sequences, tmp_path) -> None:
    expected = published(CPU, folder, tmp_path / "cpu", sequences)
    with pretended_gpu():
        found = published(GPU, folder, tmp_path / "gpu", sequences)
        assert all(isinstance(x, GpuTensor) for x in found)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-4)


def train_batch_of(scored: ScoredBatch, cfg: UpdateConfig, algorithm: AlgorithmConfig) -> TrainBatch:
    return make_train_batches(scored, cfg, algorithm, num_workers=1, seed=0, step=1)[0][0]


MOVE = 5e-3  # of a weight, in a step, at most
ALGORITHM = AlgorithmConfig(kl={"coef": 0.1, "place": "loss"})


def updated(device: torch.device, folder: Path, saved: Path) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Two updates of two optimizer steps with a KL term, the second of a trainer that resumed; its metrics and the
    weights that are published."""
    saved.mkdir()
    cfg = UpdateConfig(tokens_per_micro_batch=64, dtype="float32", optimizer=AdamWConfig(learning_rate=MOVE, eps=1e-3))
    for resumed in (False, True):
        shard = PolicyShard(
            TrainerSpec(cfg, ALGORITHM, total_steps=4, max_new_tokens=30, temperature=0.9),
            model_dir=folder / "policy",
            checkpoint=saved if resumed else None,
            device=device,
            rank=0,
            world_size=1,
        )
        batch = train_batch_of(tiny_scored(seed=int(resumed), num_groups=4), cfg, ALGORITHM)
        batch = dataclasses.replace(batch, ref_logprobs_C=shard.reference_logprobs(batch))
        report = shard.update([batch, batch])  # the second step needs the log-probabilities before the first
        shard.trainer.save(saved)
        shard.trainer.close()
    return report.metrics, [w.clone() for _, w in shard.trainer.weights()]


def test_policy_update_with_a_reference_and_a_checkpoint(decoder, folder, tmp_path) -> None:
    expected, weights = updated(CPU, folder, tmp_path / "cpu")
    with pretended_gpu():
        found, theirs = updated(GPU, folder, tmp_path / "gpu")
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
        for a, b, start in zip(weights, theirs, decoder.parameters(), strict=True):
            assert isinstance(b, GpuTensor)
            assert (a - start).abs().max() > MOVE / 2
            torch.testing.assert_close(b.cpu(), a, rtol=1e-3, atol=1e-5)


def made(device: torch.device, folder: Path, out_dir: Path) -> tuple[float, ...]:
    """A first drafter, from the target's hidden states to figures on held-out responses."""
    plain = load_decoder(folder / "policy", dtype=torch.float32, device=device)
    ids = torch.arange(0, 64, 2)
    rollouts = [
        Rollout(NoiseKey(0, 1, n, 0), tokens.int(), 3, torch.zeros(len(tokens) - 3), FinishReason.STOP, 0)
        for n, tokens in enumerate(texts((9, 12, 14, 8)))
    ]
    kept, scales = drafter_warmup._observe(plain, rollouts, ids, lambda done: None, kept_as=torch.float32)
    model = eagle3_from_target(plain, ids, scales=scales, seed=0)
    assert model.fc.weight.device == device
    trainer = Eagle3Trainer(model, plain, TrainSettings(learning_rate=1e-3, depth=3))
    trainer.step(kept)
    save_eagle3(model, out_dir / f"{device.type}-eagle3", dtype=torch.float32)
    return tuple(drafter_warmup._held_out(trainer, kept, load("conf/smoke.yaml")).values())


def test_first_drafter(folder, tmp_path) -> None:
    expected = made(CPU, folder, tmp_path)
    with pretended_gpu():
        assert made(GPU, folder, tmp_path) == pytest.approx(expected, rel=1e-3)


def shared(rank: int, meeting_point: str, folder: Path, pretended: bool) -> None:
    """One of two workers on a GPU makes two steps.  rank -1: a lone worker makes them."""
    torch.set_num_threads(1)
    workers = 1 if rank < 0 else 2
    if workers > 1:
        backend = backend_of("cuda", shares_gpus=True)
        join_group(meeting_point, own_address="127.0.0.1", rank=rank, world_size=2, backend=backend, store=None)
    cfg = UpdateConfig(tokens_per_micro_batch=64, dtype="float32", optimizer=AdamWConfig(learning_rate=MOVE))
    algorithm = AlgorithmConfig()
    with pretended_gpu() if pretended else contextlib.nullcontext():
        trainer = make_trainer(
            lively().to(GPU),
            cfg,
            algorithm=algorithm,
            rank=max(rank, 0),
            world_size=workers,
            device=GPU,
        )
        for seed in (0, 1):
            scored = tiny_scored(seed=seed, num_groups=4)
            trainer.step(make_train_batches(scored, cfg, algorithm, num_workers=workers, seed=0, step=1)[0][rank])
        weights = dict(trainer.weights())
        assert all(w.device == GPU for w in weights.values())
        torch.save({name: w.cpu() for name, w in weights.items()}, folder / f"{rank}.pt")
    if workers > 1:
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.parametrize("pretended", [True, pytest.param(False, marks=[pytest.mark.gpu, NEEDS_GPU])])
def test_two_workers_on_one_gpu_make_the_update_of_one_to_the_bit(pretended: bool, tmp_path: Path) -> None:
    """Their gradients, on the GPU, are summed over gloo."""
    store, meeting_point = host_store("127.0.0.1", world_size=2)
    mp.spawn(shared, args=(meeting_point, tmp_path, pretended), nprocs=2)
    del store
    shared(-1, "", tmp_path, pretended)
    expected, *found = (torch.load(tmp_path / f"{rank}.pt") for rank in (-1, 0, 1))
    start = dict(lively().named_parameters())
    assert any(not torch.equal(expected[name], start[name.removeprefix("decoder.")]) for name in expected)
    for weights in found:
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_the_driver_uses_a_gpu_where_it_has_one(monkeypatch) -> None:
    workers = ClusterConfig(gpus_per_worker=1)
    assert driver_device(workers) == driver_device(ClusterConfig()) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (driver_device(workers), driver_device(ClusterConfig())) == ("cuda:0", "cpu")

"""After a publish every engine decodes with the trainer's weights, or the run ends."""

from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from conf.optimizer import AdamWConfig
from conf.rollout import RolloutConfig, SpeculationConfig
from conf.system import ClusterConfig
from conf.update import AlgorithmConfig, UpdateConfig
from tests.tlt_core.grpo.rollouts import tiny_scored
from tlt_core.cluster.group import WorkerDied, WorkerGroup
from tlt_core.cluster.messages import TrainerSpec, WorkerSpec
from tlt_core.cluster.policy_shard import WeightDigest
from tlt_core.grpo.batch import make_train_batches
from tlt_core.model.config import DecoderConfig
from tlt_core.model.load import random_decoder

UPDATE = UpdateConfig(dtype="float32", optimizer=AdamWConfig(learning_rate=0.1))


@pytest.fixture
def group(tiny_folder: Path) -> Any:
    spec = WorkerSpec(
        model_dir=tiny_folder,
        rollout=RolloutConfig(dtype="float32", max_live_requests=1, speculation=SpeculationConfig(policy="off")),
        max_len=64,
        trainer=TrainerSpec(UPDATE, AlgorithmConfig(), total_steps=4, max_new_tokens=32, temperature=1.0),
        threads=1,
        device="cpu",
        release_memory=True,
    )
    with WorkerGroup(ClusterConfig(num_workers=2), spec) as started:
        started.load(None, 0)
        yield started
        started.kill()


def _engine_and_trainer(worker: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine, trainer = worker._replica._engine.decoder.named_parameters(), worker._policy.trainer.weights()
    return {n: p.detach().clone() for n, p in engine}, {n: p.clone() for n, p in trainer}


def _ask(group: WorkerGroup, question: Any) -> list[Any]:
    return ray.get([worker.__ray_call__.remote(question) for worker in group._workers])


@pytest.mark.slow
def test_engines_get_the_weights_of_a_large_step_and_workers_that_disagree_end_the_run(group: WorkerGroup) -> None:
    (before, _), _ = _ask(group, _engine_and_trainer)
    batch = tiny_scored(seed=0, num_groups=4)
    group.update(make_train_batches(batch, UPDATE, AlgorithmConfig(), num_workers=2, seed=0, step=1))
    assert _ask(group, lambda w: w._replica._engine.memory_bytes) == [0, 0], "released while the policy is trained"
    group.publish(1)
    for engine, trainer in _ask(group, _engine_and_trainer):
        assert engine.keys() == trainer.keys()
        for name, weight in engine.items():
            assert torch.equal(weight, trainer[name]), name
            assert not torch.equal(weight, before[name]), name

    def spoil(worker: Any) -> None:
        if worker._rank == 1:
            with torch.no_grad():
                next(iter(worker._policy.trainer.weights()))[1].add_(1e-3)

    _ask(group, spoil)
    with pytest.raises(WorkerDied, match=r"after publishing policy 2, workers \[\d.*\] hold other weights"):
        group.publish(2)


def _digest(named: list[tuple[str, Tensor]]) -> int:
    digest = WeightDigest()
    passed = list(digest.through(named))
    assert all(a is b for (_, a), (_, b) in zip(passed, named, strict=True))
    return digest.value


def test_equal_weights_have_equal_digests_and_others_have_not(tiny_config: DecoderConfig) -> None:
    named, again, other = (
        list(random_decoder(tiny_config, seed=seed, dtype=torch.float32).named_parameters()) for seed in (0, 0, 1)
    )
    moved = [(name, tensor + 1e-6) for name, tensor in named]
    halved = [(name, tensor.bfloat16()) for name, tensor in named]
    renamed = [(name + "x", tensor) for name, tensor in named]
    one_tensor = [(n, t * 1.001 if n == "layers.1.o_proj.weight" else t) for n, t in named]
    assert _digest(named) == _digest(again)
    others = [_digest(v) for v in (named, other, moved, halved, renamed, named[::-1], named[:-1], one_tensor)]
    assert len(set(others)) == len(others)

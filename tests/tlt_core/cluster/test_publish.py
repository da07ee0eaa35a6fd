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
from tlt_core.grpo.batch import make_train_batches

pytestmark = pytest.mark.slow
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
    )
    with WorkerGroup(ClusterConfig(num_workers=2), spec) as started:
        started.load(None, 0)
        yield started
        started.kill()


def _engine_and_trainer(worker: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = dict(worker._replica._engine.decoder.named_parameters())
    return {n: p.detach().clone() for n, p in engine.items()}, {n: p.clone() for n, p in worker._policy.weights()}


def _ask(group: WorkerGroup, question: Any) -> list[Any]:
    return ray.get([worker.__ray_call__.remote(question) for worker in group._workers])


def test_engines_get_the_weights_of_a_large_step_and_workers_that_disagree_end_the_run(group: WorkerGroup) -> None:
    (before, _), _ = _ask(group, _engine_and_trainer)
    batch = tiny_scored(seed=0, num_groups=4)
    group.update(make_train_batches(batch, UPDATE, AlgorithmConfig(), num_workers=2, seed=0, step=1))
    group.publish(1)
    for engine, trainer in _ask(group, _engine_and_trainer):
        assert engine.keys() == trainer.keys()
        for name, weight in engine.items():
            assert torch.equal(weight, trainer[name]), name
            assert not torch.equal(weight, before[name]), name

    def spoil(worker: Any) -> None:
        if worker._rank == 1:
            with torch.no_grad():
                next(iter(worker._policy.weights()))[1].add_(1e-3)

    _ask(group, spoil)
    with pytest.raises(WorkerDied, match=r"after publishing policy 2, workers \[\d.*\] hold other weights"):
        group.publish(2)

"""A worker that is told to release its rollout's memory has none during the update, and decodes the same afterwards."""

import pytest
import ray
import torch

from conf.rollout import RolloutConfig, SpeculationConfig
from conf.system import ClusterConfig
from conf.update import AlgorithmConfig, UpdateConfig
from tests.tlt_core.grpo.rollouts import tiny_scored
from tlt_core.cluster.group import WorkerGroup
from tlt_core.cluster.messages import TrainerSpec, WorkerSpec
from tlt_core.grpo.batch import make_train_batches
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams

pytestmark = pytest.mark.slow


def generate(group: WorkerGroup, step: int) -> dict:
    tokens, finished = torch.arange(3, 9).int(), []
    groups = [[GenerationRequest(NoiseKey(0, step, g, s), tokens) for s in range(2)] for g in range(3)]
    group.run_phase(
        groups,
        SamplingParams(max_new_tokens=20),
        dispatch="static",
        on_progress=lambda drained: finished.extend(drained.finished),
        step=step,
    )
    return {r.key: (r.tokens.tolist(), r.logprobs.tolist()) for r in finished}


def memory_bytes(group: WorkerGroup) -> int:
    (worker,) = group._workers
    return ray.get(worker.__ray_call__.remote(lambda w: w._replica._engine.memory_bytes))


def test_memory_is_released_in_the_update_and_taken_again(tiny_folder):
    scored, held, responses = tiny_scored(seed=0, num_groups=3), {}, {}
    update, algorithm = UpdateConfig(dtype="float32"), AlgorithmConfig()
    shares = make_train_batches(scored, update, algorithm, num_workers=1, seed=0, step=0)
    for release in (False, True):
        spec = WorkerSpec(
            model_dir=tiny_folder,
            rollout=RolloutConfig(dtype="float32", max_live_requests=3, speculation=SpeculationConfig(policy="off")),
            max_len=32,
            trainer=TrainerSpec(update, algorithm, total_steps=1, max_new_tokens=20, temperature=1.0),
            threads=1,
            device="cpu",
            release_memory=release,
        )
        with WorkerGroup(ClusterConfig(num_workers=1), spec) as group:
            group.load(None, 0)
            held[release] = [memory_bytes(group)]
            responses[release] = [generate(group, 1)]
            group.update(shares)
            held[release].append(memory_bytes(group))
            group.publish(1)
            responses[release].append(generate(group, 2))
            held[release].append(memory_bytes(group))
    size = 2 * 2 * 3 * 2 * 32 * 8 * 4
    assert held == {False: [size] * 3, True: [0, 0, size]}  # released, too, before the trainer is loaded
    assert responses[True] == responses[False]
    assert len(responses[True][1]) == 6

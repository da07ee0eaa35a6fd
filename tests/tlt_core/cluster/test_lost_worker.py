"""A worker that is killed, while it decodes or while it trains the drafter, ends the phase at once."""

import os
import signal
import time

import pytest
import ray
import torch

from conf.drafter import DrafterConfig, IdleTrainingConfig
from conf.rollout import RolloutConfig, SpeculationConfig
from conf.system import ClusterConfig
from tlt_core.cluster.group import WorkerDied, WorkerGroup
from tlt_core.cluster.messages import WorkerSpec
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.idle_training.coordinator import IdleTrainingSettings
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams
from tlt_core.model.load import load_decoder

pytestmark = pytest.mark.slow


def requests(num_groups: int, samples: int, *, step: int) -> list[list[GenerationRequest]]:
    tokens = torch.arange(3, 9).int()
    return [[GenerationRequest(NoiseKey(0, step, g, s), tokens) for s in range(samples)] for g in range(num_groups)]


def pid_of(group: WorkerGroup, rank: int) -> int:
    return ray.get(group._workers[rank].__ray_call__.remote(lambda _: os.getpid()))


@pytest.fixture
def group(tiny_folder, tmp_path):
    decoder = load_decoder(tiny_folder, dtype=torch.float32)
    drafter = tmp_path / "d-eagle3"
    save_eagle3(eagle3_from_target(decoder, torch.arange(64), scales=(1.0,) * 3, seed=1), drafter, dtype=torch.float32)
    rollout = RolloutConfig(
        dtype="float32",
        max_live_requests=2,
        dispatch="static",
        speculation=SpeculationConfig(drafter_path=str(drafter)),
    )
    spec = WorkerSpec(
        model_dir=tiny_folder,
        rollout=rollout,
        max_len=300,
        trainer=None,
        threads=1,
        device="cpu",
        drafter=DrafterConfig(depth=2, idle_training=IdleTrainingConfig(min_idle_s=0.0, micro_step_s=0.02)),
        idle_training_dir=tmp_path / "idle_training",
    )
    with WorkerGroup(ClusterConfig(num_workers=2), spec) as started:
        started.load(None, 0)
        yield started
        started.kill()


def generate(group, groups, on_progress):
    # Group 0, 2, ... go to worker 0 and 1, 3, ... to worker 1.
    return group.run_phase(
        groups,
        SamplingParams(max_new_tokens=250),
        dispatch="static",
        on_progress=on_progress,
        step=1,
        is_training=True,
        idle_training=IdleTrainingSettings(min_idle_s=0.0),
    )


@pytest.mark.parametrize("state", ["decoding", "training"])
def test_a_killed_worker_ends_the_phase(group, state, caplog):
    victim, since, killed = pid_of(group, 1), [], []
    groups = [g if i % 2 == 0 else g[:1] for i, g in enumerate(requests(9, 6, step=1))]  # thirty requests, and four

    def on_progress(drained):
        if drained.live[0] > 0 and (drained.live[1] > 0) == (state == "decoding"):
            since.append(time.monotonic())
            if not killed and since[-1] - since[0] >= (0.3 if state == "training" else 0):  # in the middle of a round
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)

    with pytest.raises(WorkerDied, match="resume"):
        generate(group, groups, on_progress)
    assert killed, f"worker 1 was not {state} for long enough"
    assert "worker 1 on node" in caplog.text, "said before Ray ends"

"""Real workers: one computes passes of the update while the other decodes, and the update is the same to the bit."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from conf.drafter import DrafterConfig
from conf.rollout import RolloutConfig, SpeculationConfig
from conf.system import ClusterConfig
from conf.update import AlgorithmConfig, UpdateConfig
from tests.tlt_core.grpo.rollouts import scored
from tlt_core.cluster.dispatcher import Drained, OfferedPass
from tlt_core.cluster.group import WorkerGroup
from tlt_core.cluster.messages import TrainerSpec, WorkerSpec
from tlt_core.grpo.batch import make_train_batches, train_batch
from tlt_core.grpo.passes import make_passes, power_of_two
from tlt_core.grpo.trainer_files import SavedState
from tlt_core.idle_training.coordinator import IdleTrainingSettings
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, RolloutBatch, SamplingParams, WorkerState

UPDATE = UpdateConfig(tokens_per_micro_batch=256, groups_per_pack=1, dtype="float32")
ALGORITHM = AlgorithmConfig()
PARAMS = SamplingParams(max_new_tokens=120)
SAMPLES = {prompt: 2 if prompt % 2 else 6 for prompt in range(8)}  # even prompts go to worker 0, so 1 is idle first


def _requests(step: int) -> list[list[GenerationRequest]]:
    tokens = torch.arange(3, 9).int()
    return [[GenerationRequest(NoiseKey(0, step, g, s), tokens) for s in range(n)] for g, n in SAMPLES.items()]


def _advantages(rollouts: RolloutBatch) -> torch.Tensor:
    return (rollouts.prompt_ids_R * 0.3 + rollouts.samples_R - 1.5).float()


@pytest.fixture
def group(tiny_folder: Path) -> Iterator[WorkerGroup]:
    spec = WorkerSpec(
        model_dir=tiny_folder,
        rollout=RolloutConfig(dtype="float32", max_live_requests=1, speculation=SpeculationConfig(policy="off")),
        max_len=300,
        trainer=TrainerSpec(UPDATE, ALGORITHM, total_steps=4, max_new_tokens=120, temperature=1.0),
        threads=1,
        device="cpu",
        drafter=DrafterConfig(),
    )
    with WorkerGroup(ClusterConfig(num_workers=2), spec) as started:
        yield started


def _train(
    group: WorkerGroup, folder: Path, *, offers: bool
) -> tuple[dict[str, torch.Tensor], list[int], set[WorkerState]]:
    """Trainer states after two steps from the start model, passes streamed in each, states of the workers."""
    folder.mkdir()
    pack_of = {prompt: prompt for prompt in range(8)}
    streamed: list[int] = []
    states: set[WorkerState] = set()
    group.load(None, 0)
    for step in (1, 2):
        finished: list[Rollout] = []
        offered: set[int] = set()

        def offer(drained: Drained, finished: list[Rollout] = finished, offered: set[int] = offered) -> None:
            finished.extend(drained.finished)
            ended = [r.key.prompt_id for r in finished]
            complete = [p for p in pack_of if ended.count(p) == SAMPLES[p] and p not in offered]
            offered.update(complete)
            if offers and complete:
                group.offer([o for p in complete for o in _passes(finished, p, pack_of)])

        done = group.run_phase(
            _requests(step),
            PARAMS,
            dispatch="static",
            on_progress=offer,
            step=step,
            is_training=True,
            idle_training=IdleTrainingSettings(enabled=False),
        )
        states |= {span.state for span in done.phase.spans}
        keys = frozenset(key for report in done.reports for key in report.streamed)
        streamed.append(len(keys))
        rollouts = RolloutBatch.pack(finished)
        shares = make_train_batches(
            scored(rollouts, _advantages(rollouts)),
            UPDATE,
            ALGORITHM,
            num_workers=2,
            seed=0,
            step=step,
            pack_of=pack_of,
            streamed=keys,
        )
        group.update(shares)
        group.publish(step)
    group.save(folder)
    return dict(SavedState(folder)), streamed, states


def _passes(finished: Sequence[Rollout], prompt: int, pack_of: dict[int, int]) -> list[OfferedPass]:
    own = RolloutBatch.pack([r for r in finished if r.key.prompt_id == prompt])
    batch = scored(own, _advantages(own))
    planned = power_of_two(sum(SAMPLES.values()))
    return [
        (p.key, train_batch(batch, [p], planned_sequences=planned))
        for p in make_passes(batch, range(len(own)), UPDATE, ALGORITHM, pack_of=pack_of)
    ]


def test_the_update_is_the_same_with_and_without_streaming(group: WorkerGroup, tmp_path: Path) -> None:
    state, streamed, states = _train(group, tmp_path / "with", offers=True)
    expected, none, _ = _train(group, tmp_path / "without", offers=False)
    assert min(streamed) > 0 == max(none)
    assert WorkerState.STREAMING in states
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    assert int(state["step"]) == 2

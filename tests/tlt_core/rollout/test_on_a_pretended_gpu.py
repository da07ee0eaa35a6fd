"""Our engine, its drafters and a whole worker on a pretended GPU: no operation mixes devices, and the CPU's tokens
come out."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.optimizer import AdamWConfig
from conf.rollout import RolloutConfig, SpeculationConfig
from conf.update import AlgorithmConfig, UpdateConfig
from tests.pretended_gpu import GpuTensor, pretended_gpu
from tests.tlt_core.grpo.rollouts import tiny_scored
from tests.tlt_core.rollout.playing import play, requests
from tlt_core.cluster.messages import TrainerSpec, WorkerSpec
from tlt_core.cluster.worker import Worker
from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.drafter.eagle3.static import room_for
from tlt_core.drafter.ngram.drafter import NgramDrafter
from tlt_core.grpo.batch import make_train_batches
from tlt_core.items.speculation import OFF, Strategy
from tlt_core.items.types import NoiseKey, Rollout, SamplingParams
from tlt_core.model.decoder import Decoder
from tlt_core.model.load import save_hf
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.rollout.replica import BuiltinReplica
from tlt_core.tuner.policies import make_tuner

GPU = torch.device("cuda:0")
STRATEGIES = [OFF, Strategy("eagle3", 3, 1, 3), Strategy("eagle3", 3, 2, 5), Strategy("ngram", 3, 1, 3)]
FILTERED = SamplingParams(temperature=0.7, top_p=0.9, top_k=9, max_new_tokens=12)


def said(engine: RolloutEngine, params: SamplingParams) -> list[list[int]]:
    finished, _ = play(engine, requests(3), params)
    return tokens_of(finished)


def tokens_of(finished: dict[NoiseKey, Rollout]) -> list[list[int]]:
    return [rollout.tokens.tolist() for _, rollout in sorted(finished.items())]


def engine_of(decoder: Decoder, strategy: Strategy) -> RolloutEngine:
    drafters: dict[str, Any] = {}
    if strategy.drafter == "eagle3":
        model = eagle3_from_target(decoder, torch.arange(0, 64, 2), scales=(1.0, 1.0, 1.0), seed=0)
        drafters["eagle3"] = Eagle3Drafter(model, decoder, max_live=3, max_len=96, room=room_for([strategy]))
    elif strategy.drafter == "ngram":
        drafters["ngram"] = NgramDrafter()
    speculation = Speculation(drafters, make_tuner("fixed", [strategy]), [strategy]) if drafters else None
    return RolloutEngine(decoder, max_live=3, max_len=96, speculation=speculation, static=True)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_rounds(tiny_decoder: Decoder, strategy: Strategy) -> None:
    """No operation of a round waits for the device but the one that brings tokens and counts to the host."""
    expected = said(engine_of(tiny_decoder, strategy), FILTERED)
    with pretended_gpu() as gpu:
        engine = engine_of(copy.deepcopy(tiny_decoder).to(GPU), strategy)
        gpu.waits.clear()
        waits = []
        finished, rounds = play(engine, requests(3), FILTERED, on_round=lambda _: waits.append(gpu.waits.copy()))
        assert tokens_of(finished) == expected
        assert gpu.calls["aten::mm"] + gpu.calls["aten::linear"] > 50
        assert gpu.waits["aten::copy_"] == len(rounds)
        live = [trace.report.live for trace in rounds]
        steady = [n for n in range(1, len(live) - 1) if live[n - 1] == live[n + 1]]  # no response ends
        assert len(steady) > 2
        assert all((waits[n] - waits[n - 1]).keys() == {"aten::copy_"} for n in steady), waits


@pytest.fixture
def spec(tiny_decoder: Decoder, tmp_path: Path) -> WorkerSpec:
    """A worker with a drafter, on the CPU."""
    weights = [(name, w.detach()) for name, w in tiny_decoder.named_parameters()]
    policy = tmp_path / "policy"
    save_hf(weights, tiny_decoder.config, policy, tokenizer_from=tmp_path, dtype=torch.float32)
    drafter = eagle3_from_target(tiny_decoder, torch.arange(64), scales=(1.0,) * 3, seed=1)
    save_eagle3(drafter, tmp_path / "drafter", dtype=torch.float32)
    speculation = SpeculationConfig(
        policy="fixed",
        strategies=[{"drafter": "eagle3", "depth": 3, "tokens": 3}],
        drafter_path=str(tmp_path / "drafter"),
    )
    update = UpdateConfig(tokens_per_micro_batch=64, dtype="float32", optimizer=AdamWConfig(learning_rate=0.01))
    return WorkerSpec(
        model_dir=policy,
        rollout=RolloutConfig(engine="builtin", dtype="float32", max_live_requests=3, speculation=speculation),
        max_len=96,
        trainer=TrainerSpec(update, AlgorithmConfig(), total_steps=4, max_new_tokens=24, temperature=1.0),
        threads=1,
        device="cpu",
    )


def worked(spec: WorkerSpec) -> tuple[list[list[int]], ...]:
    """What a worker says before and after an update."""
    worker = Worker(0, 1, spec)
    worker.load(None, 0)
    assert isinstance(worker._replica, BuiltinReplica)
    engine = worker._replica._engine
    before = said(engine, FILTERED)
    assert spec.trainer is not None
    batch = make_train_batches(
        tiny_scored(seed=0, num_groups=4), spec.trainer.update, spec.trainer.algorithm, num_workers=1, seed=0, step=1
    )[0]
    worker.update(batch)
    worker.publish(1)
    weights = [*engine.decoder.parameters(), *(w for _, w in worker._policy.trainer.weights())]
    assert {isinstance(w, GpuTensor) for w in weights} == {spec.device != "cpu"}
    after = said(engine, FILTERED)
    assert after != before, "a publish that changes nothing proves nothing"
    return before, after


def test_a_worker(spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = worked(spec)
    monkeypatch.setattr("tlt_core.cluster.worker.require_gpu", lambda needed, workers: None)
    with pretended_gpu():
        assert worked(spec._replace(device="cuda:0")) == expected

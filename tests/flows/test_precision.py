"""One run on machines of two kinds: begun all in bfloat16, refused where training would be emulated, going on there in
float32 when told to, and kept in float32 from then on."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conf.load import load
from conf.run import RunConfig
from flows.train import train
from tlt_core.grpo.trainer_files import SavedState
from tlt_core.items import checkpoint
from tlt_core.machine import precision
from tlt_core.machine.precision import Offers, PrecisionError

pytestmark = pytest.mark.prefect

HALF, FULL = "bfloat16", "float32"
AVX512 = Offers("C kernels (avx512_bf16)", "torch (avx512_bf16)", "")
AVX2 = Offers("C kernels (avx2)", "", "this processor has no bfloat16 instructions")


def _settings(folder: Path, *more: str) -> list[str]:
    return [
        f"output_dir={folder}/runs",
        f"tracking.uri=sqlite:///{folder}/mlflow.db",
        "tracking.register_models=false",
        "name=moved",
        "rollout.dtype=auto",
        "cluster.num_workers=1",
        "evaluation.every_steps=0",
        "drafter.warmup=true",
        "drafter.idle_training.rows_per_step=32",
        'reward.functions=[{kind: python, path: "tests.flows.length_reward:very_slow_length_reward"}]',
        "reward.num_processes=1",
        "update.optimizer.learning_rate=1e-3",
        *more,
    ]


def _train(folder: Path, here: Offers, *more: str) -> RunConfig:
    cfg = load("conf/smoke.yaml", _settings(folder, *more))
    with pytest.MonkeyPatch.context() as machine:
        machine.setattr(precision, "offers", lambda device, builtin_engine=True: here)
        train(cfg)
    return load(cfg.run_dir / "config.yaml")


def _dtypes(path: Path) -> set[torch.dtype]:
    return {tensor.dtype for tensor in load_file(path).values() if tensor.is_floating_point()}


def _state(folder: Path) -> checkpoint.DriverState:
    newest = checkpoint.newest_valid(folder / "runs/moved/checkpoints")
    assert newest is not None
    return checkpoint.load_state(newest)


def test_a_run_moves_to_a_machine_that_would_emulate_its_update(
    runs_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moved, run = runs_home, runs_home / "runs/moved"
    written = _train(moved, AVX512, "num_steps=1")
    assert (written.rollout.dtype, written.update.dtype, written.coldstart.dtype) == (HALF, HALF, HALF)
    with pytest.raises(PrecisionError, match=r"updates in bfloat16 would be emulated.*update\.dtype=float32"):
        _train(moved, AVX2, "num_steps=2")
    assert _state(moved).step == 1
    assert load(run / "config.yaml").update.dtype == HALF, "a refused attempt changes nothing"

    with caplog.at_level(logging.WARNING):
        written = _train(moved, AVX2, "num_steps=2", "update.dtype=float32")
    assert "resuming in another precision, as configured" in caplog.text
    assert (written.rollout.dtype, written.update.dtype, written.coldstart.dtype) == (HALF, FULL, HALF)
    assert _state(moved).precision == {"rollout": HALF, "update": FULL, "coldstart": HALF}
    assert len(list((moved / "artifacts/coldstart").iterdir())) == 1, "what RL began from is not made again"

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        written = _train(moved, AVX512, "num_steps=3")
    assert (written.rollout.dtype, written.update.dtype, written.coldstart.dtype) == (HALF, FULL, HALF)
    assert "another precision" not in caplog.text

    rows = {row["step"]: row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    assert [rows[step]["training/resume_attempt"] for step in (1, 2, 3)] == [0, 1, 2]
    for step in (1, 2, 3):
        assert rows[step]["actor/grad_norm"] > 0
        assert rows[step]["drafter/optimizer_steps"] > 0, f"idle time trains the drafter in step {step}"
        assert 0 < rows[step]["idle/harvested_s"] <= rows[step]["timing_s/reward"], "while rewards are waited for"
        # float32 passes beside bfloat16 rollouts: rounding, not another policy
        assert rows[step]["training/rollout_probs_diff_mean"] < 1e-3
    assert rows[3]["drafter/optimizer_steps_total"] > rows[2]["drafter/optimizer_steps_total"]
    assert rows[3]["drafter/version"] >= 1
    # What rollouts load is in their type, what training goes on from in float32.
    assert _dtypes(run / "policy/model.safetensors") == {torch.bfloat16}
    assert _dtypes(run / "drafter-eagle3/model.safetensors") == {torch.bfloat16}
    masters = SavedState(run / "checkpoints/step_000003")
    assert {value.dtype for name, value in masters.items() if name != "step"} == {torch.float32}
    policy = load_file(run / "policy/model.safetensors")
    assert torch.equal(policy["model.norm.weight"], masters["master/decoder.norm.weight"].bfloat16())
    with pytest.raises(checkpoint.CheckpointError, match="another model, data set"):  # more than precision
        _train(moved, AVX2, "num_steps=4", "update.dtype=bfloat16", "rollout.temperature=0.5")

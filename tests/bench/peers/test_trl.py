"""TRL itself, in its environment of 1.3 GB, on the smoke configuration."""

from pathlib import Path

import pytest

from bench.peers.command import bench_peers
from bench.peers.learning import bench_learning
from conf.load import load
from conf.run import RunConfig
from tlt_core.machine.precision import settle


@pytest.fixture
def cfg(prefect_engine: None, embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    (tmp_path / "artifacts" / "models").mkdir(parents=True)
    (tmp_path / "artifacts" / "models" / embedded_model.name).symlink_to(embedded_model)
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "artifacts"))
    own = [f"output_dir={tmp_path}/runs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
    own.append('reward.functions=[{kind: python, path: "tests.flows.length_reward:length_reward"}]')
    return settle(load("conf/smoke.yaml", [*own, "algorithm.advantage=dr_grpo"]))


@pytest.mark.slow
@pytest.mark.long
def test_both_train_on_the_same_prompts_and_rewards(cfg: RunConfig, tmp_path: Path) -> None:
    report = bench_peers(cfg, repeats=1, out=tmp_path / "peers.json", command="by hand")
    rows = {row["configuration"]: row for row in report["rows"]}
    assert list(rows) == ["plain", "tlt", "trl"]
    for name in ("plain", "tlt", "trl"):
        assert rows[name]["timing_s/step"]["median"] > 0
        assert 0 < rows[name]["response_length/mean"]["median"] <= cfg.rollout.max_new_tokens
        assert 0 < rows[name]["critic/rewards/mean"]["median"] < 1, "the reward function saw the responses"
    assert rows["trl"]["trl"] == "1.16.0"


@pytest.mark.slow
@pytest.mark.long
def test_both_learn_the_same_from_the_same_noise(cfg: RunConfig, tmp_path: Path) -> None:
    cfg = cfg.with_dtypes(rollout="float32", update="float32", coldstart="float32")
    report = bench_learning(cfg, repeats=2, out=tmp_path / "learning.json", command="by hand")
    every = report["rows"][-1]
    assert every["equal responses"]["min"] == 1.0
    assert every["distance of the weights over the way from the start"]["max"] < 0.05, "the same updates"
    assert report["verdicts"][-1]["holds"]

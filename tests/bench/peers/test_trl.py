"""TRL itself, in its environment of 1.3 GB, on the smoke configuration."""

from pathlib import Path

import pytest

from bench.peers.command import bench_peers
from conf.load import load
from tlt_core.machine.precision import settle


@pytest.mark.slow
@pytest.mark.long
def test_both_train_on_the_same_prompts_and_rewards(
    prefect_engine: None, embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "artifacts" / "models").mkdir(parents=True)
    (tmp_path / "artifacts" / "models" / embedded_model.name).symlink_to(embedded_model)
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "artifacts"))
    own = [f"output_dir={tmp_path}/runs", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
    own.append('reward.functions=[{kind: python, path: "tests.flows.length_reward:length_reward"}]')
    cfg = settle(load("conf/smoke.yaml", [*own, "algorithm.advantage=dr_grpo"]))
    report = bench_peers(cfg, repeats=1, out=tmp_path / "peers.json", command="by hand")
    rows = {row["configuration"]: row for row in report["rows"]}
    assert list(rows) == ["plain", "tlt", "trl", "reward, tlt minus trl"]
    for name in ("plain", "tlt", "trl"):
        assert rows[name]["timing_s/step"]["median"] > 0
        assert 0 < rows[name]["response_length/mean"]["median"] <= cfg.rollout.max_new_tokens
        assert 0 < rows[name]["critic/rewards/mean"]["median"] < 1, "the reward function saw the responses"
    gain = rows["reward, tlt minus trl"]
    assert gain["prompts"] == cfg.num_steps * cfg.rollout.num_prompts
    assert abs(gain["mean"]) < 5 * gain["standard_error"] + 0.1
    assert rows["trl"]["trl"] == "1.16.0"

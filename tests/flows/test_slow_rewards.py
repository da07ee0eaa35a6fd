"""Waiting for slow rewards is idle time as well: the one worker of a run trains its drafter in it."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conf.load import load
from flows.train import train

pytestmark = pytest.mark.prefect


def _rows(home: Path, name: str, *settings: str) -> list[dict[str, float]]:
    cfg = load(
        "conf/smoke.yaml",
        [
            f"output_dir={home}/runs",
            f"tracking.uri=sqlite:///{home}/mlflow.db",
            f"name={name}",
            "cluster.num_workers=1",
            "evaluation.every_steps=0",
            "drafter.warmup=true",
            "drafter.idle_training.rows_per_step=32",
            'reward.functions=[{kind: python, path: "tests.flows.length_reward:slow_length_reward"}]',
            "reward.num_processes=2",
            *settings,
        ],
    )
    train(cfg)
    return [json.loads(line) for line in (cfg.run_dir / "metrics.jsonl").read_text().splitlines()][1:]


def test_one_worker_trains_while_rewards_are_waited_for(home: Path) -> None:
    rows = _rows(home, "waits", "drafter.idle_training.keep_published=1")
    without = _rows(home, "idle", "drafter.idle_training.enabled=false")
    for row in rows:
        assert row["timing_s/reward"] > 0.5  # 8 responses, 0.4 s each, two at a time
        assert row["drafter/trained_tokens"] > 0
        assert row["drafter/optimizer_steps"] > 0
        assert 0.3 * row["timing_s/reward"] < row["idle/harvested_s"] <= row["timing_s/reward"]
    assert rows[-1]["drafter/version"] >= 1  # what was learnt is published
    for before, row in itertools.pairwise([{"drafter/version": 0.0, "drafter/policy_version_lag": -1.0}, *rows]):
        published = row["drafter/version"] > before["drafter/version"]
        assert row["drafter/policy_version_lag"] == (0.0 if published else before["drafter/policy_version_lag"] + 1)
        assert 0 < row["drafter/acc_top1"] < 1
    newest = max(r["step"] for r in rows if r["drafter/policy_version_lag"] == 0)
    assert [p.name for p in (home / "runs/waits/drafters").iterdir()] == [f"{int(newest):06d}-eagle3"]
    kept = load_file(home / f"runs/waits/drafters/{int(newest):06d}-eagle3/model.safetensors")
    final = load_file(home / "runs/waits/drafter-eagle3/model.safetensors")
    assert kept.keys() == final.keys()
    assert all(torch.equal(kept[name], value) for name, value in final.items())
    for row, other in zip(rows, without, strict=True):
        assert "drafter/trained_tokens" not in other
        assert [row[f] for f in ("rollout/checksum", "critic/rewards/mean")] == [
            other[f] for f in ("rollout/checksum", "critic/rewards/mean")
        ]

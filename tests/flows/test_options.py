"""Options that change who computes what, through the whole pipeline: run one step, then resume for a second."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.prefect]

OPTIONS = {
    "kl-dapo": [
        "algorithm.kl.coef=0.1",
        "algorithm.dynamic_sampling=true",
        "algorithm.overlong_buffer_tokens=8",
        "update.num_minibatches=2",
        "update.num_epochs=2",
    ],
    "zero-2": ["update.backend={kind: deepspeed, zero_stage: 2}"],
}


def train(root: Path, settings: list[str]) -> list[dict]:
    command = [sys.executable, "-m", "flows.cli", "train", "conf/smoke.yaml", f"output_dir={root / 'runs'}"]
    command += [f"tracking.uri=sqlite:///{root / 'mlflow.db'}", "evaluation.every_steps=0", *settings]
    command += ['reward.functions=[{kind: python, path: "tests.flows.length_reward:length_reward"}]']
    env = os.environ | {"OMP_NUM_THREADS": "1", "PREFECT_HOME": str(root / "prefect")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(x) for x in (root / "runs" / "smoke" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", OPTIONS)
def test_option_trains_and_resumes(tmp_path, name):
    train(tmp_path, [*OPTIONS[name], "num_steps=1"])
    rows = train(tmp_path, [*OPTIONS[name], "num_steps=2"])
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert all(r["actor/grad_norm"] > 0 for r in rows[1:])
    assert rows[2]["training/resume_attempt"] == 1
    if name == "kl-dapo":
        assert rows[2]["actor/kl_loss"] > 0, "the policy has moved, so it differs from its reference"

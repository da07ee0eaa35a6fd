"""vLLM's process is killed in the middle of a run whose rounds draft by EAGLE-3 and by n-grams: no token differs from
those of a run that was left alone."""

import json
import time
from pathlib import Path

import pytest

from tests.vllm.test_rollout_engine import engines_of, require_resumed, steps, train
from tlt_core.items.store import load_scored

pytestmark = pytest.mark.vllm

WANTED = (
    "model={kind: pretrained, path: smollm2-135m-instruct}",
    "num_steps=6",
    "checkpoint.every_steps=1",
    "drafter={warmup: true, vocab_size: 1024, num_prompts: 8, num_samples: 2, num_steps: 40}",
    "drafter.idle_training.enabled=false",
    "rollout.max_new_tokens=48",
    "rollout.speculation.policy=beg_mab",  # it tries everything
)


def sampled(folder: Path) -> list[list[int]]:
    found = sorted((folder / "runs/smoke/steps").glob("*/scored.safetensors"))
    return [load_scored(path).rollouts.tokens_T.tolist() for path in found]


def test_tokens_are_those_of_a_run_that_was_left_alone(vllm_python, embedded_model, tmp_path):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    said, _ = (process := train(vllm_python, alone, *WANTED)).communicate(timeout=600)
    assert process.returncode == 0, said[-3000:]
    process = train(vllm_python, killed, *WANTED)
    while not any(row["step"] == 2 for row in steps(killed)):
        assert process.poll() is None, "the run has ended before its second step"
        time.sleep(0.05)
    for engine in engines_of(process):
        engine.kill()
    require_resumed(vllm_python, killed, process, WANTED)
    assert len(sampled(alone)) == 6
    assert sampled(killed) == sampled(alone)
    for folder in (alone, killed):
        state = json.loads((folder / "runs/smoke/checkpoints/step_000006/tuner_0.json").read_text())
        assert all(state["cost"]["used_at"][kind] > 0 for kind in ("eagle3", "ngram")), "both have drafted"
        assert max(row.get("rollout/spec_accept_rate", 0.0) for row in steps(folder)) > 0.1

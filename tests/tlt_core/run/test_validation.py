"""When the policy is validated, and what is said of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from conf.load import load
from conf.reward import RewardConfig, RewardFunction
from tlt_core.grpo.reward import Score
from tlt_core.items.types import SamplingParams, ScoreStatus
from tlt_core.run.rollout_phase import Validation, passes
from tlt_core.run.step_metrics import StepMetrics, greedy_metrics, sampled_metrics
from tlt_core.run.worker_spec import worker_spec


def test_when_validation_is_due_and_how_long_its_responses_are(tiny_folder: Path) -> None:
    nobody: Any = None
    for every, due in ((0, []), (2, [0, 2, 4, 5])):
        cfg = load("conf/smoke.yaml", ["num_steps=5", f"evaluation.every_steps={every}"])
        validation = Validation(cfg, [], nobody, nobody, SamplingParams(), StepMetrics())
        assert [step for step in range(6) if validation.is_due(step)] == due
    for limit, longest in (("null", 24), ("8", 8), ("4096", 4096)):
        cfg = load("conf/smoke.yaml", ["rollout.max_new_tokens=24", f"evaluation.max_new_tokens={limit}"])
        params = SamplingParams(max_new_tokens=24)
        assert Validation(cfg, [], nobody, nobody, params, StepMetrics()).params.max_new_tokens == longest
        assert worker_spec(cfg, tiny_folder, longest_prompt=8).max_len == 8 + max(24, longest)


def test_a_response_passes_when_its_main_reward_is_full() -> None:
    cfg = RewardConfig(functions=(RewardFunction(kind="format", weight=0.1), RewardFunction(kind="exact")))
    components = [(1.0, 0.0), (0.0, 1.0), (1.0, 0.5)]  # the first is wrong, in the right format
    assert passes([Score(own, 0.5, ScoreStatus.OK, 0.0) for own in components], cfg) == [False, True, False]


def test_pass_at_k_counts_prompts_with_one_passing_sample_and_mean_at_k_all_samples() -> None:
    scores_PS, tasks = torch.tensor([[0.1, 1.0], [0.1, 0.1], [1.0, 1.0]]), ["sums", "words", "sums"]
    found = sampled_metrics(scores_PS, scores_PS >= 1, tasks) | greedy_metrics(torch.tensor([1.0, 0.0, 0.5]), tasks)
    expected = {  # mean@2, pass@2, greedy
        "all": (3.3 / 6, 2 / 3, 0.5),
        "sums": (3.1 / 4, 1.0, 0.75),
        "words": (0.1, 0.0, 0.0),
    }
    for task, values in expected.items():
        names = (f"val-core/{task}/reward/{figure}" for figure in ("mean_at_2", "pass_at_2", "greedy"))
        assert [found[name] for name in names] == pytest.approx(values)

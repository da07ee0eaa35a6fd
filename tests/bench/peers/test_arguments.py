"""TRL is asked for the same step as ours."""

from pathlib import Path

import pytest

from bench.peers.trl import arguments
from conf.load import ConfigError, load


def test_all_responses_of_a_step_make_one_optimizer_step() -> None:
    cfg = load("conf/longtail.yaml", ["rollout.num_prompts=5", "rollout.num_samples=7"])
    given = arguments(cfg, num_steps=3, out=Path("out"))
    assert given["per_device_train_batch_size"] == 7
    assert given["gradient_accumulation_steps"] == 5
    assert (given["num_generations"], given["max_completion_length"], given["max_steps"]) == (7, 960, 3)
    assert (given["learning_rate"], given["loss_type"], given["scale_rewards"]) == (3e-5, "grpo", "none")
    assert given["mask_truncated_completions"]


@pytest.mark.parametrize(
    "setting", ["algorithm.advantage=rloo", "algorithm.dynamic_sampling=true", "update.num_minibatches=2"]
)
def test_what_trl_does_otherwise_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting.split('.')[1].split('=')[0]}.*change these settings"):
        arguments(load("conf/longtail.yaml", [setting]), num_steps=3, out=Path("out"))

"""TRL is asked for the same step as ours."""

from pathlib import Path

import pytest

from bench.peers.trl import arguments
from conf.load import ConfigError, load


@pytest.mark.parametrize(
    "setting",
    [
        "algorithm.advantage=rloo",
        "algorithm.dynamic_sampling=true",
        "update.num_minibatches=2",
        "update.optimizer.schedule.warmup_steps=2",  # transformers' first rate is 0
    ],
)
def test_what_trl_does_otherwise_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting.split('.')[-1].split('=')[0]}.*change these settings"):
        arguments(load("conf/longtail.yaml", [setting]), num_steps=3, out=Path("out"))

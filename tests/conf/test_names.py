"""What a configuration may name is what the code has."""

from typing import get_args

from conf.reward import RewardFunction
from conf.rollout import _LEARNED, RolloutConfig, SpeculationConfig, StrategyConfig
from tlt_core.cluster.start_replica import _START
from tlt_core.drafter.kinds import KINDS
from tlt_core.grpo.verifiers import _BUILT_IN, _WITH_SETTINGS
from tlt_core.rollout.engines import ENGINES
from tlt_core.tuner.policies import Kind


def test_every_name_of_the_configuration_is_in_its_registry() -> None:
    drafters = {*get_args(StrategyConfig.model_fields["drafter"].annotation)}
    engines = {*get_args(RolloutConfig.model_fields["engine"].annotation)}
    rewards = {*get_args(RewardFunction.model_fields["kind"].annotation)}
    policies = get_args(SpeculationConfig.model_fields["policy"].annotation)
    assert drafters == {*KINDS}
    assert {name for name, kind in KINDS.items() if kind.learned} == {*_LEARNED}
    assert engines == {*ENGINES} == {*_START}
    assert rewards == {*_BUILT_IN, *_WITH_SETTINGS, "python"}
    assert {*policies} == {*get_args(Kind)}

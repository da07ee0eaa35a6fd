"""More workers than processors are possible, but not any number of them."""

import pytest

from conf.system import ClusterConfig
from tlt_core.machine import processors
from tlt_core.machine.processors import TooManyWorkers, check_workers


def test_a_machine_takes_a_few_workers_for_each_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "usable_processors", lambda: 10)
    check_workers(ClusterConfig(num_workers=40))
    with pytest.raises(TooManyWorkers, match=r"num_workers=41: this machine has 10 processors.* 40 worker .*lower"):
        check_workers(ClusterConfig(num_workers=41))

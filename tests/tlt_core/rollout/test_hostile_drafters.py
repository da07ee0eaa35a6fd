"""Drafters that are useless, wrong or broken, in the real engine under the real tuners: no token changes, and the cost
model stops using them."""

from itertools import groupby

import pytest

from tests.tlt_core.rollout.playing import VOCAB, Broken, Oracle, Random, Recorder, assert_same, play, requests
from tlt_core.items.speculation import DraftTree, Strategy
from tlt_core.items.types import SamplingParams
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.tuner.policies import make_tuner

STRATEGIES = (Strategy("d", 4, 1, 4), Strategy("d", 2, 1, 2), Strategy("d", 3, 3, 9))
LONGEST_PROBE = 6  # rounds; a longer stretch would be a decision
REFUSED = ("out of vocabulary", "raising", "malformed", "reckless")


class Says(Recorder):
    """Always the same."""

    def __init__(self, *tree) -> None:
        super().__init__()
        self._tree = DraftTree.of_lists(*tree)

    def propose(self, view, strategy):
        return self._tree


DRAFTERS = {
    "random": lambda plain: Random(),
    "always wrong": lambda plain: Oracle(plain, wrong_every=1),
    "empty": lambda plain: Says([], [], [], []),
    "out of vocabulary": lambda plain: Says([VOCAB], [-1], [0], [1]),
    "raising": lambda plain: Broken(),
    "malformed": lambda plain: Says(
        [1, 2], [1, -1], [99, 99], [2, 1]
    ),  # a child before its parent, in no row that lives
    "reckless": lambda plain: Says([1] * 300, range(-1, 299), [0] * 300, range(1, 301)),  # deeper than there is room
}


def run(decoder, params, drafter=None, tuner=None):
    speculation = None if drafter is None else Speculation({"d": drafter}, tuner, STRATEGIES)
    engine = RolloutEngine(decoder, max_live=4, max_len=128, speculation=speculation)
    return *play(engine, requests(16, lengths=(1, 3, 8, 20)), params), engine


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "T=1"])
def case(request, decoder):
    params = SamplingParams(temperature=request.param, max_new_tokens=100)
    return params, run(decoder, params)[0]


@pytest.mark.parametrize("name", DRAFTERS)
def test_they_change_no_token_and_the_cost_model_turns_them_off(decoder, case, name, caplog):
    params, plain = case
    finished, traces, engine = run(decoder, params, DRAFTERS[name](plain), make_tuner("cost_model", STRATEGIES))
    assert_same(plain, finished)
    late = [not t.report.strategy.is_off for t in traces[64:]]
    assert len(late) > 250
    stretches = [len(list(group)) for speculates, group in groupby(late) if speculates]
    assert max(stretches, default=0) <= LONGEST_PROBE, stretches
    assert sum(stretches) <= 0.1 * len(late), stretches
    used = sum(not t.report.strategy.is_off for t in traces)
    assert sum(engine.drafter_failures.values()) == (used if name in REFUSED else 0)
    assert sum("failed" in record.message for record in caplog.records) == (name in REFUSED), "said once"


@pytest.mark.parametrize("name", DRAFTERS)
def test_used_in_every_round_they_change_no_token(decoder, case, name):
    params, plain = case
    finished, traces, _ = run(decoder, params, DRAFTERS[name](plain), make_tuner("fixed", STRATEGIES))
    assert any(not t.report.strategy.is_off for t in traces)
    assert_same(plain, finished)

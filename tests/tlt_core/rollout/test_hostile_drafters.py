"""Drafters that are useless, wrong or broken, in the real engine under the real tuners: no token changes, and the cost
model stops using them."""

from itertools import groupby

import pytest
import torch

from tests.tlt_core.rollout.test_spec_round import VOCAB, Broken, Oracle, Outsider, Random, Recorder, assert_same
from tlt_core.items.speculation import DraftTree, Strategy
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams
from tlt_core.model.load import random_decoder
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.tuner.policies import make_tuner

MENU = (Strategy("d", 4, 1, 4), Strategy("d", 2, 1, 2), Strategy("d", 3, 3, 9))
MAX_LEN, LIVE = 128, 4
LONGEST_PROBE = 6  # rounds; a longer stretch would be a decision


class Empty(Recorder):
    """Has nothing to say."""

    def propose(self, view, strategy):
        return DraftTree.empty()


class Malformed(Recorder):
    """A child before its parent, in a row that does not live."""

    def propose(self, view, strategy):
        return DraftTree.of_lists([1, 2], [1, -1], [99, 99], [2, 1])


DRAFTERS = {
    "random": lambda plain: Random(),
    "always wrong": lambda plain: Oracle(plain, wrong_every=1),
    "empty": lambda plain: Empty(),
    "out of vocabulary": lambda plain: Outsider(),
    "raising": lambda plain: Broken(),
    "malformed": lambda plain: Malformed(),
}


@pytest.fixture(scope="module")
def decoder(tiny_config):
    return random_decoder(tiny_config, seed=5, dtype=torch.float32)


def requests():
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).to(torch.int32) for n in (1, 3, 8, 20)]
    return [GenerationRequest(NoiseKey(0, 1, p, s), t) for p, t in enumerate(prompts) for s in range(4)]


def run(decoder, params, drafter=None, tuner=None):
    speculation = None if drafter is None else Speculation({"d": drafter}, tuner, MENU)
    engine = RolloutEngine(decoder, max_live=LIVE, max_len=MAX_LEN, speculation=speculation)
    waiting, finished, traces = requests(), {}, []

    def pull(wanted):
        taken, waiting[:] = waiting[:wanted], waiting[wanted:]
        return taken

    engine.decode(pull, lambda r: finished.__setitem__(r.key, r), params, on_round=traces.append)
    return finished, traces, engine


@pytest.fixture(scope="module")
def plain(decoder):
    """By temperature."""
    return {t: run(decoder, params_of(t))[0] for t in (0.0, 0.7, 1.0)}


def params_of(temperature):
    return SamplingParams(temperature=temperature, max_new_tokens=100)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_they_change_no_token_and_the_cost_model_turns_them_off(decoder, plain, name, temperature):
    params = params_of(temperature)
    tuner = make_tuner("cost_model", MENU)
    finished, traces, engine = run(decoder, params, DRAFTERS[name](plain[temperature]), tuner)
    assert_same(plain[temperature], finished)
    late = [not t.report.strategy.is_off for t in traces[64:]]
    assert len(late) > 250
    stretches = [len(list(group)) for speculates, group in groupby(late) if speculates]
    assert max(stretches, default=0) <= LONGEST_PROBE, stretches
    assert sum(stretches) <= 0.1 * len(late), stretches
    failures = sum(engine.drafter_failures.values())
    used = sum(not t.report.strategy.is_off for t in traces)
    assert failures == (used if name in ("out of vocabulary", "raising", "malformed") else 0)


@pytest.mark.parametrize("kind", ["beg_mab", "fixed"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_other_policy_lets_them_change_a_token(decoder, plain, name, kind):
    tuner = make_tuner(kind, MENU, epsilon=0.5)
    finished, traces, _ = run(decoder, params_of(1.0), DRAFTERS[name](plain[1.0]), tuner)
    assert any(not t.report.strategy.is_off for t in traces)
    assert_same(plain[1.0], finished)

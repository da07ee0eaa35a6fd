"""The engine that a configuration asks for: fewer rounds where text repeats, and refusals."""

import dataclasses

import pytest
import torch

from conf.rollout import SpeculationConfig, StrategyConfig
from tests.decoders import lively
from tests.tlt_core.rollout.playing import assert_same, play, requests
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.items.types import SamplingParams
from tlt_core.rollout import build

VOCAB, MAX_LEN = 64, 128


@pytest.fixture(scope="module")
def drafter_folder(decoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / "d-eagle3"
    ids = torch.arange(0, VOCAB, 2)
    save_eagle3(eagle3_from_target(decoder, ids, scales=(1.0, 1.0, 1.0), seed=0), folder, dtype=torch.float32)
    return folder


def rounds(decoder, cfg, params):
    engine = build.make_engine(decoder, cfg, max_live=1, max_len=MAX_LEN, seed=0)
    build.calibrate(engine)
    return play(engine, requests(15, lengths=(1, 4, 9)), params)[1]


def test_repetition_is_exploited(decoder):
    """Greedy siblings are equal, so the n-gram drafter knows them all when the first has ended."""
    params = SamplingParams(temperature=0.0, max_new_tokens=60)
    plain = rounds(decoder, SpeculationConfig(policy="off"), params)
    chain = SpeculationConfig(policy="fixed", strategies=(StrategyConfig(depth=7, tokens=7),))
    assert len(rounds(decoder, chain, params)) < 0.5 * len(plain)


def test_a_plain_pass_between_others_drafts_nothing(decoder):
    """The same engine, the same requests: with drafts, without, with; tokens are equal."""
    params = SamplingParams(temperature=0.0, max_new_tokens=60)
    chain = SpeculationConfig(policy="fixed", strategies=(StrategyConfig(depth=7, tokens=7),))
    engine = build.make_engine(decoder, chain, max_live=2, max_len=MAX_LEN, seed=0)
    passes = [play(engine, requests(9), dataclasses.replace(params, plain=plain)) for plain in (False, True, False)]
    drafted = [any(not trace.report.strategy.is_off for trace in traces) for _, traces in passes]
    assert drafted == [True, False, True]
    for found, _ in passes[1:]:
        assert_same(passes[0][0], found)


def test_a_drafter_of_another_model_is_refused(tiny_config, drafter_folder):
    other = lively(dataclasses.replace(tiny_config, hidden_size=48))
    cfg = SpeculationConfig(drafter_path=str(drafter_folder))
    with pytest.raises(ValueError, match="hidden_size"):
        build.make_engine(other, cfg, max_live=2, max_len=64, seed=0)

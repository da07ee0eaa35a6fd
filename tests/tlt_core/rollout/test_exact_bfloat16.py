"""In bfloat16 two batch shapes usually round differently, so that near-ties flip.  With kernels whose results do not
depend on the batch nothing does: speculation gives plain decoding's tokens and log-probabilities to the bit."""

import dataclasses

import pytest
import torch

from tests.tlt_core.rollout.playing import Cycle, Knows, play, requests
from tlt_core.items.speculation import OFF, Strategy
from tlt_core.items.types import NoiseKey, Rollout, SamplingParams
from tlt_core.model.load import random_decoder
from tlt_core.rollout.engine import RolloutEngine, Speculation

pytestmark = pytest.mark.usefixtures("cpu_kernels")

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=70, stop_token_ids=(2,))
SHAPES = (Strategy("knows", 1, 1, 1), Strategy("knows", 5, 1, 5), Strategy("knows", 4, 3, 12), OFF)


def decoder(tiny_config):
    config = dataclasses.replace(tiny_config, hidden_size=96, head_dim=64, intermediate_size=160, num_layers=3)
    made = random_decoder(config, seed=0, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.1
    return made.bfloat16()


def generate(tiny_config, *, max_live: int, plain: dict[NoiseKey, Rollout] | None = None, params=PARAMS):
    """Responses by key, and how many draft tokens were accepted."""
    speculation = None if plain is None else Speculation({"knows": Knows(plain)}, Cycle(SHAPES), strategies=SHAPES[:-1])
    engine = RolloutEngine(decoder(tiny_config), max_live=max_live, max_len=120, speculation=speculation)
    assert engine.decoder.packed_layers is not None
    finished, traces = play(engine, requests(12, lengths=(5, 1, 40, 17)), params)
    return finished, sum(sum(trace.report.accepted) for trace in traces)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, rollout in wanted.items():
        assert torch.equal(found[key].tokens, rollout.tokens), key
        assert torch.equal(found[key].logprobs, rollout.logprobs), key
        assert found[key].finish == rollout.finish


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 9}, {"top_p": 0.8}, {"temperature": 0.6, "top_k": 20, "top_p": 0.9}], ids=str
)
def test_neither_speculation_nor_batch_size_changes_a_bit(tiny_config, filters):
    params = dataclasses.replace(PARAMS, **filters)
    plain, _ = generate(tiny_config, max_live=1, params=params)
    for max_live in (1, 5, 12):
        found, accepted = generate(tiny_config, max_live=max_live, plain=plain, params=params)
        assert accepted > 50, "hardly anything was accepted: the test would prove little"
        assert_same(found, plain)
        assert_same(generate(tiny_config, max_live=max_live, params=params)[0], plain)


def test_threads_change_no_bit(tiny_config):
    plain, _ = generate(tiny_config, max_live=12)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        threaded, _ = generate(tiny_config, max_live=5, plain=plain)
    finally:
        torch.set_num_threads(before)
    assert_same(threaded, plain)

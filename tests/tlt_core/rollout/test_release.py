"""The memory of live requests is given back between rollouts, and nothing that is decoded changes."""

import pytest
import torch

from tests.tlt_core.rollout.playing import play, requests
from tlt_core.items.types import SamplingParams
from tlt_core.rollout.engine import RolloutEngine

PARAMS = SamplingParams(max_new_tokens=30, stop_token_ids=(2,))


def generate(engine: RolloutEngine, step: int) -> dict:
    """Tokens, log-probs and hidden states of each response."""
    states = {}
    responses, _ = play(
        engine,
        requests(12, step=step),
        PARAMS,
        on_captured=lambda c: states.__setitem__(c.key, (c.taps_LE, c.last_PD, c.lognorms_P)),
    )
    return {key: (r.tokens, r.logprobs, *states[key]) for key, r in responses.items()}


def test_a_rollout_after_a_release_is_the_same(decoder):
    kept = RolloutEngine(decoder, max_live=5, max_len=64, capture_taps=(0, 1, 2))
    released = RolloutEngine(decoder, max_live=5, max_len=64, capture_taps=(0, 1, 2))
    held = released.memory_bytes
    slots, floats = 5 * 64, 4
    assert held == slots * floats * ((2 * 2) * (2 * 8) + 3 * 32 + 32 + 1)  # K and V of two layers; taps, last, lognorm
    for step in (1, 2, 3):
        expected, responses = generate(kept, step), generate(released, step)
        assert len(expected) == 12
        assert expected.keys() == responses.keys()
        assert all(torch.equal(a, b) for k in expected for a, b in zip(expected[k], responses[k], strict=True))
        assert released.memory_bytes == held
        released.release_memory()
        assert released.memory_bytes == 0
    released.rehearse(2, 3, 8)  # measuring takes it again, too
    assert released.memory_bytes == held


def test_live_requests_keep_their_memory(decoder):
    engine = RolloutEngine(decoder, max_live=2, max_len=64)
    with pytest.raises(ValueError, match="live"):
        play(engine, requests(1), PARAMS, on_round=lambda _: engine.release_memory())

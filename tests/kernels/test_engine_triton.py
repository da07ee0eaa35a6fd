"""The whole engine on Triton's kernels: the tokens of the torch implementations, plainly and with drafted trees."""

import pytest

from kernels import dispatch
from tests.tlt_core.rollout.playing import Cycle, Knows, assert_same, play, requests
from tlt_core.items.speculation import Strategy
from tlt_core.items.types import SamplingParams
from tlt_core.model import sampling
from tlt_core.rollout import spec_round
from tlt_core.rollout.engine import RolloutEngine, Speculation

PARAMS = SamplingParams(temperature=0.8, top_k=20, max_new_tokens=10, stop_token_ids=(2,))
TREE = Strategy("knows", depth=3, width=2, tokens=6)


def generate(decoder, drafter: Knows | None = None):
    """Responses by key, and the rounds that they took."""
    speculation = None if drafter is None else Speculation({"knows": drafter}, Cycle([TREE]), strategies=(TREE,))
    engine = RolloutEngine(decoder, max_live=3, max_len=40, speculation=speculation)
    finished, rounds = play(engine, requests(3, lengths=(5, 1, 9)), PARAMS)
    return finished, len(rounds)


@pytest.mark.skipif(not dispatch._INTERPRETED, reason="kernels are compiled for the GPU here")
def test_tokens_are_those_of_torch(tiny_decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plain_rounds = generate(tiny_decoder)
    used = set()
    monkeypatch.setattr(dispatch, "_auto", lambda op, device_type: used.add(op) or True)
    monkeypatch.setattr(spec_round, "choose", sampling.choose_no_sync)
    decoded, _ = generate(tiny_decoder)
    assert used == {"coupled_sample"}
    speculated, rounds = generate(tiny_decoder, Knows(plain))
    assert used == {"coupled_sample", "spec_verify", "kv_commit"}
    assert rounds < plain_rounds
    for found in (decoded, speculated):
        assert_same(plain, found)

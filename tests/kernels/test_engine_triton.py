"""The whole engine on Triton's kernels: the tokens of the torch implementations, plainly and with drafted trees."""

import pytest
import torch

from kernels import dispatch
from tests.tlt_core.rollout.playing import Knows
from tlt_core.items.speculation import NO_MIN_DRAFT_PROBS, Strategy
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.model import sampling
from tlt_core.rollout import spec_round
from tlt_core.rollout.engine import RolloutEngine, Speculation

PARAMS = SamplingParams(temperature=0.8, top_k=20, max_new_tokens=10, stop_token_ids=(2,))
TREE = Strategy("knows", depth=3, width=2, tokens=6)
LENGTHS = (5, 1, 9)


class Always:
    """A tuner that takes the tree."""

    min_draft_probs = NO_MIN_DRAFT_PROBS

    def choose(self, rows, context):
        return TREE

    def observe(self, rows, report): ...
    def forget(self, row): ...


def generate(decoder, drafter: Knows | None = None) -> tuple[dict[NoiseKey, Rollout], int]:
    """Responses by key, and the rounds that they took."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 64, (n,), generator=generator).to(torch.int32) for n in LENGTHS]
    waiting = [GenerationRequest(NoiseKey(0, 1, index, 0), prompt) for index, prompt in enumerate(prompts)]
    speculation = None if drafter is None else Speculation({"knows": drafter}, Always(), strategies=(TREE,))
    engine = RolloutEngine(decoder, max_live=3, max_len=40, speculation=speculation)
    finished, rounds = {}, []

    def pull(wanted: int) -> list[GenerationRequest]:
        taken, waiting[:] = waiting[:wanted], waiting[wanted:]
        return taken

    engine.decode(pull, lambda r: finished.__setitem__(r.key, r), PARAMS, on_round=rounds.append)
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
        assert found.keys() == plain.keys()
        for key, rollout in plain.items():
            assert found[key].tokens.tolist() == rollout.tokens.tolist()
            torch.testing.assert_close(found[key].logprobs, rollout.logprobs, atol=1e-4, rtol=0)

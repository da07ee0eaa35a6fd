"""The engine's responses depend on (seed, step, prompt, sample) alone, and equal transformers' when greedy."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tlt_core.rollout.playing import play, requests
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.model.load import save_hf
from tlt_core.rollout.engine import RolloutEngine
from tlt_core.rollout.prefill import Prefill

LENGTHS = (1, 5, 13, 19)


@pytest.fixture(scope="module")
def theirs(decoder, tmp_path_factory):
    """The same model of transformers."""
    path = tmp_path_factory.mktemp("model")
    weights = [(name, weight.detach()) for name, weight in decoder.named_parameters()]
    save_hf(weights, decoder.config, path / "policy", tokenizer_from=path, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(path / "policy", dtype=torch.float32)


def run(decoder, items, params, *, max_live: int) -> dict[NoiseKey, Rollout]:
    return play(RolloutEngine(decoder, max_live=max_live, max_len=96), items, params, policy_version=5)[0]


def test_tokens_do_not_depend_on_the_batch(decoder):
    items, params = requests(36, lengths=LENGTHS), SamplingParams(max_new_tokens=40, stop_token_ids=(2, 3))
    reference = run(decoder, items, params, max_live=1)
    for max_live in (7, 32, 36):
        other = run(decoder, items, params, max_live=max_live)
        for key, rollout in reference.items():
            assert torch.equal(rollout.tokens, other[key].tokens), f"{key} differs at {max_live} live"
            torch.testing.assert_close(rollout.logprobs, other[key].logprobs, atol=1e-4, rtol=0)
    shuffled = run(decoder, items[::-1], params, max_live=5)
    assert all(torch.equal(r.tokens, shuffled[k].tokens) for k, r in reference.items())


def test_a_prompt_runs_once_as_long_as_one_of_its_requests_lives(decoder, monkeypatch):
    """Responses end one by one, so siblings come in late: they take the prompt's keys and values from a live one."""
    params = SamplingParams(max_new_tokens=40, stop_token_ids=(2, 3))
    items = requests(12, lengths=(7,))
    alone = run(decoder, items, params, max_live=1)
    assert len({len(r.completion) for r in alone.values()}) > 3, "they were meant to end one by one"
    prefilled, run_pass = [], Prefill._pass
    monkeypatch.setattr(
        Prefill, "_pass", lambda self, rows, at: (prefilled.append(len(rows)), run_pass(self, rows, at))
    )
    together = run(decoder, items, params, max_live=4)
    assert prefilled == [1]
    for key, rollout in alone.items():
        assert torch.equal(rollout.tokens, together[key].tokens)
        # Rounds of other sizes: float32 rounds differently, as in the test above.
        torch.testing.assert_close(rollout.logprobs, together[key].logprobs, atol=1e-4, rtol=0)


def test_greedy_equals_transformers(theirs, decoder):
    items = requests(50, lengths=[1 + n % 20 for n in range(50)])
    finished = run(decoder, items, SamplingParams(0.0, max_new_tokens=30, stop_token_ids=(2,)), max_live=8)
    for rollout in finished.values():
        prompt = rollout.tokens[: rollout.prompt_len].long()[None]
        expected = theirs.generate(prompt, do_sample=False, max_new_tokens=30, pad_token_id=0, eos_token_id=2)
        assert rollout.tokens.tolist() == expected[0].tolist()


def test_log_probs_are_the_sampling_policys(theirs, decoder):
    """At T = 0.7: log softmax(logits / T) of a plain transformers forward over the finished sequence."""
    params = SamplingParams(temperature=0.7, max_new_tokens=20)
    for rollout in run(decoder, requests(10, lengths=LENGTHS), params, max_live=4).values():
        tokens = rollout.tokens.long()
        logprobs = (theirs(tokens[None]).logits[0].float() / 0.7).log_softmax(-1)
        expected = logprobs[rollout.prompt_len - 1 : -1].gather(1, rollout.completion.long()[:, None]).squeeze(1)
        torch.testing.assert_close(rollout.logprobs, expected, atol=2e-5, rtol=0)


def test_prompt_that_does_not_fit_is_refused(decoder):
    item = GenerationRequest(NoiseKey(0, 0, 3, 0), torch.ones(96, dtype=torch.int32))
    with pytest.raises(ValueError, match="prompt 3 has 96 tokens"):
        run(decoder, [item], SamplingParams(), max_live=1)

"""The engine's responses depend on (seed, step, prompt, sample) alone, and equal transformers' when greedy."""

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tlt_core.rollout.playing import play
from tlt_core.items.types import FinishReason, GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.model.load import load_decoder
from tlt_core.rollout.engine import RolloutEngine
from tlt_core.rollout.prefill import Prefill

VOCAB = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def decoder(folder):
    return load_decoder(folder, dtype=torch.float32)


def requests(num_prompts: int, samples: int) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, VOCAB, (int(torch.randint(1, 20, (1,), generator=generator)),), generator=generator)
        for _ in range(num_prompts)
    ]
    return [
        GenerationRequest(NoiseKey(0, 1, p, s), tokens.to(torch.int32))
        for p, tokens in enumerate(prompts)
        for s in range(samples)
    ]


def run(decoder, items, params, *, max_live: int) -> dict[NoiseKey, Rollout]:
    return play(RolloutEngine(decoder, max_live=max_live, max_len=96), items, params, policy_version=5)[0]


def test_tokens_do_not_depend_on_the_batch(decoder):
    items, params = requests(9, 4), SamplingParams(max_new_tokens=40, stop_token_ids=(2, 3))
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
    items = [r for r in requests(9, 12) if len(r.prompt_tokens) > 1][:12]
    assert len({r.key.prompt_id for r in items}) == 1
    alone = run(decoder, items, params, max_live=1)
    assert len({len(r.completion) for r in alone.values()}) > 3, "they were meant to end one by one"
    prefilled, run_pass = [], Prefill._pass
    monkeypatch.setattr(Prefill, "_pass", lambda self, groups: (prefilled.append(len(groups)), run_pass(self, groups)))
    together = run(decoder, items, params, max_live=4)
    assert prefilled == [1]
    for key, rollout in alone.items():
        assert torch.equal(rollout.tokens, together[key].tokens)
        # Rounds of other sizes: float32 rounds differently, as in the test above.
        torch.testing.assert_close(rollout.logprobs, together[key].logprobs, atol=1e-4, rtol=0)


def test_greedy_equals_transformers(folder, decoder):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    finished = run(decoder, requests(50, 1), SamplingParams(0.0, max_new_tokens=30, stop_token_ids=(2,)), max_live=8)
    for rollout in finished.values():
        prompt = rollout.tokens[: rollout.prompt_len].long()[None]
        expected = model.generate(prompt, do_sample=False, max_new_tokens=30, pad_token_id=0, eos_token_id=2)
        assert rollout.tokens.tolist() == expected[0].tolist()


def test_log_probs_are_the_sampling_policys(folder, decoder):
    """At T = 0.7: log softmax(logits / T) of a plain transformers forward over the finished sequence."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    params = SamplingParams(temperature=0.7, max_new_tokens=20)
    for rollout in run(decoder, requests(5, 2), params, max_live=4).values():
        tokens = rollout.tokens.long()
        logprobs = (model(tokens[None]).logits[0].float() / 0.7).log_softmax(-1)
        expected = logprobs[rollout.prompt_len - 1 : -1].gather(1, rollout.completion.long()[:, None]).squeeze(1)
        torch.testing.assert_close(rollout.logprobs, expected, atol=2e-5, rtol=0)


def test_finish_reasons(decoder):
    every = tuple(range(VOCAB))
    first = run(decoder, requests(3, 1), SamplingParams(max_new_tokens=9, stop_token_ids=every), max_live=3)
    assert {(r.finish, len(r.completion)) for r in first.values()} == {(FinishReason.STOP, 1)}
    never = run(decoder, requests(3, 1), SamplingParams(max_new_tokens=9), max_live=3)
    assert {(r.finish, len(r.completion)) for r in never.values()} == {(FinishReason.LENGTH, 9)}
    context = run(decoder, requests(1, 1), SamplingParams(max_new_tokens=500), max_live=1)
    assert {len(r.tokens) for r in context.values()} == {96}  # cut at the cache length
    assert {r.policy_version for r in context.values()} == {5}


def test_a_request_may_be_cut_earlier_and_its_tokens_stay(decoder):
    params = SamplingParams(max_new_tokens=9)
    whole = run(decoder, requests(3, 1), params, max_live=3)
    own = [dataclasses.replace(r, max_new_tokens=most) for r, most in zip(requests(3, 1), (1, 4, 500), strict=True)]
    cut = run(decoder, own, params, max_live=3)
    assert [len(cut[r.key].completion) for r in own] == [1, 4, 9]
    assert all(torch.equal(c.completion, whole[key].completion[: len(c.completion)]) for key, c in cut.items())


def test_one_token_prompt_needs_no_prefill(decoder):
    item = GenerationRequest(NoiseKey(0, 0, 0, 0), torch.tensor([9], dtype=torch.int32))
    assert len(run(decoder, [item], SamplingParams(max_new_tokens=4), max_live=2)[item.key].tokens) == 5


def test_prompt_that_does_not_fit_is_refused(decoder):
    item = GenerationRequest(NoiseKey(0, 0, 3, 0), torch.ones(96, dtype=torch.int32))
    with pytest.raises(ValueError, match="prompt 3 has 96 tokens"):
        run(decoder, [item], SamplingParams(), max_live=1)

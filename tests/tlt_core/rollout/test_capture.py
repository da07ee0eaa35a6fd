"""Captured hidden states and distributions are those that a plain transformers forward gives, position by position."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from conf.rollout import SpeculationConfig, StrategyConfig
from tests.tlt_core.rollout.playing import play, requests
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.drafter.eagle3.observe import draft_probs
from tlt_core.idle_training.buffer import SequenceBuffer
from tlt_core.items.types import SamplingParams
from tlt_core.model.load import load_decoder
from tlt_core.model.sampling import stream_key
from tlt_core.rollout import build

VOCAB, MAX_LEN, EOS = 64, 80, 2
CHAIN = StrategyConfig(drafter="eagle3", depth=3, width=1, tokens=3)
TREE = StrategyConfig(drafter="eagle3", depth=4, width=3, tokens=9)
NGRAM = StrategyConfig(drafter="ngram", depth=4, width=2, tokens=6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=EOS,
    )
    path = tmp_path_factory.mktemp("capture")
    LlamaForCausalLM(config).save_pretrained(path / "model")
    decoder = load_decoder(path / "model", dtype=torch.float32)
    model = eagle3_from_target(decoder, torch.arange(VOCAB), scales=(1.0, 1.0, 1.0), seed=0)
    save_eagle3(model, path / "d-eagle3", dtype=torch.float32)
    return path


def captured(folders, params, *, capture=(True, True), **speculation):
    """(TrainSequence, Rollout) of every response of the last of some phases on one engine; taps; strategies in use.

    capture: whether each phase is recorded."""
    decoder = load_decoder(folders / "model", dtype=torch.float32)
    cfg = SpeculationConfig(drafter_path=str(folders / "d-eagle3"), **speculation)
    engine = build.make_engine(decoder, cfg, max_live=4, max_len=MAX_LEN, seed=0, capture=True)
    strategies = set()
    for step, keep in enumerate(capture, start=3 - len(capture)):
        seen = []
        finished, traces = play(
            engine,
            requests(12, lengths=(1, 4, 9), step=step),
            params,
            on_captured=seen.append if keep else None,
            policy_version=step,
        )
        strategies |= {trace.report.strategy for trace in traces}
    return [(c, finished[c.key]) for c in seen], engine.speculation.drafters["eagle3"].taps, strategies


WAYS = {
    "chain": {"policy": "fixed", "strategies": (CHAIN, NGRAM)},
    "tree": {"policy": "fixed", "strategies": (TREE,)},
    "switching": {"policy": "beg_mab", "strategies": (TREE, CHAIN, NGRAM)},
}


@pytest.mark.parametrize(("way", "temperature"), [*((way, 1.0) for way in WAYS), ("switching", 0.7)])
def test_captured_states_are_those_of_transformers(folders, way, temperature):
    speculation = WAYS[way]
    pairs, taps, strategies = captured(folders, SamplingParams(temperature, max_new_tokens=40), **speculation)
    if way == "switching":
        assert len(strategies) > 2, "the way was meant to change strategies in mid-flight"
    theirs = AutoModelForCausalLM.from_pretrained(folders / "model", dtype=torch.float32)
    assert len(pairs) == 12
    for item, rollout in pairs:
        for tensor in item.tensors.values():  # a copy, which may be trained on, and no view of the engine's buffers
            assert not tensor.is_inference()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert torch.equal(item.tokens_L, rollout.tokens)
        assert (item.first, item.stream, item.policy_version) == (rollout.prompt_len, stream_key(item.key), 2)
        wanted_P = assert_aligned(item, taps, theirs)
        if temperature == 1.0:  # the sampled token's own entry is its log-probability
            own = wanted_P.gather(1, rollout.tokens[item.first :, None].long()).squeeze(1)
            torch.testing.assert_close(own, rollout.logprobs, rtol=1e-3, atol=1e-3)


def test_what_a_resumed_run_finds_is_still_that_of_transformers(folders, tmp_path):
    """Through the buffer's files: another process would map the same."""
    pairs, taps, _ = captured(folders, SamplingParams(max_new_tokens=40), **WAYS["switching"])
    bounds = {"max_bytes": 10**9, "max_sequences": 10**6}
    writer = ThreadPoolExecutor(max_workers=1)
    buffer = SequenceBuffer(tmp_path, **bounds, writer=writer)
    for item, _ in pairs:
        buffer.add(item)
    buffer.end_step(2)
    writer.shutdown()
    index = json.loads(json.dumps(buffer.index()))
    del buffer
    resumed = SequenceBuffer(tmp_path, index=index, **bounds, writer=writer)
    theirs = AutoModelForCausalLM.from_pretrained(folders / "model", dtype=torch.float32)
    by_key = {rollout.key: rollout for _, rollout in pairs}
    draft_ids_J = torch.tensor([2, 5, 9, 33, 60])
    assert len(resumed) == len(by_key) == 12
    for item in resumed.sequences():
        assert torch.equal(item.tokens_L, by_key[item.key].tokens)
        wanted_P = assert_aligned(item, taps, theirs)
        probs_PJ = draft_probs(item, slice(None), theirs.lm_head.weight.detach()[draft_ids_J])
        torch.testing.assert_close(probs_PJ, wanted_P[:, draft_ids_J].exp(), rtol=0, atol=5e-5)  # measured: 9e-6


def assert_aligned(item, taps, theirs):
    """Hidden state i is that of token i, and the distributions are those of the sampled tokens; returns their
    logarithms, [P, V].

    Two computations of the same numbers in float32, with other orders of summation: up to 2e-4 apart in hidden states
    of up to 47, 5e-5 in log-probabilities.  A neighbour's would be off by whole units.
    """
    tokens, length = item.tokens_L.long(), len(item.tokens_L)
    with torch.no_grad():
        out = theirs(tokens[None], output_hidden_states=True)
    wanted = torch.cat([out.hidden_states[tap][0, : length - 1] for tap in taps], dim=-1)
    torch.testing.assert_close(item.taps_LE, wanted, rtol=0, atol=1e-3)
    assert len(item.last_PD) == len(item.lognorms_P) == length - item.first
    wanted_P = out.logits[0, item.first - 1 : length - 1].log_softmax(-1)
    head = theirs.lm_head.weight.detach()
    torch.testing.assert_close(item.last_PD @ head.T - item.lognorms_P[:, None], wanted_P, rtol=0, atol=3e-4)
    return wanted_P


def test_a_phase_that_is_not_kept_spoils_nothing(folders):
    """Validation, and then a rollout; against the rollout alone."""
    params = SamplingParams(max_new_tokens=20)
    alone, after = (captured(folders, params, capture=c, **WAYS["chain"])[0] for c in ((True,), (False, True)))
    assert len(alone) == len(after) == 12
    by_key = {item.key: item for item, _ in after}
    for item, _ in alone:
        for mine, theirs in zip(item.tensors.values(), by_key[item.key].tensors.values(), strict=True):
            torch.testing.assert_close(mine, theirs)

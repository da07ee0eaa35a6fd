"""Captured hidden states and distributions are those that a plain transformers forward gives, position by position."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from conf.rollout import SpeculationConfig, StrategyConfig
from tests.decoders import lively
from tests.tlt_core.rollout.playing import play, requests
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.items.types import SamplingParams
from tlt_core.model.load import load_decoder, save_hf
from tlt_core.model.sampling import stream_key
from tlt_core.rollout import build

VOCAB, MAX_LEN = 64, 80
CHAIN = StrategyConfig(drafter="eagle3", depth=3, width=1, tokens=3)
TREE = StrategyConfig(drafter="eagle3", depth=4, width=3, tokens=9)
NGRAM = StrategyConfig(drafter="ngram", depth=4, width=2, tokens=6)


@pytest.fixture(scope="module")
def folders(tiny_config, tmp_path_factory):
    path = tmp_path_factory.mktemp("capture")
    decoder = lively(dataclasses.replace(tiny_config, num_layers=8))
    weights = [(name, weight.detach()) for name, weight in decoder.named_parameters()]
    save_hf(weights, decoder.config, path / "model", tokenizer_from=path, dtype=torch.float32)
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

"""The real drafters and the real tuner in the real engine: same tokens, and fewer rounds where text repeats."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conf.load import load
from conf.rollout import SpeculationConfig, StrategyConfig
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams
from tlt_core.model.load import load_decoder
from tlt_core.rollout import build

VOCAB, MAX_LEN = 64, 128


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
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
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return load_decoder(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def drafter_folder(decoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / "d-eagle3"
    ids = torch.arange(0, VOCAB, 2)
    save_eagle3(eagle3_from_target(decoder, ids, scales=(1.0, 1.0, 1.0), seed=0), folder, dtype=torch.float32)
    return folder


def rollouts(decoder, cfg, params, *, max_live=6):
    engine = build.make_engine(decoder, cfg, max_live=max_live, max_len=MAX_LEN, seed=0)
    build.calibrate(engine)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).to(torch.int32) for n in (1, 4, 9)]
    waiting = [GenerationRequest(NoiseKey(0, 1, p, s), t) for p, t in enumerate(prompts) for s in range(5)]
    finished, traces = {}, []

    def pull(wanted):
        taken, waiting[:] = waiting[:wanted], waiting[wanted:]
        return taken

    engine.decode(pull, lambda r: finished.__setitem__(r.key, r), params, on_round=traces.append)
    return finished, traces, engine


POLICIES = ("cost_model", "beg_mab", "fixed")


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_and_both_drafters_change_no_token(decoder, drafter_folder, policy, temperature):
    params = SamplingParams(temperature=temperature, max_new_tokens=60, stop_token_ids=(2,))
    plain, _, _ = rollouts(decoder, SpeculationConfig(policy="off"), params)
    arms = (
        StrategyConfig(drafter="eagle3", depth=3, tokens=3),
        StrategyConfig(drafter="eagle3", depth=3, width=2, tokens=6),
        StrategyConfig(drafter="ngram", depth=5, tokens=5),
        StrategyConfig(drafter="ngram", depth=4, width=3, tokens=9),
    )
    for first in range(len(arms)):
        menu = arms[first:] + arms[:first]  # `fixed` takes the first
        cfg = SpeculationConfig(policy=policy, menu=menu, drafter_path=str(drafter_folder))
        speculative, traces, engine = rollouts(decoder, cfg, params)
        assert engine.drafter_failures == {}
        for key, rollout in plain.items():
            assert speculative[key].tokens.tolist() == rollout.tokens.tolist(), (key, menu[0])
            torch.testing.assert_close(speculative[key].logprobs, rollout.logprobs, atol=1e-4, rtol=0)
        if policy == "fixed":
            assert any(sum(t.report.drafted) for t in traces)
        if policy in ("cost_model", "beg_mab"):
            break  # they choose from the whole menu


def test_repetition_is_exploited(decoder):
    """Greedy siblings are equal, so the n-gram drafter knows them all when the first has ended."""
    params = SamplingParams(temperature=0.0, max_new_tokens=60)
    plain = rollouts(decoder, SpeculationConfig(policy="off"), params, max_live=1)[1]
    chain = SpeculationConfig(policy="fixed", menu=(StrategyConfig(depth=7, tokens=7),))
    speculative = rollouts(decoder, chain, params, max_live=1)[1]
    assert len(speculative) < 0.5 * len(plain)


def test_a_drafter_of_another_model_is_refused(decoder, drafter_folder, tmp_path):
    other = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4
    )
    LlamaForCausalLM(other).save_pretrained(tmp_path)
    cfg = SpeculationConfig(drafter_path=str(drafter_folder))
    with pytest.raises(ValueError, match="hidden_size"):
        build.make_engine(load_decoder(tmp_path, dtype=torch.float32), cfg, max_live=2, max_len=64, seed=0)


def test_a_menu_with_a_drafter_that_is_not_there_is_refused_at_load():
    with pytest.raises(ValueError, match="drafter_path is not set"):
        SpeculationConfig(menu=(StrategyConfig(drafter="eagle3", depth=2, tokens=2),))


def test_the_tuner_goes_on_where_it_was(decoder):
    params = SamplingParams(max_new_tokens=40)
    engine = rollouts(decoder, SpeculationConfig(), params)[2]
    state = engine.speculation.tuner.state_dict()
    fresh = build.make_engine(decoder, SpeculationConfig(), max_live=6, max_len=MAX_LEN, seed=0)
    fresh.speculation.tuner.load_state_dict(state)
    assert fresh.speculation.tuner.state_dict() == state
    assert build.snapshot(fresh)["rounds"] == build.snapshot(engine)["rounds"] > 0


def test_a_bare_off_switches_speculation_off():
    """YAML reads it as false."""
    assert load("conf/smoke.yaml", ["rollout.speculation.policy=off"]).rollout.speculation.policy == "off"

"""Speculation changes no token, on 201 (prompt, seed) pairs of a small model in fp32: every drafter, every tree shape,
every policy of the tuner, T = 0, 0.7 and 1.  (`test_lossless.py` does the same on a real model.)"""

import pytest
import torch

from conf.rollout import SpeculationConfig, StrategyConfig
from tests.tlt_core.drafter.eagle3.training_texts import lively_decoder
from tests.tlt_core.rollout.playing import assert_same, play, requests
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import Eagle3Config, eagle3_from_target, random_eagle3, tap_scales
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.train import Eagle3Trainer, TrainSettings
from tlt_core.items.types import SamplingParams
from tlt_core.rollout import build

VOCAB, NEW_TOKENS, MAX_LEN = 64, 16, 40
PROMPTS, SEEDS = 67, 3
TEMPERATURES = (0.0, 0.7, 1.0)
IDS = torch.arange(0, VOCAB, 2)
SHAPES = {
    "one": (1, 1, 1),
    "chain": (4, 1, 4),
    "long chain": (9, 1, 9),
    "pair": (1, 2, 2),
    "star": (1, 8, 8),
    "narrow tree": (5, 2, 9),
    "wide tree": (3, 4, 14),
}
STRATEGIES = tuple(
    StrategyConfig(drafter=drafter, depth=depth, width=width, tokens=tokens)
    for drafter, depth, width, tokens in (
        ("eagle3", 2, 1, 2),
        ("eagle3", 4, 1, 4),
        ("eagle3", 7, 1, 7),
        ("eagle3", 5, 2, 8),
        ("ngram", 2, 1, 2),
        ("ngram", 8, 1, 8),
    )
)


@pytest.fixture(scope="module")
def decoder(tiny_config):
    return lively_decoder(tiny_config)


@pytest.fixture(scope="module")
def drafters(decoder, tmp_path_factory):
    """Folders of an EAGLE-3 drafter with random weights, and of one trained on what the model writes."""
    root = tmp_path_factory.mktemp("drafters")
    random = random_eagle3(Eagle3Config.for_target(decoder.config, len(IDS)), IDS, seed=4)
    said = [r for t in TEMPERATURES for r in decode(decoder, SpeculationConfig(policy="off"), t)[0].values()]
    trained = trained_drafter(decoder, said, IDS, TrainSettings(learning_rate=3e-3, warmup_steps=5))
    for name, model in (("random", random), ("trained", trained)):
        save_eagle3(model, root / f"{name}-eagle3", dtype=torch.float32)
    return {name: str(root / f"{name}-eagle3") for name in ("random", "trained")}


def trained_drafter(decoder, responses, ids, settings):
    """Learnt from responses, so that its drafts are accepted now and then at every temperature."""
    firsts = [r.prompt_len for r in responses]
    probe = eagle3_from_target(decoder, ids, scales=(1.0, 1.0, 1.0), seed=1)
    seen = observe(decoder, [r.tokens for r in responses], probe, firsts=firsts, dtype=torch.float32)
    drafter = eagle3_from_target(decoder, ids, scales=tap_scales(torch.cat([s.taps_LE for s in seen])), seed=1)
    trainer = Eagle3Trainer(drafter, decoder, settings)
    for step in range(40):
        trainer.step(seen[step % 4 :: 4])
    return drafter


@pytest.fixture(scope="module")
def plain(decoder):
    """By temperature."""
    rollouts = {t: decode(decoder, SpeculationConfig(policy="off"), t)[0] for t in TEMPERATURES}
    assert len({tuple(r.completion.tolist()) for r in rollouts[1.0].values()}) > 150
    return rollouts


def decode(decoder, cfg, temperature, *, max_live=32):
    """Responses, and accepted draft tokens."""
    params = SamplingParams(temperature=temperature, max_new_tokens=NEW_TOKENS, stop_token_ids=(2,))
    engine = build.make_engine(decoder, cfg, max_live=max_live, max_len=MAX_LEN, seed=0)
    items = requests(PROMPTS * SEEDS, lengths=[1 + p % 9 for p in range(PROMPTS)])
    finished, traces = play(engine, items, params)
    assert len(finished) == PROMPTS * SEEDS >= 200
    assert engine.drafter_failures == {}
    return finished, sum(sum(t.report.accepted) for t in traces)


DRAFTERS = ("ngram", "random", "trained")
CASES = [  # each drafter in each shape, each shape at each temperature, each drafter at each temperature
    (drafter, shape, TEMPERATURES[(i + j) % 3]) for i, drafter in enumerate(DRAFTERS) for j, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(("drafter", "shape", "temperature"), CASES)
def test_every_drafter_in_every_shape(decoder, drafters, plain, drafter, shape, temperature):
    depth, width, tokens = SHAPES[shape]
    name = "ngram" if drafter == "ngram" else "eagle3"
    strategies = (StrategyConfig(drafter=name, depth=depth, width=width, tokens=tokens),)
    cfg = SpeculationConfig(policy="fixed", strategies=strategies, drafter_path=drafters.get(drafter))
    finished, accepted = decode(decoder, cfg, temperature)
    assert accepted > (100 if drafter == "trained" else 10)  # drafts were accepted: their keys and values were kept
    assert_same(plain[temperature], finished)


@pytest.mark.parametrize("max_live", [5, 201])
@pytest.mark.parametrize(("policy", "temperature"), [("cost_model", 0.0), ("cost_model", 0.7), ("beg_mab", 1.0)])
def test_every_policy_with_all_strategies_and_every_batch_size(decoder, drafters, plain, policy, temperature, max_live):
    cfg = SpeculationConfig(policy=policy, strategies=STRATEGIES, drafter_path=drafters["trained"])
    assert_same(plain[temperature], decode(decoder, cfg, temperature, max_live=max_live)[0])

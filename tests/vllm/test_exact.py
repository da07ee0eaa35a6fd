"""The plug-in in a running vLLM, float32: same tokens whatever is drafted, and those of our engine.

One plain engine, one with fixed chains of two, one with fixed chains of seven, one adaptive.  The adaptive one drafts
with a good drafter, then with a random one, then with one that proposes what the target never says, then with the good
one again; it also keeps hidden states.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from conf.rollout import RolloutConfig, SpeculationConfig
from tests.vllm.test_rollout_engine import chains_of, completions
from tlt_core.drafter.eagle3.files import load_eagle3
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.model.edge_weights import EdgeWeights
from tlt_core.model.load import load_decoder
from tlt_core.rollout import build
from tlt_core.rollout.engine import RoundTrace
from tlt_core.rollout.vllm import client
from tlt_core.rollout.vllm.client import VllmError, VllmRollout
from tlt_core.rollout.vllm.drafts import VllmDrafts
from tlt_core.rollout.vllm.replica import VllmSpec, start_vllm

pytestmark = pytest.mark.vllm

PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=40),
    SamplingParams(temperature=0.7, max_new_tokens=40),
    SamplingParams(temperature=1.0, max_new_tokens=40),
    SamplingParams(temperature=1.0, top_k=20, max_new_tokens=24),
    SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=24),
]
SAMPLES = 2
# Share of responses that may leave those of our engine: float32 kernels differ in the last bits, and a token whose two
# best scores are closer than that flips.
NEAR_TIES = 0.06
CROSSING = 120  # tokens of a prompt that fits into four blocks of keys and values (32 each), as its responses do not
STATES = 2e-3  # relative difference of hidden states, kernels of two engines


class Run(NamedTuple):
    """One pass over all prompts and parameters."""

    tokens: list[list[int]]
    rollouts: list[Rollout]
    rounds: tuple[RoundTrace, ...]
    captured: list[TrainSequence]


def requests(prompts, number: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(NoiseKey(0, number, i, s), torch.tensor(list(p)).int(), max_new_tokens=9 if i == s else None)
        for i, p in enumerate(prompts)
        for s in range(SAMPLES)
    ]


def decode_all(decode, prompts, *, capture: bool = False) -> Run:
    rollouts: list[Rollout] = []
    captured: list[TrainSequence] = []
    for number, params in enumerate(PARAMS):
        waiting, finished = requests(prompts, number), []

        def pull(wanted, waiting=waiting):
            taken, waiting[:] = waiting[:wanted], waiting[wanted:]
            return taken

        extra = {"on_captured": captured.append} if capture else {}
        decode(pull, finished.append, params, **extra)
        rollouts += sorted(finished, key=lambda r: r.key)
    return Run(completions(rollouts), rollouts, (), captured)


class Engines:
    """Starts vLLM with our settings."""

    def __init__(self, python: Path, target, folder: Path) -> None:
        self.python, self.target, self.folder = python, target, folder
        self.count = 0

    def start(
        self, speculation: SpeculationConfig, *, edge_weights: EdgeWeights | None = None, kv_cache_mb: int | None = None
    ) -> VllmRollout:
        self.count += 1
        longest = max(CROSSING, *(len(p) for p in self.target.prompts))
        return start_vllm(
            VllmSpec(self.python, self.folder / str(self.count)),
            RolloutConfig(
                engine="vllm",
                dtype="float32",
                max_live_requests=6,
                speculation=speculation,
                vllm={"kv_cache_mb": kv_cache_mb},
            ),
            model_dir=self.target.folder,
            max_len=longest + 40,
            threads=1,
            rank=0,
            seed=0,
            policy_version=0,
            edge_weights=edge_weights,
        )


@pytest.fixture(scope="module")
def prompts(target):
    return target.prompts[:5]


@pytest.fixture(scope="module")
def engines(vllm_python, target, tmp_path_factory) -> Engines:
    return Engines(vllm_python, target, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def plain(engines, prompts) -> Run:
    engine = engines.start(SpeculationConfig(policy="off"))
    try:
        return decode_all(engine.decode, prompts)
    finally:
        engine.close()


def adaptive_speculation(drafter: Path) -> SpeculationConfig:
    draft_lengths = [{"drafter": "eagle3", "depth": k, "tokens": k} for k in (1, 3, 7)]
    return SpeculationConfig(policy="cost_model", strategies=draft_lengths, drafter_path=str(drafter))


class Adaptive(NamedTuple):
    """An engine in use, what it drafts with, and its good drafter's weights."""

    engine: VllmRollout
    drafts: VllmDrafts
    good: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def adaptive(engines, target, drafter) -> Iterator[Adaptive]:
    speculation = adaptive_speculation(drafter)
    edge_weights = EdgeWeights.load(target.folder, dtype=torch.float32)
    engine = engines.start(speculation, edge_weights=edge_weights)
    try:
        drafts = VllmDrafts(engine.ask, speculation, edge_weights, folder=engine.folder)
        yield Adaptive(engine, drafts, load_file(drafter / "model.safetensors"))
    finally:
        engine.close()


def random_drafter(good: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: w if not w.is_floating_point() or w.ndim < 2 else w.std() * torch.randn(w.shape, generator=generator)
        for name, w in good.items()
    }


def hostile_drafter(good: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prefers what the good one thinks least likely."""
    return good | {"lm_head.weight": -good["lm_head.weight"]}


def share_of_drafting(rounds) -> float:
    return sum(not r.report.strategy.is_off for r in rounds) / len(rounds)


@pytest.mark.parametrize("length", [2, 7])
def test_fixed_chains_change_no_token(engines, prompts, drafter, plain, length):
    draft_lengths = [{"drafter": "eagle3", "depth": length, "tokens": length}]
    engine = engines.start(SpeculationConfig(policy="fixed", strategies=draft_lengths, drafter_path=str(drafter)))
    try:
        found = decode_all(engine.decode, prompts)
        counted = chains_of(engine)
    finally:
        engine.close()
    assert found.tokens == plain.tokens
    assert counted.accepted > 0, "drafts were accepted, also at temperatures above 0"
    assert counted.draft_tokens >= length * (counted.drafts - 5 * SAMPLES * len(prompts)), "shorter only at the end"


def test_log_probs_do_not_depend_on_drafts(adaptive, prompts, plain):
    found = decode_all(adaptive.engine.decode, prompts)
    adaptive.engine.report()
    assert found.tokens == plain.tokens
    for ours, theirs in zip(found.rollouts, plain.rollouts, strict=True):
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=1e-3, atol=1e-3)


def test_tokens_and_their_log_probs_are_those_of_our_engine(target, prompts, plain):
    decoder = load_decoder(target.folder, dtype=torch.float32)
    own = build.make_engine(decoder, SpeculationConfig(policy="off"), max_live=6, max_len=300, seed=0)
    ours = decode_all(own.decode, prompts)
    left = [n for n, (a, b) in enumerate(zip(ours.tokens, plain.tokens, strict=True)) if a != b]
    print(f"{len(left)} of {len(ours.tokens)} responses leave our engine's")
    assert len(left) <= NEAR_TIES * len(ours.tokens)
    for there, here in zip(plain.rollouts, ours.rollouts, strict=True):
        if there.completion.equal(here.completion):  # with top-k and top-p, too: both are before these filters
            torch.testing.assert_close(there.logprobs, here.logprobs, rtol=1e-3, atol=1e-3)


def test_rounds_follow_the_tuner_and_equal_vllms_counters(adaptive, prompts):
    """Of requests that begin together: steps that also read a prompt are no rounds, and vLLM counts their drafts."""
    before = chains_of(adaptive.engine)
    adaptive.engine.report()
    ended = decode_all(adaptive.engine.decode, prompts[:3]).rollouts
    assert len(ended) <= 6 * len(PARAMS), "more than there are slots for"
    rounds, after = adaptive.engine.report().rounds, chains_of(adaptive.engine)
    drafted = sum(sum(r.report.drafted) for r in rounds)
    accepted = sum(sum(r.report.accepted) for r in rounds)
    print(f"rounds: {drafted} drafted, {accepted} accepted; vLLM: {after.draft_tokens - before.draft_tokens}")
    assert {r.report.strategy.tokens for r in rounds} <= {0, 1, 3, 7}
    for trace in rounds:
        assert all(n in (0, trace.report.strategy.tokens) for n in trace.report.drafted) or trace.report.live
    lost = 7 * len(ended)  # vLLM does not count the chain in which a request ends
    assert 0 <= drafted - (after.draft_tokens - before.draft_tokens) <= lost
    assert 0 <= accepted - (after.accepted - before.accepted) <= lost


def test_a_drafter_that_turns_useless_is_switched_off_and_found_again(adaptive, prompts, plain):
    engine, drafts, good = adaptive
    engine.report()
    decode_all(engine.decode, prompts)
    before = share_of_drafting(engine.report().rounds)
    for weights in (random_drafter(good), hostile_drafter(good)):
        drafts.load_drafter(weights)
        drafts.tuner.notify_change("eagle3")
        engine.report()
        assert decode_all(engine.decode, prompts).tokens == plain.tokens, "whatever is drafted"
        rounds = engine.report().rounds
        off = [r.report.strategy.is_off for r in rounds]
        assert sum(off[60:]) >= 0.8 * len(off[60:]), "from the 60th round on, up to probes"
    drafts.load_drafter(good)
    drafts.tuner.notify_change("eagle3")
    for _ in range(2):
        engine.report()
        assert decode_all(engine.decode, prompts).tokens == plain.tokens
    after = share_of_drafting(engine.report().rounds)
    print(f"rounds with drafts: {before:.2f} at first, {after:.2f} when the drafter is good again")
    assert after > 0.5 * before > 0, "it is used again"


def test_a_drafter_that_is_not_in_use_is_an_error(adaptive):
    """A layer that is missing leaves old weights in place, which would only show as a drop of acceptance."""
    incomplete = {name: w for name, w in adaptive.good.items() if "down_proj" not in name}
    with pytest.raises(VllmError, match=r"no weights came for 1 layers, e\.g\. .*down_proj"):
        adaptive.drafts.load_drafter(incomplete)
    adaptive.drafts.load_drafter(adaptive.good)


def test_hidden_states_are_those_that_our_engine_sees(adaptive, target, prompts, drafter):
    """With prefix caching: siblings share their prompt."""
    require_our_states(decode_all(adaptive.engine.decode, prompts, capture=True), target, drafter)


def test_preempted_requests_keep_their_tokens_and_states(engines, target, prompts, drafter, adaptive):
    """Six requests begin with four blocks of keys and values each, of which two share three, and need a fifth that is
    not there: vLLM computes some of them again."""
    long = [[*p, *prompts[0] * 3][:CROSSING] for p in prompts]
    expected = decode_all(adaptive.engine.decode, long)
    adaptive.engine.report()
    edge_weights = EdgeWeights.load(target.folder, dtype=torch.float32)
    engine = engines.start(adaptive_speculation(drafter), edge_weights=edge_weights, kv_cache_mb=24)
    try:
        found = decode_all(engine.decode, long, capture=True)
        preempted = engine.counters()["preempted"]
    finally:
        engine.close()
    print(f"{preempted} preemptions in {len(found.rollouts)} responses")
    assert preempted >= 5
    left = [n for n, (a, b) in enumerate(zip(found.tokens, expected.tokens, strict=True)) if a != b]
    assert len(left) <= NEAR_TIES * len(found.tokens), "computed again, keys and values differ in their last bits"
    require_our_states(found, target, drafter)


def test_sleep_changes_no_token(adaptive, prompts, plain):
    """vLLM keeps its memory on a CPU; the rest of the way is that of a GPU."""
    adaptive.engine.release_memory()
    assert decode_all(adaptive.engine.decode, prompts).tokens == plain.tokens
    adaptive.engine.report()


def test_a_drafter_that_is_lost_in_sleep_is_an_error(engines, drafter, prompts, monkeypatch):
    monkeypatch.setattr(client, "_SCRIPT", Path(__file__).with_name("forgetful.py"))
    engine = engines.start(adaptive_speculation(drafter))
    try:
        engine.release_memory()
        with pytest.raises(VllmError, match=r"layers of .* have changed in the engine's sleep"):
            decode_all(engine.decode, prompts)
    finally:
        engine.close()


def require_our_states(found: Run, target, drafter: Path) -> None:
    assert len(found.captured) >= 0.9 * len(found.rollouts), "few are dropped"
    model = load_eagle3(drafter, target.decoder.config)
    whole = [s for s in found.captured if s.key.step in (0, 2)]
    expected = observe(
        target.decoder, [s.tokens_L for s in whole], model, firsts=[s.first for s in whole], dtype=torch.float32
    )
    assert any(s.key.sample > 0 for s in whole), "siblings, whose prompt was not computed again"
    for ours, theirs in zip(whole, expected, strict=True):
        assert torch.equal(ours.tokens_L, theirs.tokens_L)
        for name in ("taps_LE", "last_PD", "lognorms_P"):
            a, b = getattr(ours, name).float(), getattr(theirs, name).float()
            error = float((a - b).norm() / b.norm())
            assert error < STATES, f"{name} of {ours.id}: {error:.1e}"

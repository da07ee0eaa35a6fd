"""Acceptance along recorded responses: the rounds that are counted are those that the engine makes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.idle.chains import NgramReplay, Recorded, accept_length, by_round_error, longer
from conf.load import load
from tests.tlt_core.drafter.eagle3.test_acceptance import recorded as observed
from tests.tlt_core.drafter.eagle3.training_texts import IDS, lively_decoder
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.drafter.ngram.drafter import NgramDrafter
from tlt_core.items.speculation import Strategy
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams
from tlt_core.machine.precision import settle
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.tuner.policies import make_tuner

DRAFTS = 5
PARAMS = SamplingParams(temperature=0.4, max_new_tokens=30, stop_token_ids=(2,))


@pytest.fixture(scope="module")
def decoder(tiny_config):
    return lively_decoder(tiny_config)


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    return settle(load(Path("conf/smoke.yaml"), ["rollout.temperature=0.4", f"output_dir={runs}"]))


def rounds_of(decoder, steps):
    """Rollouts of three prompts, one after the other, in each step; and the accepted drafts of their rounds."""
    strategies = [Strategy("ngram", DRAFTS, 1, DRAFTS)]
    engine = RolloutEngine(
        decoder,
        max_live=1,
        max_len=64,
        speculation=Speculation({"ngram": NgramDrafter()}, make_tuner("fixed", strategies, seed=0), strategies),
    )
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 64, (n,), generator=generator).int() for n in (3, 6, 9)]
    waiting = [
        GenerationRequest(NoiseKey(0, step, p, 0), prompt)
        for step in range(1, steps + 1)
        for p, prompt in enumerate(prompts)
    ]
    rollouts, accepted = [], {}

    def on_round(trace):
        accepted.setdefault(trace.numbers[0], []).append(trace.report.accepted[0])

    engine.decode(lambda _: [waiting.pop(0)] if waiting else [], rollouts.append, PARAMS, on_round=on_round)
    return rollouts, accepted


def recorded_of(decoder, rollouts):
    model = eagle3_from_target(decoder, IDS, scales=(1.0,) * 3, seed=1)
    sequences = observed(decoder, rollouts, model)
    return model, [Recorded("worker_0", replace(s, key=r.key)) for r, s in zip(rollouts, sequences, strict=True)]


def test_the_ngram_replay_accepts_what_the_engine_did(decoder, cfg):
    rollouts, accepted = rounds_of(decoder, steps=4)
    _, responses = recorded_of(decoder, rollouts)
    replay = NgramReplay(cfg)
    runs = replay.runs(responses[:6], drafts=DRAFTS) | replay.runs(responses[6:], drafts=DRAFTS)  # two blocks
    hits = 0
    for number, r in enumerate(responses):
        at, mine = 0, []
        while at < len(runs[r.id]):
            mine.append(int(runs[r.id][at]))
            at += 1 + mine[-1]
        *earlier, _ = accepted[number]
        assert mine[:-1] == earlier  # the last round may end at the response's end
        hits += sum(mine)
    assert hits > 20
    assert accept_length(runs, drafts=DRAFTS) == pytest.approx(
        sum(len(r.completion) for r in rollouts) / sum(map(len, accepted.values()))
    )


def test_lengths_by_hand():
    runs = {"a": torch.tensor([2, 0, 0, 1, 0]), "b": torch.tensor([0, 4, 0, 0, 0, 0])}
    assert accept_length(runs, drafts=8) == 11 / (2 + 2)  # 3 and 2 tokens; 1 and 5
    assert accept_length(runs, drafts=1) == 11 / (3 + 5)
    both = longer(runs, {"a": torch.tensor([0, 3, 0, 0, 0]), "b": torch.zeros(6, dtype=torch.int64)})
    assert both["a"].tolist() == [2, 3, 0, 1, 0]
    assert both["b"].tolist() == runs["b"].tolist()


def test_error_is_what_chance_does_to_the_length():
    """Three prompts of their own lengths and acceptance, answered six times each, 300 times over."""
    generator = torch.Generator().manual_seed(0)

    def answers():
        return {
            f"worker_0/1/{prompt}/{sample}": torch.randint(
                0, most, (int(torch.randint(longest // 2, longest, (), generator=generator)),), generator=generator
            )
            for prompt, (longest, most) in enumerate([(20, 9), (40, 5), (300, 2)])
            for sample in range(6)
        }

    again = [answers() for _ in range(300)]
    lengths = torch.tensor([accept_length(runs, drafts=6) for runs in again])
    told = torch.tensor([by_round_error(runs, drafts=6) for runs in again])
    assert told.mean().item() == pytest.approx(lengths.std().item(), rel=0.12)  # of 300: 4 %
    assert lengths.std() > 0.01

"""Acceptance measured off-line is what the engine accepts."""

import pytest
import torch

from tests.tlt_core.drafter.eagle3.reference import lively_model
from tests.tlt_core.drafter.eagle3.training_texts import IDS, blank, texts
from tlt_core.drafter.eagle3.acceptance import AcceptanceMeasure, measure_acceptance, start_runs
from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.drafter.eagle3.model import eagle3_from_target, tap_scales
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.train import Eagle3Trainer, TrainSettings
from tlt_core.drafter.eagle3.windows import Window
from tlt_core.items.speculation import Strategy
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams
from tlt_core.model.sampling import stream_key
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.tuner.policies import make_tuner

DEPTH = 4
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_new_tokens=40, stop_token_ids=(2,)),
    "T1": SamplingParams(max_new_tokens=40, stop_token_ids=(2,)),
    "T0.6": SamplingParams(temperature=0.6, max_new_tokens=40),
    "top": SamplingParams(temperature=1.2, top_k=12, top_p=0.9, max_new_tokens=40),
}


def requests():
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 2, 5, 9, 14, 3)
    prompts = [torch.randint(3, 64, (n,), generator=generator).int() for n in lengths]
    return [GenerationRequest(NoiseKey(0, 1, p, s), tokens) for p, tokens in enumerate(prompts) for s in range(3)]


@pytest.fixture(scope="module")
def drafters(decoder):
    """A drafter that learnt the decoder's responses a little, for each sampling: hits and misses at every depth."""
    made = {}
    for name, params in SAMPLINGS.items():
        rollouts = RolloutEngine(decoder, max_live=4, max_len=64).decode_all(requests(), params)
        sequences = recorded(decoder, rollouts, eagle3_from_target(decoder, IDS, scales=(1.0,) * 3, seed=1))
        ids = torch.cat([r.completion for r in rollouts]).long().unique()
        model = eagle3_from_target(decoder, ids, scales=tap_scales(sequences[0].taps_LE), seed=1)
        trainer = Eagle3Trainer(model, decoder, TrainSettings(learning_rate=5e-3, depth=DEPTH))
        sequences = recorded(decoder, rollouts, model)
        for _ in range(25):
            trainer.step(sequences)
        made[name] = model
    return made


def recorded(decoder, rollouts, model):
    return observe(
        decoder,
        [r.tokens for r in rollouts],
        model,
        firsts=[r.prompt_len for r in rollouts],
        dtype=torch.float32,
        streams=[stream_key(r.key) for r in rollouts],
    )


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_engine_accepts_what_was_predicted(decoder, drafters, name):
    """Every round of every request, chains of four, several requests at a time."""
    params, model = SAMPLINGS[name], drafters[name]
    strategies = [Strategy("eagle3", DEPTH, 1, DEPTH)]
    drafter = Eagle3Drafter(model, decoder, max_live=4, max_len=64)
    tuner = make_tuner("fixed", strategies, seed=0)
    engine = RolloutEngine(
        decoder, max_live=4, max_len=64, speculation=Speculation({"eagle3": drafter}, tuner, strategies)
    )
    accepted: dict[int, list[int]] = {}  # of each round of a request

    def on_round(trace):
        for number, count in zip(trace.numbers, trace.report.accepted, strict=True):
            accepted.setdefault(number, []).append(count)

    rollouts = engine.decode_all(requests(), params, on_round=on_round)
    sequences = recorded(decoder, rollouts, model)
    spans = [Window(s, s.earliest, len(s.tokens_L) - 2) for s in sequences]
    runs = start_runs(model, decoder.embed_tokens.weight, spans, depth=DEPTH, params=params)
    seen = []
    for number, (sequence, run_T) in enumerate(zip(sequences, runs, strict=True)):
        known = sequence.first
        for count in accepted[number]:
            left = len(sequence.tokens_L) - known
            if known > 1:  # after one token there is nothing to draft from
                predicted = int(run_T[known - 2 - sequence.earliest])
                # The engine drafts no further than the length limit, and may go on behind a stop token.
                room = sequence.first + params.max_new_tokens - known
                assert min(count, left) == min(predicted, room - 1)
                seen.append(count)
            known += count + 1
        assert known >= len(sequence.tokens_L)
    assert set(seen) == set(range(DEPTH + 1))
    sampling = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
    measure = measure_acceptance(model, decoder.embed_tokens.weight, sequences, depth=DEPTH, **sampling)
    every = torch.cat(runs)
    assert measure == AcceptanceMeasure(len(every), tuple(int((every > k).sum()) for k in range(DEPTH)))
    assert measure.accept_length == pytest.approx(1 + float(every.float().mean()))
    assert 1.2 < measure.accept_length < 4


def test_passes_cut_long_sequences(decoder, tiny_config, monkeypatch):
    """The same counts in passes of 7 starts."""
    model = lively_model(tiny_config, torch.arange(64))
    sequences = observe(decoder, texts((30, 11, 18)), model, firsts=[4, 1, 9], dtype=torch.float32, streams=[1, 2, 3])

    def measure():
        return measure_acceptance(model, decoder.embed_tokens.weight, sequences, depth=3, temperature=1.0)

    whole = measure()
    monkeypatch.setattr("tlt_core.drafter.eagle3.acceptance._PASS_ROWS", 7)
    assert measure() == whole
    assert whole.starts == 26 + 9 + 9
    assert whole.accepted_by_depth[0] > 0


def test_no_start():
    with pytest.raises(ValueError, match="three tokens"):
        measure_acceptance(None, torch.zeros(4, 2), [blank(2, 1)], depth=2, temperature=1.0)

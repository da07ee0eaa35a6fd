"""A trial's measurement: the same counts however it is cut, group by group."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.tlt_core.drafter.eagle3.training_texts import lively_decoder, texts
from tlt_core.drafter.eagle3.acceptance import start_runs
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.windows import Window
from tlt_core.idle_training.candidate import Trial, TrialSettings, group_of, trial_windows
from tlt_core.items.types import NoiseKey, SamplingParams

PARAMS = SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def held(tiny_config):
    """Two prompts of step 3, with three responses and one; one of step 2.  And the decoder, and a drafter."""
    decoder = lively_decoder(tiny_config)
    model = eagle3_from_target(decoder, torch.arange(64), scales=(1.0,) * 3, seed=1)
    options = {"firsts": [4, 1, 9, 2, 3], "dtype": torch.float32, "streams": [1, 2, 3, 4, 5]}
    sequences = observe(decoder, texts((30, 11, 18, 40, 25)), model, **options)
    keys = [(3, 7), (3, 7), (3, 7), (3, 9), (2, 9)]
    named = [replace(s, key=NoiseKey(0, *key, i)) for i, (key, s) in enumerate(zip(keys, sequences, strict=True))]
    return decoder, model, named


def groups(windows):
    return [group_of(w.sequence) for w in windows]


def test_one_window_of_each_response(held):
    _, _, responses = held
    whole = trial_windows(responses, rows=64, max_starts=1000)
    assert [(w.start, w.end) for w in whole] == [(s.earliest, s.earliest + s.rows) for s in responses]
    assert groups(whole) == [group_of(s) for s in responses] == [(3, 7), (3, 7), (3, 7), (3, 9), (2, 9)]
    cut = trial_windows(responses, rows=10, max_starts=1000)
    assert [w.end - w.start for w in cut] == [10, 9, 9, 10, 2]
    # 26 rows are three windows, and stream 1 takes the second; 38 are four, and stream 4 takes the first; 22 are
    # three, and stream 5 takes the last.
    assert (cut[0].start, cut[3].start) == (2 + 10, 0)
    assert groups(trial_windows(responses, rows=10, max_starts=20)) == [(3, 7), (3, 9)]
    assert groups(trial_windows(responses, rows=10, max_starts=23)) == [(3, 7), (3, 7), (3, 9), (2, 9)]
    assert trial_windows([], rows=10, max_starts=20) == []


@pytest.mark.parametrize(
    ("pass_rows", "dtype", "steps"), [(1, torch.float32, 5), (24, torch.bfloat16, 4), (1000, torch.float32, 3)]
)
def test_counts_by_group_are_those_of_the_runs(held, pass_rows, dtype, steps):
    decoder, model, responses = held
    embedding = decoder.embed_tokens.weight
    windows = trial_windows(responses, rows=64, max_starts=1000)
    trial = Trial(model, model, windows, TrialSettings(embedding, 3, PARAMS, dtype, pass_rows))
    taken = 0
    while not trial.done:
        trial.step()
        taken += 1
    assert taken == 2 * steps
    starts, accepted = Counter(), Counter()
    for s in responses:
        span = Window(s, s.earliest, s.earliest + s.rows)
        (run_T,) = start_runs(model, embedding, [span], depth=3, params=PARAMS, compute_dtype=dtype)
        starts[group_of(s)] += len(run_T)
        accepted[group_of(s)] += int(run_T.sum())
    assert trial.used_counts == {group: (starts[group], accepted[group]) for group in starts}
    assert accepted.total() > 0
    itself = trial.comparison()
    assert (itself.gain, itself.groups) == (0, 3)

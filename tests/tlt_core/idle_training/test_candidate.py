"""A trial's measurement: the same counts however it is cut, group by group.  And the decision: who is refused, and how
often wrongly."""

import math
import random
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
from tlt_core.idle_training.comparison import Comparison, Group
from tlt_core.items.types import NoiseKey, SamplingParams

PARAMS = SamplingParams(temperature=1.0)
TRIALS = 400


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


def test_a_comparison_by_hand():
    comparison = Comparison.of([Group(10, 20, 24), Group(30, 60, 54), Group(0, 0, 0)])
    assert comparison == Comparison(2, 40, 80, 78, 16 + 36, 40 - 180, 100 + 900)
    assert (comparison.used_length, comparison.candidate_length) == (3.0, 2.95)
    assert comparison.gain == pytest.approx(-0.05)
    # d - gain n = 4.5 and -4.5
    assert comparison.error == pytest.approx(math.sqrt(2 / 1 * 2 * 4.5**2) / 40)
    assert not comparison.is_worse(errors=1.0)
    assert comparison.is_worse(errors=0.0)
    one = Comparison.of([Group(10, 20, 19)])
    assert one.is_worse(errors=9.0), "one group tells no error"
    assert not Comparison().is_worse(errors=0.0)


def test_change_is_how_far_lengths_may_lie_apart():
    """Gain 0.1 or -0.1 tokens a round, certain, of a length of 3; with one group nothing is certain."""
    for sign in (1, -1):
        known = Comparison.of([Group(100, 200, 200 + sign * 10), Group(200, 400, 400 + sign * 20)])
        assert known.change == pytest.approx(0.1 / 3)
    assert Comparison.of([Group(100, 200, 210)]).change == float("inf")
    unsure = Comparison.of([Group(100, 200, 190), Group(100, 200, 210)])
    assert unsure.gain == 0
    assert unsure.change == pytest.approx(unsure.error / 3)


def test_workers_add_up():
    groups = [Group(10, 20, 24), Group(30, 60, 54), Group(7, 9, 9), Group(12, 40, 40)]
    assert Comparison.of(groups[:1]).plus(Comparison.of(groups[1:])) == Comparison.of(groups)
    assert Comparison().plus(Comparison.of(groups)) == Comparison.of(groups)


def planted(gain: float, *, seed: int, groups: int = 8, starts: int = 128) -> Comparison:
    """Chains of six drafts along responses of very different ease; the candidate differs on one start in five.

    gain: tokens a round, over all prompts; a prompt's own differs from it by 0.05 (standard deviation).
    """
    draw = random.Random(seed)
    counts = []
    for _ in range(groups):
        ease, own = draw.uniform(0.4, 0.9), gain + draw.gauss(0, 0.05)
        used = candidate = 0
        for _ in range(starts):
            length = next((k for k in range(6) if draw.random() > ease), 6)
            used += length
            moved = 0
            if draw.random() < 0.2:
                moved = 1 if draw.random() < 0.5 + own / 0.4 else -1
            candidate += length + moved
        counts.append(Group(starts, used, candidate))
    return Comparison.of(counts)


def refused(gain: float, *, errors: float = 1.0) -> float:
    return sum(planted(gain, seed=seed).is_worse(errors=errors) for seed in range(TRIALS)) / TRIALS


def test_power_of_the_decision():
    """1,024 tokens of eight prompts, as many as the canary takes."""
    assert refused(+0.08) <= 0.01
    assert 0.08 <= refused(0.0) <= 0.22, "one-sided, at one standard error: 0.16"
    assert refused(-0.08) >= 0.8
    assert refused(-0.15) >= 0.99
    # The rule that any lower figure is refused throws every other candidate away that is as good.
    assert refused(0.0, errors=0.0) == pytest.approx(0.5, abs=0.08)

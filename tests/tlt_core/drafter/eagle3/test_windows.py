"""Windows: their losses and gradients add up to the sequence's, and they are cut where they should be."""

import math
from dataclasses import replace

import pytest
import torch

from tests.tlt_core.drafter.eagle3.training_texts import texts
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.train import Eagle3Trainer, TrainSettings
from tlt_core.drafter.eagle3.windows import Pack, Window, cut, whole

SETTINGS = TrainSettings(depth=4)


@pytest.fixture
def sequences(decoder, model):
    return observe(decoder, texts((40, 23, 31)), model, firsts=[7, 1, 12], dtype=torch.float32)


def gradient(model, decoder, passes, settings=SETTINGS):
    """Summed loss, rows and gradients of some passes of windows."""
    trainer = Eagle3Trainer(model, decoder, settings)
    metrics = [trainer.accumulate(windows) for windows in passes]
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return sum(m.loss * m.rows for m in metrics), sum(m.rows for m in metrics), grads


def close(found, expected):
    assert found[1] == expected[1]
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[2].items():
        difference = (found[2][name] - value).abs().max() / value.abs().max()
        assert float(difference) < 1e-4, name  # fp32; measured 1e-5


@pytest.mark.parametrize(("rows", "loss"), [(1, "soft_ce"), (5, "soft_ce"), (7, "tv"), (100, "tv")])
def test_windows_add_up_to_the_sequence(decoder, model, sequences, rows, loss):
    """Loss and gradient, with windows shorter than the depth too."""
    settings = replace(SETTINGS, loss=loss)
    for sequence in sequences:
        windows = cut(sequence, rows=rows)
        assert sum(w.rows for w in windows) == sequence.rows
        assert len(windows) == -(-sequence.rows // rows)
        expected = gradient(model, decoder, [whole(sequence)], settings)
        close(gradient(model, decoder, [[w] for w in windows], settings), expected)


def test_a_window_does_not_see_later_positions_or_neighbours(decoder, model, sequences):
    """To the bit: loss and every gradient."""
    first = sequences[0]
    tokens, taps, lognorms = first.tokens_L.clone(), first.taps_LE.clone(), first.lognorms_P.clone()
    tokens[21:] = (tokens[21:] + 1) % 64  # row 19 reads token 20 and predicts token 21
    taps[20:] += 1
    lognorms[21 - 6 :] = math.inf  # probability 0, of token 22 on
    changed = replace(first, tokens_L=tokens, taps_LE=taps, lognorms_P=lognorms)
    before = gradient(model, decoder, [[Window(first, 12, 20)]])
    after = gradient(model, decoder, [[Window(changed, 12, 20)]])
    assert before[0] == after[0]
    assert all(torch.equal(before[2][name], after[2][name]) for name in before[2])
    # A neighbour adds its own gradient and changes nothing of ours: its loss is taken out by its distributions.
    silent = [replace(s, lognorms_P=torch.full_like(s.lognorms_P, math.inf)) for s in (sequences[1], changed)]
    other = replace(silent[0], taps_LE=silent[0].taps_LE * 2, tokens_L=(silent[0].tokens_L + 3) % 64)
    packs = [[*whole(s), Window(first, 12, 20), *whole(silent[1])] for s in (silent[0], other)]
    one, two = (gradient(model, decoder, [pack]) for pack in packs)
    assert one[0] == two[0] == pytest.approx(before[0], rel=1e-6)
    assert all(torch.equal(one[2][name], two[2][name]) for name in one[2])


def test_only_context_rows_are_added(sequences):
    """The pass over a window: its rows, depth - 1 rows of halo, and all before as context; no halo before drafting."""
    pack = Pack.of([Window(sequences[0], 20, 25), Window(sequences[0], 7, 9)], torch.device("cpu"), halo=3)
    assert (pack.context, pack.queries) == ([17, 5], [8, 4])
    assert pack.positions_R.tolist() == [*range(17), *range(5), *range(17, 25), *range(5, 9)]
    assert [len(pack.counted_N(k)) for k in range(4)] == [5 + 2, 5 + 2, 5 + 2, 5 + 1]

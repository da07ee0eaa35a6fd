"""Training computes what drafting does, and nobody sees what they should not."""

from dataclasses import replace

import pytest
import torch

from kernels.attention import draft_attention
from tests.tlt_core.drafter.eagle3.reference import logits_after
from tests.tlt_core.drafter.eagle3.training_texts import LENGTHS, texts
from tlt_core.drafter.eagle3.cache import DraftCache
from tlt_core.drafter.eagle3.depths import drafted_depths
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.windows import Pack, Window


def whole(sequences, starts=(0, 0, 0, 0)):
    return [Window(s, start, len(s.tokens_L) - 2) for s, start in zip(sequences, starts, strict=False)]


def teacher_forced(model, decoder, windows, *, depth):
    """Logits [span][depth][query row, J]."""
    pack = Pack.of(windows, torch.device("cpu"))
    embeds = decoder.embed_tokens(pack.tokens_R)
    with torch.no_grad():
        levels = [model.logits(y).split(pack.queries) for y in drafted_depths(model, embeds, pack, depth=depth)]
    return list(zip(*levels, strict=True))


@pytest.mark.parametrize("block", [32, 3])
def test_teacher_forced_logits_equal_a_recomputation(decoder, model, monkeypatch, block):
    """Depth k + 1 at row p: what drafting k tokens ahead of p - k gives when the drafts are the true tokens.

    With and without context rows, in one block of queries and in several."""
    monkeypatch.setattr(draft_attention, "_BLOCK", block)
    sequences = observe(decoder, texts(), model, firsts=[1] * 4, dtype=torch.float32)
    compared = 0
    for starts in ((0, 0, 0, 0), (4, 0, 5, 1)):
        windows = whole(sequences, starts)
        found = teacher_forced(model, decoder, windows, depth=4)
        for window, levels in zip(windows, found, strict=True):
            tokens = window.sequence.tokens_L.tolist()
            for k, logits in enumerate(levels):
                for p in range(window.start + k, len(tokens) - 2):
                    known = p - k + 2  # tokens of the row when drafting began
                    path, taps = tokens[known : p + 2], window.sequence.taps_LE
                    expected = logits_after(model, decoder.embed_tokens.weight, tokens[:known], taps, path)
                    difference = float((logits[p - window.start] - expected).abs().max())
                    assert difference < 2e-5, (k, p)  # fp32, logits of order 1; measured 2.4e-6
                    compared += 1
    rows = [n - 2 for n in LENGTHS] + [n - 2 - start for n, start in zip(LENGTHS, (4, 0, 5, 1), strict=True)]
    assert compared == sum(max(0, count - k) for count in rows for k in range(4))


def test_teacher_forced_logits_equal_cached_drafting(decoder, model):
    """The same with the drafter's own KV cache, all rows of a batch at once."""
    sequences = observe(decoder, texts([11, 8, 9]), model, firsts=[1] * 3, dtype=torch.float32)
    found = teacher_forced(model, decoder, whole(sequences), depth=4)
    known = [6, 3, 5]
    ends = [n - 1 for n in known]
    cache = DraftCache(model.config, num_slots=3, max_len=16, dtype=torch.float32, device=torch.device("cpu"))
    embedding, worst = decoder.embed_tokens, 0.0
    with torch.inference_mode():
        todo = cache.catch_up([0, 0, 0], ends)
        at = list(zip(todo.rows_T.tolist(), todo.positions_T.tolist(), strict=True))
        taps = torch.stack([sequences[row].taps_LE[t] for row, t in at])
        read = embedding(torch.stack([sequences[row].tokens_L[t + 1] for row, t in at]))
        y = model(read, model.fuse(taps), cache.rope_C21d[todo.positions_T], todo.attend)[todo.last_B]
        levels = cache.draft(ends, levels=3, width=1)
        for k in range(4):
            expected = torch.stack([found[row][k][end - 1 + k] for row, end in enumerate(ends)])
            worst = max(worst, float((model.logits(y) - expected).abs().max()))
            if k < 3:
                drafted = torch.stack([sequences[row].tokens_L[n + k] for row, n in enumerate(known)])
                rope = levels.rope()
                y = model(embedding(drafted), y, rope, levels.attend(torch.zeros(3, 1, dtype=torch.int64)))
    assert worst < 2e-5


@pytest.mark.parametrize("start", [0, 2])
def test_later_positions_and_neighbours_are_not_seen(decoder, model, start):
    """To the bit, with query rows from the start or from row 2 on."""
    sequences = observe(decoder, texts(), model, firsts=[1] * 4, dtype=torch.float32)
    starts = (0, 0, start, 1)
    before = teacher_forced(model, decoder, whole(sequences, starts), depth=3)
    changed = list(sequences)
    tokens, taps = sequences[2].tokens_L.clone(), sequences[2].taps_LE.clone()
    tokens[8] = (tokens[8] + 1) % 64
    taps[7:] += 1
    changed[2] = replace(sequences[2], tokens_L=tokens, taps_LE=taps)
    after = teacher_forced(model, decoder, whole(changed, starts), depth=3)
    for index in (0, 1, 3):
        for k in range(3):  # rows below k hold nothing meaningful
            assert torch.equal(before[index][k][k:], after[index][k][k:])
    first = 7 - start  # row 7 is the first to read token 8 or hidden state 7
    for k in range(3):
        assert torch.equal(before[2][k][k:first], after[2][k][k:first])
        assert (before[2][k][first:] != after[2][k][first:]).any(1).all()


def test_context_is_seen(decoder, model):
    """An earlier position, before the query rows, changes all of them."""
    sequences = observe(decoder, texts(), model, firsts=[1] * 4, dtype=torch.float32)
    before = teacher_forced(model, decoder, whole(sequences[2:3], (5,)), depth=3)
    taps = sequences[2].taps_LE.clone()
    taps[1] += 1
    after = teacher_forced(model, decoder, whole([replace(sequences[2], taps_LE=taps)], (5,)), depth=3)
    for k in range(3):
        assert (before[0][k][k:] != after[0][k][k:]).any(1).all()

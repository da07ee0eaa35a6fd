"""Training computes what drafting does, and nobody sees what they should not."""

import pytest
import torch

from kernels.attention import draft_attention
from tests.tlt_core.drafter.eagle3.reference import logits_after
from tests.tlt_core.drafter.eagle3.training_texts import LENGTHS, texts
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

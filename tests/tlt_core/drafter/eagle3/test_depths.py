"""What training reads and computes: the target's distributions, and what drafting would compute."""

import pytest
import torch
import torch.nn.functional as F

from kernels.attention import draft_attention
from kernels.attention.packed_attention import packed_causal_attention
from tests.tlt_core.drafter.eagle3.reference import lively_model, logits_after
from tests.tlt_core.drafter.eagle3.training_texts import IDS, LENGTHS, blank, probs_of, texts
from tlt_core.drafter.eagle3.depths import drafted_depths
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.train import Eagle3Trainer, TrainSettings
from tlt_core.drafter.eagle3.windows import Pack, Window


def test_observe_is_the_target(decoder, model):
    """Packed or alone, the same distributions, restricted but not renormalised; of sampled tokens alone."""
    sequences = observe(decoder, texts(), model, firsts=[1, 2, 3, 4], dtype=torch.float32, streams=[7, 8, -9, 1])
    assert [(s.first, s.stream) for s in sequences] == [(1, 7), (2, 8), (3, -9), (4, 1)]
    for tokens, seen in zip(texts(), sequences, strict=True):

        def attend(layer, q, k, v, tokens=tokens):
            return packed_causal_attention(q, k, v, torch.tensor([0, len(tokens)]))

        with torch.inference_mode():
            hidden = decoder(tokens, torch.arange(len(tokens)), attend, taps=model.config.taps)
            probs = decoder.logits(hidden.last_TD).softmax(-1)[:, IDS]
        assert torch.equal(seen.tokens_L, tokens)
        own = probs_of(seen, decoder, IDS)
        torch.testing.assert_close(own, probs[seen.first - 1 : -1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(seen.taps_LE, hidden.taps_TE[:-1], atol=1e-4, rtol=1e-4)
        assert float(own.sum(-1).max()) < 0.999


@pytest.mark.parametrize(
    ("length", "first", "earliest", "rows"), [(9, 4, 2, 5), (9, 2, 0, 7), (9, 1, 0, 7), (3, 2, 0, 1), (2, 1, 0, 0)]
)
def test_trained_rows(length, first, earliest, rows):
    """Row p predicts token p + 2: the sampled ones, save token 1, for which there is no row."""
    sequence = blank(length, first)
    assert (sequence.earliest, sequence.rows) == (earliest, rows)
    assert sequence.nbytes == 4 * length + 4 * 6 * (length - 1) + (4 * 4 + 4) * (length - first)


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


def by_definition(model, decoder, sequence, settings):
    """Loss and gradient of one sequence, written with autograd's own operations."""
    model.zero_grad(set_to_none=True)
    start, end = sequence.earliest, len(sequence.tokens_L) - 2
    pack = Pack.of([Window(sequence, start, end)], torch.device("cpu"))
    embeds = F.embedding(pack.tokens_R, decoder.embed_tokens.weight.detach())
    total = 0.0
    for k, y in enumerate(drafted_depths(model, embeds, pack, depth=settings.depth)):
        log_q = model.logits(y[k:]).log_softmax(-1)  # rows below k did not begin where drafting can
        p = probs_of(sequence, decoder, IDS)[start + 2 - sequence.first :][k:]
        total = total - (p * log_q).sum() * settings.depth_decay**k
    total = total / sum(settings.depth_decay**k for k in range(settings.depth))
    total.backward()
    return total.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_training_by_definition(decoder, tiny_config):
    model, settings = lively_model(tiny_config, IDS), TrainSettings(depth=3, depth_decay=0.7)
    (sequence,) = observe(decoder, texts((20,)), model, firsts=[6], dtype=torch.float32)
    loss, gradient = by_definition(model, decoder, sequence, settings)
    model.zero_grad(set_to_none=True)
    trainer = Eagle3Trainer(model, decoder, settings)
    metrics = trainer.accumulate([Window(sequence, 4, 18)])
    assert metrics.loss * metrics.rows == pytest.approx(loss, rel=1e-5)
    assert len(metrics.overlaps) == 3
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - gradient[name]).abs().max() / gradient[name].abs().max()
        assert float(difference) < 1e-4, name


def test_the_gradient_runs_through_earlier_depths(decoder, tiny_config):
    """A second depth's gradient with respect to the first one's y."""
    model = lively_model(tiny_config, IDS)
    (sequence,) = observe(decoder, texts((12,)), model, firsts=[2], dtype=torch.float32)
    pack = Pack.of([Window(sequence, 0, 10)], torch.device("cpu"))
    embeds = F.embedding(pack.tokens_R, decoder.embed_tokens.weight.detach())
    first, second = drafted_depths(model, embeds, pack, depth=2)
    (grad,) = torch.autograd.grad(second[1:].sum(), first)
    assert float(grad.abs().max()) > 0

"""What observation keeps, and which rows there are."""

from dataclasses import replace

import pytest
import torch

from kernels.attention.packed_attention import packed_causal_attention
from tests.tlt_core.drafter.eagle3.reference import lively_model
from tests.tlt_core.drafter.eagle3.training_texts import IDS, blank, lively_decoder, probs_of, texts
from tlt_core.drafter.eagle3.observe import draft_probs, observe


def test_observe_is_the_target(tiny_config):
    """Packed or alone, the same distributions, restricted but not renormalised; of sampled tokens alone."""
    decoder, model = lively_decoder(tiny_config), lively_model(tiny_config, IDS)
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


def test_probabilities_from_the_head(tiny_config):
    """Of any rows, those of the whole vocabulary's softmax, to the rounding of one product; in bfloat16 those of the
    logits as they were rounded when sampled from."""
    decoder, model = lively_decoder(tiny_config), lively_model(tiny_config, IDS)
    (seen,) = observe(decoder, [texts((12,))[0]], model, firsts=[4], dtype=torch.float32)
    head = decoder.head_weight.detach()
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.0)):
        last = seen.last_PD.to(dtype)
        logits = (last.float() @ head.T).to(dtype).float()
        again = replace(seen, last_PD=last, lognorms_P=logits.logsumexp(-1))
        expected = logits.sub(logits.logsumexp(-1, keepdim=True)).exp()[2:6, IDS]
        found = draft_probs(again, slice(2, 6), head[IDS])
        torch.testing.assert_close(found, expected, atol=max(tolerance, 1e-6), rtol=1e-5 + 10 * tolerance)

"""What observation keeps, and which rows there are."""

import pytest
import torch

from kernels.packed_attention import packed_causal_attention
from tests.tlt_core.drafter.eagle3_reference import lively_model
from tests.tlt_core.drafter.training_texts import IDS, lively_decoder, texts
from tlt_core.drafter.eagle3_sequence import HeadProbs, TrainSequence, observe
from tlt_core.drafter.eagle3_train import Eagle3Trainer, TrainSettings


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
        torch.testing.assert_close(seen.probs_PJ, probs[seen.first - 1 : -1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(seen.taps_LE, hidden.taps_TE[:-1], atol=1e-4, rtol=1e-4)
        assert float(seen.probs_PJ.sum(-1).max()) < 0.999


@pytest.mark.parametrize(
    ("length", "first", "earliest", "rows"), [(9, 4, 2, 5), (9, 2, 0, 7), (9, 1, 0, 7), (3, 2, 0, 1)]
)
def test_trained_rows(length, first, earliest, rows):
    """Row p predicts token p + 2: the sampled ones, save token 1, for which there is no row."""
    sequence = TrainSequence(torch.arange(length), torch.zeros(length - 1, 6), torch.zeros(length - first, 4), first)
    assert (sequence.earliest, sequence.rows) == (earliest, rows)
    assert sequence.num_bytes == 8 * length + 4 * 6 * (length - 1) + 4 * 4 * (length - first)


def test_two_tokens_are_not_enough():
    assert TrainSequence(torch.arange(2), torch.zeros(1, 6), torch.zeros(1, 4), 1).rows == 0


def test_probabilities_from_the_head(tiny_config):
    """What rollout leaves behind restores the same distributions, to the rounding of one product."""
    decoder, model = lively_decoder(tiny_config), lively_model(tiny_config, IDS)
    tokens = texts((12,))[0]
    (seen,) = observe(decoder, [tokens], model, firsts=[4], dtype=torch.float32)

    def attend(layer, q, k, v):
        return packed_causal_attention(q, k, v, torch.tensor([0, 11]))

    with torch.inference_mode():
        last = decoder(tokens[:-1], torch.arange(11), attend).last_TD[3:]
        lognorms = decoder.logits(last).logsumexp(-1)
    probs = HeadProbs(last, lognorms, decoder.head_weight.detach()[IDS])
    assert (len(probs), probs.nbytes) == (8, 8 * 32 * 4 + 8 * 4)
    torch.testing.assert_close(probs[2:6], seen.probs_PJ[2:6], atol=1e-6, rtol=1e-5)
    trainer = Eagle3Trainer(model, decoder.embed_tokens.weight, TrainSettings())
    lazy, eager = trainer.measure([seen._replace(probs_PJ=probs)]), trainer.measure([seen])
    assert lazy.loss == pytest.approx(eager.loss, rel=1e-5)
    assert lazy.rows == eager.rows == 8

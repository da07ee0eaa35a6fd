"""Training computes what its description says."""

import pytest
import torch
import torch.nn.functional as F

from tests.tlt_core.drafter.eagle3.reference import lively_model
from tests.tlt_core.drafter.eagle3.training_texts import IDS, probs_of, texts
from tlt_core.drafter.eagle3.depths import drafted_depths
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.train import Eagle3Trainer, TrainSettings
from tlt_core.drafter.eagle3.windows import Pack, Window


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

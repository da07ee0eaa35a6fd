"""Late gradients are autograd's: of layers that are used at every depth, in a part, once, or not at all."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tlt_core.drafter.eagle3.training_texts import IDS, texts
from tlt_core.drafter.eagle3.depths import drafted_depths
from tlt_core.drafter.eagle3.gradients import late_gradients
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.windows import Pack, Window

DEPTH = 4


@pytest.fixture
def pack(decoder, model):
    sequences = observe(decoder, texts((40, 23)), model, firsts=[7, 5], dtype=torch.float32)
    windows = [Window(sequences[0], 20, 31), Window(sequences[1], 4, 21)]  # the first has context, so a slice is used
    return Pack.of(windows, torch.device("cpu"), halo=DEPTH - 1)


def loss_of(model, decoder, pack, *, half=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        embeds = F.embedding(pack.tokens_R, decoder.embed_tokens.weight.to(model.fc.weight.dtype))
        depths = drafted_depths(model, embeds, pack, depth=DEPTH)
        targets = (torch.arange(sum(pack.queries)) % len(IDS)).long()
        return sum(F.cross_entropy(model.logits(y).double(), targets) / (k + 1) for k, y in enumerate(depths))


def gradients(model):
    found = {name: p.grad.double() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def by_autograd(model, decoder, pack, **options):
    loss_of(model, decoder, pack, **options).backward()
    return gradients(model)


def late(model, decoder, pack, *, times=1, **options):
    for _ in range(times):
        with late_gradients(model) as add:
            loss_of(model, decoder, pack, **options).backward()
            add()
    return gradients(model)


def error(found, exact):
    return {name: float((found[name] - value).norm() / value.norm()) for name, value in exact.items()}


@pytest.mark.parametrize("times", [1, 2])
def test_they_are_autograds(model, decoder, pack, times):
    exact = by_autograd(model, decoder, pack)
    found = late(model, decoder, pack, times=times)
    assert found.keys() == exact.keys()
    assert all(e < 1e-5 for e in error({n: g / times for n, g in found.items()}, exact).values())


def test_in_bfloat16_they_are_no_less_exact(model, decoder, pack):
    """Autograd rounds the sum over depths after each of them; one product rounds once."""
    wide = copy.deepcopy(model).double()
    exact = by_autograd(wide, decoder, pack._replace(taps_RE=pack.taps_RE.double()))
    usual = error(by_autograd(model, decoder, pack, half=True), exact)
    found = error(late(model, decoder, pack, half=True), exact)
    assert all(0 < usual[name] < 0.1 for name in usual)
    assert all(found[name] < 1.05 * usual[name] for name in usual), (found, usual)


class Mark:
    """Lives as long as the graph that it was given to."""


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mark):
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("adds", [True, False])
def test_a_pass_leaves_no_graph_in_memory(adds):
    """A layer's second use keeps an input that goes back to its first one."""
    layer, mark = nn.Linear(3, 3, bias=False), Mark()
    left = weakref.ref(mark)
    with late_gradients(layer) as add:
        layer(Marked.apply(layer(torch.ones(2, 3)), mark)).sum().backward()
        if adds:
            add()
    del mark, add
    gc.collect()
    assert left() is None

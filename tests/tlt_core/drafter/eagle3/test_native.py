"""The drafter's passes in C propose what torch's kernels propose, up to what two roundings can tell apart."""

import dataclasses

import pytest
import torch

from tests.tlt_core.drafter.eagle3.reference import paths
from tests.tlt_core.drafter.eagle3.test_drafter import IDS, Bench, ready, same
from tlt_core.drafter.eagle3.model import Eagle3Config, random_eagle3
from tlt_core.items.speculation import MinDraftProbs, Strategy
from tlt_core.items.types import SamplingParams
from tlt_core.model.load import random_decoder

pytestmark = pytest.mark.usefixtures("cpu_kernels")

CHAIN, TREE = Strategy("eagle3", 5, 1, 5), Strategy("eagle3", 4, 3, 10)
LENGTHS = [40, 9, 17, 3, 33, 16, 15]


@pytest.fixture(scope="module", params=[64, 128])
def config(request, tiny_config):
    return dataclasses.replace(tiny_config, head_dim=request.param)


@pytest.fixture(scope="module")
def decoder(config):
    return random_decoder(config, seed=0, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def model(config):
    made = random_eagle3(Eagle3Config.for_target(config, len(IDS)), IDS, seed=0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if not name.endswith("norm.weight"):
                parameter *= 8
    return made


def alike(found, wanted):
    """Two estimates may lie closer together than roundings: one chain of all may differ, and a few nodes of trees."""
    if same(found, wanted):
        return True
    rows = range(len(LENGTHS))
    ours, theirs = ([set(paths(tree, row)) for row in rows] for tree in (found, wanted))
    is_tree = len(set(zip(wanted.rows_N.tolist(), wanted.depths_N.tolist(), strict=True))) < len(wanted.rows_N)
    if not is_tree:
        return sum(ours[row] != theirs[row] for row in rows) <= 1
    shared = sum(len(ours[row] & theirs[row]) for row in rows)
    return shared >= 0.85 * max(sum(map(len, ours)), sum(map(len, theirs)))


def pair(decoder, model, **settings):
    bench = Bench(decoder, LENGTHS)
    fast, slow = (ready(bench, model, decoder, **settings) for _ in range(2))
    assert fast._native is not None
    slow._native = None
    return bench, fast, slow


@pytest.mark.parametrize("strategy", [CHAIN, TREE, Strategy("eagle3", 1, 1, 1), Strategy("eagle3", 1, 4, 4)], ids=str)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(top_k=6)])
def test_same_proposals(decoder, model, strategy, params):
    bench, fast, slow = pair(decoder, model)
    found, wanted = (drafter.propose(bench.view(params), strategy) for drafter in (fast, slow))
    assert alike(found, wanted)
    assert len(found.tokens_N) > len(LENGTHS) or strategy.depth == 1


@pytest.mark.parametrize("strategy", [CHAIN, TREE], ids=str)
def test_rounds_after_each_other(decoder, model, strategy):
    """Catching up over places that drafts were in, rows that end, and more drafts than ever before."""
    bench, fast, slow = pair(decoder, model)
    for step in range(4):
        wanted = strategy._replace(depth=strategy.depth + 3 * (step == 2))
        view = bench.view(SamplingParams(), room=[50, 1, 3, 50, 2, 50, 50])
        assert alike(*(drafter.propose(view, wanted) for drafter in (fast, slow)))
        for row, length in enumerate(bench.lengths):
            end = min(length + 1 + row % 3, 80)
            for drafter in (fast, slow):
                bench.record(drafter, row, length - 1, end - 1)
            bench.lengths[row] = end


@pytest.mark.parametrize("strategy", [CHAIN, TREE], ids=str)
@pytest.mark.parametrize(
    "min_draft_probs", [MinDraftProbs(0.05, 0.0), MinDraftProbs(0.3, 0.5), MinDraftProbs(0.6, 4.0)]
)
def test_floors(decoder, model, strategy, min_draft_probs):
    bench, fast, slow = pair(decoder, model, error_scale=1.5)
    view = bench.view(SamplingParams())._replace(min_draft_probs=min_draft_probs)
    found, wanted = (drafter.propose(view, strategy) for drafter in (fast, slow))
    full = fast.propose(bench.view(SamplingParams()), strategy)
    assert alike(found, wanted)
    assert len(found.tokens_N) < len(full.tokens_N)

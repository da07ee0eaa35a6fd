"""Acceptance by position, on drafters that are always and never right; the batch-size table, by hand."""

import pytest
import torch

from tlt_core.data import dataset
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.export.measure import ChainAcceptance, depth_table, expected_rates, measure
from tlt_core.items.types import SamplingParams
from tlt_core.model.load import load_decoder, load_tokenizer

RESPONSE = 12


def measured(tiny, ids_J, *, temperatures=(0.0,), depth=2):
    policy = tiny.source.policy
    decoder = load_decoder(policy, dtype=torch.float32)
    prompts = dataset.load(tiny.source.data_dir, "validation", load_tokenizer(policy))[:1]
    model = eagle3_from_target(decoder, ids_J, scales=(1.0, 1.0, 1.0), seed=1)
    return measure(
        decoder,
        model,
        prompts,
        temperatures=temperatures,
        params=SamplingParams(max_new_tokens=RESPONSE),
        depth=depth,
        max_live=3,
        seed=0,
    )


def test_survival_by_hand():
    row = ChainAcceptance(0.0, 1, 16, offered=(10, 9), accepted=(6, 2))
    assert row.survival == pytest.approx((0.6, 2 / 9))
    assert row.accept_length == pytest.approx(1.6 + 2 / 9)
    late = ChainAcceptance(0.0, 1, 9, offered=(10, 1, 0), accepted=(6, 1, 0))
    assert late.survival == (0.6, 0.6, 0.0), "no position is reached more often than the one before"


def test_a_drafter_that_is_always_right_and_one_that_never_is(tiny):
    (rollout,) = measured(tiny, torch.arange(3, 40)).greedy
    (repeated,) = set(rollout.completion.tolist())
    # It can say nothing else.  12 tokens in chains of 2: four rounds of three tokens.
    (row,) = measured(tiny, torch.tensor([repeated])).acceptance
    assert (row.offered, row.accepted) == ((4, 4), (4, 4))
    assert (row.survival, row.accept_length, row.tokens, row.responses) == ((1.0, 1.0), 3.0, RESPONSE, 1)
    # It can say anything else.  One token a round; the last has no room for a draft, the one before for one.
    (row,) = measured(tiny, torch.tensor([i for i in range(64) if i != repeated])).acceptance
    assert row.accepted == (0, 0)
    assert row.offered == (RESPONSE - 1, RESPONSE - 2)
    assert row.accept_length == 1.0


def test_costs_of_every_batch_size_and_chain(tiny):
    found = measured(tiny, torch.arange(3, 40), temperatures=(1.0, 0.0), depth=3)
    assert [row.temperature for row in found.acceptance] == [0.0, 1.0]
    assert [len(row) for row in found.seconds_BK] == [4, 4, 4]
    assert all(0 < plain < chain for plain, *chains in found.seconds_BK for chain in chains)
    assert found.context > RESPONSE // 2


def test_the_shortest_chain_within_two_percent_of_the_best():
    found = expected_rates((0.5, 0.25), [[1.0, 1.2, 1.4], [1.0, 1.5, 2.5]])
    assert found == [pytest.approx([1.0, 1.5 / 1.2, 1.75 / 1.4]), pytest.approx([2.0, 3.0 / 1.5, 3.5 / 2.5])]
    # 1: chains of 1 and 2 are equal; 2: a gain of 1 % is none; 3, 4: clear gains of 2; 5: none pays
    rates = [[1.0, 1.25, 1.25], [1.0, 1.01, 0.9], [1.0, 1.1, 1.2], [1.0, 1.1, 1.3], [1.0, 0.9, 0.8]]
    assert depth_table(rates) == [[1, 1, 1], [2, 2, 0], [3, 4, 2], [5, 5, 0]]
    with pytest.raises(ValueError, match=r"batch size 2: one positive number of seconds .* from 0 to 1"):
        expected_rates((0.5,), [[1.0, 1.0], [1.0]])

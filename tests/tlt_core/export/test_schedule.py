"""The batch-size table, by hand."""

import pytest

from tlt_core.export.schedule import DepthRange, depth_table, expected_rates


def test_rates_are_expected_tokens_over_seconds():
    rates = expected_rates((0.5, 0.25), [[1.0, 1.2, 1.4], [1.0, 1.5, 2.5]])
    assert rates[0] == pytest.approx([1.0, 1.5 / 1.2, 1.75 / 1.4])
    assert rates[1] == pytest.approx([2.0, 3.0 / 1.5, 3.5 / 2.5])


def test_the_shortest_chain_within_two_percent_of_the_best():
    # 1: chains of 1 and 2 are equal; 2: a gain of 1 % is none; 3, 4: clear gains of 2; 5: none pays
    rates = [[1.0, 1.25, 1.25], [1.0, 1.01, 0.9], [1.0, 1.1, 1.2], [1.0, 1.1, 1.3], [1.0, 0.9, 0.8]]
    assert depth_table(rates) == [(1, 1, 1), (2, 2, 0), (3, 4, 2), (5, 5, 0)]
    assert depth_table(rates)[2] == DepthRange(first=3, last=4, depth=2)


def test_ranges_are_what_vllm_demands():
    """Begin at 1, ascend, leave no gap, K >= 0; equal neighbours are one range."""
    cheap, dear = [1.0, 1.1, 1.2], [1.0, 2.0, 3.0]
    table = depth_table(expected_rates((0.6, 0.4), [cheap] * 8 + [dear] * 24))
    assert [list(entry) for entry in table] == [[1, 8, 2], [9, 32, 0]]


def test_costs_that_do_not_fit():
    with pytest.raises(ValueError, match=r"batch size 2: one positive number of seconds .* from 0 to 1"):
        expected_rates((0.5,), [[1.0, 1.0], [1.0]])
    with pytest.raises(ValueError, match="batch size 1"):
        expected_rates((0.5,), [[1.0, 0.0]])

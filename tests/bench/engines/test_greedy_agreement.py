"""Equal tokens and gaps by hand."""

import pytest
import torch

from bench.engines.greedy_agreement import agreement, float32_log_probs
from tlt_core.model.load import load_decoder


def scores(tokens):
    """Log-probs of the next token: minus its number, minus how many tokens there are."""
    return -torch.arange(10.0) - len(tokens)


def test_tokens_count_until_two_engines_part():
    found = agreement(
        [[1, 1], [2]], [[5, 9, 9, 4], [3, 3, 3, 3]], [[5, 9, 7, 4], [3, 3, 3, 3]], enders=(), log_probs=scores
    )
    assert found == (6 / 8, 1, 2.0)


def test_what_follows_the_end_of_a_response_does_not_count():
    found = agreement([[1]], [[5, 0, 9, 9]], [[5, 7, 7, 7]], enders=(0,), log_probs=scores)
    assert found == (1.0, 0, 0.0)


def test_the_gap_is_taken_at_the_first_difference_alone():
    asked = []

    def log_probs(tokens):
        asked.append(list(tokens))
        return scores(tokens)

    found = agreement([[1], [1]], [[5, 6, 9], [4, 4, 4]], [[5, 3, 1], [8, 4, 4]], enders=(0,), log_probs=log_probs)
    assert found == (1 / 6, 2, 4.0)
    assert asked == [[1, 5], [1]]


def test_log_probs_are_the_models(tiny_folder):
    found = float32_log_probs(tiny_folder)([1, 9, 4])
    assert float(found.exp().sum()) == pytest.approx(1.0)
    assert len(found) == load_decoder(tiny_folder, dtype=torch.float32).config.vocab_size

"""Equal tokens and gaps by hand."""

import pytest
import torch

from bench.engines.command import agreement, float32_log_probs


def test_tokens_count_until_two_engines_part_and_the_gap_is_taken_there():
    asked = []

    def log_probs(tokens):
        asked.append(list(tokens))
        return -torch.arange(10.0) - len(tokens)

    prompts, theirs = [[1, 1], [2], [3]], [[5, 9, 7, 1], [3, 3, 3, 3], [5, 7, 7, 7]]
    ours = [[5, 9, 9, 4], [3, 3, 3, 3], [5, 0, 9, 9]]  # 0 ends a response: what follows does not count
    found = agreement(prompts, ours, theirs, enders=(0,), log_probs=log_probs)
    assert found == (7 / 9, 1, 2.0)
    assert asked == [[1, 1, 5, 9]]


def test_log_probs_are_the_models(tiny_folder):
    found = float32_log_probs(tiny_folder)([1, 9, 4])
    assert len(found) == 64
    assert float(found.exp().sum()) == pytest.approx(1.0)

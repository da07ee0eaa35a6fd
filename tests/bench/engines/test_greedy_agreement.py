"""Equal tokens and gaps by hand."""

import torch

from bench.engines.command import agreement


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

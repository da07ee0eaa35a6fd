"""What is emitted when a chain is verified, by hand and against a loop over random batches."""

import random

import torch

from tlt_vllm.accepted import NO_TOKEN, emitted, merged


def test_random_batches_against_a_loop() -> None:
    """Two tokens alone, so that drafts are often right; a right draft after a wrong one does not count."""
    chance = random.Random(0)
    for _ in range(200):
        counts = [chance.randint(1, 5) for _ in range(chance.randint(1, 6))]
        tokens = [chance.randint(0, 1) for _ in range(sum(counts))]
        drafts = [chance.randint(0, 1) for _ in range(sum(counts) - len(counts))]
        expected, start, first = [], 0, 0
        for count in counts:
            chosen, offered = tokens[start : start + count], drafts[first : first + count - 1]
            right = 0
            while right < len(offered) and offered[right] == chosen[right]:
                right += 1
            expected.append(chosen[: right + 1] + [NO_TOKEN] * (max(counts) - right - 1))
            start, first = start + count, first + count - 1
        given = torch.tensor(drafts, dtype=torch.int32) if drafts else None
        assert emitted(torch.tensor(tokens), counts, given, max(counts)).tolist() == expected


def test_requests_of_both_samplers_keep_their_own_figures() -> None:
    """Three requests with two places each; the second is vLLM's.  Then vLLM has made one place for each."""
    ours, other = [torch.zeros(6, 2), torch.zeros(6).long()], torch.tensor([False, True, False])
    theirs = [torch.arange(12.0).view(6, 2), torch.arange(6)]
    found = merged(ours, theirs, other)
    assert found[0].tolist() == [[0, 0], [0, 0], [4, 5], [6, 7], [0, 0], [0, 0]]
    assert found[1].tolist() == [0, 0, 2, 3, 0, 0]
    assert merged(ours, [x[::2] for x in theirs], other)[1].tolist() == [0, 0, 2, 0, 0, 0]

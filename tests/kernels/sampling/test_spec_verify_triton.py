"""The walk in Triton against the specification and against a walk in plain Python, on random and on planted trees."""

import pytest
import torch
from torch import Tensor

from kernels.sampling import spec_verify as module
from kernels.sampling.spec_verify import AcceptedPath, accepted_path


def random_round(seed: int, *, live: int, nodes: int, vocab: int) -> tuple[Tensor, ...]:
    """Trees of `nodes` tokens in all, parents before children; few tokens, so that many are accepted."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, live, (nodes,), generator=generator).sort().values
    parents, tokens = [], []
    for index, row in enumerate(rows.tolist()):
        earlier = [-1] + [i for i in range(index) if rows[i] == row]
        parents.append(earlier[int(torch.randint(0, len(earlier), (), generator=generator))])
        tokens.append(int(torch.randint(0, vocab, (), generator=generator)))
    choice = torch.randint(0, vocab, (live + nodes,), generator=generator)
    return choice, torch.tensor(tokens), torch.tensor(parents), rows


def walk(choice, tokens, parents, rows, *, row: int, live: int, depth: int) -> list[int]:
    """In plain Python: the nodes of one row's accepted path."""
    path, parent = [row], -1
    while len(path) <= depth:
        hits = [
            n for n in range(len(tokens)) if rows[n] == row and parents[n] == parent and tokens[n] == choice[path[-1]]
        ]
        if not hits:
            break
        parent = hits[-1]
        path.append(parent + live)
    return path


def run(device: str, inputs: tuple[Tensor, ...], **sizes: int) -> AcceptedPath:
    path = accepted_path(*(x.to(device) for x in inputs), **sizes, impl="triton")
    return AcceptedPath(*(x.cpu() for x in path))


@pytest.mark.parametrize(("live", "nodes", "depth"), [(1, 1, 1), (4, 30, 4), (9, 70, 3), (3, 40, 0)])
def test_equals_the_walk(device: str, monkeypatch: pytest.MonkeyPatch, live: int, nodes: int, depth: int) -> None:
    monkeypatch.setattr(module, "_MOST_NODES", 16)  # several blocks of nodes
    lengths = set()
    for seed in range(3):
        inputs = random_round(seed, live=live, nodes=nodes, vocab=2)
        found = run(device, inputs, num_rows=live, depth=depth)
        wanted = accepted_path(*inputs, num_rows=live, depth=depth, impl="torch")
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs)
        for row in range(live):
            nodes_A = walk(*inputs, row=row, live=live, depth=depth)
            assert found.nodes_BA[row, : len(nodes_A)].tolist() == nodes_A
            assert found.counts_B[row] == len(nodes_A)
            lengths.add(len(nodes_A))
    assert depth < 3 or len(lengths) > 1

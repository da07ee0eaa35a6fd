"""Layout and walk of any draft tree, against a few lines of Python that follow each path by hand."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import native
from kernels.sampling import spec_verify
from kernels.sampling.spec_verify import accepted_path
from kernels.tree.tree_layout import tree_layout
from tests.fuzz import cases, fuzz

TOKENS = 5  # few, so that choices and guesses often agree
IMPLS = ["torch", "native"]


class Tree(NamedTuple):
    """Draft tokens of some rows, in the order of `DraftTree`."""

    positions: list[int]  # of the newest tokens
    tokens: list[int]
    parents: list[int]
    rows: list[int]
    depths: list[int]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Valid ones: a parent stands before its children, siblings differ; any row may have no draft."""
    positions = draw(st.lists(st.integers(0, 90), min_size=1, max_size=5))
    tree = Tree(positions, [], [], [], [])
    for row in range(len(positions)):
        known: dict[int, set[int]] = {-1: set()}  # node -> tokens of its children
        for _ in range(draw(st.integers(0, 7))):
            parent = draw(st.sampled_from(sorted(node for node in known if len(known[node]) < TOKENS)))
            token = draw(st.sampled_from([t for t in range(TOKENS) if t not in known[parent]]))
            known[parent].add(token)
            known[len(tree.tokens)] = set()
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.rows.append(row)
            tree.depths.append(1 if parent < 0 else tree.depths[parent] + 1)
    return tree


def _tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.fixture(params=IMPLS)
def impl(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and native.library() is None:
        pytest.skip("the C kernels do not run on this machine")
    return str(request.param)


@cases(few=40, many=1000)
def test_layout_of_any_tree(count: int, impl: str) -> None:
    @fuzz(count)
    @given(trees(), st.integers(0, 2))
    def check(tree: Tree, more: int) -> None:
        depth, live = max(tree.depths, default=0) + more, len(tree.positions)
        found = tree_layout(
            *map(_tensor, (tree.positions, tree.parents, tree.rows, tree.depths)), depth=depth, impl=impl
        )
        rows, positions, places, known, paths, lengths = (x.tolist() for x in found)
        assert rows == [*range(live), *tree.rows]
        assert lengths == [0] * live + tree.depths
        for token, row in enumerate(rows):
            newest, node = tree.positions[row], token - live
            path = []
            while node >= 0:
                path.append(newest + 1 + node - tree.rows.index(row))
                node = tree.parents[node]
            assert positions[token] == newest + len(path)
            assert places[token] == (path[0] if path else newest)
            assert known[token] == newest + 1
            assert paths[token] == path[::-1] + [places[token]] * (depth - len(path))

    check()


@pytest.fixture(params=[*IMPLS, "triton"])
def walker(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and (device != "cpu" or native.library() is None):
        pytest.skip("the C kernels do not run here")
    monkeypatch.setattr(spec_verify, "_MOST_NODES", 16)  # several blocks of nodes
    return str(request.param)


@cases(few=40, many=1000)
def test_walk_of_any_tree(count: int, walker: str, device: str) -> None:
    @fuzz(count)
    @given(trees(), st.data(), st.integers(0, 2))
    def check(tree: Tree, data: st.DataObject, more: int) -> None:
        depth, live = max(tree.depths, default=0) + more, len(tree.positions)
        nodes = live + len(tree.tokens)
        choice = data.draw(st.lists(st.integers(0, TOKENS - 1), min_size=nodes, max_size=nodes))
        arrays = (choice, tree.tokens, tree.parents, tree.rows)
        inputs = (_tensor(values).to(device) for values in arrays)
        found = accepted_path(*inputs, num_rows=live, depth=depth, impl=walker)
        for row in range(live):
            path, parent = [row], -1
            while True:
                children = [
                    n for n, r in enumerate(tree.rows)
                    if r == row and tree.parents[n] == parent and tree.tokens[n] == choice[path[-1]]
                ]  # fmt: skip
                if not children:
                    break
                (parent,) = children
                path.append(live + parent)
            assert found.counts_B[row] == len(path)
            assert found.nodes_BA[row].tolist() == path + path[-1:] * (depth + 1 - len(path))

    check()

"""What a pool of CUDA graphs asks of CUDA; CUDA itself is replaced."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from tlt_core.rollout.graphs import GraphKey, GraphPool, Sampling


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Streams that were made."""
    made: list[SimpleNamespace] = []

    def stream(device: torch.device) -> SimpleNamespace:
        made.append(SimpleNamespace(wait_stream=lambda other: None))
        return made[-1]

    default = SimpleNamespace(wait_stream=lambda other: None)
    for name, substitute in {
        "Stream": stream,
        "current_stream": lambda device: default,
        "stream": lambda side: contextlib.nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(reset=lambda: None),
        "graph": lambda graph, **_: contextlib.nullcontext(),
        "graph_pool_handle": lambda: 1,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (0, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, substitute)
    return made


def test_all_graphs_are_captured_beside_one_stream(streams: list[SimpleNamespace]) -> None:
    """Libraries keep a workspace for each stream: 32 MB in cuBLAS, for each of tens of graphs."""
    pool = GraphPool(torch.device("cuda"))
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0)
    works = {GraphKey("verify", rows, 4, sampling): lambda: None for rows in (1, 2, 4, 8)}
    pool.capture(works)
    pool.release()
    pool.capture(works)
    assert len(pool) == 4
    assert len(streams) == 1

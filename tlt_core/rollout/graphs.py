"""The pool of captured CUDA graphs: every bucket of every kind of pass, on one pool of memory.

    plain    B rows                          verify   B rows, W nodes of each
    extend   B rows                          draft    B rows, one of the drafter's strategies

A graph is captured once, the largest first: the next ones find its memory free and take nothing of their own, as what
outlives a replay lies in static buffers that all share (`static_shapes.Inputs`, `PaddedTree`, `static_pass.Path`).  So
further strategies cost the bookkeeping of their launches, not activations.  Graphs hold addresses, not values: weights
that are overwritten in place are used from the next replay on.  Whoever moves a buffer or a weight calls `release`.

Where there are no graphs (CPU) the pool runs the same functions as they are, so what they compute on padded rows is
tested everywhere.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from tlt_core.speculation import OFF, Strategy
from tlt_core.types import SamplingParams

log = logging.getLogger(__name__)


class Sampling(NamedTuple):
    """What of `SamplingParams` is compiled into a graph."""

    temperature: float
    top_p: float
    top_k: int

    @classmethod
    def of(cls, params: SamplingParams) -> "Sampling":
        """Lengths and stop tokens are the host's affair."""
        return cls(params.temperature, params.top_p, params.top_k)


class GraphKey(NamedTuple):
    """Names a graph."""

    kind: str  # plain, verify, extend or draft
    rows: int
    width: int  # tokens of a row in its widest pass
    sampling: Sampling | None = None  # of extend: it samples nothing
    strategy: Strategy = OFF  # of draft


Works = Mapping[GraphKey, Callable[[], None]]


class Pool(Protocol):
    """Fixed-shape functions by key."""

    bytes: int  # device memory that the captured graphs take
    capture_s: float  # seconds spent on capturing them, in all

    def capture(self, works: Works) -> None:
        """Take more functions, which must have no effect beyond what their next call overwrites."""

    def run(self, key: GraphKey) -> None:
        """Call one.  Raises KeyError when it was not captured."""

    def release(self) -> None:
        """Forget all, and give their memory back."""


class EagerPool:
    """Calls the functions."""

    bytes = 0

    def __init__(self) -> None:
        self.capture_s = 0.0
        self._works: dict[GraphKey, Callable[[], None]] = {}

    def capture(self, works: Works) -> None:
        """See `Pool`; each is called once, as a capture does."""
        began_s = time.perf_counter()
        for key in sorted(works, key=_size, reverse=True):
            works[key]()
            self._works[key] = works[key]
        self.capture_s += time.perf_counter() - began_s

    def run(self, key: GraphKey) -> None:
        """See `Pool`."""
        self._works[key]()

    def release(self) -> None:
        """See `Pool`."""
        self._works.clear()

    def __len__(self) -> int:
        return len(self._works)


class GraphPool:
    """Replays captured graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._handle: Any = None
        self.bytes, self.capture_s = 0, 0.0

    def capture(self, works: Works) -> None:
        """See `Pool`."""
        began_s, free = time.perf_counter(), self._free_bytes()
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        for key in sorted(works, key=_size, reverse=True):
            self._graphs[key] = self._captured(works[key])
        self.bytes += max(0, free - self._free_bytes())
        self.capture_s += time.perf_counter() - began_s
        log.info("%d graphs captured in %.1f s, %.2f GB", len(works), self.capture_s, self.bytes / 1e9)

    def run(self, key: GraphKey) -> None:
        """See `Pool`."""
        self._graphs[key].replay()

    def release(self) -> None:
        """See `Pool`."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._handle = None
        torch.cuda.empty_cache()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            work()  # kernels are compiled and libraries set up here, which no capture allows
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads of the worker do on the device meanwhile is not part of this
        with torch.cuda.graph(graph, pool=self._handle, capture_error_mode="thread_local"):
            work()
        return graph

    def _free_bytes(self) -> int:
        """As the driver sees it: graphs' own bookkeeping and compiled kernels count, too."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]


def make_pool(device: torch.device) -> EagerPool | GraphPool:
    """Graphs on a GPU."""
    return GraphPool(device) if device.type == "cuda" else EagerPool()


def _size(key: GraphKey) -> int:
    return key.rows * key.width

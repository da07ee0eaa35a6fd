"""The pool of captured CUDA graphs: every bucket of every kind of pass, on one pool of memory.

    plain    B rows                          verify   B rows, W nodes of each
    extend   B rows                          draft    B rows, one of the drafter's strategies

The largest graph is captured first.  Smaller ones reuse its memory and take none of their own: what outlives a replay
lies in static buffers that all graphs share (`static_pass.StaticTarget`).  So a further strategy costs the bookkeeping
of its launches, not memory for activations.  Graphs hold addresses, not values: weights that are overwritten in place
are used from the next replay on.  Call `release` before moving a buffer or a weight.

On a CPU the pool calls the functions themselves, so that tests without a GPU cover them.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from tlt_core.items.speculation import OFF, Strategy
from tlt_core.items.types import SamplingParams

log = logging.getLogger(__name__)


class Sampling(NamedTuple):
    """The part of `SamplingParams` that is compiled into a graph."""

    temperature: float
    top_p: float
    top_k: int

    @classmethod
    def of(cls, params: SamplingParams) -> "Sampling":
        """Without lengths and stop tokens, which the host handles."""
        return cls(params.temperature, params.top_p, params.top_k)


class GraphKey(NamedTuple):
    """Names a graph."""

    kind: str  # plain, verify, extend or draft
    rows: int
    width: int  # tokens of a row in its widest pass
    sampling: Sampling | None = None  # None in extend, which samples nothing
    strategy: Strategy = OFF  # only in draft


Works = Mapping[GraphKey, Callable[[], None]]


class Pool(Protocol):
    """Fixed-shape functions by key."""

    bytes: int  # device memory that the captured graphs take
    capture_s: float  # seconds spent on capturing them, in all

    def capture(self, works: Works) -> None:
        """Capture more functions; each is called, so it must have no effect that its next call does not overwrite."""

    def run(self, key: GraphKey) -> None:
        """Call one function.  Raises KeyError when it was not captured."""

    def release(self) -> None:
        """Forget all functions and give their memory back."""


class EagerPool:
    """Calls the functions."""

    bytes = 0

    def __init__(self) -> None:
        self.capture_s = 0.0
        self._works: dict[GraphKey, Callable[[], None]] = {}

    def capture(self, works: Works) -> None:
        """See `Pool`."""
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
        self._side: torch.cuda.Stream | None = None  # one for all graphs: libraries keep a workspace for each stream
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
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            work()  # compiles kernels and sets up libraries, which a capture does not allow
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: leaves out what other threads of the worker do on the device meanwhile
        with torch.cuda.graph(graph, pool=self._handle, capture_error_mode="thread_local"):
            work()
        return graph

    def _free_bytes(self) -> int:
        """As the driver sees it, so that bookkeeping of graphs and compiled kernels count, too."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]


def make_pool(device: torch.device) -> EagerPool | GraphPool:
    """Graphs on a GPU."""
    return GraphPool(device) if device.type == "cuda" else EagerPool()


def _size(key: GraphKey) -> int:
    return key.rows * key.width

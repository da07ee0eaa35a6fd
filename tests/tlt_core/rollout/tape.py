"""What a captured graph does, on a CPU: operations are recorded once, with the tensors that they ran on, and repeated.

As in a graph, no Python runs again: a value that the host put into an operation stays what it was, an operation that
the host chose is made again, a tensor from outside is the memory that it was, whatever has taken its name since.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from tlt_core.rollout.graphs import GraphKey, Works


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))  # keeps the tensors, so that none's id is taken by another
        return out


class TapePool:
    """In the place of `GraphPool`."""

    bytes = 0

    def __init__(self) -> None:
        self.capture_s = 0.0
        self.replays = 0
        self._tapes: dict[GraphKey, list[tuple[Any, Any, Any, Any]]] = {}

    def capture(self, works: Works) -> None:
        for key, work in works.items():
            with _Recorder() as recorder:
                work()
            self._tapes[key] = recorder.calls

    def run(self, key: GraphKey) -> None:
        self.replays += 1
        now: dict[int, Tensor] = {}

        def current(x: Tensor) -> Tensor:
            return now.get(id(x), x)

        with torch.inference_mode():
            for func, args, kwargs, out in self._tapes[key]:
                args, kwargs = tree_map_only(Tensor, current, (args, kwargs))
                new = func(*args, **kwargs)
                for old, made in zip(tree_flatten(out)[0], tree_flatten(new)[0], strict=True):
                    if isinstance(old, Tensor):
                        now[id(old)] = made

    def release(self) -> None:
        self._tapes.clear()

    def __len__(self) -> int:
        return len(self._tapes)

"""A GPU that does not exist: tensors that say they are on it, and compute on the CPU.

    with pretended_gpu() as gpu:
        x = torch.zeros(3, device="cuda")
        x + torch.zeros(3)          raises MixedDevices, as CUDA does
        float(x.sum())              is counted in gpu.waits: a GPU's queue runs empty meanwhile

Values are real, so whole stations of the pipeline run as they would, branches and losses included.  Not checked:
kernels for GPUs, which are replaced by their torch references, captured graphs, which are called instead, backward
passes, and the order of streams.
"""

import collections
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from kernels import dispatch
from kernels.attention.packed_attention import packed_causal_attention_reference
from tlt_core.rollout import static_rounds
from tlt_core.rollout.graphs import EagerPool

_GPU = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_CROSSES = {"aten::copy_", "aten::_to_copy", "aten::to"}  # from one device to the other
# Indices of a tensor on the GPU may be on the CPU.
_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_VARLEN = {"torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"}
_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"}


class MixedDevices(AssertionError):
    """An operation got tensors of both devices."""


class GpuTensor(Tensor):
    """Says that it is on the GPU.

    torch's stubs declare `device`, `is_cuda`, `is_cpu` and `data` as attributes, hence the type: ignore there.
    """

    values: Tensor  # on the CPU

    @staticmethod
    def __new__(cls, values: Tensor) -> "GpuTensor":
        with torch.inference_mode(False):  # a view of an ordinary tensor has to be one, too
            made: GpuTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                values.size(),
                strides=values.stride(),
                storage_offset=values.storage_offset(),
                dtype=values.dtype,
                layout=values.layout,
                device=values.device,
                requires_grad=values.requires_grad,
            )
        made.values = values
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The GPU."""
        return _GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Yes."""
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """No."""
        return False

    @property
    def data(self) -> "GpuTensor":  # type: ignore[override]
        """Without its gradient."""
        return self.detach()

    @data.setter
    def data(self, other: "GpuTensor") -> None:
        """Share the other's memory from now on.  torch would change what it sees itself, and leave `values`."""
        if not isinstance(other, GpuTensor):
            raise MixedDevices("tensor.data: a tensor on the GPU cannot share memory on the CPU")
        self.values = other.values

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        """A copy on the CPU."""
        return self._fetched("cpu").clone(memory_format=memory_format)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As usual.  torch itself sees a tensor on the CPU, so it would not move it there."""
        asked = [kwargs.get("device"), *args]
        if any(isinstance(x, str | torch.device) and _of(x) == _CPU for x in asked):
            return self._fetched("to").to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def tolist(self) -> Any:
        """Values, for which the CPU waits."""
        return self._fetched("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refused, as by CUDA."""
        raise TypeError("can't convert a tensor on the GPU to numpy: use .cpu() first")

    def _fetched(self, how: str) -> Tensor:
        _open[-1].waits[how] += 1
        return self.values.detach()

    def __repr__(self, **options: Any) -> str:
        return f"GpuTensor({self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a pretended GPU, outside of pretended_gpu()")


_open: "list[PretendedGpu]" = []


class PretendedGpu(TorchDispatchMode):
    """Runs every operation on the CPU, and keeps account of devices."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()
        self.calls: collections.Counter[str] = collections.Counter()  # of operations, by name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation."""
        name, given = func._schema.name, kwargs or {}
        kwargs = dict(given)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        on_gpu = [x for x in tensors if isinstance(x, GpuTensor)]
        asked = kwargs.get("device") or next((x for x in args if isinstance(x, torch.device)), None)
        target = _of(asked) if asked is not None else (_GPU if on_gpu else _CPU)
        if on_gpu and name not in _CROSSES:
            written = _written(func, args)
            strict = name == "aten::_fused_adamw_"  # counts its steps on the device
            strangers = [x for x in tensors if not isinstance(x, GpuTensor) and (x.dim() > 0 or x is written or strict)]
            if name in _INDEX:
                strangers = [] if isinstance(args[0], GpuTensor) else strangers
            if strangers and not _in_backward():
                shape = tuple(strangers[0].shape)
                raise MixedDevices(f"{name}: a tensor of shape {shape} is on the CPU, others on the GPU")
        self.calls[name] += bool(on_gpu)
        if name in _VARLEN:
            with ThreadPoolExecutor(1) as pool:  # this thread records no gradients below its own autograd
                return tree_map(GpuTensor, pool.submit(_attention, name, *tree_map(_inside, args)).result())
        if name == "aten::copy_":
            target = args[0].device
        if on_gpu and (name in _WAITS or (name in _CROSSES and target == _CPU)):
            self.waits[name] += 1
        if "device" in kwargs:
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        out = func(*tree_map(_inside, args), **tree_map(_inside, kwargs))
        if target != _GPU:
            return out
        wrapped = tree_map(lambda x: GpuTensor(x) if isinstance(x, Tensor) else x, out)
        if not on_gpu:
            return wrapped
        if name in _CROSSES or torch.is_inference_mode_enabled():
            written = _written(func, args)
            return given.get("out", wrapped if written is None else written)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _written(func: Any, args: Any) -> Any:
    """The first argument where the operation changes it in place."""
    alias = func._schema.arguments[0].alias_info if args else None
    return args[0] if alias is not None and alias.is_write else None


def _in_backward() -> bool:
    """torch's own gradients make tensors where it sees the GPU's: on the CPU."""
    return torch._C._current_graph_task_id() != -1


def _attention(name: str, *args: Any) -> tuple[Tensor, ...]:
    """torch's varlen_attn and its gradient, by the reference."""
    backward = name.endswith("backward")
    gradient, (q, k, v) = (args[0], args[1:4]) if backward else (None, args[:3])
    offsets, key_offsets = args[6:8] if backward else args[3:5]
    with torch.set_grad_enabled(backward):
        inputs = [x.detach().requires_grad_() if backward else x for x in (q, k, v)]
        out = packed_causal_attention_reference(*inputs, offsets.long(), key_offsets.long())
        if backward:
            return torch.autograd.grad(out, inputs, gradient)
    return out.detach(), torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)


def _inside(value: Any) -> Any:
    if isinstance(value, GpuTensor):
        return value.values
    if isinstance(value, torch.device):
        return _CPU
    return value


def _of(device: Any) -> torch.device:
    return _GPU if torch.device(device).type == "cuda" else _CPU


@contextlib.contextmanager
def pretended_gpu() -> Iterator[PretendedGpu]:
    """While this is open, device cuda:0 can be used."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter cannot become a GpuTensor in place
    try:
        with _patched() as gpu:
            _open.append(gpu)
            yield gpu
            _open.pop()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


class HostEvent:
    """A mark in the queue of a GPU that has none: the time at which it was made."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._at_s = 0.0

    def record(self) -> None:
        """Here."""
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is under way."""

    def elapsed_time(self, end: "HostEvent") -> float:
        """Milliseconds from here to there."""
        return 1e3 * (end._at_s - self._at_s)


_torch_tensor = torch.tensor


def _tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """torch.tensor fills the device's memory itself."""
    made = _torch_tensor(data, **options)
    return made if device is None else made.to(device)


@contextlib.contextmanager
def _patched() -> Iterator[PretendedGpu]:
    memory, shares = 1 << 34, [1.0]
    with contextlib.ExitStack() as stack:
        for target, name, substitute in (
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "synchronize", lambda device=None: None),
            (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "memory_reserved", lambda device=None: 0),
            (torch.cuda, "memory_allocated", lambda device=None: 0),
            (torch.cuda, "max_memory_allocated", lambda device=None: 0),
            (torch.cuda, "mem_get_info", lambda device=None: (memory, memory)),
            (torch.cuda, "get_per_process_memory_fraction", lambda device=None: shares[-1]),
            (torch.cuda, "set_per_process_memory_fraction", lambda share, device=None: shares.append(share)),
            (torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
            (torch.cuda, "Event", HostEvent),
            (static_rounds, "make_pool", lambda device: EagerPool()),
            (dispatch, "_auto", lambda *_, **__: False),
            (torch, "tensor", _tensor),
        ):
            stack.enter_context(mock.patch.object(target, name, substitute))
        yield stack.enter_context(PretendedGpu())

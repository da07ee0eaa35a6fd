"""Weights into a running engine, in place, and a proof that they are there.

vLLM packs and fuses them, so after a load each layer's output for one random input must be that of the file's weights.
"""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class Loading:
    """New weights of one model, which may come in several files.  Until `end` the model must not be used."""

    def __init__(self, runner: Any, model: nn.Module) -> None:
        self._runner, self._model = runner, model
        self._wanted = {name for name, _ in model.named_parameters()}
        found = (p.dtype for _, layer, _ in _layers(model) for p in layer.parameters() if p.is_floating_point())
        self._dtype = next(found, torch.float32)  # a model's first parameter may be a map of token ids
        self._loaded: set[str] = set()
        self._expected: dict[str, Tensor] = {}  # what each matrix makes of its `_input`, by the end of its name
        self._parts = {
            part: _part(layer, number) for _, layer, names in _layers(model) for number, part in enumerate(names)
        }
        self._tensors, self._has_head = 0, False
        with set_current_vllm_config(runner.vllm_config):
            initialize_layerwise_reload(model)

    def add(self, file: str) -> None:
        with safe_open(file, framework="pt") as tensors:
            given = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  (not a mapping)
        for name, weight in given.items():
            if weight.dim() == 2:
                rows, columns = self._parts.get(_end(name), (slice(None), slice(None)))
                x = _input(weight.shape[1], self._dtype).float()
                self._expected[_end(name)] = x[:, columns] @ weight[rows, columns].to(self._dtype).float().T
        with set_current_vllm_config(self._runner.vllm_config):
            try:
                self._loaded |= set(cast(Any, self._model).load_weights(iter(given.items())) or self._wanted)
            except Exception:  # whatever vLLM says goes on to the caller
                self._give_up()
                raise
        self._tensors += len(given)
        self._has_head |= "lm_head.weight" in given

    def end(self) -> dict[str, Any]:
        """Finish.  Returns {"tensors": loaded, "checked": layers that were compared}.

        Raises ValueError when the files do not fill the model, or the model does not compute with them."""
        with set_current_vllm_config(self._runner.vllm_config):
            finalize_layerwise_reload(self._model, self._runner.vllm_config.model_config)
        # A head that is tied to the embedding is not in the file, but it is packed apart.
        head = getattr(self._model, "lm_head", None)
        if head is not None and not self._has_head:
            head.quant_method.process_weights_after_loading(head)
        missing = sorted(self._wanted - self._loaded)
        if missing:
            raise ValueError(f"no weights came for {len(missing)} parameters, e.g. {missing[0]}")
        _refuse_missing(self._model, self._expected)
        return {"tensors": self._tensors, "checked": self._require_in_use()}

    def _give_up(self) -> None:
        """Layers that are not complete get their old weights back: the next request would end the engine."""
        for layer in self._model.modules():
            get_layerwise_info(layer).load_numel = 0  # as if nothing had come
        finalize_layerwise_reload(self._model, self._runner.vllm_config.model_config)

    @torch.inference_mode()
    def _require_in_use(self) -> int:
        """Compare each layer with the files' weights; returns how many were compared.  Raises ValueError."""
        checked, device = 0, next(self._model.parameters()).device
        for name, module, parts in _layers(self._model):
            dtype = next((p.dtype for p in module.parameters()), self._dtype)
            if module.bias is not None or dtype != self._dtype:
                continue
            if dtype not in _TOLERANCE:  # quantised: not to be compared
                continue
            expected = torch.cat([self._expected[part] for part in parts], dim=-1)
            _, columns = self._parts[parts[0]]
            # Of this worker's part alone: calling the layer would add up those of all workers.
            x = _input(module.input_size, dtype)[:, columns].to(device)
            found = module.quant_method.apply(module, x).float().cpu()
            error = float((found - expected).norm() / expected.norm())
            if not error <= _TOLERANCE[dtype]:
                raise ValueError(
                    f"{name} does not compute with the weights that came (relative error {error:.1e}): the engine "
                    "would decode with other weights than were published"
                )
            checked += 1
        return checked


def _input(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, size, generator=torch.Generator().manual_seed(size)).to(dtype)


@torch.inference_mode()
def answers(model: nn.Module) -> dict[str, Tensor]:
    """What each layer computes for one random input, and the sum of each parameter.  On the CPU, by name."""
    found = {f"{name} (sum)": p.detach().double().sum().cpu() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for name, module in model.named_modules():
        parameter = next(module.parameters(), None)
        if isinstance(module, LinearBase) and parameter is not None:
            size = getattr(module, "input_size_per_partition", module.input_size)
            x = torch.randn(1, size, generator=generator).to(parameter.dtype)
            answer = module.quant_method.apply(module, x.to(parameter.device))
            found[name] = answer.float().cpu()
    return found


def require_answers(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Raises ValueError when the model does not answer as before, to the bit."""
    now = answers(model)
    changed = [name for name, answer in before.items() if not torch.equal(answer, now[name])]
    if changed:
        raise ValueError(
            f"{len(changed)} layers of {type(model).__name__} have changed in the engine's sleep, e.g. {changed[0]}: "
            "it would decode with other weights than were published"
        )


def file_of(path: str) -> str:
    """The safetensors file that is meant by a file or by a model's folder.  Raises ValueError where there is none."""
    file = Path(path) / "model.safetensors" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"{path}: neither a safetensors file nor a folder with model.safetensors")
    return str(file)


def require_fits(model: nn.Module, file: str) -> None:
    """A layer that the file leaves out would silently keep its old weights, and vLLM ends where one has another shape.
    Raises ValueError with the first such layer."""
    with safe_open(file, framework="pt") as tensors:
        names = tensors.keys()
        given = {_end(name): tuple(tensors.get_slice(name).get_shape()) for name in names}
    _refuse_missing(model, given)
    for name, shape in _shapes(model):
        if given.get(name, shape) != shape:
            raise ValueError(
                f"{name} in {file} has the shape {given[name]}, in the engine {shape}: another model's file?"
            )


def _shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of whole matrices and norms, by the ends of their names in a file."""
    for _, layer, parts in _layers(model):
        heads = getattr(layer, "total_num_heads", 0)
        for number, part in enumerate(parts):
            rows = layer.output_sizes[number] if hasattr(layer, "output_sizes") else layer.output_size
            if heads:  # several workers may have the same keys and values, which vLLM counts once for each
                rows = layer.head_size * (layer.total_num_kv_heads if number else heads)
            yield part, (rows, layer.input_size)
    for name, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            yield _end(f"{name}.weight"), (module.org_vocab_size, module.embedding_dim)
        elif not isinstance(module, LinearBase):
            own = module.named_parameters(recurse=False)
            yield from ((_end(f"{name}.{which}"), tuple(p.shape)) for which, p in own if p.dim() == 1)


def _refuse_missing(model: nn.Module, given: Container[str]) -> None:
    missing = sorted(name for name, _, parts in _layers(model) if any(part not in given for part in parts))
    if missing:
        raise ValueError(f"no weights came for {len(missing)} layers, e.g. {missing[0]}")


def _layers(model: nn.Module) -> Iterator[tuple[str, Any, list[str]]]:
    """Linear layers, with the ends of the names that their matrices have in a file."""
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {}) or {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            room, _, last = name.rpartition(".")
            yield name, module, [_end(f"{room}.{part}.weight") for part in fused.get(last, [last])]


def _part(layer: Any, number: int) -> tuple[slice, slice]:
    """Rows and columns of a layer's matrix that this worker has under tensor parallelism.  number: of the matrix, where
    several are fused."""
    whole = slice(None)
    if isinstance(layer, RowParallelLinear):
        size = layer.input_size_per_partition
        return whole, slice(layer.tp_rank * size, (layer.tp_rank + 1) * size)
    if isinstance(layer, ColumnParallelLinear):
        size = layer.output_partition_sizes[number]
        # Several workers have the same keys and values where there are fewer heads of those than workers.
        rank = layer.tp_rank // (getattr(layer, "num_kv_head_replicas", 1) if number else 1)
        return slice(rank * size, (rank + 1) * size), whole
    return whole, whole


def _end(name: str) -> str:
    """A parameter's name as both sides spell it: vLLM calls the drafter's only layer, `midlayer`, layers.0."""
    parts = [part for part in name.split(".") if part != "model"]
    if parts and parts[0] == "midlayer":
        parts = ["layers", "0", *parts[1:]]
    return ".".join(parts)

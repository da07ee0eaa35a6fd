"""Weights into a running engine, in place, and a proof that they are there.

vLLM packs weights for its CPU kernels and fuses projections, so what is in use cannot be compared with the file.  After
a load each layer is therefore asked: its output for one random input must be that of the file's weights.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def load(runner: Any, model: nn.Module, file: str) -> dict[str, Any]:
    """Load all tensors of the file.  Returns {"tensors": loaded, "checked": layers and parameters that were compared}.

    Raises ValueError when the file does not fill the model, or the model does not compute with it afterwards."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

    wanted = {name for name, _ in model.named_parameters()}
    with safe_open(file, framework="pt") as tensors:
        given = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  (not a mapping)
    _require_complete(model, given, file)
    with set_current_vllm_config(runner.vllm_config):
        initialize_layerwise_reload(model)
        loaded = cast(Any, model).load_weights(iter(given.items()))
        finalize_layerwise_reload(model, runner.vllm_config.model_config)
    # A head that is tied to the embedding is not in the file, but it is packed apart.
    head = getattr(model, "lm_head", None)
    if head is not None and "lm_head.weight" not in given:
        head.quant_method.process_weights_after_loading(head)
    missing = sorted(wanted - set(loaded or wanted))
    if missing:
        raise ValueError(f"{file} has no weights for {len(missing)} parameters, e.g. {missing[0]}")
    return {"tensors": len(given), "checked": require_in_use(model, given, file)}


@torch.inference_mode()
def require_in_use(model: nn.Module, given: Mapping[str, Tensor], file: str) -> int:
    """Compare each layer with the file's weights; returns how many were compared.  Raises ValueError."""
    checked, generator = 0, torch.Generator().manual_seed(0)
    for name, module, weights in _layers(model, given):
        if any(w is None for w in weights) or getattr(module, "tp_size", 1) > 1 or module.bias is not None:
            continue
        size = weights[0].shape[1]
        dtype = next((p.dtype for p in module.parameters()), weights[0].dtype)
        if dtype not in _TOLERANCE:  # quantised: not to be compared
            continue
        x = torch.randn(1, size, generator=generator).to(dtype)
        expected = torch.cat([x.float() @ w.to(dtype).float().T for w in weights], dim=-1)
        device = next(model.parameters()).device
        answer = module(x.to(device))
        found = (answer[0] if isinstance(answer, tuple) else answer).float().cpu()
        error = float((found - expected).norm() / expected.norm())
        if not error <= _TOLERANCE[dtype]:
            raise ValueError(
                f"{name} does not compute with the weights of {file} (relative error {error:.1e}): the engine would "
                "decode with other weights than were published"
            )
        checked += 1
    return checked


@torch.inference_mode()
def answers(model: nn.Module) -> dict[str, Tensor]:
    """What each layer computes for one random input, and the sum of each parameter.  On the CPU, by name."""
    from vllm.model_executor.layers.linear import LinearBase

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


def _require_complete(model: nn.Module, given: Mapping[str, Tensor], file: str) -> None:
    """A layer that the file leaves out would keep what it had, without a word.  Raises ValueError."""
    missing = sorted(name for name, _, weights in _layers(model, given) if any(w is None for w in weights))
    if missing:
        raise ValueError(f"{file} has no weights for {len(missing)} layers, e.g. {missing[0]}")


def _layers(model: nn.Module, given: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Module, list[Any]]]:
    """Linear layers, with the file's weights of each; None for those that it lacks."""
    from vllm.model_executor.layers.linear import LinearBase

    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {}) or {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    by_end = {_end(name): tensor for name, tensor in given.items()}
    for name, module in model.named_modules():
        if not isinstance(module, LinearBase):
            continue
        room, _, last = name.rpartition(".")
        yield name, module, [by_end.get(_end(f"{room}.{part}.weight")) for part in fused.get(last, [last])]


def _end(name: str) -> str:
    """A parameter's name as both sides spell it: vLLM calls the drafter's only layer, `midlayer`, layers.0."""
    parts = [part for part in name.split(".") if part != "model"]
    if parts and parts[0] == "midlayer":
        parts = ["layers", "0", *parts[1:]]
    return ".".join(parts)

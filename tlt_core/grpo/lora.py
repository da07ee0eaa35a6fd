"""Low-rank adapters on our decoder, by peft.  Only the adapters are trained; rollouts use the merged weights.

Hu et al., arXiv 2106.09685: W' = W + alpha / rank * B A, with B = 0 at the start.

Shapes: T tokens, D input size, N output size, R rank.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.update import LoraConfig
from tlt_core.model.config import ModelError

_BASE = ".base_layer."  # how peft names the adapted weight inside its wrapper


def inject_adapters(model: nn.Module, cfg: LoraConfig, *, seed: int = 0) -> None:
    """Freeze the model and put adapters on the linear layers named in cfg.target_modules, in place.

    seed: for matrix A, equal on all workers.  Raises ModelError when no module has such a name.
    """
    import peft

    require_targets(model, cfg)
    config = peft.LoraConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha,  # type: ignore[arg-type]  # peft only divides it by the rank
        target_modules=list(cfg.target_modules),
        lora_dropout=0.0,
        bias="none",
    )
    peft.inject_adapter_in_model(config, model)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_A" in name:
            bound = 1 / math.sqrt(parameter.shape[1])  # Kaiming uniform with a = sqrt(5), as peft draws it
            noise = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            parameter.data.copy_(noise)


def fuse_adapters(model: nn.Module) -> None:
    """Let each adapted layer add its adapter inside the matrix products, in place.  The parameters stay as they are.
    Not under ZeRO-3, which gathers a weight only where its own module runs."""
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.forward = functools.partial(_adapted, module)


def _adapted(module: Any, x: Tensor) -> Tensor:
    base, down, up = module.base_layer, module.lora_A["default"].weight, module.lora_B["default"].weight
    y_TN: Tensor = _AdaptedLinear.apply(x.flatten(0, -2), base.weight, base.bias, down, up, module.scaling["default"])
    out: Tensor = y_TN.unflatten(0, x.shape[:-1])
    return out


class _AdaptedLinear(torch.autograd.Function):
    """y = W x + b + scale B A x, W and b frozen.  In peft, products of size [T, N] are scaled and added by operations
    of their own, forward and backward: a ninth of an update's time on a CPU."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None, a_RD: Tensor, b_NR: Tensor, scale: float
    ) -> Tensor:
        low_TR = x_TD @ a_RD.T
        ctx.save_for_backward(x_TD, weight_ND, a_RD, b_NR, low_TR)
        ctx.scale = scale
        return F.linear(x_TD, weight_ND, bias_N).addmm_(low_TR, b_NR.T, alpha=scale)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> Any:
        x_TD, weight_ND, a_RD, b_NR, low_TR = ctx.saved_tensors
        grad_low_TR = (grad_TN @ b_NR).mul_(ctx.scale)
        grad_b_NR = (grad_TN.T @ low_TR).mul_(ctx.scale)
        grad_TD = (grad_TN @ weight_ND).addmm_(grad_low_TR, a_RD) if ctx.needs_input_grad[0] else None
        return grad_TD, None, None, grad_low_TR.T @ x_TD, grad_b_NR, None


def require_targets(model: nn.Module, cfg: LoraConfig) -> None:
    """Raises ModelError when the model lacks a linear layer of cfg.target_modules.  Weights are not looked at."""
    leaves = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    missing = sorted(set(cfg.target_modules) - leaves)
    if missing:
        fused = " (query, key and value are one, and so are gate and up)" if "qkv_proj" in leaves else ""
        raise ModelError(
            f"update.lora.target_modules={missing}: the decoder has no such linear layer; it has {sorted(leaves)}"
            f"{fused}"
        )


def merged_weights(model: nn.Module, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The model's weights under the names they had before `inject_adapters`, with the adapters added in float32.

    named: every parameter of the model by name.
    """
    adapted: dict[str, Any] = dict(model.named_modules())
    for name, weight in named:
        if "lora_" in name:
            continue
        if _BASE not in name:
            yield name, weight
            continue
        owner, _, leaf = name.partition(_BASE)
        if leaf == "weight":
            layer = adapted[owner]
            update = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
            weight = (weight.float() + layer.scaling["default"] * update).detach().to(weight.dtype)
        yield f"{owner}.{leaf}", weight

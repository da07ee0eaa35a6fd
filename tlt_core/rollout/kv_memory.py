"""Checks before the first token that the requested slots fit into a GPU's memory.

A slot cache is allocated whole, so that graphs can hold its addresses: `max_live` slots of `max_len` positions and the
room that drafts need behind them.
"""

import torch

from tlt_core.model.config import DecoderConfig


def slot_bytes(config: DecoderConfig, *, positions: int, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * config.num_kv_heads * positions * config.head_dim * dtype.itemsize


def check_fits(slot: int, *, max_live: int, positions: int, free: int, fraction: float) -> None:
    """slot: bytes of one slot; free: bytes of the device.  Raises ValueError that says what would fit."""
    allowed = int(free * fraction)
    if slot * max_live <= allowed:
        return
    most = allowed // slot
    remedy = f"rollout.max_live_requests={most}" if most else "shorter texts (rollout.max_new_tokens)"
    raise ValueError(
        f"a KV cache for {max_live} live requests of {positions} positions takes {slot * max_live / 1e9:.2f} GB, and "
        f"rollout.kv_memory_fraction={fraction:g} of the device's {free / 1e9:.2f} GB free memory is "
        f"{allowed / 1e9:.2f} GB: {remedy} fits; or raise the fraction"
    )


def check_on_device(
    config: DecoderConfig, device: torch.device, *, max_live: int, positions: int, dtype: torch.dtype, fraction: float
) -> None:
    """`check_fits` on a GPU, where memory that torch has cached counts as free, and what lies beyond this process's
    share does not (`machine/memory.require_gpu`); nothing is checked elsewhere."""
    if device.type != "cuda":
        return
    used = torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    share = int(total * torch.cuda.get_per_process_memory_fraction(device.index))
    check_fits(
        slot_bytes(config, positions=positions, dtype=dtype),
        max_live=max_live,
        positions=positions,
        free=min(free + torch.cuda.memory_reserved(device) - used, share - used),
        fraction=fraction,
    )

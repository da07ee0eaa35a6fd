"""A training pass that is small enough to be measured: what a forecast needs to know of this machine.

A large product alone would promise too much: where products are fast, most of a pass is everything else.
"""

from collections.abc import Callable

import torch

from kernels.attention.packed_attention import packed_causal_attention
from tlt_core.model.config import DecoderConfig
from tlt_core.model.load import random_decoder

_RESPONSE = 64  # tokens; as short as most
_RESPONSES = 8
_VOCAB = 256  # the LM head is not part of it


def layer_pass(*, width: int, inner: int, dtype: torch.dtype) -> tuple[Callable[[], object], float]:
    """Forward and backward of one layer, and its floating-point operations."""
    head = 64 if width % 64 == 0 else width
    config = DecoderConfig(
        family="llama",
        vocab_size=_VOCAB,
        hidden_size=width,
        intermediate_size=inner,
        num_layers=1,
        num_heads=width // head,
        num_kv_heads=1,
        head_dim=head,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=True,
        max_position_embeddings=_RESPONSE,
        eos_token_ids=(0,),
        bos_token_id=None,
    )
    decoder = random_decoder(config, seed=0, dtype=dtype)
    tokens = torch.arange(_RESPONSE * _RESPONSES)
    offsets = torch.arange(_RESPONSES + 1) * _RESPONSE

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return packed_causal_attention(q, k, v, offsets, key_offsets_S1=offsets)

    def run() -> None:
        decoder(tokens % _VOCAB, tokens % _RESPONSE, attend).last_TD.sum().backward()

    parameters = sum(p.numel() for name, p in decoder.named_parameters() if name.startswith("layers") and p.ndim == 2)
    return run, 6.0 * parameters * len(tokens)

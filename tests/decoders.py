"""The tiny models of the tests."""

import torch

from tlt_core.model.config import DecoderConfig
from tlt_core.model.decoder import Decoder
from tlt_core.model.load import random_decoder

# Two layers, four query heads on two key/value heads, vocabulary 64, token 2 ends a response.
TINY = DecoderConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    eos_token_ids=(2,),
    bos_token_id=1,
)


def lively(config: DecoderConfig = TINY, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    """Random weights, large enough that distributions are far from uniform and differ from token to token."""
    decoder = random_decoder(config, seed=seed, dtype=torch.float32)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return decoder.to(dtype)

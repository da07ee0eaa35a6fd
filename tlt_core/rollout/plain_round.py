"""One plain decode round: every live request gets one token.

newest token -> decoder over the KV cache -> logits -> keyed Gumbel arg-max -> token and its log-probability
"""

import torch

from tlt_core.model.decoder import Decoder
from tlt_core.rollout.batch import LiveBatch
from tlt_core.rollout.kv_cache import SlotCache
from tlt_core.sampling import Choice, choose, row_keys
from tlt_core.types import SamplingParams


@torch.inference_mode()
def plain_round(decoder: Decoder, cache: SlotCache, batch: LiveBatch, params: SamplingParams) -> Choice:
    """Sample the next token of every live row.  Returns B tokens and log-probs; commits only the KV of the newest."""
    tokens_B, positions_B = batch.newest()
    hidden = decoder(tokens_B, positions_B, cache.decode_attend(positions_B, batch.longest))
    keys_B2 = row_keys(batch.streams_B[: len(batch)], positions_B + 1)
    return choose(decoder.logits(hidden.last_TD), keys_B2, params)

"""One plain decode round: every live request gets one token.

newest token -> decoder over the KV cache -> logits -> keyed Gumbel arg-max -> token and its log-probability
"""

import torch

from tlt_core.model.decoder import Decoder
from tlt_core.rollout.batch import Emitted, LiveBatch, RoundResult
from tlt_core.rollout.kv_cache import SlotCache
from tlt_core.sampling import choose, lognorms, row_keys
from tlt_core.types import SamplingParams


@torch.inference_mode()
def plain_round(
    decoder: Decoder, cache: SlotCache, batch: LiveBatch, params: SamplingParams, *, taps: tuple[int, ...] = ()
) -> RoundResult:
    """Sample the next token of every live row; the cache gets the newest token's keys and values.

    Commits nothing.
    """
    tokens_B, positions_B = batch.newest()
    hidden = decoder(tokens_B, positions_B, cache.decode_attend(positions_B, batch.longest), taps=taps)
    keys_B2 = row_keys(batch.streams_B[: len(batch)], positions_B + 1)
    logits_BV = decoder.logits(hidden.last_TD)
    choice = choose(logits_BV, keys_B2, params)
    tokens = choice.tokens_N
    emitted = Emitted(tokens[:, None], choice.logprobs_N[:, None], torch.ones_like(tokens))
    return RoundResult(
        emitted,
        torch.arange(len(batch), device=tokens.device),
        positions_B,
        hidden.taps_TE,
        hidden.last_TD,
        choice.lognorms_N if hidden.taps_TE is None else lognorms(logits_BV, choice, params),
    )

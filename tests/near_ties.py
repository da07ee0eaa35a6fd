"""Two engines' responses to the same requests: where they first differ, was it a near-tie?

With another order of sums two tokens whose perturbed logits z / T + g are almost equal may change places; then another
text follows.  So each pair of responses counts up to its first difference.  There

    gap = |(z_a / T + g_a) - (z_b / T + g_b)|        of the two tokens, z of the model in float32 on the CPU

is compared with the rounding of the engine's own arithmetic: the largest difference of the same logits, among the
likeliest, between the model where the engine runs and the model in float32, in an ordinary pass over the text.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention.packed_attention import packed_causal_attention
from kernels.sampling.coupled_sample import gumbel_noise
from tlt_core.items.types import NoiseKey, Rollout, SamplingParams
from tlt_core.model.decoder import Decoder
from tlt_core.model.sampling import row_keys, stream_key

_LIKELY = 64  # tokens whose logits tell the rounding
_LEAST = 1e-4  # of float32 logits, whatever two passes show


class Agreement(NamedTuple):
    tokens: int  # compared: up to the first difference of each response
    near_ties: int
    unexplained: int
    largest: float  # gap over rounding

    def in_words(self) -> str:
        found = f"{self.tokens} tokens, {self.near_ties} near-ties, {self.unexplained} other differences"
        return found + (
            f", largest gap {self.largest:.2f} of the rounding" if self.near_ties or self.unexplained else ""
        )


def compare(
    responses: Mapping[NoiseKey, Rollout],
    others: Mapping[NoiseKey, Rollout],
    decoder: Decoder,
    exact: Decoder,
    params: SamplingParams,
) -> Agreement:
    """decoder: of the engine, where it runs; exact: the same in float32 on the CPU."""
    assert responses.keys() == others.keys(), "both engines answered all requests"
    tokens, shares = 0, []
    for key, ours in responses.items():
        theirs, first = others[key].tokens, ours.prompt_len
        most = min(len(ours.tokens), len(theirs))
        differs = (ours.tokens[:most] != theirs[:most]).nonzero().flatten().tolist()
        at = differs[0] if differs else most
        tokens += at - first + bool(differs)
        if differs:
            shares.append(
                _share(ours.tokens[:at], key, [int(ours.tokens[at]), int(theirs[at])], decoder, exact, params)
            )
        elif len(ours.tokens) != len(theirs):
            shares.append(torch.inf)  # equal tokens end a response at the same place
    near = sum(share <= 1 for share in shares)
    return Agreement(tokens, near, len(shares) - near, max(shares, default=0.0))


def _share(
    text_T: Tensor, key: NoiseKey, pair: list[int], decoder: Decoder, exact: Decoder, params: SamplingParams
) -> float:
    narrow_V, exact_V = (_logits(d, text_T) for d in (decoder, exact))
    likely = exact_V.topk(min(_LIKELY, len(exact_V))).indices
    rounding = max(float((narrow_V - exact_V)[likely].abs().max()), _LEAST)
    keys_12 = row_keys(torch.tensor([stream_key(key)]), torch.tensor([len(text_T)]))
    noise = gumbel_noise(keys_12, torch.tensor(pair, dtype=torch.int32))[0] if params.temperature else torch.zeros(2)
    scores = exact_V[pair] / (params.temperature or 1.0) + noise
    return float((scores[0] - scores[1]).abs()) / (2 * rounding / (params.temperature or 1.0))


@torch.inference_mode()
def _logits(decoder: Decoder, text_T: Tensor) -> Tensor:
    device, offsets = decoder.head_weight.device, torch.tensor([0, len(text_T)])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_causal_attention(q, k, v, offsets)

    hidden = decoder(text_T.to(device, torch.int64), torch.arange(len(text_T), device=device), attend)
    return decoder.logits(hidden.last_TD[-1:])[0].float().cpu()

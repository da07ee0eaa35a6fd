"""Which tokens a request gets from a pass that verifies a chain of drafts.  Knows no vLLM."""

from collections.abc import Sequence

import torch
from torch import Tensor

NO_TOKEN = -1  # vLLM's placeholder


def emitted(tokens_N: Tensor, counts: Sequence[int], drafts: Tensor | None, width: int) -> Tensor:
    """Accepted tokens and the one after them, [B, width] int64, filled up with NO_TOKEN.

    tokens_N: the target's choice after each input; counts: inputs of each request, its newest token and its drafts;
    drafts: all draft tokens in order, None where there are none.

    The choices 5, 6, 7 after a newest token and the drafts 5, 9: draft 5 is right, 9 is not, so 5 and 6 are emitted.
    """
    sizes = torch.tensor(counts, device=tokens_N.device)
    first_B = sizes.cumsum(0) - sizes
    steps_K = torch.arange(width, device=tokens_N.device)
    own_BK = steps_K < sizes[:, None]
    chosen_BK = tokens_N[(first_B[:, None] + steps_K).clamp(max=len(tokens_N) - 1)]
    accepted_B = torch.zeros_like(sizes)
    if drafts is not None and drafts.numel():
        # Draft token j of a request is right if the target chose it after the j inputs before it.
        place_BK = (first_B[:, None] - torch.arange(len(counts), device=tokens_N.device)[:, None] + steps_K[:-1]).clamp(
            max=drafts.numel() - 1
        )
        right_BK = (drafts.long()[place_BK] == chosen_BK[:, :-1]) & own_BK[:, 1:]
        accepted_B = right_BK.long().cumprod(1).sum(1)
    return torch.where(own_BK & (steps_K <= accepted_B[:, None]), chosen_BK, torch.full_like(chosen_BK, NO_TOKEN))


def merged(ours: Sequence[Tensor], theirs: Sequence[Tensor], other_B: Tensor) -> list[Tensor]:
    """Tensors of the places that `emitted` has, request by request, [B * places, ..]: those of the requests `other_B`
    as vLLM made them.  vLLM may have made fewer places, if none of its requests has a draft."""
    result = []
    for own, other in zip(ours, theirs, strict=True):
        own_BK, other_BK = (x.unflatten(0, (len(other_B), -1)) for x in (own.clone(), other))
        own_BK[other_B, : other_BK.shape[1]] = other_BK[other_B].to(own.dtype)
        result.append(own_BK.flatten(0, 1))
    return result

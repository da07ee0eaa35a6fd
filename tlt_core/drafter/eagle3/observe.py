"""What a target says about token sequences: `TrainSequence`s made off-line, and the distributions they stand for.

Rollout leaves TrainSequences behind, because its passes compute all that is in them; `observe` makes them of texts.

Shapes: L tokens of one sequence, P sampled tokens, T positions of a pass, E tapped width, D hidden size, J draft
vocabulary, N rows that are read.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.packed_attention import packed_causal_attention
from tlt_core.drafter.eagle3.model import Eagle3Model
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import NoiseKey
from tlt_core.model.decoder import Decoder


def draft_probs(sequence: TrainSequence, rows: slice, head_JD: Tensor) -> Tensor:
    """The target's probabilities on the draft vocabulary, [N, J] float32 on the head's device, not renormalised.

    rows: of the sequence's P distributions.  head: the draft vocabulary's rows of the LM head that sampled the
    sequence, in the dtype to compute in.  Logits are rounded to the dtype that they were sampled in.
    """
    last_ND = sequence.last_PD[rows].to(head_JD.device, head_JD.dtype)
    logits_NJ = F.linear(last_ND, head_JD).to(sequence.last_PD.dtype).float()
    return logits_NJ.sub_(sequence.lognorms_P[rows, None].to(head_JD.device)).exp_()


@torch.inference_mode()
def observe(
    decoder: Decoder,
    sequences: Sequence[Tensor],
    model: Eagle3Model,
    *,
    firsts: Sequence[int],
    dtype: torch.dtype,
    streams: Sequence[int] | None = None,
) -> list[TrainSequence]:
    """Run the target over whole token sequences ([L] int, L > 1) in one packed pass; keep what training needs.

    Their policy version is 0.  dtype: of the tapped hidden states.  streams: None where nobody measures acceptance at
    a temperature.
    """
    device = decoder.head_weight.device
    tokens = [tokens_L.to(device, torch.int64) for tokens_L in sequences]
    lengths = [len(tokens_L) - 1 for tokens_L in tokens]
    offsets_S1 = torch.tensor([0, *lengths]).cumsum(0)
    positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        return packed_causal_attention(q_THd, k_TKd, v_TKd, offsets_S1)

    hidden = decoder(torch.cat([tokens_L[:-1] for tokens_L in tokens]), positions_T, attend, taps=model.config.taps)
    assert hidden.taps_TE is not None, "an EAGLE-3 drafter has taps"
    observed = []
    parts = zip(tokens, hidden.last_TD.split(lengths), hidden.taps_TE.split(lengths), firsts, strict=True)
    for index, (tokens_L, last_LD, taps_LE, first) in enumerate(parts):
        last_PD = last_LD[first - 1 :]
        lognorms_P = decoder.logits(last_PD).float().logsumexp(-1)  # of one sequence: the whole vocabulary is large
        observed.append(
            TrainSequence(
                key=NoiseKey(0, 0, index, 0),
                policy_version=0,
                stream=0 if streams is None else streams[index],
                first=first,
                tokens_L=tokens_L.to("cpu", torch.int32),
                taps_LE=taps_LE.to("cpu", dtype, copy=True),
                last_PD=last_PD.to("cpu", copy=True),
                lognorms_P=lognorms_P.cpu(),
            )
        )
    return observed

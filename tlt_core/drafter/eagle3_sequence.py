"""What the drafter is trained on: a response as its target saw it.

Rollout leaves TrainSequences behind (its passes compute all that is in them); `observe` makes them off-line.

Row p of a sequence is one position of the drafter: it reads the target's hidden state of token p and the token p + 1,
and predicts token p + 2 against the target's distribution at position p + 1.  The rows whose token was sampled, and
that have something to read, are trained: p = max(first - 2, 0) .. L - 3.

Shapes: L tokens of one sequence, P = L - first sampled tokens, T positions of a pass, E tapped width, H query heads, K
key/value heads, d head size, D hidden size, J draft vocabulary, N positions that are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.packed_attention import packed_causal_attention
from tlt_core.drafter.eagle3_model import Eagle3Model
from tlt_core.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class HeadProbs:
    """The target's probabilities on the draft vocabulary, [P, J], computed when they are read: `probs[2:5]`.

    What rollout leaves behind is D + 1 numbers a token where the probabilities are J: log p(v) = W_v h - lognorm.
    """

    last_PD: Tensor  # h, hidden states after the final norm, in the type of the target's logits
    lognorms_P: Tensor  # float32, over the whole vocabulary
    head_JD: Tensor  # rows of the LM head that those hidden states met, in the type to compute in

    def __post_init__(self) -> None:
        assert len(self.last_PD) == len(self.lognorms_P), "a log-normaliser for each position"

    def __len__(self) -> int:
        return len(self.last_PD)

    def __getitem__(self, rows: slice) -> Tensor:
        """Float32, on the head's device.  Logits are rounded as they were when sampled from."""
        head_JD = self.head_JD
        logits_NJ = F.linear(self.last_PD[rows].to(head_JD.device, head_JD.dtype), head_JD)
        logits_NJ = logits_NJ.to(self.last_PD.dtype).float()
        return logits_NJ.sub_(self.lognorms_P[rows, None].to(head_JD.device)).exp_()

    @property
    def nbytes(self) -> int:
        """Memory of the positions; the head is shared."""
        return self.last_PD.nbytes + self.lognorms_P.nbytes


class TrainSequence(NamedTuple):
    """One response with its prompt.

    A prompt of 3 tokens and 2 sampled ones: tokens_L=[1, 9, 4, 7, 2], taps_LE of positions 0 .. 3 at least, first=3,
    probs_PJ of positions 2 and 3, which are those that tokens 3 and 4 were sampled from; rows 1 and 2 are trained.
    """

    tokens_L: Tensor  # int64
    taps_LE: Tensor  # hidden states of positions 0 .. L - 2 at least: the target never runs the last token
    probs_PJ: Tensor | HeadProbs  # row i: the target's (at temperature 1) at position first - 1 + i, not renormalised
    first: int  # index of the first sampled token (the length of the prompt), at least 1
    stream: int = 0  # base of the noise that it was sampled with, see `sampling.stream_key`

    @property
    def earliest(self) -> int:
        """The first row that is trained: drafting began here at the earliest."""
        return max(self.first - 2, 0)

    @property
    def rows(self) -> int:
        """Rows that are trained (at depth 1)."""
        return max(len(self.tokens_L) - 2 - self.earliest, 0)

    @property
    def num_bytes(self) -> int:
        """Memory of its tensors."""
        return self.tokens_L.nbytes + self.taps_LE.nbytes + self.probs_PJ.nbytes


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

    Hidden states and probabilities are kept in `dtype`.  streams: None where nobody measures acceptance at a
    temperature.
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
    ids_J, observed = model.draft_ids_J.to(device), []
    parts = zip(tokens, hidden.last_TD.split(lengths), hidden.taps_TE.split(lengths), firsts, strict=True)
    for index, (tokens_L, last_LD, taps_LE, first) in enumerate(parts):
        # Of one sequence: the whole vocabulary is large.
        probs_PJ = decoder.logits(last_LD[first - 1 :]).float().softmax(-1)[:, ids_J]
        stream = 0 if streams is None else streams[index]
        observed.append(TrainSequence(tokens_L, taps_LE.to(dtype, copy=True), probs_PJ.to(dtype), first, stream))
    return observed

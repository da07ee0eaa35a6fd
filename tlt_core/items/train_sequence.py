"""What the drafter learns from: one finished response, as the policy saw it.

The policy's distribution after position t is softmax(W h_t) with the LM head W.  It is not stored: the hidden state h_t
and the log-normaliser of its logits restore it: log p(v) = W_v h_t - lognorm_t.

Row p takes the hidden states of position p and token p + 1, and predicts token p + 2.  Trained are the rows that
predict a sampled token: p = max(first - 2, 0) .. L - 3.

Shapes: L tokens, prompt included; P = L - first sampled tokens; E tapped width, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlt_core.items.types import NoiseKey, require

TENSORS = ("tokens_L", "taps_LE", "last_PD", "lognorms_P")


def sequence_id(key: Sequence[int], first: int) -> str:
    """Seed, step, prompt, sample, and where the response begins, which tells the turns of an episode apart:
    sequence_id(NoiseKey(0, 12, 3, 1), 84) == "0.12.3.1.84"."""
    return ".".join(map(str, (*key, first)))


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One response with its prompt.

    A prompt of 3 tokens and 2 sampled ones: tokens_L=[1, 9, 4, 7, 2], first=3, taps_LE of positions 0 .. 3, last_PD and
    lognorms_P of positions 2 and 3, from which tokens 3 and 4 were sampled; rows 1 and 2 are trained.

    Raises ValueError where the tensors do not fit together, or are not on the CPU.
    """

    key: NoiseKey
    policy_version: int
    stream: int  # base of the noise it was sampled with, see `sampling.stream_key`
    first: int  # length of the prompt: index of the first sampled token
    tokens_L: Tensor  # int32
    taps_LE: Tensor  # hidden states of positions 0 .. L - 2: the policy never runs the last token
    last_PD: Tensor  # after the final norm, at positions first - 1 .. L - 2; in the dtype of the policy's logits
    lognorms_P: Tensor  # float32, at the same positions, over the whole vocabulary at temperature 1
    id: str = field(init=False)  # see `sequence_id`: the same in every run with this seed
    nbytes: int = field(init=False)  # of the tensors

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", sequence_id(self.key, self.first))
        object.__setattr__(self, "nbytes", sum(t.nbytes for t in self.tensors.values()))
        length = len(self.tokens_L)
        require(self.tokens_L.dtype == torch.int32, f"tokens are {self.tokens_L.dtype}, not int32")
        require(0 < self.first < length, f"{self.first} prompt tokens of {length}")
        require(len(self.taps_LE) == length - 1, f"{len(self.taps_LE)} hidden states of {length} tokens")
        sampled = length - self.first
        require(len(self.last_PD) == len(self.lognorms_P) == sampled, f"not one distribution each of {sampled} tokens")
        for states in (self.taps_LE, self.last_PD):
            require(states.is_floating_point(), f"hidden states are {states.dtype}")
        require(self.lognorms_P.dtype == torch.float32, f"log-normalisers are {self.lognorms_P.dtype}")
        require(all(t.device.type == "cpu" for t in self.tensors.values()), "not on the CPU: copy it there first")

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in TENSORS}

    @property
    def step(self) -> int:
        return self.key.step

    @property
    def earliest(self) -> int:
        """The first trained row: drafting cannot begin before it."""
        return max(self.first - 2, 0)

    @property
    def rows(self) -> int:
        return max(len(self.tokens_L) - 2 - self.earliest, 0)

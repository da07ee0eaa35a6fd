"""The two ends of a policy, its embedding and its LM head: all that training a drafter needs of it.

Where the engine that decodes is a process of its own, a worker keeps these two tensors alone.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from tlt_core.model.config import DecoderConfig
from tlt_core.model.load import ENDS, load_config, read_tensors


class EdgeWeights:
    """Has `config`, `embed_tokens` and `head_weight` as `Decoder` has them."""

    def __init__(self, config: DecoderConfig, embedding_VD: Tensor, head_VD: Tensor | None) -> None:
        """head_VD: None where the head is the embedding."""
        self.config = config
        self.embed_tokens = nn.Embedding.from_pretrained(embedding_VD, freeze=True)
        self._head_VD = head_VD

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> "EdgeWeights":
        """Of a Hugging Face folder.  Raises ModelError."""
        config, tensors = load_config(folder), read_tensors(folder, only=ENDS)
        embedding, head = ENDS
        embedding_VD = tensors[embedding].to(device, dtype)
        head_VD = None if config.tie_word_embeddings else tensors[head].to(device, dtype)
        return cls(config, embedding_VD, head_VD)

    @property
    def head_weight(self) -> Tensor:
        return self.embed_tokens.weight if self._head_VD is None else self._head_VD

    def through(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the policy's new weights on, and keep the two, in place.  Names as in `Decoder`."""
        for name, value in weights:
            if name == "embed_tokens.weight":
                self.embed_tokens.weight.data.copy_(value)
            elif name == "lm_head.weight" and self._head_VD is not None:
                self._head_VD.copy_(value)
            yield name, value

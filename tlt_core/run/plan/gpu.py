"""Costs of a step on GPUs that are not here, from their published rates.

    pass over T new tokens of n requests that hold C tokens each (roofline):

        seconds = max((weights + n C keys-and-values) / bandwidth, 2 P T / operations) + launch

    round with a chain of K drafts: K passes of the drafter, one of the policy over n (K + 1) tokens,
    1 + a + a^2 + .. + a^K tokens for each request; a: share of drafts accepted, the same at each position

P: parameters.  The chain that gives most tokens a second is taken at each number of live requests: what a tuner finds
that makes no mistake.  Rates are data sheets' (dense bfloat16); the shares of them that are reached are believed, as
are the seconds of launches.  `tlt bench engines --device cuda` measures.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tlt_core.drafter.eagle3.model import Eagle3Config, Eagle3Model
from tlt_core.machine.memory import GPUS_GB
from tlt_core.model.config import DecoderConfig
from tlt_core.model.decoder import Decoder
from tlt_core.run.plan.errors import PlanError
from tlt_core.run.plan.simulate import Costs

CHAINS = (0, 1, 2, 3, 4, 5, 7, 10)
ACCEPTANCE = 0.75  # of each draft: 3.3 tokens a round with chains of five
_BANDWIDTH, _OPERATIONS = 0.75, 0.6  # reached while decoding
_UPDATE = 0.4  # of the operations, while training
_TOGETHER = 0.85  # of each, when GPUs share a model
_PASS_S, _DRAFT_S = 1.0e-3, 0.3e-3  # scheduler, sampling and launches of a pass; of a drafter's, inside a graph
_USABLE = 0.9  # of a GPU's memory, for weights, keys and values
_PUBLISH = 25e9  # bytes a second into the engine, over PCIe
_OTHER_S, _ROLLOUT_S = 2.0, 1.0  # rewards, tracking, waking up; calls and prompts
_DRAFT_VOCAB = 32_000


class Gpu(NamedTuple):
    """A data sheet's rates."""

    bandwidth: float  # bytes a second
    operations: float  # bfloat16, dense, a second


GPUS = {
    "l4": Gpu(0.300e12, 121e12),
    "rtx4090": Gpu(1.008e12, 165e12),
    "rtx5090": Gpu(1.792e12, 209e12),
    "a100-40": Gpu(1.555e12, 312e12),
    "l40s": Gpu(0.864e12, 362e12),
    "a100": Gpu(2.039e12, 312e12),
    "h100": Gpu(3.35e12, 989e12),
    "h200": Gpu(4.8e12, 989e12),
    "b200": Gpu(8.0e12, 2250e12),
}


class Worker:
    """One worker's GPUs and the model on them."""

    def __init__(
        self, gpu: str, model: DecoderConfig, *, gpus: int, lengths: Sequence[int], workers: int, acceptance: float
    ) -> None:
        """lengths: of all responses of a step.  Raises PlanError where the weights leave no room."""
        together = gpus * (_TOGETHER if gpus > 1 else 1.0)
        self._gpu = Gpu(GPUS[gpu].bandwidth * together, GPUS[gpu].operations * together)
        self._parameters, self._draft_parameters = _parameters(model)
        self._kv_bytes = 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim  # of a token
        self._attention = 4 * model.num_layers * model.num_heads * model.head_dim  # operations of a token on another
        self._acceptance = acceptance
        self._by_rank = sorted(lengths, reverse=True)[::workers]  # a worker's share
        room = _USABLE * GPUS_GB[gpu] * 1e9 * gpus - 2 * self._parameters
        longest = self._kv_bytes * self._by_rank[0]
        if room < longest:
            raise PlanError(
                f"the weights take {2 * self._parameters / 1e9:.0f} GB, a response of {self._by_rank[0]} tokens "
                f"{longest / 1e9:.1f}: {gpus} x {gpu} have {_USABLE * GPUS_GB[gpu] * gpus:.0f} GB for both.  Name a "
                "larger GPU, or more of them with --gpus-per-worker"
            )
        mean = sum(self._by_rank) / len(self._by_rank)
        self.most_live = max(int(room / (self._kv_bytes * mean)), 1)

    def rate(self, chains: Sequence[int] = (0,)) -> Callable[[int], float]:
        """Tokens a second of one request by the number of live ones, with the best chain of these lengths."""
        return functools.cache(lambda live: max(self.tokens(k) / self.round_s(k, live) for k in chains))

    def best(self, live: int) -> int:
        """The chain that gives most tokens a second."""
        return max(CHAINS, key=lambda k: self.tokens(k) / self.round_s(k, live))

    def tokens(self, chain: int) -> float:
        """Expected of a request and round."""
        return sum(self._acceptance**i for i in range(chain + 1))

    def round_s(self, chain: int, live: int) -> float:
        """Drafts and the pass that verifies them."""
        own = self._pass_s(self._parameters, live * (chain + 1), live * self._kv_bytes * self._context(live)) + _PASS_S
        return own + chain * (self._pass_s(self._draft_parameters, live, 0.0) + _DRAFT_S)

    def costs(self) -> Costs:
        """Of everything but decoding."""
        seen = sum(n * n for n in self._by_rank) / sum(self._by_rank) / 2  # tokens that a token attends to
        operations = 3 * (2 * self._parameters + seen * self._attention)  # forward, and twice that backward
        return Costs(
            update_token_s=operations / (_UPDATE * self._gpu.operations),
            update_fixed_s=2 * self._parameters / _PUBLISH,
            rollout_fixed_s=_ROLLOUT_S,
            other_s=_OTHER_S,
        )

    def _pass_s(self, parameters: int, tokens: int, kv_bytes: float) -> float:
        moved_s = (2 * parameters + kv_bytes) / (_BANDWIDTH * self._gpu.bandwidth)
        return max(moved_s, 2 * parameters * tokens / (_OPERATIONS * self._gpu.operations))

    def _context(self, live: int) -> int:
        """Tokens of a response when so many are left: all that began together and are live have as many."""
        return self._by_rank[min(live, len(self._by_rank)) - 1]


@functools.cache
def _parameters(model: DecoderConfig) -> tuple[int, int]:
    """Of the policy; of the drafter, with the rows of the head that it computes."""
    with torch.device("meta"):
        policy, drafter = (
            Decoder(model),
            Eagle3Model(Eagle3Config.for_target(model, min(_DRAFT_VOCAB, model.vocab_size))),
        )
    return sum(p.numel() for p in policy.parameters()), sum(p.numel() for p in drafter.parameters())

"""The policy as the update sees it: packed tokens in, log-probabilities of completion tokens out.

Shapes: U input tokens, Q attention segments, C completion tokens.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.attention.packed_attention import packed_causal_attention
from kernels.sampling.token_logprob import linear_token_logprob
from tlt_core.grpo.batch import TrainBatch
from tlt_core.grpo.micro_batch import MicroBatch, micro_batches
from tlt_core.model.decoder import Decoder


class PolicyModel(nn.Module):
    def __init__(self, decoder: Decoder, *, temperature: float, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.decoder = decoder
        self.temperature = temperature
        if activation_checkpointing:
            decoder.run_layer = _recomputing  # type: ignore[method-assign, assignment]

    def forward(
        self,
        tokens_U: Tensor,
        positions_U: Tensor,
        offsets_Q1: Tensor,
        keys: Tensor | None,
        key_offsets_Q1: Tensor,
        outputs_C: Tensor,
        targets_C: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy at the sampling temperature, both [C] float32 (fields of `MicroBatch`)."""

        def attend(layer: int, q_UHd: Tensor, k_UKd: Tensor, v_UKd: Tensor) -> Tensor:
            if keys is not None:
                k_UKd, v_UKd = k_UKd.index_select(0, keys), v_UKd.index_select(0, keys)
            return packed_causal_attention(
                q_UHd, k_UKd, v_UKd, offsets_Q1, key_offsets_S1=key_offsets_Q1, together=True
            )

        hidden_UD = self.decoder(tokens_U, positions_U, attend).last_TD
        hidden_CD = hidden_UD.index_select(0, outputs_C)
        logprob_C, entropy_C = linear_token_logprob(
            hidden_CD, self.decoder.head_weight, targets_C, temperature=self.temperature
        )
        return logprob_C, entropy_C


def inputs_of(micro: MicroBatch, device: torch.device) -> tuple[Tensor | None, ...]:
    """Arguments of `PolicyModel.forward`, on its device.  Segment offsets stay on the host, which reads them."""
    return (
        micro.tokens_U.to(device),
        micro.positions_U.to(device),
        micro.offsets_Q1,
        None if micro.keys is None else micro.keys.to(device),
        micro.key_offsets_Q1,
        micro.outputs_C.to(device),
        micro.targets_C.to(device),
    )


class FrozenPolicy:
    """Log-probabilities under a model that is not trained: the reference of the KL penalty."""

    def __init__(self, decoder: Decoder, *, temperature: float, token_budget: int, device: torch.device) -> None:
        self._model = PolicyModel(decoder.requires_grad_(False), temperature=temperature)
        self._token_budget, self._device = token_budget, device

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """[C] float32 on the CPU, aligned with batch.rollout_logprobs_C."""
        passes = micro_batches(batch, token_budget=self._token_budget, skip_zero_advantage=False)
        return measure_logprobs(self._model, passes, len(batch.rollout_logprobs_C), device=self._device)


@torch.no_grad()
def measure_logprobs(
    model: Callable[..., tuple[Tensor, Tensor]], passes: Iterable[MicroBatch], count: int, *, device: torch.device
) -> Tensor:
    """Log-probabilities of a share's `count` completion tokens, [C] float32 on the CPU."""
    result_C = torch.zeros(count)
    for micro in passes:
        result_C[micro.place_C] = model(*inputs_of(micro, device))[0].cpu()
    return result_C


def _recomputing(layer: nn.Module, *arguments: Any) -> Any:
    """Run a layer and keep only its input; backward computes the activations again."""
    return checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)

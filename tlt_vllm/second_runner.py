"""Exact sampling on vLLM's second model runner (V2): the same tokens as `exact`, whose docstring says which.

    row of logits -> 0 at the token that our definition samples there, -inf elsewhere

So vLLM's sampler draws that token, and its rejection sampler keeps a draft token exactly if it is that token, whatever
the temperature.  Drafts take the noise of their positions, by operations that a graph can capture.

Shapes: B requests of the batch, N rows of logits, S slots that vLLM keeps for requests, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kernels.sampling.coupled_sample import coupled_sample
from tlt_core.items.types import SamplingParams
from tlt_core.model.sampling import choose, row_keys
from tlt_vllm.rows import Row, Rows


class SlotSampler:
    """Stands before methods of this runner's sampler and speculator."""

    def __init__(self, runner: Any) -> None:
        """Before graphs are captured, and before the first request."""
        sampler, speculator = runner.sampler, runner.speculator
        self._names = runner.req_states.index_to_req_id
        self._rows = Rows(seed=runner.model_config.seed, replica=runner.parallel_config.data_parallel_index)
        self._of_name: dict[str, Row | None] = {}  # until a request has ended: one that was preempted comes back
        self._of_slot: dict[int, Row | None] = {}
        self._streams_S = torch.zeros(runner.max_num_reqs, dtype=torch.int64, device=runner.device)
        self.foreign = 0  # requests that vLLM sampled, added up over steps
        add, apply, finish = sampler.add_request, sampler.apply_sampling_params, runner.finish_requests

        def add_request(slot: int, wanted: Any) -> None:
            self._add(slot, wanted)
            add(slot, wanted)

        def apply_sampling_params(*args: Any, **options: Any) -> Tensor:
            return self._apply(apply, *args, **options)

        def finish_requests(scheduled: Any) -> None:
            finish(scheduled)
            self._forget(scheduled.finished_req_ids)

        sampler.add_request, sampler.apply_sampling_params = add_request, apply_sampling_params
        runner.finish_requests = finish_requests
        if speculator is not None and hasattr(speculator, "sample_draft") and speculator.draft_logits is None:
            self._stand_before_drafts(speculator)

    def _add(self, slot: int, wanted: Any) -> None:
        name = self._names[slot]
        if name not in self._of_name:
            self._of_name[name] = self._rows.new(name, wanted)
        row = self._of_slot[slot] = self._of_name[name]
        self._streams_S[slot] = 0 if row is None else row.stream

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._of_name.pop(name, None)

    def _apply(
        self,
        original: Callable[..., Tensor],
        logits_NV: Tensor,
        slots_N: Tensor,
        slots_B: Tensor,
        slots: Any,  # slots_B on the host
        positions_N: Tensor,
        *more: Any,
        **options: Any,
    ) -> Tensor:
        """As `Sampler.apply_sampling_params`."""
        rows = {int(slot): self._of_slot.get(int(slot)) for slot in slots}
        if not any(rows.values()):
            return original(logits_NV, slots_N, slots_B, slots, positions_N, *more, **options)
        keys_N2 = row_keys(self._streams_S[slots_N.long()], positions_N.long() + 1)
        foreign = sum(row is None for row in rows.values())
        if not foreign:
            result_NV = torch.full_like(logits_NV, -torch.inf, dtype=torch.float32)
        else:
            theirs_NV = original(logits_NV.clone(), slots_N, slots_B, slots, positions_N, *more, **options)
            result_NV = theirs_NV.float()
            self.foreign += foreign
        groups: dict[SamplingParams, list[int]] = defaultdict(list)
        for slot, row in rows.items():
            if row is not None:
                groups[row.params].append(slot)
        for params, members in groups.items():
            here_N: slice | Tensor = slice(None)  # a mask would make a GPU's host wait
            if len(members) < len(rows):
                here_N = torch.isin(slots_N, torch.tensor(members, device=slots_N.device))
            part_NV = logits_NV[here_N]
            tokens_N = choose(part_NV, keys_N2[here_N], params).tokens_N
            chosen_NV = torch.full_like(part_NV, -torch.inf, dtype=torch.float32)
            result_NV[here_N] = chosen_NV.scatter_(1, tokens_N[:, None].long(), 0.0)
        return result_NV

    def _stand_before_drafts(self, speculator: Any) -> None:
        def sample_draft(
            hidden_states: Tensor,
            sample_src_positions: Tensor,
            idx_mapping: Tensor,
            temperature: Tensor,
            seeds: Tensor,
            draft_step: Tensor,
            draft_logits: Tensor | None,
            spec_step_idx: int = 0,
            **more: Any,
        ) -> Tensor:
            """Of positions: that of the token before the drafted one."""
            logits_BV = speculator.compute_draft_logits(hidden_states, spec_step_idx)
            slots_B = idx_mapping.long().clamp(min=0)  # padding of a captured batch
            heat_B = temperature[slots_B]
            keys_B2 = row_keys(self._streams_S[slots_B], sample_src_positions.long() + 1)
            scaled_BV = logits_BV.float() / torch.where(heat_B > 0, heat_B, 1.0)[:, None]
            noisy_B = coupled_sample(scaled_BV, keys_B2, temperature=1.0).tokens_N
            drafted_B: Tensor = torch.where(heat_B > 0, noisy_B.long(), logits_BV.argmax(-1))
            speculator._maybe_predict_acceptance(logits_BV, idx_mapping, draft_step)
            return drafted_B

        speculator.sample_draft = sample_draft

"""The drafter's pass over new tokens in steps in which it drafts nothing, put off and done for many steps at once.

    no drafts, or n-grams   keep (token, position, states, slot) of each new token
    drafts of the model     one pass over what was kept, which drafts nothing | vLLM's own pass, which drafts

No token of the policy changes.  A request that leaves before its pass was made up leaves gaps in the drafter's keys:
requests that continue its text from the prefix cache get worse drafts there.

Written for vLLM's V1 runner.  Shapes: B requests of the batch, N tokens kept, E tapped width.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_TOKENS = 1024  # kept at once: 25 MB of states of a 7B model


class _Step(NamedTuple):
    rows: Mapping[str, int]  # of the batch, by request
    places: Mapping[str, range]  # of its tokens among the step's
    ends: Mapping[str, int]  # position after its last token
    tokens_N: Tensor
    next_B: Tensor  # sampled after its last token
    positions_N: Tensor
    slots_N: Tensor
    states_NE: Tensor


class Deferred:
    """One a runner.  `put_off` or `make_up` is called for each of the drafter's passes."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._steps: list[_Step] = []
        self._count = 0  # tokens kept
        self._longest = runner.num_spec_tokens
        self.most_tokens = min(MOST_TOKENS, runner.max_num_tokens)
        self.passes = 0  # that make up for others

    def put_off(self, original: Callable[..., Tensor], options: Mapping[str, Any]) -> Tensor | None:
        """What `propose(**options)` returns where the model drafts nothing, its pass put off; None: it is due now."""
        metadata, drafter = options["common_attn_metadata"], self._runner.drafter
        names = list(self._runner.input_batch.req_ids)
        plain = (
            options["num_speculative_tokens"] == 0
            and options["mm_embed_inputs"] is None
            and drafter.method == "eagle3"
            and not drafter.needs_extra_input_slots
            and not drafter.uses_mrope
            and self._runner.parallel_config.data_parallel_size == 1  # ranks would wait for each other's passes
            and metadata.max_query_len <= 1 + self._longest
            and len(names) == metadata.num_reqs
        )
        if not plain:
            return None
        begins = self._runner.input_batch.num_computed_tokens_cpu
        self._forget(names)
        starts, kept = metadata.query_start_loc_cpu.tolist(), None
        lasts = [start - 1 for start in starts[1:]]
        if options["token_indices_to_sample"] is not None:  # drafts were verified: those behind the last one are wrong
            lasts = options["token_indices_to_sample"].tolist()
            kept = torch.tensor(
                [at for first, last in zip(starts, lasts, strict=False) for at in range(first, last + 1)]
            )
        counts = [last - first + 1 for first, last in zip(starts, lasts, strict=False)]
        firsts = [0, *accumulate(counts)]

        def own(values: Tensor) -> Tensor:
            """Of the tokens that stay.  A copy: the next step overwrites vLLM's buffers."""
            return values[: starts[-1]].clone() if kept is None else values[kept.to(values.device)]

        self._steps.append(
            _Step(
                rows={name: b for b, name in enumerate(names)},
                places={name: range(firsts[b], firsts[b + 1]) for b, name in enumerate(names)},
                ends={name: int(begins[b]) + counts[b] for b, name in enumerate(names)},
                tokens_N=own(options["target_token_ids"]),
                next_B=options["next_token_ids"].clone(),
                positions_N=own(options["target_positions"]),
                slots_N=own(metadata.slot_mapping),
                states_NE=own(options["target_hidden_states"]),
            )
        )
        self._count += firsts[-1]
        if self._count + len(names) * (1 + self._longest) > self.most_tokens:
            self._pass(original, options)
        return torch.empty(len(names), 0, device=metadata.slot_mapping.device, dtype=torch.int64)

    def make_up(self, original: Callable[..., Tensor], options: Mapping[str, Any]) -> None:
        """Before a pass that is due: the ones that were put off."""
        self._forget(list(self._runner.input_batch.req_ids))
        if self._steps:
            self._pass(original, options)

    def _forget(self, names: list[str]) -> None:
        """Requests that have ended, that were preempted (their blocks may be another's), or whose tokens have a gap."""
        if not self._steps:
            return
        begins = self._runner.input_batch.num_computed_tokens_cpu
        ends = self._steps[-1].ends
        kept = {name for b, name in enumerate(names) if ends.get(name) == int(begins[b])}
        if len(kept) == len(self._steps[-1].rows):  # the usual case, in every step
            return
        steps = [
            step._replace(rows={name: row for name, row in step.rows.items() if name in kept}) for step in self._steps
        ]
        self._steps = [step for step in steps if step.rows]
        self._count = sum(len(step.places[name]) for step in self._steps for name in step.rows)

    def _pass(self, original: Callable[..., Tensor], options: Mapping[str, Any]) -> None:
        steps, self._steps, self._count = self._steps, [], 0
        metadata, device = options["common_attn_metadata"], options["target_token_ids"].device
        places_of: dict[str, list[int]] = {name: [] for name in steps[-1].rows}  # among all that was kept
        first = 0
        for step in steps:
            for name in step.rows:
                places_of[name] += [first + place for place in step.places[name]]
            first += len(step.tokens_N)
        names = sorted(places_of, key=lambda name: len(places_of[name]))  # some attention wants short queries first
        places = [places_of[name] for name in names]
        counts = list(map(len, places))
        order_N = torch.tensor(np.concatenate(places)).to(device, non_blocking=True)
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        ends = torch.tensor([steps[-1].ends[name] for name in names], dtype=torch.int32)
        batch = {name: b for b, name in enumerate(self._runner.input_batch.req_ids)}
        rows_B = torch.tensor([batch[name] for name in names]).to(device, non_blocking=True)
        last_B = torch.tensor([steps[-1].rows[name] for name in names]).to(device, non_blocking=True)
        kept = metadata.replace(
            query_start_loc=starts.to(device, non_blocking=True),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(device, non_blocking=True),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(names),
            num_actual_tokens=len(order_N),
            max_query_len=max(counts),
            max_seq_len=int(ends.max()),
            block_table_tensor=metadata.block_table_tensor[rows_B],
            slot_mapping=torch.cat([step.slots_N for step in steps])[order_N],
            positions=None,
            is_prefilling=None,
            logits_indices_padded=None,
            **{field.name: None for field in fields(metadata) if field.name.endswith("_cache")},  # 0.24 has fewer
        )
        original(
            num_speculative_tokens=0,
            target_token_ids=torch.cat([step.tokens_N for step in steps])[order_N],
            target_positions=torch.cat([step.positions_N for step in steps])[order_N],
            target_hidden_states=torch.cat([step.states_NE for step in steps])[order_N],
            next_token_ids=steps[-1].next_B[last_B],
            token_indices_to_sample=None,
            common_attn_metadata=kept,
            sampling_metadata=options["sampling_metadata"],
            mm_embed_inputs=None,
            num_rejected_tokens_gpu=None,
            slot_mappings=None,
        )
        self.passes += 1

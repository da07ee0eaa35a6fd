"""Hidden states of the target, kept while vLLM decodes: what a drafter is trained on (`items/train_sequence`).

A request has a slot, in main memory, from its first pass to its last.  States of rejected drafts are overwritten by the
next pass.  Prompt tokens that the prefix cache knows are copied from the request that computed them, whose slot stays
readable until it is needed.  A request that finds no slot, or no such copy, is counted as dropped.

Written for vLLM's V1 runner.  Shapes: S slots, C positions, T tokens of a pass, E tapped width, D hidden size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Taken(NamedTuple):
    """What was kept of one response of L tokens, prompt included; P of them sampled."""

    taps_LE: Tensor  # [L - 1, E]
    last_PD: Tensor  # after the final norm, where tokens were sampled
    lognorms_P: Tensor  # float32


class _Slot:
    def __init__(self, index: int) -> None:
        self.index = index
        self.owner: str | None = None
        self.taken = True  # its response has been taken, or there was none
        self.whole = True  # no position is missing
        self.covered = 0  # positions with states, from 0
        self.tokens: list[int] = []  # of the prompt; of the response, too, when that has ended


class Tap:
    def __init__(self, runner: Any, *, capture_mb: int) -> None:
        """capture_mb: main memory for all slots.  It is taken at the first pass."""
        self._runner, self._bytes = runner, capture_mb << 20
        self._slots: list[_Slot] = []
        self._of: dict[str, _Slot] = {}
        self._foreign: set[str] = set()  # requests of the pass that vLLM has sampled
        self._pending: tuple[list[str], Tensor, Tensor, Tensor] | None = None
        self.dropped = 0  # responses without a slot, or with a gap

    def states(self, taps_TE: Tensor, last_TD: Tensor) -> None:
        """A pass of the target has ended; T tokens of the batch, request by request."""
        if not self._slots:
            self._acquire(taps_TE, last_TD)
        slots_B, skipped = self._prepare()
        length, count = self._taps_SCE.shape[1], len(slots_B)
        starts = torch.from_numpy(self._runner.query_start_loc.np[: count + 1]).long()
        row_T = torch.repeat_interleave(torch.arange(count), starts.diff())
        positions_T = self._runner._get_positions(len(row_T)).long().cpu()
        slots_T = torch.tensor(slots_B)[row_T]
        kept_T = (slots_T >= 0).nonzero().flatten()
        places = slots_T[kept_T] * length + positions_T[kept_T]
        for states_SCX, new_TX in ((self._taps_SCE, taps_TE), (self._last_SCD, last_TD)):
            states_SCX.flatten(0, 1).index_copy_(0, places, new_TX[: len(row_T)].cpu()[kept_T])
        self._copy(skipped)  # now, since this pass may have computed them for another request

    def norms(self, row_N: Tensor, positions_N: Tensor, norms_N: Tensor, *, foreign: Sequence[int] = ()) -> None:
        """Log-normalisers of the logits after these positions.  Called before `states` of the same pass.

        foreign: rows of the batch that were sampled otherwise; their responses are not kept."""
        names = list(self._runner.input_batch.req_ids)
        self._pending = (names, row_N, positions_N, norms_N)
        self._foreign = {names[b] for b in foreign}

    def take(self, name: str, *, first: int, length: int, sampled: Sequence[int] = ()) -> Taken | None:
        """What was kept of a response that has ended; None when something is missing.

        first: length of its prompt.  sampled: its tokens, which the next turn of an episode begins with."""
        # vLLM appends a random part to the name that the caller gave.
        own = next((own for own in self._of if name in (own, own.rpartition("-")[0])), name)
        slot = self._of.pop(own, None)
        if slot is None:
            self.dropped += 1
            return None
        slot.taken = True
        slot.tokens += sampled
        if not slot.whole or slot.covered < length - 1:
            self.dropped += 1
            return None
        predicting = slice(first - 1, length - 1)
        return Taken(
            self._taps_SCE[slot.index, : length - 1].clone(),
            self._last_SCD[slot.index, predicting].clone(),
            self._norms_SC[slot.index, predicting].clone(),
        )

    def clear(self) -> None:
        """The policy is another one: no state is worth copying any more."""
        for slot in self._slots:
            slot.taken, slot.covered, slot.owner, slot.tokens = True, 0, None, []
        self._of = {}

    def _acquire(self, taps_TE: Tensor, last_TD: Tensor) -> None:
        positions = self._runner.max_model_len
        each = positions * ((taps_TE.shape[1] + last_TD.shape[1]) * taps_TE.element_size() + 4)
        count = min(max(self._bytes // each, 1), 4 * self._runner.max_num_reqs)
        self._slots = [_Slot(i) for i in range(count)]
        self._taps_SCE = torch.zeros(count, positions, taps_TE.shape[1], dtype=taps_TE.dtype)
        self._last_SCD = torch.zeros(count, positions, last_TD.shape[1], dtype=last_TD.dtype)
        self._norms_SC = torch.zeros(count, positions)

    def _prepare(self) -> tuple[list[int], list[tuple[_Slot, int]]]:
        """The slot of each request of the batch, -1 for none; and slots with the length of what the prefix cache has
        skipped."""
        runner, skipped = self._runner, []
        starts, result = runner.query_start_loc.np, []
        for b, name in enumerate(runner.input_batch.req_ids):
            begin = int(runner.input_batch.num_computed_tokens_cpu[b])
            slot = self._of.get(name) or self._admit(name)
            if slot is None:
                result.append(-1)
                continue
            if begin > slot.covered:
                skipped.append((slot, begin))
            slot.whole &= self._pending is not None and name not in self._foreign
            slot.covered = begin + int(starts[b + 1] - starts[b])
            result.append(slot.index)
        self._write_norms()
        return result, skipped

    def _write_norms(self) -> None:
        if self._pending is None:  # vLLM has sampled the whole batch
            return
        names = self._pending[0]
        row_N, positions_N, norms_N = (values.cpu() for values in self._pending[1:])
        self._pending = None
        slots_B = torch.tensor([self._of[n].index if n in self._of else -1 for n in names])
        slots_N = slots_B[row_N]
        kept_N = (slots_N >= 0).nonzero().flatten()
        places = slots_N[kept_N] * self._norms_SC.shape[1] + positions_N[kept_N]
        self._norms_SC.flatten().index_copy_(0, places, norms_N[kept_N])

    def _admit(self, name: str) -> _Slot | None:
        """A slot whose response was taken, the longest unused first; else one whose request is gone."""
        free = [slot for slot in self._slots if slot.taken]
        if not free:
            free = [slot for slot in self._slots if slot.owner not in self._runner.requests]
        if not free:
            return None
        slot = free[0]
        if slot.owner in self._of and self._of[slot.owner] is slot:
            del self._of[slot.owner]
        self._slots.remove(slot)
        self._slots.append(slot)
        slot.owner, slot.taken, slot.whole, slot.covered = name, False, True, 0
        slot.tokens = list(self._runner.requests[name].prompt_token_ids or [])
        self._of[name] = slot
        return slot

    def _copy(self, skipped: list[tuple[_Slot, int]]) -> None:
        """States of the first tokens, from requests that begin with the same tokens, and have theirs already."""
        waiting = list(skipped)
        while waiting:
            lacking = [slot for slot, _ in waiting]
            left = [(slot, until) for slot, until in waiting if not self._copied(slot, until, lacking)]
            if len(left) == len(waiting):
                for slot, _ in left:
                    slot.whole = False
                return
            waiting = left

    def _copied(self, slot: _Slot, until: int, lacking: Sequence[_Slot]) -> bool:
        wanted = slot.tokens[:until]
        for donor in self._slots:
            has = donor not in lacking and donor.whole and donor.covered >= until
            if has and len(wanted) == until and donor.tokens[:until] == wanted:
                for kept in (self._taps_SCE, self._last_SCD, self._norms_SC):
                    kept[slot.index, :until] = kept[donor.index, :until]
                return True
        return False

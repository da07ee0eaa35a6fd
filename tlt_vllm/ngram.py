"""Drafts of n-grams in an engine whose drafter is a model: what followed the same tokens in the prompt, in the response
or in other responses to the prompt (`tlt_core/drafter/ngram`), with the target's own noise.

Written for vLLM's V1 runner.  Rows of the n-gram drafter are requests of the batch, in another order.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tlt_core.drafter.ngram.drafter import NgramDrafter
from tlt_core.items.speculation import LiveView, MinDraftProbs, Strategy
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams
from tlt_vllm.rows import Row

_READ_EVERY = 16  # steps: a response that ends between two loses so many tokens to the index at most
_NOTHING = torch.empty(0, dtype=torch.int32)


class NgramDrafts:
    """One a runner.  `is_due` is asked in every step that samples."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._drafter = runner, NgramDrafter()
        self._names: list[str] = []  # by row
        self._steps = 0

    def is_due(self, longest: int) -> bool:
        """Whether `step` has something to do in this step: to draft, or to read what was sampled."""
        self._steps += 1
        return longest > 0 or self._steps % _READ_EVERY == 0

    def step(
        self, rows: Sequence[Row | None], sampled: Sequence[Sequence[int]], *, longest: int, least: float
    ) -> list[list[int]]:
        """Chains of at most `longest` tokens, by request of the batch; empty ones where nothing is known.

        rows, sampled: of the batch: its noise, and tokens of this step (none: its prompt was not read to its end).
        least: estimated chance of acceptance that a token needs."""
        batch = self._runner.input_batch
        at = {name: b for b, name in enumerate(batch.req_ids)}
        self._follow(at)
        order = [at[name] for name in self._names]
        lengths = [int(batch.num_tokens_no_spec[b]) + len(sampled[b]) for b in order]
        tokens_BC = torch.zeros(len(order), max(lengths, default=0), dtype=torch.int64)
        for row, (b, length) in enumerate(zip(order, lengths, strict=True)):
            known = length - len(sampled[b])
            tokens_BC[row, :known] = torch.from_numpy(batch.token_ids_cpu[b, :known])
            tokens_BC[row, known:length] = torch.tensor(sampled[b])
        coupled = all(row is not None and row.params.temperature > 0 for row in rows)
        view = LiveView(
            requests=(),
            tokens_BC=tokens_BC,
            lengths=lengths,
            room=[self._runner.max_model_len - length for length in lengths],
            streams_B=torch.tensor([0 if (own := rows[b]) is None else own.stream for b in order]),
            params=SamplingParams(temperature=float(coupled)),
            min_draft_probs=MinDraftProbs(token=least),
        )
        tree = self._drafter.propose(view, Strategy(NgramDrafter.name, longest, 1, longest))
        chains: list[list[int]] = [[] for _ in sampled]
        for row, token in zip(tree.rows_N.tolist(), tree.tokens_N.tolist(), strict=True):
            if sampled[order[row]]:
                chains[order[row]].append(token)
        return chains

    def _follow(self, at: dict[str, int]) -> None:
        """Requests that have left the batch, and those that have come."""
        for row in reversed(range(len(self._names))):
            if self._names[row] not in at:
                self._drafter.release(row, _NOTHING)
                last = self._names.pop()
                if row < len(self._names):
                    self._drafter.move(len(self._names), row)
                    self._names[row] = last
        for name in at.keys() - set(self._names):
            prompt = torch.tensor(self._runner.requests[name].prompt_token_ids, dtype=torch.int32)
            self._drafter.admit(len(self._names), GenerationRequest(NoiseKey(0, 0, 0, 0), prompt))
            self._names.append(name)

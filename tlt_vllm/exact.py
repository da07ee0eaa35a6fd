"""Sampling in vLLM by our definition of the policy (`tlt_core.model.sampling`): noise is keyed by request and position.

So a draft token is accepted exactly if it is the token that plain decoding samples there.  Drafts are sampled with the
same noise, which raises acceptance.  Requests that want what this definition lacks are sampled by vLLM, in the same
batch; `rows` says which.

Written for vLLM's V1 runner.  Shapes: B requests of the batch, N rows of logits (a request has one, and one more for
each draft token), V vocabulary, K longest draft of the batch.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from tlt_core.items.types import SamplingParams
from tlt_core.model.sampling import choose, lognorms, policy_scores, row_keys
from tlt_vllm.accepted import NO_TOKEN, emitted, merged
from tlt_vllm.rows import Row, Rows
from tlt_vllm.tap import Tap


class ExactSampler:
    def __init__(self, runner: Any, tap: Tap | None = None, *, policy_logprobs: bool = False) -> None:
        """tap: hears the log-normalisers of what is sampled.  policy_logprobs: see `Settings`."""
        self._runner, self._tap, self._policy_logprobs = runner, tap, policy_logprobs
        parallel = runner.parallel_config
        self._rows = Rows(seed=runner.model_config.seed, replica=parallel.data_parallel_index)
        self.foreign = 0  # rows of logits that vLLM sampled

    def sample(self, original: Callable[..., SamplerOutput], logits_NV: Tensor | None, spec: Any) -> SamplerOutput:
        """As `GPUModelRunner._sample`.  original: that, for the requests that do not take part."""
        rows = self.rows()
        if logits_NV is None or not any(rows):
            return original(logits_NV, spec)
        counts = [1] * len(rows) if spec is None else [n + 1 for n in spec.num_draft_tokens]
        own = [row for row in rows if row is not None]
        theirs = None
        if len(own) < len(rows):
            self.foreign += sum(count for row, count in zip(rows, counts, strict=True) if row is None)
            theirs = original(logits_NV.clone(), spec)  # it may write to the logits
        tokens_N = self._choose(rows, counts, logits_NV, spec)
        return self._output(rows, counts, tokens_N, logits_NV, spec, theirs)

    def _choose(self, rows: Sequence[Row | None], counts: Sequence[int], logits_NV: Tensor, spec: Any) -> Tensor:
        """The token of every row of logits, [N] int64; meaningless where vLLM samples."""
        runner = self._runner
        index_N = runner.query_start_loc.gpu[1 : len(rows) + 1] - 1 if spec is None else spec.logits_indices
        positions_N = runner._get_positions(index_N.long()).long() + 1
        row_N = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts)).to(logits_NV.device)
        streams_B = torch.tensor([0 if row is None else row.stream for row in rows], device=logits_NV.device)
        keys_N2 = row_keys(streams_B[row_N], positions_N)
        tokens_N, norms_N = torch.zeros_like(positions_N), torch.zeros_like(positions_N, dtype=torch.float32)
        for params, members in _by_params(rows).items():
            here_N: slice | Tensor = slice(None)  # a mask would make a GPU's host wait
            if len(members) < len(rows):
                here_N = torch.isin(row_N, torch.tensor(members, device=row_N.device))
            part_NV = logits_NV[here_N]
            choice = choose(part_NV, keys_N2[here_N], params)
            tokens_N[here_N] = choice.tokens_N
            if self._tap is not None:
                norms_N[here_N] = lognorms(part_NV, choice, params)
        if self._tap is not None:
            foreign = [b for b, row in enumerate(rows) if row is None]
            self._tap.norms(row_N, positions_N - 1, norms_N, foreign=foreign)
        return tokens_N

    def _output(
        self,
        rows: Sequence[Row | None],
        counts: Sequence[int],
        tokens_N: Tensor,
        logits_NV: Tensor,
        spec: Any,
        theirs: SamplerOutput | None,
    ) -> SamplerOutput:
        width = 1 if spec is None else max(counts)
        emitted_BK = emitted(tokens_N, counts, None if spec is None else spec.draft_token_ids, width)
        if theirs is not None:
            other = torch.tensor([row is None for row in rows], device=emitted_BK.device)
            emitted_BK[other] = NO_TOKEN
            emitted_BK[other, : theirs.sampled_token_ids.shape[1]] = theirs.sampled_token_ids[other].long()
        wanted = self._runner.input_batch.sampling_metadata.max_num_logprobs
        if wanted is None:
            return SamplerOutput(sampled_token_ids=emitted_BK.int(), logprobs_tensors=None)
        logprobs = self._logprobs(rows, counts, emitted_BK, logits_NV, wanted)
        if theirs is not None and theirs.logprobs_tensors is not None:
            logprobs = LogprobsTensors(*merged(logprobs[:3], theirs.logprobs_tensors[:3], other))
        return SamplerOutput(sampled_token_ids=emitted_BK.int(), logprobs_tensors=logprobs)

    def _logprobs(
        self, rows: Sequence[Row | None], counts: Sequence[int], emitted_BK: Tensor, logits_NV: Tensor, most: int
    ) -> LogprobsTensors:
        """Of every place of emitted_BK, row by row, as vLLM's rejection sampler lays them out.  Places without a token
        are dropped later."""
        mode = self._runner.sampler.logprobs_mode
        scores_NV = logits_NV.float()
        if mode.startswith("processed"):
            scores_NV = scores_NV.clone()
            starts = [sum(counts[:b]) for b in range(len(counts) + 1)]
            for b, row in enumerate(rows):
                if row is not None:
                    part = slice(starts[b], starts[b + 1])
                    params = replace(row.params, top_p=1.0, top_k=0) if self._policy_logprobs else row.params
                    scores_NV[part] = policy_scores(scores_NV[part], params)
        if mode.endswith("logprobs"):
            scores_NV = scores_NV.log_softmax(-1)
        first_B = torch.tensor([0, *counts[:-1]], device=logits_NV.device).cumsum(0)
        places = first_B[:, None] + torch.arange(emitted_BK.shape[1], device=logits_NV.device)
        at = scores_NV[places.flatten().clamp_(max=len(scores_NV) - 1)]
        result: LogprobsTensors = Sampler.gather_logprobs(at, most, emitted_BK.clamp(min=0).flatten())
        return result

    def draft(self, original: Callable[..., Any], options: dict[str, Any]) -> Tensor:
        """As the drafter's `propose(**options)`, with the noise of the positions that the tokens would take."""
        rows, drafter = self.rows(), self._runner.drafter
        sampled = [row for row in rows if row is not None and row.params.temperature > 0]
        if not sampled or not hasattr(drafter, "_sample_draft_tokens"):
            return original(**options)
        cad, at = options["common_attn_metadata"], options["token_indices_to_sample"]
        if at is None:
            at = cad.query_start_loc[1:] - 1
        # The input at `at` precedes the newest token, which the first draft token follows.
        positions_B = options["target_positions"][at.long()].long() + 2
        streams_B = torch.tensor([0 if row is None else row.stream for row in rows], device=positions_B.device)
        groups, level = _by_params(rows), 0

        def with_noise(hidden_states: Tensor, metadata: Any) -> tuple[Tensor, None]:
            nonlocal level
            keys_B2 = row_keys(streams_B, positions_B + level)
            level += 1
            logits_BV = drafter.model.compute_logits(hidden_states)
            tokens_B = logits_BV.argmax(-1)
            for params, members in groups.items():
                if params.temperature > 0:
                    tokens_B[members] = choose(logits_BV[members], keys_B2[members], params).tokens_N
            return tokens_B, None

        drafter._sample_draft_tokens = with_noise
        try:
            drafted: Tensor = original(**options)
        finally:
            del drafter._sample_draft_tokens  # the method of the class is back
        return drafted

    def rows(self) -> list[Row | None]:
        """Of the batch; None where vLLM samples."""
        return [self._rows.of(self._runner.requests, name) for name in self._runner.input_batch.req_ids]


def _by_params(rows: Sequence[Row | None]) -> dict[SamplingParams, list[int]]:
    groups: dict[SamplingParams, list[int]] = defaultdict(list)
    for b, row in enumerate(rows):
        if row is not None:
            groups[row.params].append(b)
    return groups

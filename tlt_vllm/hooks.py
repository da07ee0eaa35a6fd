"""Puts `exact` and `tap` in front of methods of vLLM's V1 runner, `second_runner` in front of V2's.  Imported in the
processes that run the model."""

import functools
import time
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from tlt_vllm.deferred import Deferred
from tlt_vllm.exact import ExactSampler
from tlt_vllm.ngram import NgramDrafts
from tlt_vllm.second_runner import SlotSampler
from tlt_vllm.settings import Settings
from tlt_vllm.tap import Tap

_INSTALLED = "_tlt_installed"


class Parts:
    def __init__(self, runner: Any) -> None:
        speculative = runner.speculative_config
        longest = 0 if speculative is None else speculative.num_speculative_tokens
        settings = Settings.read(runner.vllm_config.additional_config, longest=longest)
        capture_mb = 0 if settings is None else settings.capture_mb
        # All workers of a tensor-parallel engine compute the same hidden states.
        self.tap = Tap(runner, capture_mb=capture_mb) if capture_mb and get_tp_group().is_first_rank else None
        first = isinstance(runner, GPUModelRunner)  # V1
        self.exact: Any = None
        # A stage of a pipeline without the model's end has no sampler.
        if settings is not None and settings.exact and (first or runner.sampler is not None):
            logprobs = settings.policy_logprobs
            self.exact = ExactSampler(runner, self.tap, policy_logprobs=logprobs) if first else SlotSampler(runner)
        self.deferred = Deferred(runner) if settings is not None and first else None
        self.ngrams: NgramDrafts | None = None  # made in the first step of a scheduler that may choose them
        self.scheduled: Any = None  # of the step under way: vLLM's SchedulerOutput,
        self.sampled: Any = None  # and tokens sampled, [B, ..], -1 behind the last
        self._runner = runner
        self.draft_s = 0.0  # of the step under way
        self.late_s = 0.0  # of it, for steps before

    def propose(self, original: Any, options: dict[str, Any]) -> Any:
        is_ngram, least = getattr(self.scheduled, "tlt_ngram", (None, 0.0))
        longest = options["num_speculative_tokens"] if is_ngram else 0
        chains = None if is_ngram is None else self._ngrams(longest, least)
        if is_ngram:
            self._propose(original, options | {"num_speculative_tokens": 0})
            return chains
        return self._propose(original, options)

    def _ngrams(self, longest: int, least: float) -> list[list[int]] | None:
        assert self.exact is not None, "the scheduler chooses n-grams with exact sampling alone"
        if self.ngrams is None:
            self.ngrams = NgramDrafts(self._runner)
        if not self.ngrams.is_due(longest):
            return None
        unread_B = self._runner.discard_request_mask.np
        sampled = [
            [] if unread_B[b] else [token for token in tokens if token >= 0]
            for b, tokens in enumerate(self.sampled.tolist())
        ]
        return self.ngrams.step(self.exact.rows(), sampled, longest=longest, least=least)

    def _propose(self, original: Any, options: dict[str, Any]) -> Any:
        if self.deferred is not None:
            nothing = self.deferred.put_off(original, options)
            if nothing is not None:
                return nothing
            began_s = time.perf_counter()
            self.deferred.make_up(original, options)
            self.late_s = time.perf_counter() - began_s
        return original(**options) if self.exact is None else self.exact.draft(original, options)


def parts_of(runner: Any) -> Parts:
    """Those of this runner, made at the first call."""
    parts: Parts | None = getattr(runner, "_tlt_parts", None)
    if parts is None:
        parts = runner._tlt_parts = Parts(runner)
    return parts


def install() -> None:
    """Wrap the methods of the class.  A second call does nothing."""
    if getattr(GPUModelRunner, _INSTALLED, False):
        return
    sample, propose = GPUModelRunner._sample, GPUModelRunner.propose_draft_token_ids
    sample_tokens, load = GPUModelRunner.sample_tokens, Worker.load_model

    @functools.wraps(load)
    def load_model(self: Any, **options: Any) -> None:
        load(self, **options)
        if not isinstance(self.model_runner, GPUModelRunner):
            parts_of(self.model_runner)  # V2: before its graphs are captured
        if draft_model(self.model_runner) is not None:
            _keep_drafter(self)

    @functools.wraps(sample)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        exact = parts_of(self).exact
        if exact is None:
            return sample(self, logits, spec_decode_metadata)
        return exact.sample(functools.partial(sample, self), logits, spec_decode_metadata)

    @functools.wraps(propose)
    def propose_draft_token_ids(self: Any, *args: Any, **options: Any) -> Any:
        parts, began_s = parts_of(self), time.perf_counter()
        hidden_states, aux_hidden_states = args[3], args[5]
        if parts.tap is not None and aux_hidden_states is not None:
            parts.tap.states(torch.cat(aux_hidden_states, dim=-1), hidden_states)
        _stand_before(self, parts)
        parts.scheduled, parts.sampled = args[0], args[1]
        result = propose(self, *args, **options)
        parts.draft_s = time.perf_counter() - began_s - parts.late_s
        return result

    @functools.wraps(sample_tokens)
    def timed_sample_tokens(self: Any, *args: Any, **options: Any) -> Any:
        parts = parts_of(self)
        parts.draft_s = parts.late_s = 0.0
        output = sample_tokens(self, *args, **options)
        if output is not None and self.device.type == "cpu":  # on a GPU the work has only been queued by now
            output.tlt_draft_s, output.tlt_late_s = parts.draft_s, parts.late_s
        return output

    GPUModelRunner._sample = _sample
    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids
    GPUModelRunner.sample_tokens = timed_sample_tokens
    Worker.load_model = load_model
    setattr(GPUModelRunner, _INSTALLED, True)


def draft_model(runner: Any) -> Any:
    """Of either model runner; None: there is none."""
    if hasattr(runner, "get_draft_model"):
        return runner.get_draft_model()
    return getattr(getattr(runner, "drafter", None), "model", None)  # vLLM 0.24


def _keep_drafter(worker: Any) -> None:
    """Sleep of level 2 drops all weights; whoever asks for it sends the policy's again, and nobody the drafter's.  So
    they wait in main memory."""
    sleep, wake_up = worker.sleep, worker.wake_up
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # what the model computes with, and its copy

    def keeping_sleep(level: int = 1) -> None:
        if level == 2:
            shared = {tensor.data_ptr() for tensor in _tensors(worker.model_runner.get_model())}
            own = [tensor for tensor in _tensors(draft_model(worker.model_runner)) if tensor.data_ptr() not in shared]
            kept[:] = [(tensor, tensor.detach().cpu().clone()) for tensor in own]
        sleep(level)

    def restoring_wake_up(tags: list[str] | None = None) -> None:
        wake_up(tags)
        if tags is None or "weights" in tags:
            for tensor, copy in kept:
                tensor.data.copy_(copy)
            kept.clear()

    worker.sleep, worker.wake_up = keeping_sleep, restoring_wake_up


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _stand_before(runner: Any, parts: Parts) -> None:
    """Our `propose` before that of the runner's drafter, where that is a model."""
    drafter = getattr(runner, "drafter", None)
    if drafter is None or "propose" in vars(drafter) or not hasattr(drafter, "_sample_draft_tokens"):
        return
    propose = drafter.propose
    drafter.propose = lambda **options: parts.propose(propose, options)

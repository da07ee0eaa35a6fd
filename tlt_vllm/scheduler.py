"""vLLM's scheduler with a draft length that the tuner chooses in every step (see `draft_lengths`)."""

import logging
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from tlt_vllm.counters import Writer
from tlt_vllm.draft_lengths import NGRAM, DraftLengths
from tlt_vllm.settings import Settings

_log = logging.getLogger("vllm.plugins.tlt")  # vLLM shows INFO of its own loggers only


class AdaptiveScheduler(Scheduler):
    """Set by `plugin`; by hand: scheduler_cls="tlt_vllm.scheduler.AdaptiveScheduler"."""

    def __new__(cls, vllm_config: Any, *_: Any, **__: Any) -> "AdaptiveScheduler":
        """The asynchronous one where the engine schedules asynchronously."""
        asynchronous = bool(vllm_config.scheduler_config.async_scheduling)
        return object.__new__(AsyncAdaptiveScheduler if asynchronous else AdaptiveScheduler)

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        super().__init__(vllm_config, *args, **options)
        given = vllm_config.additional_config
        settings = Settings.read(given, longest=self.num_spec_tokens)
        if settings is None:
            raise ValueError(f'{type(self).__name__} needs additional_config={{"tlt": {{...}}}}, and got {given!r}')
        speculative = vllm_config.speculative_config
        drafter = "ngram" if speculative is not None and "ngram" in speculative.method else "eagle3"
        beside = settings.ngram and settings.exact and drafter == "eagle3" and settings.policy != "fixed"
        # Drafts of n-grams are known on the host alone, which the asynchronous scheduler does not wait for.
        with_ngrams = beside and not vllm_config.scheduler_config.async_scheduling
        with_ngrams &= not getattr(vllm_config, "use_v2_model_runner", False)
        if with_ngrams:
            _log.info("tlt: n-grams draft beside the drafter")
        elif beside:
            _log.info(
                "tlt: n-grams do not draft: they need --no-async-scheduling and vLLM's first model runner "
                "(VLLM_USE_V2_MODEL_RUNNER=0)"
            )
        self.draft_lengths = DraftLengths(settings, drafter, with_ngrams=with_ngrams)
        self._counters = Writer(vllm_config.parallel_config.data_parallel_index)
        self._began_s = 0.0

    def schedule(self, *args: Any, **options: Any) -> SchedulerOutput:
        self._began_s = time.perf_counter()
        return super().schedule(*args, **options)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.num_scheduled_tokens:
            scheduler_output.num_spec_tokens_to_schedule = self._choose(scheduler_output)
            if self.draft_lengths.ngrams:  # an attribute of ours, which vLLM pickles with its own, for `hooks`
                is_ngram = self.draft_lengths.chosen.drafter == NGRAM
                least = self.draft_lengths.tuner.min_draft_probs.token
                scheduler_output.tlt_ngram = (is_ngram, least)  # type: ignore[attr-defined]
        super()._update_after_schedule(scheduler_output)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        if scheduler_output.num_scheduled_tokens:
            sampled = model_runner_output.sampled_token_ids
            # A request that has ended is no longer there; the asynchronous scheduler began this step before it knew.
            rows = model_runner_output.req_id_to_index
            emitted = {name: len(sampled[row]) for name, row in rows.items() if name in self.requests}
            self.draft_lengths.finish(
                emitted,
                draft_s=getattr(model_runner_output, "tlt_draft_s", None),
                late_s=getattr(model_runner_output, "tlt_late_s", 0.0),
            )
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.draft_lengths.forget([name for name in scheduler_output.num_scheduled_tokens if name not in self.requests])
        self._counters.write(self.draft_lengths, is_idle=not self.requests)
        return outputs

    def _choose(self, scheduled: SchedulerOutput) -> int:
        drafted: dict[str, int] = {}
        next_up: dict[str, int] = {}
        context, prefills = 0, False
        for name, tokens in scheduled.num_scheduled_tokens.items():
            request = self.requests[name]
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            decodes = tokens == 1 + drafts and request.num_computed_tokens >= request.num_prompt_tokens
            if decodes:
                drafted[name] = drafts
                context += request.num_tokens
            prefills |= not decodes
            if decodes or request.num_computed_tokens + tokens >= request.num_tokens:
                next_up[name] = request.num_tokens + 1
        return self.draft_lengths.schedule(
            drafted, next_up=next_up, context=context, prefills=prefills, began_s=self._began_s
        )


class AsyncAdaptiveScheduler(AdaptiveScheduler, AsyncScheduler):
    """The same before `AsyncScheduler`."""

"""Entry point of group `vllm.general_plugins`, called in every process of vLLM."""

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

from tlt_vllm import counters, cpu_fix, rows
from tlt_vllm.extensions import beside_ours
from tlt_vllm.settings import Settings, table
from tlt_vllm.signatures import WITH_SECOND_RUNNER, is_one_of, require_vllm

SCHEDULER = "tlt_vllm.scheduler.AdaptiveScheduler"
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_log = logging.getLogger("vllm.plugins.tlt")  # vLLM shows INFO of its own loggers only


def register() -> None:
    """May be called more than once."""
    cpu_fix.register()
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.parallel_sampling import ParentRequest

    if getattr(EngineArgs, "_tlt_installed", False):
        return
    params_of_child = ParentRequest._get_child_sampling_params

    @functools.wraps(params_of_child)
    def _get_child_sampling_params(self: Any, index: int) -> Any:
        return rows.of_child(params_of_child(self, index), index)

    ParentRequest._get_child_sampling_params = _get_child_sampling_params
    verify = SamplingParams.verify

    @functools.wraps(verify)
    def verify_with_stream(self: Any, *args: Any, **options: Any) -> None:
        try:
            rows.require_stream(self)
        except ValueError as error:
            raise VLLMValidationError(str(error)) from None  # of others the server says "internal error"
        verify(self, *args, **options)

    SamplingParams.verify = verify_with_stream
    create = EngineArgs.create_engine_config

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **options: Any) -> Any:
        prepare(self)
        return create(self, *args, **options)

    EngineArgs.create_engine_config = create_engine_config
    EngineArgs._tlt_installed = True


def prepare(args: Any) -> None:
    """Set what TLT needs in vLLM's EngineArgs, where the user has asked for TLT.

    Raises ValueError: settings that do not fit, or a vLLM whose source was not read."""
    speculative = args.speculative_config
    if speculative is not None and not isinstance(speculative, dict):
        speculative = dict(speculative)
    longest = int((speculative or {}).get("num_speculative_tokens") or 0)
    settings = Settings.read(args.additional_config, longest=longest)
    if settings is None:
        return
    version = require_vllm()
    refuse_pairs(args, settings, speculative or {})
    if not args.disable_log_stats:  # a server; LLM(...) shows no counters
        counters.publish()
    first = _for_first_runner(args, settings, version)
    if first:
        _choose_runner_v1(first)
    if args.scheduler_cls not in (None, "", SCHEDULER):
        raise ValueError(
            f"scheduler_cls={args.scheduler_cls!r} beside tlt in additional_config: TLT sets it to {SCHEDULER}; leave "
            "it out"
        )
    args.scheduler_cls = SCHEDULER
    args.worker_extension_cls = beside_ours(args.worker_extension_cls or "")
    if speculative:
        args.speculative_config = _defaults(args, settings) | speculative
    _log.info("tlt: vLLM %s, %s", version, _in_words(settings, first))


def _defaults(args: Any, settings: Settings) -> dict[str, Any]:
    """Entries of the speculative config that the user may leave out."""
    lengths = {"num_speculative_tokens_per_batch_size": table(settings.draft_lengths, args.max_num_seqs or 256)}
    if args.load_format != "dummy":
        return lengths
    from vllm.config import LoadConfig

    # The policy's weights are to come from a trainer (verl); those of the drafter are in its folder.
    return lengths | {"draft_load_config": LoadConfig(load_format="auto")}


def refuse_pairs(args: Any, settings: Settings, speculative: Mapping[str, Any]) -> None:
    """What would go wrong without a word.  Raises ValueError with the remedy."""
    if speculative.get("enable_adaptive_verification"):
        raise ValueError(
            "enable_adaptive_verification in the speculative config with tlt in additional_config: two tuners, and "
            "ours would count drafts that the other did not verify; leave one of them out"
        )
    if speculative and args.data_parallel_size > 1:
        raise ValueError(
            f"data_parallel_size={args.data_parallel_size} with tlt and speculation: each rank would choose a draft "
            "length of its own, and ranks that draft wait for those that do not; start an engine for each rank, or "
            "leave out the speculative config"
        )
    if settings.exact and args.logits_processors:
        raise ValueError(
            f"logits_processors={args.logits_processors!r} with exact sampling, which would pass them by: set "
            "tlt.exact to false, or leave them out"
        )


def _for_first_runner(args: Any, settings: Settings, version: str) -> str:
    """What of the settings is written for vLLM's first model runner alone, in words; "" where nothing is."""
    if settings.capture_mb:
        return f"hidden states (tlt.capture_mb={settings.capture_mb})"
    if settings.exact and not is_one_of(version, WITH_SECOND_RUNNER):
        return f"exact sampling in vLLM {version}"
    if settings.exact and str(args.logprobs_mode).startswith("processed"):
        return f"exact sampling with logprobs_mode={args.logprobs_mode}"
    return ""


def _in_words(settings: Settings, first: str) -> str:
    """What is on, and why the rest is off.  first: why it is vLLM's first model runner."""
    runner = f"model runner V1, for which alone {first} is written" if first else "model runner as vLLM chooses"
    lengths = ", ".join(map(str, settings.draft_lengths))
    captured = f"{settings.capture_mb} MB for" if settings.capture_mb else "no"
    return "; ".join(
        [
            runner,
            f"draft length of 0, {lengths} by {settings.policy}" if lengths else "no drafts (no speculative config)",
            "exact sampling" if settings.exact else "vLLM's own sampling (tlt.exact=false)",
            f"{captured} hidden states (tlt.capture_mb={settings.capture_mb})",
        ]
    )


def _choose_runner_v1(what: str) -> None:
    """vLLM's processes inherit the variable.  what: why.  Raises ValueError where the user wants the second runner."""
    wanted = os.environ.get(_RUNNER)
    if wanted not in (None, "0", "false", "False"):
        raise ValueError(
            f"{_RUNNER}={wanted} with tlt in additional_config: {what} is written for vLLM's first model runner; unset "
            f"{_RUNNER}, or do without"
        )
    os.environ[_RUNNER] = "0"

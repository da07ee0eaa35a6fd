"""Our rollout engine for `process.py`; settings: model, dtype, threads, max_live, max_len, speculation."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from conf.rollout import SpeculationConfig
from kernels import native
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams
from tlt_core.machine.memory import keep_freed_memory
from tlt_core.model.load import load_decoder
from tlt_core.rollout.build import calibrate, make_engine


def describe(settings: Mapping[str, Any]) -> dict[str, Any]:
    chosen = os.environ.get("TLT_NATIVE_KERNELS")
    own = f"our own kernels, {f'TLT_NATIVE_KERNELS={chosen}' if chosen else 'as the processor has them'}"
    by_torch = f"{torch.backends.cpu.get_cpu_capability()} in torch's kernels"
    return {
        "version": f"torch {torch.__version__}",
        "threads": torch.get_num_threads(),
        "precision": f"{settings['dtype']} weights and products",
        "instructions": by_torch if native.library() is None else own,
    }


def build(settings: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Callable[[], list[list[int]]]]:
    """Each job gets a fresh engine, drafter and calibrated tuner: an n-gram index that has seen the job before would
    know all answers."""
    torch.set_num_threads(settings["threads"])
    keep_freed_memory()
    decoder = load_decoder(Path(settings["model"]), dtype=getattr(torch, settings["dtype"]))
    cfg = SpeculationConfig.model_validate(settings["speculation"])

    def decode(job: Mapping[str, Any]) -> Callable[[], list[list[int]]]:
        engine = make_engine(decoder, cfg, max_live=settings["max_live"], max_len=settings["max_len"], seed=job["seed"])
        if job["new_tokens"] > 1:
            calibrate(engine)
        prompts = [torch.tensor(tokens, dtype=torch.int32) for tokens in job["prompts"]]
        requests = [GenerationRequest(NoiseKey(job["seed"], 1, i, 0), tokens) for i, tokens in enumerate(prompts)]
        params = SamplingParams(temperature=job["temperature"], max_new_tokens=job["new_tokens"])

        return lambda: [rollout.completion.tolist() for rollout in engine.decode_all(requests, params)]

    return decode

"""transformers' `generate` for `process.py`; settings: model, dtype, threads, lookup_tokens.

lookup_tokens: draft so many tokens by prompt look-up (assisted generation, one request at a time); 0: plain.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers


def describe(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "version": f"transformers {transformers.__version__}",
        "threads": torch.get_num_threads(),
        "precision": f"{settings['dtype']} weights and products",
        "instructions": f"{torch.backends.cpu.get_cpu_capability()} in torch's kernels",
    }


def build(settings: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Callable[[], list[list[int]]]]:
    torch.set_num_threads(settings["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=getattr(torch, settings["dtype"]), attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None  # a fixed number of tokens
    lookup = {"prompt_lookup_num_tokens": settings["lookup_tokens"]} if settings["lookup_tokens"] else {}

    def decode(job: Mapping[str, Any]) -> Callable[[], list[list[int]]]:
        longest = max(map(len, job["prompts"]))
        ids_BL = torch.zeros(len(job["prompts"]), longest, dtype=torch.int64)
        mask_BL = torch.zeros_like(ids_BL)
        for row, tokens in enumerate(job["prompts"]):
            ids_BL[row, longest - len(tokens) :] = torch.tensor(tokens)
            mask_BL[row, longest - len(tokens) :] = 1
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        if job["temperature"]:
            sampling = {"do_sample": True, "temperature": job["temperature"], "top_k": 0, "top_p": 1.0}

        def run() -> list[list[int]]:
            torch.manual_seed(job["seed"])
            with torch.inference_mode():
                out_BL = model.generate(
                    ids_BL,
                    attention_mask=mask_BL,
                    max_new_tokens=job["new_tokens"],
                    min_new_tokens=job["new_tokens"],
                    pad_token_id=0,
                    **sampling,
                    **lookup,
                )
            tokens: list[list[int]] = out_BL[:, longest:].tolist()
            return tokens

        return run

    return decode

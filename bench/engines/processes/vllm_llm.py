"""vLLM for `process.py`, run by the interpreter of vLLM's own environment; nothing of ours is imported.

Settings: model, dtype, threads, max_live, max_len, kv_cache_mb, speculative (vLLM's speculative_config or null), eager,
tlt (settings of our plug-in; left out: vLLM alone).
"""

import torch
import vllm


def describe(settings):  # type: ignore[no-untyped-def]  # this file is run by another interpreter than the checker's
    return {
        "version": f"vllm {vllm.__version__}",
        "threads": torch.get_num_threads(),
        "precision": f"{settings['dtype']} weights and products",
        "instructions": f"{torch.backends.cpu.get_cpu_capability()} in torch's kernels",
    }


def build(settings):  # type: ignore[no-untyped-def]
    llm = vllm.LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_len"],
        max_num_seqs=settings["max_live"],
        kv_cache_memory_bytes=settings["kv_cache_mb"] << 20,
        enable_prefix_caching=False,  # each job is decoded more than once
        enforce_eager=settings["eager"],
        speculative_config=settings["speculative"],
        disable_log_stats=True,
        **({"additional_config": {"tlt": settings["tlt"]}} if "tlt" in settings else {}),
    )

    def decode(job):  # type: ignore[no-untyped-def]
        prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
        params = vllm.SamplingParams(
            temperature=job["temperature"],
            top_p=1.0,
            top_k=0,
            max_tokens=job["new_tokens"],
            ignore_eos=not job["natural_ends"],
            detokenize=False,
        )
        return lambda: [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    return decode

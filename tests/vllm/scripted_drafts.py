"""What is proposed when draft lengths follow a script.  Run by vLLM's interpreter.

stdin   {"model": ..., "drafter": ..., "prompts": [[...], ...], "max_tokens": [...], "temperatures": [...],
         "lengths": [3, 0, -3, ...], "defer": true, "most_tokens": 0}                -3: three tokens of n-grams
stdout  the last line: {"tokens": [[...], ...], "drafts": [{request: [...]}, ...], "passes": 2}     drafts of each step
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # scheduler and runner in this process

import vllm

from tlt_core.items.speculation import NO_MIN_DRAFT_PROBS, Strategy


def main():
    job = json.loads(sys.stdin.read())
    llm = vllm.LLM(
        job["model"],
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=200 << 20,
        enforce_eager=True,
        disable_log_stats=True,
        speculative_config={"method": "eagle3", "model": job["drafter"], "num_speculative_tokens": 3},
        additional_config={"tlt": {}},
    )
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    lengths, drafts = iter(job["lengths"]), []
    chosen = core.scheduler.draft_lengths
    schedule, propose = chosen.schedule, runner.propose_draft_token_ids

    def scripted(*args, **options):
        schedule(*args, **options)
        chosen.tuner.min_draft_probs = NO_MIN_DRAFT_PROBS  # the tuner's follows the clock
        length = next(lengths, 0)
        chosen._chosen = chosen.by_length[length] if length >= 0 else Strategy("ngram", -length, 1, -length)
        return abs(length)

    def noted(*args, **options):
        proposed = propose(*args, **options)
        chains = proposed if isinstance(proposed, list) else proposed.tolist()
        drafts.append(dict(zip(runner.input_batch.req_ids, chains, strict=True)))
        return proposed

    chosen.schedule, runner.propose_draft_token_ids = scripted, noted
    parts = sys.modules["tlt_vllm.hooks"].parts_of(runner)
    deferred = parts.deferred
    deferred.most_tokens = job["most_tokens"] or deferred.most_tokens
    if not job["defer"]:
        parts.deferred = None
    prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
    params = [
        vllm.SamplingParams(temperature=heat, seed=number, max_tokens=count, ignore_eos=True, detokenize=False)
        for number, (heat, count) in enumerate(zip(job["temperatures"], job["max_tokens"], strict=True))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print(json.dumps({"tokens": tokens, "drafts": drafts, "passes": deferred.passes}))


if __name__ == "__main__":
    main()

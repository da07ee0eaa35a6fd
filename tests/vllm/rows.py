"""Run by vLLM's Python: what requests get from an engine with the plug-in, as JSON.   rows.py MODEL SEED"""

import json
import sys

import vllm


def main(model, seed):
    llm = vllm.LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        seed=seed,
        max_model_len=64,
        max_num_seqs=8,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        logprobs_mode="processed_logprobs",
        additional_config={"tlt": {}},
    )

    def ask(*wanted):
        """Tokens and their log-probabilities of each answer to each request."""
        params = [vllm.SamplingParams(temperature=0.5, max_tokens=8, logprobs=0, detokenize=False, **w) for w in wanted]
        answers = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}] * len(params), params, use_tqdm=False)
        return [
            [
                [list(o.token_ids), [at[token].logprob for at, token in zip(o.logprobs, o.token_ids, strict=True)]]
                for o in answer.outputs
            ]
            for answer in answers
        ]

    penalised = {"repetition_penalty": 1.5, "seed": 3}
    (children,), (single,) = ask({"n": 4, "extra_args": {"tlt_stream": 5}}), ask({"extra_args": {"tlt_stream": 5}})
    print(
        "RESULT"
        + json.dumps(
            {
                "unseeded": ask({}, {}, {}),
                "children": children,
                "single": single,
                "alone": ask(penalised)[0][0],
                "together": ask({"seed": 4}, penalised, {})[1][0],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

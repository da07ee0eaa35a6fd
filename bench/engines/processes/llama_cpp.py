"""llama.cpp for `process.py`, run by the interpreter of its own environment (package xllamacpp).

Settings: weights (a GGUF file), dtype (of its matrices), threads, max_live, max_len.  Tokens come from the package's
server, inside this process.  `ignore_eos` forbids tokens that end a response.
"""

import json
import urllib.request

import xllamacpp

_SLOT_TOKENS = 256  # a request's part of the cache is a multiple of this
_CACHE = {"bfloat16": "GGML_TYPE_BF16", "float16": "GGML_TYPE_F16", "float32": "GGML_TYPE_F32"}


def describe(settings):  # type: ignore[no-untyped-def]  # this file is run by another interpreter than the checker's
    """For the report.  Inputs of a product are rounded to the weights' type, sums are float32."""
    told = [part.rsplit(":")[-1].partition("=") for part in xllamacpp.get_system_info().split("|")]  # "CPU : AVX = 1"
    built_for = [name.strip() for name, _, value in told if value.strip() == "1"]
    wide = [name for name in built_for if name.startswith(("AVX", "AMX"))]
    return {
        "version": f"llama.cpp, xllamacpp {xllamacpp.__version__}",
        "threads": settings["threads"],
        "precision": f"{settings['dtype']} weights and inputs, float32 sums",
        "instructions": f"{', '.join(wide) or 'no AVX'}, for which its wheel was built; they cannot be chosen",
    }


def build(settings):  # type: ignore[no-untyped-def]
    params = xllamacpp.CommonParams()
    params.model.path = settings["weights"]
    params.n_parallel = settings["max_live"]
    params.n_ctx = settings["max_live"] * -(-settings["max_len"] // _SLOT_TOKENS) * _SLOT_TOKENS
    params.fit_params = False  # what is asked for, not what llama.cpp thinks would fit
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, _CACHE[settings["dtype"]])
    params.cache_prompt = False  # each job is decoded more than once
    params.cache_ram_mib = 0
    params.n_threads_http = 1
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = settings["threads"]
    server = xllamacpp.Server(params)

    def decode(job):  # type: ignore[no-untyped-def]
        temperature = job["temperature"]
        chosen = {"samplers": ["temperature"], "temperature": temperature} if temperature else {"samplers": ["top_k"]}
        question = {
            "prompt": job["prompts"],
            "n_predict": job["new_tokens"],
            "ignore_eos": True,
            "return_tokens": True,
            "cache_prompt": False,
            "seed": job["seed"],
            "top_k": 1,  # of the greedy ones: `samplers` says which settings count
            **chosen,
        }

        def run():  # type: ignore[no-untyped-def]
            answers = _post(server.listening_address, json.dumps(question))
            rows = answers if isinstance(answers, list) else [answers]
            return [row["tokens"] for row in sorted(rows, key=lambda row: row["index"])]

        return run

    return decode


def _post(address, body):  # type: ignore[no-untyped-def]
    request = urllib.request.Request(f"{address}/completion", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
        return json.loads(reply.read())

"""OpenVINO GenAI for `process.py`, run by the interpreter of its own environment; continuous batching, as its server's.

Settings: weights (a folder of OpenVINO IR), dtype (of its weights), threads, max_live, kv_cache_mb.

OpenVINO computes in bfloat16 where the processor has instructions for it, in float32 elsewhere.  ONEDNN_MAX_CPU_ISA
keeps its matrix products from instructions, but not the kernels of its plug-in, and the plug-in goes on asking for
bfloat16 products, which then do not exist: with a limit it is told float32.  Its cache is kept in the same precision
(by default it would be quantised).
"""

import os
from collections import Counter

import numpy as np
import openvino
import openvino_genai

_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_WITH_BF16 = ("BF16", "FP16", "AMX", "AVX10", "ALL", "DEFAULT", "AVX2_VNNI_2")  # in names of oneDNN's instruction sets
_TYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def describe(settings):  # type: ignore[no-untyped-def]  # this file is run by another interpreter than the checker's
    """For the report: precisions as the compiled model says them of its matrix products."""
    model = openvino.Core().compile_model(f"{settings['weights']}/openvino_model.xml", "CPU", _properties(settings))
    found = Counter()
    for op in model.get_runtime_model().get_ops():
        told = op.get_rt_info()
        if told["layerType"].value == "FullyConnected":
            weights, computed = told["runtimePrecision"].value, told["primitiveType"].value.rsplit("_")[-1]
            found[_TYPES.get(weights, weights), _TYPES.get(computed, computed)] += 1
    (weights, computed), _ = found.most_common(1)[0]
    limit = _limit()
    limited = f"matrix products limited to {limit}, other kernels as the processor has them"
    return {
        "version": f"OpenVINO GenAI {openvino_genai.__version__}",
        "threads": settings["threads"],
        "precision": f"{weights} weights, {computed} products",
        "instructions": limited if limit else "as the processor has them",
    }


def build(settings):  # type: ignore[no-untyped-def]
    """See `process.py`."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = settings["max_live"]
    scheduler.cache_size = settings["kv_cache_mb"] >> 10
    scheduler.enable_prefix_caching = False  # each job is decoded more than once
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        settings["weights"], scheduler_config=scheduler, device="CPU", properties=_properties(settings)
    )

    def decode(job):  # type: ignore[no-untyped-def]
        params = openvino_genai.GenerationConfig()
        params.max_new_tokens = job["new_tokens"]
        params.ignore_eos = True
        params.rng_seed = job["seed"]
        params.do_sample = bool(job["temperature"])
        if params.do_sample:
            params.temperature = job["temperature"]
        prompts = [openvino.Tensor(np.array([tokens], dtype=np.int64)) for tokens in job["prompts"]]
        return lambda: [r.m_generation_ids[0] for r in pipeline.generate(prompts, [params] * len(prompts))]

    return decode


def _properties(settings):  # type: ignore[no-untyped-def]
    able = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    limit = _limit()
    allowed = not limit or any(word in limit for word in _WITH_BF16)
    precision = "bf16" if settings["dtype"] == "bfloat16" and able and allowed else "f32"
    return {
        "INFERENCE_NUM_THREADS": settings["threads"],
        "ENABLE_CPU_PINNING": False,  # `process.py` has chosen the cores
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }


def _limit():  # type: ignore[no-untyped-def]
    return next((os.environ[name].upper() for name in _LIMITS if os.environ.get(name)), "")

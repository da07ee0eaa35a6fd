"""What the plug-in replaces or calls in vLLM, with the parameters that it relies on, read from vLLM's sources.

Nothing is imported: other plug-ins may have replaced the same methods.
"""

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path

VERSIONS = ("0.24", "0.32", "0.33")  # whose sources were read; a test reads them again
WITH_SECOND_RUNNER = ("0.32", "0.33")  # in which exact sampling knows vLLM's second model runner

_SCHEDULER, _RUNNER = "v1/core/sched/scheduler.py", "v1/worker/gpu_model_runner.py"
_SECOND = "v1/worker/gpu"
_PROPOSER, _RELOAD = "v1/spec_decode/llm_base_proposer.py", "model_executor/model_loader/reload/layerwise.py"
_SIGNATURES: Mapping[str, Mapping[str, str]] = {
    "engine/arg_utils.py": {"EngineArgs.create_engine_config": "self"},
    "v1/engine/parallel_sampling.py": {"ParentRequest._get_child_sampling_params": "self index"},
    _SCHEDULER: {
        "Scheduler.schedule": "self",
        "Scheduler._update_after_schedule": "self scheduler_output",
        "Scheduler.update_from_output": "self scheduler_output model_runner_output",
    },
    "v1/core/sched/async_scheduler.py": {"AsyncScheduler._update_after_schedule": "self scheduler_output"},
    _RUNNER: {
        "GPUModelRunner._sample": "self logits spec_decode_metadata",
        "GPUModelRunner.sample_tokens": "self grammar_output",
        "GPUModelRunner._get_positions": "self num_tokens",
        "GPUModelRunner.propose_draft_token_ids": (
            "self scheduler_output sampled_token_ids sampling_metadata hidden_states sample_hidden_states "
            "aux_hidden_states spec_decode_metadata common_attn_metadata slot_mappings"
        ),
    },
    _PROPOSER: {
        "SpecDecodeBaseProposer.propose": (
            "self num_speculative_tokens target_token_ids target_positions target_hidden_states next_token_ids "
            "token_indices_to_sample common_attn_metadata sampling_metadata mm_embed_inputs num_rejected_tokens_gpu "
            "slot_mappings"
        ),
        "SpecDecodeBaseProposer._sample_draft_tokens": "self hidden_states sampling_metadata",
    },
    "v1/worker/gpu_worker.py": {"Worker.load_model": "self"},
    "v1/sample/sampler.py": {"Sampler.gather_logprobs": "logprobs num_logprobs token_ids"},
    _RELOAD: {
        "get_layerwise_info": "layer",
        "initialize_layerwise_reload": "model",
        "finalize_layerwise_reload": "",  # all of the next one's
        "finalize_layerwise_processing": "model model_config",
    },
}
# Of the second model runner, for exact sampling.
_OF_SECOND: Mapping[str, Mapping[str, str]] = {
    f"{_SECOND}/model_runner.py": {"GPUModelRunner.finish_requests": "self scheduler_output"},
    f"{_SECOND}/sample/sampler.py": {
        "Sampler.add_request": "self req_idx sampling_params",
        "Sampler.apply_sampling_params": (
            "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
            "seq_lens_upper_bound_np"
        ),
    },
    f"{_SECOND}/spec_decode/speculator.py": {
        "DraftModelSpeculator.sample_draft": (
            "self hidden_states sample_src_positions idx_mapping temperature seeds draft_step draft_logits"
        ),
        "DraftModelSpeculator.compute_draft_logits": "self hidden_states spec_step_idx",
    },
}
# What is read of them besides.
_NAMES: Mapping[str, str] = {
    _RUNNER: "query_start_loc discard_request_mask requests max_num_tokens num_spec_tokens parallel_config",
    "v1/worker/gpu_input_batch.py": (
        "req_ids token_ids_cpu num_tokens_no_spec num_computed_tokens_cpu sampling_metadata prompt_token_ids"
    ),
    "v1/core/sched/output.py": "num_spec_tokens_to_schedule scheduled_spec_decode_tokens num_scheduled_tokens",
    "v1/outputs.py": "sampled_token_ids req_id_to_index logprobs_tensors",
    _PROPOSER: "needs_extra_input_slots uses_mrope method",
    "model_executor/model_loader/reload/types.py": "load_numel",
    "sampling_params.py": "verify extra_args",
    "exceptions.py": "VLLMValidationError",
}


def is_one_of(version: str, known: tuple[str, ...]) -> bool:
    """is_one_of("0.32.1", WITH_SECOND_RUNNER)"""
    return version.startswith(tuple(f"{beginning}." for beginning in known))


def differences(read: Callable[[str], str], *, version: str) -> list[str]:
    """What is not as expected, in words; empty where all is.  read: source of a file under vLLM's package.

    Further parameters with defaults are no difference."""
    second = _OF_SECOND if is_one_of(version, WITH_SECOND_RUNNER) else {}
    names = [
        f"{path}: nothing is called {name}"
        for path, wanted in _NAMES.items()
        for text in [read(path)]
        for name in wanted.split()
        if not re.search(rf"\b{name}\b", text)
    ]
    return names + [
        f"{path}: {name} {'is not there' if found is None else tuple(found)}, where {tuple(wanted.split())} is needed"
        for path, functions in {**_SIGNATURES, **second}.items()
        for tree in [ast.parse(read(path))]
        for name, wanted in functions.items()
        if (found := _parameters(tree, name, len(wanted.split()))) != wanted.split()
    ]


def require_vllm() -> str:
    """vLLM's version.  Raises ValueError where the plug-in was not written for it, with what was found."""
    import vllm

    package = Path(vllm.__file__).parent
    if is_one_of(vllm.__version__, VERSIONS):
        wrong = differences(lambda path: (package / path).read_text(), version=vllm.__version__)
        if not wrong:
            return vllm.__version__
        raise ValueError(f"vLLM {vllm.__version__} is not as tlt_vllm expects: {'; '.join(wrong)}")
    raise ValueError(
        f"tlt_vllm was written for vLLM {', '.join(VERSIONS)}, and this is {vllm.__version__}: install one of "
        "those, or leave tlt out of additional_config"
    )


def _parameters(tree: ast.Module, name: str, wanted: int) -> list[str] | None:
    """Of a function or method: as many as are wanted, and further ones without a default.  None: it is not there."""
    body: list[ast.stmt] = tree.body
    for part in name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        if not isinstance(found, ast.ClassDef | ast.FunctionDef):
            return None
        body = found.body
    assert isinstance(found, ast.FunctionDef), name
    names = [argument.arg for argument in (*found.args.posonlyargs, *found.args.args)]
    return names[: max(wanted, len(names) - len(found.args.defaults))]

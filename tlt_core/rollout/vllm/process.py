"""vLLM as a rollout engine: requests in, responses out, new weights in between.  A line of JSON in, a line of JSON out.

    python -P process.py       run by the interpreter of vLLM's own environment; nothing of ours is imported

    stdin   {"model": ..., "dtype": ..., "max_len": ..., ...}                                      settings, once
    stdout  {"ready": {"version": ..., "threads": ...}}
    stdin   {"ask": "weights", "file": "x.safetensors", "version": 3}
    stdout  {"tensors": 272, "seconds": 0.4}
    stdin   {"ask": "decode", "params": {...}, "requests": [{"id": "7", "tokens": [...], "seed": 1}, ...]}
    stdout  {"live": 3, "tokens": 40, "finished": [{"id", "tokens", "logprobs", "stopped"}, ...], "version": 3}
    stdin   {"ask": "counters"}
    stdout  {"drafts": ..., "draft_tokens": ..., "accepted": ..., "accepted_per_pos": [...]}
    any     {"error": "..."} instead, when a request was refused; the process goes on

A decode call takes new requests, and steps until a response ends or a quarter of a second has passed.  It returns at
once when no request is live.  The process ends when stdin does, so it does not outlive the worker that started it.

The engine core runs in this process (the caller sets VLLM_ENABLE_V1_MULTIPROCESSING=0), so weights are loaded by a
plain call.  They go through vLLM's layer-wise reload, which undoes and redoes the packing for CPU kernels.
"""

# Run by another interpreter than the type checker's.
# mypy: ignore-errors

import json
import os
import sys
import time

_STEPS_S = 0.25  # longest decode call without a finished response: the caller wants to hear of new tokens


def main():
    """Serve until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints must not look like a reply
    server = Server(json.loads(sys.stdin.readline()))
    _reply(replies, {"ready": server.describe()})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("ask"))(**request)
        except (ValueError, RuntimeError, OSError, KeyError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _reply(replies, answer)
    os._exit(0)  # threads of the engine may not end by themselves


class Server:
    """One engine and the responses that are being decoded."""

    def __init__(self, settings):
        import vllm

        self._llm = vllm.LLM(
            settings["model"],
            skip_tokenizer_init=True,
            dtype=settings["dtype"],
            seed=settings["seed"],
            max_model_len=settings["max_len"],
            max_num_seqs=settings["max_live"],
            kv_cache_memory_bytes=settings["kv_cache_mb"] << 20,
            enforce_eager=settings["eager"],
            enable_prefix_caching=True,  # the responses of a group share their prompt
            speculative_config=settings["speculative"],
            logprobs_mode="processed_logprobs",  # after temperature and filters, as the update computes them
            disable_log_stats=False,  # counters of speculation
        )
        self._engine = self._llm.llm_engine
        self._version = settings["version"]
        self._live = {}  # by id: [tokens, logprobs]

    def describe(self):
        """What runs here.  samples_rightly: see `_spreads_temperatures`."""
        import torch
        import vllm

        return {
            "version": f"vllm {vllm.__version__}",
            "threads": torch.get_num_threads(),
            "samples_rightly": _spreads_temperatures(),
        }

    def weights(self, *, file, version):
        """Replace the policy's weights by those of a safetensors file."""
        if self._live:
            raise RuntimeError(f"{len(self._live)} responses are being decoded: weights change between rollouts only")
        started_s = time.monotonic()
        tensors = self._llm.collective_rpc(_load, args=(file,))[0]
        self._version = version
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not emptied: it holds states of the old weights")
        return {"tensors": tensors, "seconds": time.monotonic() - started_s}

    def decode(self, *, params, requests):
        """See the module docstring."""
        import vllm
        from vllm.sampling_params import RequestOutputKind

        for request in requests:
            wanted = vllm.SamplingParams(
                seed=request["seed"],
                logprobs=0,  # of the sampled token alone
                ignore_eos=True,  # tokens that stop are named
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                **params,
            )
            self._engine.add_request(request["id"], {"prompt_token_ids": request["tokens"]}, wanted)
            self._live[request["id"]] = ([], [])
        finished, made, until_s = [], 0, time.monotonic() + _STEPS_S
        while self._live and not finished and time.monotonic() < until_s:
            for output in self._engine.step():
                made += self._take(output, finished)
        return {"live": len(self._live), "tokens": made, "finished": finished, "version": self._version}

    def _take(self, output, finished):
        """New tokens of one response; returns how many."""
        part = output.outputs[0]
        tokens, logprobs = self._live[output.request_id]
        tokens.extend(part.token_ids)
        logprobs.extend(at[token].logprob for token, at in zip(part.token_ids, part.logprobs, strict=True))
        if output.finished:
            del self._live[output.request_id]
            stopped = part.finish_reason == "stop"
            finished.append({"id": output.request_id, "tokens": tokens, "logprobs": logprobs, "stopped": stopped})
        return len(part.token_ids)

    def counters(self):
        """Of speculation, since the start."""
        told = {metric.name: metric for metric in self._llm.get_metrics() if "spec_decode" in metric.name}
        values = {
            name: getattr(told.get(f"vllm:spec_decode_num_{metric}"), "value", 0)
            for name, metric in (
                ("drafts", "drafts"),
                ("draft_tokens", "draft_tokens"),
                ("accepted", "accepted_tokens"),
            )
        }
        per_pos = getattr(told.get("vllm:spec_decode_num_accepted_tokens_per_pos"), "values", [])
        return values | {"accepted_per_pos": list(per_pos)}


def _load(worker, file):
    """In the worker: load all tensors, return how many.  Raises ValueError when the file does not fill the model."""
    from safetensors import safe_open
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

    runner = worker.model_runner
    model = runner.get_model()
    wanted = {name for name, _ in model.named_parameters()}
    with safe_open(file, framework="pt") as tensors:
        names = list(tensors.keys())
        with set_current_vllm_config(runner.vllm_config):
            initialize_layerwise_reload(model)
            loaded = model.load_weights((name, tensors.get_tensor(name)) for name in names)
            finalize_layerwise_reload(model, runner.vllm_config.model_config)
        # A head that is tied to the embedding is not in the file, but it is packed apart.
        head = getattr(model, "lm_head", None)
        if head is not None and "lm_head.weight" not in names:
            head.quant_method.process_weights_after_loading(head)
    missing = sorted(wanted - set(loaded or wanted))
    if missing:
        raise ValueError(f"{file} has no weights for {len(missing)} parameters of the policy, e.g. {missing[0]}")
    return len(names)


def _spreads_temperatures():
    """Whether drafts of sampled requests are verified at the requests' temperatures.

    The CPU build loses the temperatures unless our plugin repairs it (see cpu_fix).  Builds without that replacement of
    a kernel are right.
    """
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return True
    from vllm.utils import cpu_triton_utils

    spread = getattr(cpu_triton_utils, "_expand_kernel_impl", None)
    if spread is None:
        return True
    rows = torch.full((3,), -1.0)
    spread(rows, torch.tensor([0.5, 0.25]), torch.tensor([2, 3], dtype=torch.int32), 0, 0, MAX_NUM_TOKENS=3)
    return rows.tolist() == [0.5, 0.5, 0.25]


def _reply(replies, value):
    replies.write(json.dumps(value) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()

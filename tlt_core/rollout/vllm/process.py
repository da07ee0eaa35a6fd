"""vLLM as a rollout engine: requests in, responses out, new weights in between.  A line of JSON in, a line of JSON out.

    python -P process.py       run by the interpreter of vLLM's own environment, where `tlt_vllm` is installed

    stdin   {"model": ..., "dtype": ..., "max_len": ..., ...}                                      settings, once
    stdout  {"ready": {"version": ..., "threads": ...}}
    stdin   {"ask": "part", "file": "x.safetensors"}                                    some of the policy's new weights
    stdout  {}
    stdin   {"ask": "weights", "version": 3}                                            that were all of them
    stdout  {"tensors": 272, "checked": 120, "seconds": 0.4}
    stdin   {"ask": "drafter", "file": "y.safetensors"}
    stdout  {"tensors": 12, "checked": 6}
    stdin   {"ask": "decode", "params": {...}, "requests": [{"id": "7", "tokens": [...], "stream": 1,
             "max_tokens": 512}, ...]}
    stdout  {"live": 3, "tokens": 40, "finished": [{"id", "tokens", "logprobs", "stopped", "states"}, ...],
             "rounds": [...], "version": 3}
    stdin   {"ask": "tuner", "call": "suspend", "arguments": ["eagle3"], "options": {}}
    stdout  {"answer": ...}
    stdin   {"ask": "sleep"}                                  memory is given back until the next question that needs it
    stdout  {}
    stdin   {"ask": "counters"}
    stdout  {"drafts": ..., "draft_tokens": ..., "accepted": ..., "accepted_per_pos": [...]}
    any     {"error": "..."} instead, when a request was refused; the process goes on

A decode call takes new requests, and steps until a response ends or a quarter of a second has passed.  It returns at
once when no request is live.  `states` names a file with the hidden states of the response, where those are kept; the
reader deletes it.  The process ends when stdin does, so it does not outlive the worker that started it.

The engine core runs in this process (the caller sets VLLM_ENABLE_V1_MULTIPROCESSING=0), so weights are loaded by a
plain call, and drafting is what `tlt_vllm` makes of it.
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

        keeps_states = bool(settings["tlt"].get("capture_mb"))
        self._folder = settings["folder"] if keeps_states else None
        self._llm = vllm.LLM(
            settings["model"],
            skip_tokenizer_init=True,
            dtype=settings["dtype"],
            seed=settings["seed"],
            max_model_len=settings["max_len"],
            max_num_seqs=settings["max_live"],
            tensor_parallel_size=settings["tensor_parallel"],
            **_memory(settings),
            enforce_eager=_on_cpu() if settings["eager"] is None else settings["eager"],
            enable_prefix_caching=True,
            speculative_config=settings["speculative"],
            logprobs_mode="processed_logprobs",  # after temperature
            disable_log_stats=False,  # counters of speculation
            additional_config={"tlt": {"policy_logprobs": True, **settings["tlt"]}},  # the update knows no filters
        )
        self._engine = self._llm.llm_engine
        self._lengths = self._engine.engine_core.engine_core.scheduler.draft_lengths
        self._lengths.trace = []
        self._version = settings["version"]
        self._live = {}  # by id: [tokens, logprobs]
        self._asleep = False

    def describe(self):
        import torch
        import vllm

        return {"version": f"vllm {vllm.__version__}", "threads": torch.get_num_threads()}

    def part(self, *, file):
        if self._live:
            raise RuntimeError(f"{len(self._live)} responses are being decoded: weights change between rollouts only")
        self._wake()
        self._llm.collective_rpc("tlt_load_policy_part", args=(file,))
        return {}

    def weights(self, *, version):
        """All parts are there: from now on the policy has this version."""
        started_s = time.monotonic()
        report = self._llm.collective_rpc("tlt_end_policy")[0]
        self._version = version
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not emptied: it holds states of the old weights")
        return report | {"seconds": time.monotonic() - started_s}

    def drafter(self, *, file):
        self._wake()
        return self._llm.collective_rpc("tlt_load_drafter", args=(file,))[0]

    def sleep(self):
        """Weights move to host memory, keys and values are forgotten, until the engine is needed again."""
        if self._live:
            raise RuntimeError(f"{len(self._live)} responses are being decoded: vLLM sleeps between rollouts only")
        self._llm.collective_rpc("tlt_before_sleep")
        self._llm.sleep(level=1)
        self._asleep = True
        return {}

    def _wake(self):
        """Raises ValueError when a layer does not compute what it did before the sleep."""
        if self._asleep:
            self._llm.wake_up()
            self._llm.collective_rpc("tlt_after_sleep")
            self._asleep = False

    def tuner(self, *, call, arguments, options):
        return {"answer": getattr(self._lengths.tuner, call)(*arguments, **options)}

    def decode(self, *, params, requests):
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self._wake()
        for request in requests:
            wanted = vllm.SamplingParams(
                extra_args={"tlt_stream": request["stream"]},
                max_tokens=request["max_tokens"],
                logprobs=0,  # of the sampled token alone
                ignore_eos=True,  # tokens that stop are named
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                **params,
            )
            self._engine.add_request(request["id"], {"prompt_token_ids": request["tokens"]}, wanted)
            self._live[request["id"]] = ([], [], len(request["tokens"]))
        finished, made, until_s = [], 0, time.monotonic() + _STEPS_S
        while self._live and not finished and time.monotonic() < until_s:
            for output in self._engine.step():
                made += self._take(output, finished)
        rounds, self._lengths.trace = self._lengths.trace, []
        told = {"live": len(self._live), "tokens": made, "finished": finished, "version": self._version}
        return told | {"rounds": rounds}

    def _take(self, output, finished):
        """New tokens of one response; returns how many."""
        part = output.outputs[0]
        tokens, logprobs, first = self._live[output.request_id]
        tokens.extend(part.token_ids)
        logprobs.extend(at[token].logprob for token, at in zip(part.token_ids, part.logprobs, strict=True))
        if output.finished:
            del self._live[output.request_id]
            stopped = part.finish_reason == "stop"
            told = {"id": output.request_id, "tokens": tokens, "logprobs": logprobs, "stopped": stopped}
            finished.append(told | {"states": self._states(output.request_id, first, tokens)})
        return len(part.token_ids)

    def _states(self, name, first, sampled):
        """Write what was kept of a response; returns the file, None where nothing was."""
        if self._folder is None:
            return None
        file = f"{self._folder}/states_{name}.safetensors"
        written = self._llm.collective_rpc("tlt_write_states", args=(name, first, sampled, file))[0]
        return file if written else None

    def counters(self):
        """Of speculation, since the start; preemptions; the tuner's figures; responses whose hidden states are lost."""
        told = {metric.name: metric for metric in self._llm.get_metrics()}
        metrics = {"drafts": "drafts", "draft_tokens": "draft_tokens", "accepted": "accepted_tokens"}
        values = {
            name: getattr(told.get(f"vllm:spec_decode_num_{metric}"), "value", 0) for name, metric in metrics.items()
        }
        per_pos = getattr(told.get("vllm:spec_decode_num_accepted_tokens_per_pos"), "values", [])
        values["preempted"] = told["vllm:num_preemptions"].value
        told = {"tuner": self._lengths.tuner.snapshot()} | self._llm.collective_rpc("tlt_report")[0]
        return values | {"accepted_per_pos": list(per_pos)} | told


def _on_cpu():
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _memory(settings):
    if _on_cpu():
        # Responses of a group share whole blocks of their prompt.  vLLM 0.32's default on CPUs is 128 tokens: shorter
        # prompts share nothing.
        return {"kv_cache_memory_bytes": (settings["kv_cache_mb"] or 512) << 20, "block_size": 32}
    sleep = {"enable_sleep_mode": settings["sleeps"]}
    if settings["kv_cache_mb"] is None:
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        share = min(settings["memory_fraction"], 1 - settings["leave_bytes"] / total)
        return sleep | {"gpu_memory_utilization": round(share, 3)}
    return sleep | {"kv_cache_memory_bytes": settings["kv_cache_mb"] << 20}


def _reply(replies, value):
    replies.write(json.dumps(value) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()

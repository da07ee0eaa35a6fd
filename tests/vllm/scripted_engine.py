"""An engine of vLLM in one process, with either model runner and either scheduler.  Run by vLLM's interpreter.

vLLM's build for CPUs refuses its second runner, whose kernels are written in Triton, and asynchronous scheduling, which
brings nothing there.  Both run on a CPU: the kernels in Triton's interpreter.

stdin   {"model": ..., "drafter": null, "second_runner": false, "asynchronous": false, "exact": true,
         "prompts": [[...], ...], "max_tokens": [...], "temperatures": [...], "repetition": [...], "stop": [2],
         "lengths": [3, 0, 1, ...],                             null: the tuner chooses draft lengths
         "load_format": "auto", "extension": null,              vLLM's load_format and worker_extension_cls
         "loads": [["tlt_load_drafter", file], null]}           one pass over the prompts after each of these
stdout  the last line: {"runner": ..., "scheduler": ..., "passes": [{"tokens": [[...], ...],
         "steps": [[length chosen, drafted by request, emitted by request], ...],          of the engine
         "rounds": [[length, requests, drafted, accepted], ...],                           of the tuner
         "counted": [drafted, accepted]}, ...]}                                            by vLLM itself
"""

import json
import os
import sys
from types import SimpleNamespace

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # scheduler and runner in this process


def allow_second_runner():
    """Before vLLM is imported.  It wants Triton with a device that is there; the interpreter needs none."""
    os.environ["TRITON_INTERPRET"] = os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=None)


def allow_asynchronous_scheduling():
    from vllm.platforms import current_platform

    check = current_platform.check_and_update_config

    def leaving_it_on(config):
        check(config)
        config.scheduler_config.async_scheduling = True

    current_platform.check_and_update_config = leaving_it_on


def follow_script(chosen, left):
    """left: draft lengths of the next steps, which are taken from it."""
    schedule = chosen.schedule

    def scripted(*args, **options):
        schedule(*args, **options)
        chosen._chosen = chosen.by_length[left.pop(0) if left else 0]
        return chosen.chosen.tokens

    chosen.schedule = scripted


def note_steps(scheduler, steps):
    update = scheduler.update_from_output

    def noted(scheduled, output):
        drafted = {name: len(tokens) for name, tokens in scheduled.scheduled_spec_decode_tokens.items()}
        emitted = {name: len(output.sampled_token_ids[row]) for name, row in output.req_id_to_index.items()}
        steps.append([scheduled.num_spec_tokens_to_schedule, drafted, emitted])
        return update(scheduled, output)

    scheduler.update_from_output = noted


def main():
    job = json.loads(sys.stdin.read())
    if job["second_runner"]:
        allow_second_runner()
    import vllm

    if job["asynchronous"]:
        allow_asynchronous_scheduling()
    longest = max(job["lengths"] or [3])
    speculative = {"method": "eagle3", "model": job["drafter"], "num_speculative_tokens": longest}
    llm = vllm.LLM(
        job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=len(job["prompts"]),
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,
        async_scheduling=job["asynchronous"],
        disable_log_stats=False,
        speculative_config=speculative if job["drafter"] else None,
        load_format=job["load_format"],
        worker_extension_cls=job["extension"] or "",
        additional_config={"tlt": {"exact": job["exact"], "ngram": False}},
    )
    core = llm.llm_engine.engine_core.engine_core
    steps, rounds, script = [], [], []
    core.scheduler.draft_lengths.trace = rounds
    if job["lengths"]:
        follow_script(core.scheduler.draft_lengths, script)
    note_steps(core.scheduler, steps)
    params = [
        vllm.SamplingParams(
            temperature=heat,
            repetition_penalty=repetition,
            seed=number,
            max_tokens=count,
            stop_token_ids=job["stop"],
            detokenize=False,
        )
        for number, (heat, repetition, count) in enumerate(
            zip(job["temperatures"], job["repetition"], job["max_tokens"], strict=True)
        )
    ]

    def counted():
        of = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        names = ("draft_tokens", "accepted_tokens")
        return [of.get(f"vllm:spec_decode_num_{name}", 0) for name in names]

    passes, before = [], counted()
    for load in job["loads"]:
        script[:] = job["lengths"] or []
        if load:
            llm.collective_rpc(load[0], args=(load[1],))
        outputs = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], params, use_tqdm=False)
        after = counted()
        passes.append(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "steps": [[k, sorted(drafted.values()), sorted(of.values())] for k, drafted, of in steps],
                "rounds": [
                    [r.strategy.tokens, r.live, sum(r.drafted), sum(r.accepted)]
                    for r in (entry["report"] for entry in rounds)
                ],
                "counted": [now - then for now, then in zip(after, before, strict=True)],
            }
        )
        before = after
        steps.clear()
        rounds.clear()
    runner = type(core.model_executor.driver_worker.worker.model_runner).__module__
    print(json.dumps({"runner": runner, "scheduler": type(core.scheduler).__name__, "passes": passes}))


if __name__ == "__main__":
    main()

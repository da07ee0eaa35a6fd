"""One decoding engine in a process of its own, to be measured: python -P process.py ENGINE_FILE

    stdin   {"model": ..., "threads": ..., "cores": [...], ...}                                  settings, once
    stdout  {"ready": {"version": ..., "threads": ..., "precision": ..., "instructions": ...}}  `describe(settings)`
    stdin   {"prompts": [[...], ...], "new_tokens": 64, "natural_ends": false, "temperature": 0.0, "seed": 1}    a job
    stdout  {"seconds": ..., "first_seconds": ..., "tokens": [[...], ...]}        `build(settings)` makes `decode(job)`

A job is decoded twice, to its first token and to the end.  Any interpreter with an engine can run this file.
"""

import gc
import json
import os
import runpy
import sys
import time


def main() -> None:
    """Serve jobs until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever an engine prints must not look like a reply
    settings = json.loads(sys.stdin.readline())
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, settings["cores"])  # before any thread exists: all of them inherit it
    engine = runpy.run_path(sys.argv[1])
    decode = engine["build"](settings)
    print(json.dumps({"ready": engine["describe"](settings)}), file=replies, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        _, first_seconds = _timed(decode, job | {"new_tokens": 1})
        tokens, seconds = _timed(decode, job)
        reply = {"seconds": seconds, "first_seconds": first_seconds, "tokens": tokens}
        print(json.dumps(reply), file=replies, flush=True)


def _timed(decode, job):  # type: ignore[no-untyped-def]  # of a module that no import names
    """Tokens by prompt, and seconds.  `decode(job)` prepares, and returns what is to be timed."""
    run = decode(job)
    gc.collect()
    began = time.perf_counter()
    tokens = run()
    seconds = time.perf_counter() - began
    least = 1 if job["natural_ends"] else job["new_tokens"]
    wrong = [len(row) for row in tokens if not least <= len(row) <= job["new_tokens"]]
    if wrong or len(tokens) != len(job["prompts"]):
        raise ValueError(f"{job['new_tokens']} tokens were wanted for each prompt, the engine made {wrong}")
    return tokens, seconds


if __name__ == "__main__":
    main()

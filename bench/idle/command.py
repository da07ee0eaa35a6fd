"""`tlt bench idle`: what training the drafter in idle time brings over a whole training run.

Two runs take turns, a block of steps each: all of TLT, and the same with the first drafter left as it is.  After each
block, on that block's responses under their own noise: what is accepted of the first drafter (static) and of the one
that each step's rollout drafted with (adaptive), of the n-gram drafter, and of the longer one of its and the static
chains (`bench/idle/chains`).  Each published drafter is written to a file, which counts as time of its step.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from torch import Tensor

from bench.idle.chains import NgramReplay, Runs, accept_length, by_round_error, eagle3_runs, longer, recorded
from bench.report import write_report
from bench.runs import first_drafter, same_steps, steps_of, take_turns, variants
from bench.verdicts import summarise, verdict
from conf.run import RunConfig
from tlt_core.drafter.eagle3.files import load_eagle3
from tlt_core.machine.precision import as_torch
from tlt_core.model.load import load_decoder
from tlt_core.run.drafter_release import published_dir

_LONG = 12  # drafts of a long chain
_TIMES = ("timing_s/step", "timing_s/gen", "timing_s/update_actor")
_FIGURES = ("timing_s/step", "timing_s/publish_drafter", "rollout/", "idle/", "drafter/", "critic/rewards/mean")


@flow(name="bench-idle")
def bench_idle(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """`repeats` blocks of steps, `num_steps` in all, of both runs; returns the report."""
    first, policy_dir = first_drafter(cfg)
    both = variants(cfg, first)
    kept = {"keep_published": -(-cfg.num_steps // repeats) + 1}  # the drafters of a block, and the one before it
    idle_training = both["trained"].drafter.idle_training.model_copy(update=kept)
    keeping = both["trained"].drafter.model_copy(update={"idle_training": idle_training})
    run = both["trained"].model_copy(update={"drafter": keeping})
    turns = {"static": both["static"], "tlt": run}
    decoder = load_decoder(policy_dir, dtype=as_torch(cfg.rollout.dtype))
    embedding_VD = decoder.embed_tokens.weight.detach()
    acceptance: list[dict[str, Any]] = []
    used, done = first, 0
    ngram = NgramReplay(cfg)
    for steps in take_turns(turns, num_steps=cfg.num_steps, blocks=repeats):
        responses = [r for r in recorded(run.run_dir / "idle_training") if done < r.step <= steps]
        drafter = load_eagle3(first, decoder.config)
        runs: dict[str, Runs] = {"static": eagle3_runs(cfg, drafter, embedding_VD, responses, drafts=_LONG)}
        adaptive: dict[str, Tensor] = {}
        for step in range(done + 1, steps + 1):
            drafter, of_step = load_eagle3(used, decoder.config), [r for r in responses if r.step == step]
            adaptive |= eagle3_runs(cfg, drafter, embedding_VD, of_step, drafts=_LONG)
            published = published_dir(run.run_dir, step)
            used = published if published.is_dir() else used
        runs["adaptive"] = adaptive
        runs["ngram"] = ngram.runs(responses, drafts=_LONG)
        runs["static_or_ngram"] = longer(runs["static"], runs["ngram"])
        times = _times(turns, after=done)
        acceptance += [
            {"configuration": f"steps {done + 1} to {steps}, {drafts} drafts", "responses": len(responses)}
            | _lengths(runs, drafts)
            | times
            for drafts in (cfg.drafter.depth, _LONG)
        ]
        done = steps
    rows, times = steps_of(run), _times(turns, after=0)
    figures = summarise(rows, sorted({figure for row in rows for figure in row if figure.startswith(_FIGURES)}))
    same = same_steps(run, turns["static"])
    whole = {"configuration": "training in idle time over none", "same_steps": same, **times}
    report_rows = [{"configuration": "steps", **figures}, whole, *acceptance]
    verdicts = _verdicts(rows, [a for a in acceptance if a["drafts"] == _LONG], times["over_static/timing_s/step"])
    return write_report(out, command=command, repeats=repeats, rows=report_rows, verdicts=verdicts)


def _times(turns: Mapping[str, RunConfig], *, after: int) -> dict[str, float]:
    """Of the steps after `after` that count: training in idle time over none, all of them together."""
    steps = {name: [row for row in steps_of(run) if row["step"] > after] for name, run in turns.items()}
    return {
        f"over_static/{name}": sum(row[name] for row in steps["tlt"]) / sum(row[name] for row in steps["static"])
        for name in _TIMES
    }


def _lengths(runs: Mapping[str, Runs], drafts: int) -> dict[str, float]:
    lengths = {name: accept_length(of_it, drafts=drafts) for name, of_it in runs.items()}
    figures: dict[str, float] = {"drafts": drafts}
    figures |= {f"{name}_by_round_error": by_round_error(of_it, drafts=drafts) for name, of_it in runs.items()}
    figures |= {f"{name}_by_round": length for name, length in lengths.items()}
    return figures | {"ratio_by_round": lengths["adaptive"] / lengths["static"]}


def _verdicts(
    steps: Sequence[Mapping[str, float]], acceptance: Sequence[Mapping[str, Any]], over_static: float
) -> list[dict[str, Any]]:
    """acceptance: by block, with long chains.  over_static: step time of all steps together."""
    long_idle_s = sum(row.get("idle/long_idle_s", 0.0) for row in steps)
    missed_s = sum(row.get("idle/long_idle_s", 0.0) * (1 - row.get("idle/harvested_ratio", 0.0)) for row in steps)
    stopped = [row["idle/preempt_ms_p95"] for row in steps if "idle/preempt_ms_p95" in row]
    lengths = [a["adaptive_by_round"] for a in acceptance]
    worst = min(length / best for length, best in zip(lengths, itertools.accumulate(lengths, max), strict=True))
    trained = 1 - missed_s / long_idle_s if long_idle_s else 0.0
    last = f"acceptance length of the last block, chains of {_LONG}, adaptive over static"
    cost = "step time, all steps together, training in idle time over none"
    return [
        verdict(last, [acceptance[-1]["ratio_by_round"]], 1.3),
        verdict("acceptance length, adaptive: worst block over the best before", [worst], 0.95),
        verdict("idle seconds in windows over 0.5 s that trained, all steps together", [trained], 0.9),
        verdict("pre-emption, p95 of a step, ms", stopped or [0.0], 250.0, at_most=True),
        verdict(cost, [over_static], 1.01, at_most=True),
    ]

"""`tlt bench idle`: what training the drafter in idle time brings over a whole training run.

Runs take turns, a block of steps each.  They sample the same responses, and differ in the drafter:

plain     none
ngram     n-grams alone
static    the first drafter, as it is
trained   the first drafter, trained in idle time
base      a drafter of the model before its cold start, as it is; base_trained: the same, trained in idle time

After each block, on that block's responses under their own noise: what is accepted of these drafters, of n-grams, and
of the longer one of n-grams' and the first drafter's chains (`bench/idle/chains`).  Each published drafter is written
to a file, which counts as time of its step.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from torch import Tensor

from bench.idle.chains import NgramReplay, Runs, accept_length, by_round_error, eagle3_runs, longer, recorded
from bench.report import write_report
from bench.runs import base_drafter, first_drafter, same_steps, steps_of, take_turns, variants
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
    """`repeats` blocks of steps, `num_steps` in all, of each run; returns the report."""
    first, policy_dir = first_drafter(cfg)
    arms = {name: run for name, run in variants(cfg, first).items() if name in ("plain", "static", "trained")}
    arms["ngram"] = _without_drafter(arms["static"])
    drafters = {"static": first, "trained": first}
    if cfg.coldstart.enabled:
        base = base_drafter(cfg)
        of_base = variants(cfg.model_copy(update={"name": f"{cfg.name}-base"}), base)
        arms |= {"base": of_base["static"], "base_trained": of_base["trained"]}
        drafters |= {"base": base, "base_trained": base}
    kept = -(-cfg.num_steps // repeats) + 1  # the drafters of a block, and the one before it
    arms = {name: _keeping(run, kept) for name, run in arms.items()}
    decoder = load_decoder(policy_dir, dtype=as_torch(cfg.rollout.dtype))
    embedding_VD = decoder.embed_tokens.weight.detach()
    blocks: list[dict[str, Any]] = []
    done, ngram = 0, NgramReplay(cfg)
    for steps in take_turns(arms, num_steps=cfg.num_steps, blocks=repeats):
        responses = [r for r in recorded(arms["trained"].run_dir / "idle_training") if done < r.step <= steps]
        runs: dict[str, Runs] = {"ngram": ngram.runs(responses, drafts=_LONG)}
        for name in drafters:
            found: dict[str, Tensor] = {}
            for step, own in itertools.groupby(responses, key=lambda r: r.step):
                drafter = load_eagle3(drafters[name], decoder.config)
                found |= eagle3_runs(cfg, drafter, embedding_VD, [*own], drafts=_LONG)
                published = published_dir(arms[name].run_dir, step)
                drafters[name] = published if published.is_dir() else drafters[name]
            runs[name] = found
        runs["static_or_ngram"] = longer(runs["static"], runs["ngram"])
        blocks += [
            {"configuration": f"steps {done + 1} to {steps}, {drafts} drafts", "responses": len(responses)}
            | _lengths(runs, drafts)
            | _times(arms, after=done)
            for drafts in (cfg.drafter.depth, _LONG)
        ]
        done = steps
    rows = steps_of(arms["trained"])
    figures = summarise(rows, sorted({figure for row in rows for figure in row if figure.startswith(_FIGURES)}))
    last = [b for b in blocks if b["drafts"] == _LONG]
    report_rows = [*_arms(arms, last[-1]), {"configuration": "steps", **figures}, *blocks]
    verdicts = _verdicts(rows, last, _times(arms, after=0)["over_static/timing_s/step"])
    return write_report(out, command=command, repeats=repeats, rows=report_rows, verdicts=verdicts)


def _without_drafter(run: RunConfig) -> RunConfig:
    speculation = run.rollout.speculation.model_copy(update={"drafter_path": None, "strategies": None})
    rollout = run.rollout.model_copy(update={"speculation": speculation})
    return run.model_copy(update={"name": f"{run.name}-ngram", "rollout": rollout})


def _keeping(run: RunConfig, published: int) -> RunConfig:
    """The run, with so many of its newest drafters kept."""
    idle_training = run.drafter.idle_training.model_copy(update={"keep_published": published})
    return run.model_copy(update={"drafter": run.drafter.model_copy(update={"idle_training": idle_training})})


def _arms(arms: Mapping[str, RunConfig], last: Mapping[str, float]) -> list[dict[str, Any]]:
    """Of each run: speed of all steps together over plain decoding's, tokens a round of the last block's chains."""
    rows: list[dict[str, Any]] = []
    plain = steps_of(arms["plain"])
    for name, run in arms.items():
        own = steps_of(run)
        speeds = {f"over_plain/{t}": sum(row[t] for row in plain) / sum(row[t] for row in own) for t in _TIMES}
        same = {"same_steps": same_steps(run, arms["plain"]), "last_block_by_round": last.get(f"{name}_by_round")}
        rows.append({"arm": name, **summarise(own, _TIMES), **speeds, **same})
    return rows


def _times(arms: Mapping[str, RunConfig], *, after: int) -> dict[str, float]:
    """Of the steps after `after` that count: training in idle time over none, all of them together."""
    trained, static = ([row for row in steps_of(arms[n]) if row["step"] > after] for n in ("trained", "static"))
    return {f"over_static/{t}": sum(row[t] for row in trained) / sum(row[t] for row in static) for t in _TIMES}


def _lengths(runs: Mapping[str, Runs], drafts: int) -> dict[str, float]:
    lengths = {name: accept_length(of_it, drafts=drafts) for name, of_it in runs.items()}
    figures: dict[str, float] = {"drafts": drafts}
    figures |= {f"{name}_by_round_error": by_round_error(of_it, drafts=drafts) for name, of_it in runs.items()}
    figures |= {f"{name}_by_round": length for name, length in lengths.items()}
    return figures | {"ratio_by_round": lengths["trained"] / lengths["static"]}


def _verdicts(
    steps: Sequence[Mapping[str, float]], acceptance: Sequence[Mapping[str, Any]], over_static: float
) -> list[dict[str, Any]]:
    """acceptance: by block, with long chains.  over_static: step time of all steps together."""
    long_idle_s = sum(row.get("idle/long_idle_s", 0.0) for row in steps)
    missed_s = sum(row.get("idle/long_idle_s", 0.0) * (1 - row.get("idle/harvested_ratio", 0.0)) for row in steps)
    stopped = [row["idle/preempt_ms_p95"] for row in steps if "idle/preempt_ms_p95" in row]
    lengths = [a["trained_by_round"] for a in acceptance]
    worst = min(length / best for length, best in zip(lengths, itertools.accumulate(lengths, max), strict=True))
    trained = 1 - missed_s / long_idle_s if long_idle_s else 0.0
    last = f"acceptance length of the last block, chains of {_LONG}, trained over static"
    cost = "step time, all steps together, training in idle time over none"
    return [
        verdict(last, [acceptance[-1]["ratio_by_round"]], 1.3),
        verdict("acceptance length, trained: worst block over the best before", [worst], 0.95),
        verdict("idle seconds in windows over 0.5 s that trained, all steps together", [trained], 0.9),
        verdict("pre-emption, p95 of a step, ms", stopped or [0.0], 250.0, at_most=True),
        verdict(cost, [over_static], 1.01, at_most=True),
    ]

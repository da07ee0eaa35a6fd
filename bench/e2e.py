"""`tlt bench e2e`: whole RL steps that differ only in drafting and in the use of idle time (`bench.runs.variants`).

tail      the configuration as it is
no-tail   responses are cut short, so that no worker waits for long ones
exact     a few short steps in float32, without importance weights: `same_steps`, the share of steps whose rollouts
          and rewards are those of plain decoding, and the share of equal weights must be 1 in all variants
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow

from bench.report import write_report
from bench.runs import first_drafter, ratios, same_steps, same_weights, steps_of, take_turns, variants
from bench.verdicts import summarise, verdict
from bench.written import written
from conf.load import ConfigError
from conf.run import RunConfig

_UNCUT_TOKENS = 48  # longest response of the workload without a tail
_EXACT_PROMPTS, _EXACT_TOKENS = 4, 160  # upper bounds
_EXACT_STEPS = 2
_FIGURES = ("timing_s/", "perf/", "rollout/", "response_length/", "idle/", "critic/rewards/mean")  # of a run's metrics
_WORKLOADS = ("tail", "no-tail", "exact")
_EXACT_CLAIMS = {
    "same_steps": "float32: share of steps with the same rollouts and rewards as plain",
    "same_weights": "float32: share of weights that are equal to the bit after training",
}
_IDLE_CLAIMS = (  # figure, claim, bound, at most
    ("idle/harvested_ratio", "tail: share of idle windows over 0.5 s that TLT uses", 0.95, False),
    ("idle/preempt_ms_p95", "tail: idle work stops within, in milliseconds", 250.0, True),
)
_Steps = Mapping[str, Sequence[Mapping[str, float]]]


@flow(name="bench-e2e")
def bench_e2e(cfg: RunConfig, *, repeats: int, out: Path, command: str, workload: str | None = None) -> dict[str, Any]:
    """`repeats` blocks of steps, `num_steps` in all, of each variant; returns the report.  workload: only this one."""
    if workload not in (None, *_WORKLOADS):
        raise ConfigError(f"--workload={workload}: choose one of {', '.join(_WORKLOADS)}, or leave it out for all")
    drafter, _ = first_drafter(cfg)
    rows: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []
    for name in _WORKLOADS if workload is None else (workload,):
        if name == "exact":
            exact = _exact(cfg, drafter)
            rows += exact
            verdicts += [verdict(claim, [r[figure] for r in exact], 1.0) for figure, claim in _EXACT_CLAIMS.items()]
            continue
        runs = variants(cfg if name == "tail" else _without_tail(cfg), drafter)
        list(take_turns(runs, num_steps=cfg.num_steps, blocks=repeats))
        steps = {variant: steps_of(run) for variant, run in runs.items()}
        rows += _rows(name, steps, {variant: same_steps(run, runs["plain"]) for variant, run in runs.items()})
        rows.append({"workload": name, "configuration": "responses", **written(runs["plain"])})
        verdicts += _verdicts(name, steps)
    return write_report(out, command=command, repeats=repeats, rows=rows, verdicts=verdicts)


def _without_tail(cfg: RunConfig) -> RunConfig:
    rollout = cfg.rollout.model_copy(update={"max_new_tokens": min(_UNCUT_TOKENS, cfg.rollout.max_new_tokens)})
    return cfg.model_copy(update={"name": f"{cfg.name}-no-tail", "rollout": rollout})


def _exact(cfg: RunConfig, drafter: Path) -> list[dict[str, Any]]:
    """A row for each variant: the share of its steps that equal those of plain decoding."""
    given = cfg.rollout
    small = {
        "dtype": "float32",
        "num_prompts": min(_EXACT_PROMPTS, given.num_prompts),
        "max_new_tokens": min(_EXACT_TOKENS, given.max_new_tokens),
    }
    changes = {
        "name": f"{cfg.name}-exact",
        "rollout": given.model_copy(update=small),
        "update": cfg.update.model_copy(update={"dtype": "float32"}),
        # Importance weights follow the last bits of the rollout's log-probabilities, which torch rounds by batch.
        "algorithm": cfg.algorithm.model_copy(update={"tis_cap": 0.0}),
    }
    runs = variants(cfg.model_copy(update=changes), drafter)
    list(take_turns(runs, num_steps=_EXACT_STEPS, blocks=1))
    return [
        {
            "workload": "exact",
            "configuration": name,
            "steps": _EXACT_STEPS,
            "same_steps": same_steps(run, runs["plain"]),
            "same_weights": same_weights(run, runs["plain"]),
        }
        for name, run in runs.items()
    ]


def _rows(workload: str, steps: _Steps, same: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each variant, and one with the largest possible speed-up of a step (Amdahl's law)."""
    rows: list[dict[str, Any]] = []
    seconds = {name: sum(row["timing_s/step"] for row in own) for name, own in steps.items()}
    for name, own in steps.items():
        figures = summarise(own, sorted({figure for row in own for figure in row if figure.startswith(_FIGURES)}))
        whole = {"same_steps": same[name], "over_plain_in_all": seconds["plain"] / seconds[name]}
        rows.append({"workload": workload, "configuration": name, **figures, **whole})
    share = statistics.median(row["timing_s/gen"] / row["timing_s/step"] for row in steps["plain"])
    ceiling = {"rollout_share": share, "speedup_if_rollout_were_free": 1.0 / (1.0 - share)}
    return [*rows, {"workload": workload, "configuration": "ceiling", **ceiling}]


def _verdicts(workload: str, steps: _Steps) -> list[dict[str, Any]]:
    plain = steps["plain"]
    least = 1.7 if workload == "tail" else 0.97
    faster = ratios(plain, steps["tlt"], "timing_s/step")
    verdicts = [verdict(f"{workload}: step time, plain over TLT", faster, least)]
    if workload == "tail":
        streamed = ratios(plain, steps["streamed"], "timing_s/step")
        verdicts.append(verdict("tail: step time, plain over plain with a streamed update", streamed, 1.15))
        for figure, claim, bound, at_most in _IDLE_CLAIMS:
            if known := [row[figure] for row in steps["tlt"] if figure in row]:  # steps that have such windows
                verdicts.append(verdict(claim, known, bound, at_most=at_most))
        cost = ratios(steps["trained"], steps["static"], "timing_s/step")
        claim = "tail: step time, drafter training in idle time over none"
        verdicts.append(verdict(claim, cost, 1.01, at_most=True))
    return verdicts

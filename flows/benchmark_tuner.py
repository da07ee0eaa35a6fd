"""`tlt bench tuner`: which strategy is chosen, by each policy, where the right answer is known.

Throughput of every policy and of each strategy alone on planted workloads, and the rounds that a policy needs after the
drafter was swapped for a useless one, and back.  On a virtual clock: a repeat is another seed of luck and noise.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow

from conf.schema import RunConfig
from flows.benchmark import write_report
from tlt_core.adaptive import menu_of
from tlt_core.bench_tuner import POLICIES, SWAP_LIVE, WORKLOADS, best_fixed, earnings, recovery
from tlt_core.verdicts import summarise

_OF_BEST = 0.97
_MOST_ROUNDS = 100
_SWAPS = {"rounds_bad": "its drafter turned useless", "rounds_back": "the drafter is good again"}


@flow(name="bench-tuner")
def bench_tuner(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Play, judge, write the report; returns it."""
    speculation = cfg.rollout.speculation
    # a planted drafter needs no folder, only a name
    menu = menu_of(speculation if speculation.menu else speculation.model_copy(update={"drafter_path": "planted"}))
    seeds = range(cfg.seed + 1, cfg.seed + 1 + repeats)
    rows, verdicts = [], []
    for name, work in WORKLOADS.items():
        played = [earnings(work, speculation, menu, seed=seed) for seed in seeds]
        rows += _earning_rows(name, played)
        verdicts.append(_earning_verdict(name, played))
    for live in SWAP_LIVE:
        for policy in POLICIES:
            figures = [recovery(policy, speculation, menu, live=live, seed=seed) for seed in seeds]
            rows.append({"workload": f"swap, {live} live", "configuration": policy, **summarise(figures, list(_SWAPS))})
            if policy == "cost_model":
                verdicts += _swap_verdicts(live, figures)
    return write_report(out, command=command, repeats=repeats, rows=rows, verdicts=verdicts)


def _earning_rows(workload: str, played: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """One a configuration; `of_best_fixed` is over the best fixed strategy of the same seed."""
    rows = []
    for name in played[0]:
        figures = [
            {"tokens_per_s": earned[name], "of_best_fixed": earned[name] / best_fixed(earned)} for earned in played
        ]
        rows.append({"workload": workload, "configuration": name, **summarise(figures, list(figures[0]))})
    return rows


def _earning_verdict(workload: str, played: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    ratios = [earned["cost_model"] / best_fixed(earned) for earned in played]
    return _verdict(f"{workload}: cost_model over the best fixed strategy", ratios, _OF_BEST, at_least=True)


def _swap_verdicts(live: int, figures: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    return [
        _verdict(
            f"{live} live: cost_model's rounds until it does well again after {what}",
            [f[figure] for f in figures],
            _MOST_ROUNDS,
            at_least=False,
        )
        for figure, what in _SWAPS.items()
    ]


def _verdict(claim: str, values: Sequence[float], bound: float, *, at_least: bool) -> dict[str, Any]:
    """The bound itself holds."""
    value = statistics.median(values)
    holds = value >= bound if at_least else value <= bound
    return {"claim": claim, "value": value, "spread": [min(values), max(values)], "bound": bound, "holds": holds}

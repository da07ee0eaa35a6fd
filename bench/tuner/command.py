"""`tlt bench tuner`: how well each policy chooses where the best choice is known.  Repeats differ by their seed."""

from pathlib import Path
from typing import Any

from prefect import flow

from bench.report import write_report
from bench.tuner.workloads import POLICIES, SWAP_LIVE, WORKLOADS, best_fixed, earnings, recovery
from bench.verdicts import summarise, verdict
from conf.run import RunConfig
from tlt_core.drafter.kinds import strategies_of

_OF_BEST = 0.97  # of the best single strategy's throughput, which a tuner does not know beforehand
_MOST_ROUNDS = 100  # until a change of the drafter is followed: about a second on the simulated machine
_SWAPS = {"rounds_bad": "its drafter turned useless", "rounds_back": "the drafter is good again"}


@flow(name="bench-tuner")
def bench_tuner(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Run all of it, judge, write the report; returns the report."""
    speculation = cfg.rollout.speculation
    # a simulated drafter needs no folder, only a name
    strategies = strategies_of(
        speculation if speculation.strategies else speculation.model_copy(update={"drafter_path": "simulated"})
    )
    seeds = range(cfg.seed + 1, cfg.seed + 1 + repeats)
    rows, verdicts = [], []
    for name, work in WORKLOADS.items():
        played = [earnings(work, strategies, seed=seed) for seed in seeds]
        for player in played[0]:  # a policy or strategy; compared with the best fixed strategy with the same seed
            figures = [{"tokens_per_s": own[player], "of_best_fixed": own[player] / best_fixed(own)} for own in played]
            rows.append({"workload": name, "configuration": player, **summarise(figures)})
        ratios = [earned["cost_model"] / best_fixed(earned) for earned in played]
        verdicts.append(verdict(f"{name}: cost_model over the best fixed strategy", ratios, _OF_BEST))
    for live in SWAP_LIVE:
        for policy in POLICIES:
            figures = [recovery(policy, strategies, live=live, seed=seed) for seed in seeds]
            rows.append({"workload": f"swap, {live} live", "configuration": policy, **summarise(figures)})
            if policy == "cost_model":
                until = f"{live} live: cost_model's rounds until it does well again after"
                for figure, what in _SWAPS.items():
                    rounds = [f[figure] for f in figures]
                    verdicts.append(verdict(f"{until} {what}", rounds, _MOST_ROUNDS, at_most=True))
    return write_report(out, command=command, repeats=repeats, rows=rows, verdicts=verdicts)

"""`tlt plan`: what each part of TLT, and what other ways would bring, from the lengths and costs of a run."""

from typing import Any, NamedTuple

from conf.load import ConfigError
from flows.report import find


class Line(NamedTuple):
    """Line("streamed update", 15.5, 1.24, 0.0, 0.0)"""

    name: str
    step_s: float
    over_plain: float
    stale: float
    bias: float


def plan(plain: str, *, speculative: str | None, workers: int | None) -> tuple[list[Line], str]:
    """Lines of the table, and what the simulation says of the recorded run itself.

    plain: a run that did not speculate.  speculative: one that did, on the same machine.  workers: of the planned run.
    Raises ConfigError.
    """
    from tlt_core.grpo.passes import skips_zero_advantage
    from tlt_core.run.plan.alternatives import alternatives
    from tlt_core.run.plan.fit import PlanError, Recorded, recorded
    from tlt_core.run.plan.simulate import simulate
    from tlt_core.run.summary import rows_of

    def read(run: str) -> tuple[Any, Recorded]:
        run_dir, cfg = find(run)
        try:
            skips = skips_zero_advantage(cfg.update, cfg.algorithm)
            return cfg, recorded(run_dir, rows_of(run_dir), workers=cfg.cluster.num_workers, skips=skips)
        except PlanError as error:
            raise ConfigError(str(error)) from None

    cfg, base = read(plain)
    if cfg.rollout.speculation.policy != "off":
        raise ConfigError(
            f"{plain}: rollout.speculation.policy={cfg.rollout.speculation.policy}, so plain decoding is not known "
            "from it; name a run with rollout.speculation.policy=off, and this one as --speculative"
        )
    count, most = workers or cfg.cluster.num_workers, cfg.rollout.max_live_requests

    def mean_s(rates: Any, *, streams: bool, size: int = count) -> float:
        steps = [simulate(g, rates, base.costs, workers=size, max_live=most, streams=streams) for g in base.groups]
        return sum(step.step_s for step in steps) / len(steps)

    found = {"plain": mean_s(base.rates, streams=False), "streamed update": mean_s(base.rates, streams=True)}
    if speculative is not None:
        rates = read(speculative)[1].rates
        found |= {"speculation": mean_s(rates, streams=False), "all of TLT": mean_s(rates, streams=True)}
    lines = [Line(name, seconds, found["plain"] / seconds, 0.0, 0.0) for name, seconds in found.items()]
    others = alternatives(base.groups, base.rates, base.costs, workers=count, max_live=most)
    lines += [Line(o.name, o.step_s, found["plain"] / o.step_s, o.stale, o.bias) for o in others]
    own_s = mean_s(base.rates, streams=cfg.update.streamed != "off", size=cfg.cluster.num_workers)
    said = f"the recorded run: {base.step_s:.2f} s a step, simulated {own_s:.2f} s ({own_s / base.step_s - 1:+.1%})"
    return lines, said


def table(lines: list[Line]) -> str:
    """The lines as text."""
    width = max(len(line.name) for line in lines)
    head = f"{'':{width}}  step s  plain/it  stale  length bias"
    rows = [f"{x.name:{width}}  {x.step_s:6.2f}  {x.over_plain:8.2f}  {x.stale:5.0%}  {x.bias:+11.1%}" for x in lines]
    return "\n".join([head, *rows])

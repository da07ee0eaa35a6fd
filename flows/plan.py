"""`tlt plan`: what each part of TLT, and what other ways would bring: from a run's lengths and costs, or on GPUs that
are not here."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from conf.load import ConfigError
from flows.report import find

if TYPE_CHECKING:  # reading the command line needs no torch
    from tlt_core.model.config import DecoderConfig
    from tlt_core.run.plan.fit import Recorded
    from tlt_core.run.plan.simulate import Costs, Group, Rate

_PROMPTS, _SAMPLES, _WORKERS, _MAX_LIVE = 32, 8, 8, 256
_ONLY_GPU = ("model", "gpus_per_worker", "acceptance", "lengths", "prompts", "samples", "max_live", "draft_tokens")


class Line(NamedTuple):
    """Line("streamed update", 15.5, 1.24, 0.0, 0.0)"""

    name: str
    step_s: float
    over_plain: float
    stale: float
    bias: float


def plan(args: argparse.Namespace) -> tuple[list[Line], str]:
    """Lines of the table, and a sentence about what they rest on.  Raises ConfigError."""
    from tlt_core.run.plan.errors import PlanError

    given = [f"--{name.replace('_', '-')}" for name in _ONLY_GPU if getattr(args, name) is not None]
    if args.gpu is None and given:
        raise ConfigError(f"{' and '.join(given)}: only with --gpu, which plans for a machine that is not here")
    if args.gpu is None and args.run is None:
        raise ConfigError("name a run without speculation, or a machine: --gpu h100 --model qwen2.5-7b")
    if args.gpu is not None and args.speculative is not None:
        raise ConfigError("--speculative beside --gpu: its costs are those of another machine; leave it out")
    try:
        return _as_recorded(args) if args.gpu is None else _on_gpus(args)
    except PlanError as error:
        raise ConfigError(str(error)) from None


def table(lines: list[Line]) -> str:
    """The lines as text."""
    width = max(len(line.name) for line in lines)
    head = f"{'':{width}}  step s  plain/it  stale  length bias"
    rows = [f"{x.name:{width}}  {x.step_s:6.2f}  {x.over_plain:8.2f}  {x.stale:5.0%}  {x.bias:+11.1%}" for x in lines]
    return "\n".join([head, *rows])


def _as_recorded(args: argparse.Namespace) -> tuple[list[Line], str]:
    """args.run: did not speculate.  args.speculative: did, on the same machine."""
    cfg, base = _read(args.run)
    if cfg.rollout.speculation.policy != "off":
        raise ConfigError(
            f"{args.run}: rollout.speculation.policy={cfg.rollout.speculation.policy}, so plain decoding is not known "
            "from it; name a run with rollout.speculation.policy=off, and this one as --speculative"
        )
    count, most = args.workers or cfg.cluster.num_workers, cfg.rollout.max_live_requests
    drafted = {} if args.speculative is None else {"speculation": _read(args.speculative)[1].rates}
    lines = _lines(base.groups, base.costs, base.rates, drafted, workers=count, max_live=most)
    own_s = _mean_s(
        base.groups,
        base.rates,
        base.costs,
        workers=cfg.cluster.num_workers,
        max_live=most,
        streams=cfg.update.streamed != "off",
    )
    said = f"the recorded run: {base.step_s:.2f} s a step, simulated {own_s:.2f} s ({own_s / base.step_s - 1:+.1%})"
    return lines, said


def _on_gpus(args: argparse.Namespace) -> tuple[list[Line], str]:
    """args.run: only its lengths are taken."""
    from tlt_core.run.plan import gpu
    from tlt_core.run.plan.simulate import simulate

    if args.gpu not in gpu.GPUS:
        raise ConfigError(f"--gpu {args.gpu}: choose one of {', '.join(gpu.GPUS)}")
    if args.model is None:
        raise ConfigError("--gpu needs --model: the name of a known shape (qwen2.5-7b) or a folder with config.json")
    steps, workers, gpus = _steps(args), args.workers or _WORKERS, args.gpus_per_worker or 1
    everything = [length for groups in steps for group in groups for length in group.lengths]
    machine = gpu.Worker(
        args.gpu,
        _shape(args.model),
        gpus=gpus,
        lengths=everything,
        workers=workers * len(steps),
        acceptance=gpu.ACCEPTANCE if args.acceptance is None else args.acceptance,
    )
    size: dict[str, Any] = {"workers": workers, "max_live": min(args.max_live or _MAX_LIVE, machine.most_live)}
    costs = machine.costs()
    chains = gpu.CHAINS[1:] if args.draft_tokens is None else [args.draft_tokens]
    best = min(chains, key=lambda k: _mean_s(steps, machine.rate([k]), costs, **size))
    drafted = {f"speculation, always {best}": machine.rate([best]), "speculation, adaptive": machine.rate(gpu.CHAINS)}
    lines = _lines(steps, costs, machine.rate(), drafted, **size)
    over_s = sum(simulate(groups, machine.rate(), costs, **size).rollout_s for groups in steps) / len(steps)
    chosen = ", ".join(f"{machine.best(n)} at {n}" for n in (1, 4, 16, 64, 256) if n <= size["max_live"])
    said = (
        f"{workers} workers of {gpus} x {args.gpu}, {args.model}, at most {size['max_live']} live each: rates of data "
        "sheets and believed shares of them, not measured.  A plain rollout takes "
        f"{over_s:.1f} s, an update {lines[0].step_s - over_s - costs.other_s:.1f} s.  "
        f"Best draft length by live requests: {chosen}"
    )
    return lines, said


def _steps(args: argparse.Namespace) -> "Sequence[Sequence[Group]]":
    from tlt_core.run.plan import lengths

    if args.run is not None and args.lengths is not None:
        raise ConfigError(f"{args.run} beside --lengths: both give response lengths; leave one out")
    if args.run is not None:
        return _read(args.run)[1].groups
    prompts = args.prompts or _PROMPTS
    if args.lengths is not None and Path(args.lengths).is_file():
        return lengths.read(Path(args.lengths), prompts=prompts)
    return lengths.drawn(args.lengths or lengths.SPEC, prompts=prompts, samples=args.samples or _SAMPLES)


def _lines(
    steps: "Sequence[Sequence[Group]]",
    costs: "Costs",
    plain: "Rate",
    drafted: "Mapping[str, Rate]",
    *,
    workers: int,
    max_live: int,
) -> list[Line]:
    """drafted: rates with speculation by name; the last one is TLT's."""
    from tlt_core.run.plan.alternatives import alternatives

    size: dict[str, Any] = {"workers": workers, "max_live": max_live}
    found = {
        "plain": _mean_s(steps, plain, costs, **size),
        "streamed update": _mean_s(steps, plain, costs, streams=True, **size),
    }
    for name, rate in drafted.items():
        found[name] = _mean_s(steps, rate, costs, **size)
    if drafted:
        found["all of TLT"] = _mean_s(steps, list(drafted.values())[-1], costs, streams=True, **size)
    lines = [Line(name, seconds, found["plain"] / seconds, 0.0, 0.0) for name, seconds in found.items()]
    others = alternatives(steps, plain, costs, **size)
    return lines + [Line(o.name, o.step_s, found["plain"] / o.step_s, o.stale, o.bias) for o in others]


def _mean_s(
    steps: "Sequence[Sequence[Group]]",
    rate: "Rate",
    costs: "Costs",
    *,
    workers: int,
    max_live: int,
    streams: bool = False,
) -> float:
    from tlt_core.run.plan.simulate import simulate

    size: dict[str, Any] = {"workers": workers, "max_live": max_live, "streams": streams}
    return sum(simulate(groups, rate, costs, **size).step_s for groups in steps) / len(steps)


def _read(run: str) -> "tuple[Any, Recorded]":
    from tlt_core.grpo.passes import skips_zero_advantage
    from tlt_core.run.plan.fit import recorded
    from tlt_core.run.summary import rows_of

    run_dir, cfg = find(run)
    skips = skips_zero_advantage(cfg.update, cfg.algorithm)
    return cfg, recorded(run_dir, rows_of(run_dir), workers=cfg.cluster.num_workers, skips=skips)


def _shape(model: str) -> "DecoderConfig":
    from tlt_core.model.config import ModelError
    from tlt_core.model.load import load_config
    from tlt_core.model.shapes import KNOWN

    if model in KNOWN:
        return KNOWN[model]
    try:
        return load_config(Path(model))
    except ModelError as error:
        raise ConfigError(
            f"--model {model}: no known shape ({', '.join(KNOWN)}), and no model's folder: {error}"
        ) from None

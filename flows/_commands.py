"""What each command of `tlt` does: `tlt check-drafter` is `check_drafter`.

Those that take a configuration get it, and all get the command line's arguments; they return the exit code, or None.
"""

import argparse
import os
import pkgutil
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from conf.load import ConfigError
from conf.rollout import SpeculationConfig
from conf.run import RunConfig
from flows._heartbeat import Heartbeat
from flows._parser import DEMO, benchmark_function

_PARAMS_HEAD = """\
# Parameters of dvc.yaml, and a configuration like any other.  Written by: tlt params {source}
# Change values here, or for one experiment: dvc exp run -S rollout.speculation.policy=off
"""
_BENCH_ONLY = {  # options that only these benchmarks take
    "workload": ("rollout", "e2e"),
    "peers": ("engines",),
    "instructions": ("engines",),
}


def prepare(cfg: RunConfig, _: argparse.Namespace) -> None:
    dataset, page = _run(cfg, "flows.stages:prepare")
    print("\n".join(page), end="\n\n")
    print(f"{dataset.count} training prompts in {dataset.path}, digest {dataset.sha256[:12]}")


def params(cfg: RunConfig, args: argparse.Namespace) -> None:
    """Every key is written, so that a stage can name those that it depends on and `dvc exp run -S` can set any."""
    from tlt_core.items.store import write_atomically

    head = _PARAMS_HEAD.format(source=" ".join([args.config, *args.overrides]))
    text = head + yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False)
    write_atomically(args.out, lambda partial: partial.write_text(text))
    print(f"parameters of dvc.yaml: {args.out}    run what has changed: dvc repro")


def coldstart(cfg: RunConfig, args: argparse.Namespace) -> None:
    if args.if_enabled and not cfg.coldstart.enabled:
        print("coldstart.enabled=false: nothing to do")
        _show_metrics({}, args.metrics)
        return
    folder, metrics = _run(cfg, "flows.stages:coldstart")
    print(f"model after the cold start: {folder}")
    _show_metrics(metrics, args.metrics)


def train(cfg: RunConfig, args: argparse.Namespace) -> None:
    if args.out is not None:
        _run(cfg, "flows.train_stage:train_stage", out=args.out, summary=args.summary or args.out)
        print(f"policy: {args.out}/policy    figures: {args.summary or args.out}")
        return
    policy = _run(cfg, "flows.train:train", before="flows._announcement:announce")
    print(f"policy: {policy}    figures, samples, metrics: {cfg.run_dir}    MLflow: tlt ui --uri {cfg.tracking.uri}")
    print(f"all of it on one page: tlt report {cfg.run_dir}")


def warmup(cfg: RunConfig, args: argparse.Namespace) -> None:
    folder, metrics = _run(cfg, "flows.stages:warmup", out=args.out)
    _show_metrics(metrics, args.metrics)
    print(f"drafter: {folder}    use it: rollout.speculation.drafter_path={folder}")


def export(cfg: RunConfig, args: argparse.Namespace) -> None:
    folder = _run(
        cfg,
        "flows.stages:export",
        policy=args.policy,
        drafter=args.drafter,
        out=args.out,
        num_prompts=args.prompts,
        verifier=args.verifier,
        track=args.track,
    )
    print(f"export: {folder}    check it: tlt verify-export {folder}")


def verify_export(args: argparse.Namespace) -> int:
    from tlt_core.export.verify import passed, verify

    checks = verify(args.folder, target=args.target, other_weights=args.other_weights)
    for check in checks:
        print(f"{check.outcome:8} {check.name:18} {check.text}")
    good = passed(checks)
    print(f"{args.folder}: {'fit to be served' if good else 'REFUSED: do not serve it'}")
    return 0 if good else 1


def retrain(cfg: RunConfig, _: argparse.Namespace) -> None:
    decision = _run(cfg, "flows.retrain:retrain")
    print(f"{decision.outcome}: {decision.reason}")


def check_drafter(cfg: RunConfig, _: argparse.Namespace) -> int:
    found = _run(cfg, "flows.retrain:check_drafter")
    print(f"{found.outcome}: {found.reason}")
    return 1 if found.outcome == "dropped" else 0


def rollback(cfg: RunConfig, args: argparse.Namespace) -> None:
    from tasks.registry import roll_back

    left, now = roll_back(cfg, kind=args.kind, to=None if args.to is None else str(args.to))
    print(f"champion: {now}; it was version {left.number}.  Exports are as they were: tlt export makes a new one")


def evaluate(cfg: RunConfig, args: argparse.Namespace) -> None:
    metrics = _run(cfg, "flows.stages:evaluate", policy=args.policy)
    _show_metrics(metrics, args.metrics)


def bench(cfg: RunConfig, args: argparse.Namespace) -> None:
    flow = benchmark_function(args.benchmark)
    command = f"tlt {' '.join(sys.argv[1:])}"
    part = f"-{args.workload}" if args.workload else ""  # one workload's report must not replace the whole report
    out = args.out or Path("reports") / f"{args.benchmark}{part}.json"
    given = {name: value for name in _BENCH_ONLY if (value := getattr(args, name)) is not None}
    for name in given:
        if args.benchmark not in _BENCH_ONLY[name]:
            option, takers = name.replace("_", "-"), " and ".join(f"'tlt bench {b}'" for b in _BENCH_ONLY[name])
            raise ConfigError(f"--{option}={given[name]}: only {takers} take it; leave it out")
    from tlt_core.machine import precision
    from tlt_core.run import engine_choice
    from tlt_core.run.summary import write_json

    settled = precision.settle(engine_choice.settle(cfg))
    report = _run(settled, flow, repeats=args.repeats, out=out, command=command, **given)
    for verdict in report["verdicts"]:
        print(f"{'holds' if verdict['holds'] else 'FAILS'}: {verdict['claim']}: {verdict['value']:.3f}")
    if args.metrics is not None:
        write_json(args.metrics, {v["claim"]: v["value"] for v in report["verdicts"]})
    print(f"report: {out}")


def generate(args: argparse.Namespace) -> None:
    from tlt_core.items.types import SamplingParams
    from tlt_core.run.generate import generate_file

    params = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, max_new_tokens=args.max_new_tokens
    )
    same = ("model", "prompts", "out", "seed", "dtype", "batch_size", "num_workers", "system_prompt")
    count = generate_file(
        **{name: getattr(args, name) for name in same},
        params=params,
        speculation=_speculation(args.speculation),
        template_kwargs=args.chat_template_kwargs,
    )
    print(f"{count} responses in {args.out}")


def _speculation(choice: str) -> SpeculationConfig:
    if choice in ("off", "auto", "ngram"):
        return SpeculationConfig(policy="off" if choice == "off" else "cost_model")
    if not Path(choice).is_dir():
        raise ConfigError(f"--speculation={choice}: choose off, auto, ngram, or the folder of an EAGLE-3 drafter")
    return SpeculationConfig(drafter_path=choice)


def report(args: argparse.Namespace) -> None:
    from flows.status import report

    path, verdict = report(args.run, out=args.out)
    print(f"{verdict}\nreport: {path}    open it in a browser")


def doctor(args: argparse.Namespace) -> None:
    from flows._doctor import show

    show(args.config, default=DEMO, gpu=args.gpu)


def status(args: argparse.Namespace) -> int:
    from flows.status import status

    text, is_well = status(args.run, stacks=args.stacks)
    print(text)
    return 0 if is_well else 1


def ui(args: argparse.Namespace) -> None:
    from flows.deploy import serve

    serve(uri=args.uri, host=args.host, port=args.port)


def deploy(args: argparse.Namespace) -> None:
    from flows import deploy

    if args.stop:
        print(f"stopped: {', '.join(deploy.stop()) or 'nothing was running'}")
        return
    notify_url = os.environ.get("TLT_NOTIFY_URL", "")
    url = deploy.deploy(port=args.port, file=args.file, notify_url=notify_url, with_worker=not args.no_worker)
    print(f"deployed; pages: {url.removesuffix('/api')}    stop: tlt deploy --stop (make deploy-stop).  Run with")
    print(f"export PREFECT_API_URL={url}")
    print("prefect deployment run 'train/train' -p config=conf/smoke.yaml")


def recover(args: argparse.Namespace) -> None:
    from flows import deploy

    for line in deploy.recover_here(port=args.port, alone=args.alone):
        print(line)


def _run(cfg: RunConfig, flow: str, *, before: str = "", **arguments: Any) -> Any:
    """Check what can be checked, then run a flow.  Prefect's server starts while the flow's modules are imported.

    before: function that is called with the configuration before Prefect is imported.
    """
    from flows._server import PrivateServer
    from tlt_core.machine import precision
    from tlt_core.run import engine_choice, preflight

    began_s = time.monotonic()
    settled = cfg.with_engine(engine_choice.choose(cfg).engine)
    preflight.check_run(settled)
    precision.decide(settled)
    if before:
        pkgutil.resolve_name(before)(settled)
    with PrivateServer() as server:
        with Heartbeat(lambda: f"starting Prefect: {time.monotonic() - began_s:.0f} s so far"):
            call = pkgutil.resolve_name(flow)
            server.wait_ready()
        return call(cfg, **arguments)


def _show_metrics(metrics: dict[str, float], path: Path | None) -> None:
    """Print them, and write them as JSON where that is wanted."""
    for name, value in sorted(metrics.items()):
        print(f"{name:45} {value:.4f}")
    if path is not None:
        from tlt_core.run.summary import write_json

        write_json(path, metrics)

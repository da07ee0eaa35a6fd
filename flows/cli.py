"""The command `tlt`.

Imports of torch, Prefect and MLflow wait until a command needs them: help and configuration errors take a fraction of
a second.  Every failure that a user can cause is one paragraph on stderr and an exit code (see `_errors.py`).
"""

import argparse
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conf.load import ConfigError, load
from conf.schema import RunConfig, SpeculationConfig
from flows import _environment, _errors, _logging
from flows._benchmarks import BENCHMARKS
from flows._heartbeat import Heartbeat

_DEMO = "conf/demo.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = _parse(argv)
    _environment.set_defaults()
    _logging.attach_terminal()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill ends like Ctrl-C, with everything closed
    run_dir: Path | None = None
    try:
        if args.command in _ON_CONFIG:
            cfg = load(args.config, args.overrides)
            run_dir = cfg.run_dir
            _ON_CONFIG[args.command](cfg, args)
        else:
            return _OTHERS[args.command](args) or 0
    except BaseException as error:
        report = _errors.explain(error, run_dir=run_dir)
        if report is None:
            raise
        print(f"tlt {args.command}: {report.text}", file=sys.stderr)
        return report.exit_code
    return 0


def _prepare(cfg: RunConfig, _: argparse.Namespace) -> None:
    dataset = _run(cfg, "flows.prepare:prepare")
    print(f"{dataset.count} training prompts in {dataset.path}, digest {dataset.sha256[:12]}")


def _params(cfg: RunConfig, args: argparse.Namespace) -> None:
    from flows.params import write

    write(cfg, args.out, source=" ".join([args.config, *args.overrides]))
    print(f"parameters of dvc.yaml: {args.out}    run what has changed: dvc repro")


def _coldstart(cfg: RunConfig, args: argparse.Namespace) -> None:
    if args.if_enabled and not cfg.coldstart.enabled:
        print("coldstart.enabled=false: nothing to do")
        _write_metrics(args.metrics, {})
        return
    done = _run(cfg, "flows.coldstart:coldstart")
    print(f"model after the cold start: {done.model_dir}")
    _print_metrics(done.metrics)
    _write_metrics(args.metrics, done.metrics)


def _train(cfg: RunConfig, args: argparse.Namespace) -> None:
    if args.out is not None:
        _run(cfg, "flows.train_stage:train_stage", out=args.out, summary=args.summary or args.out)
        print(f"policy: {args.out}/policy    figures: {args.summary or args.out}")
        return
    policy = _run(cfg, "flows.train:train", before="flows._announcement:announce")
    print(f"policy: {policy}    figures, samples, metrics: {cfg.run_dir}    MLflow: tlt ui --uri {cfg.tracking.uri}")


def _warmup(cfg: RunConfig, args: argparse.Namespace) -> None:
    folder, metrics = _run(cfg, "flows.warmup:warmup", out=args.out)
    _print_metrics(metrics)
    _write_metrics(args.metrics, metrics)
    print(f"drafter: {folder}    use it: rollout.speculation.drafter_path={folder}")


def _export(cfg: RunConfig, args: argparse.Namespace) -> None:
    folder = _run(
        cfg,
        "flows.export:export",
        policy=args.policy,
        drafter=args.drafter,
        out=args.out,
        num_prompts=args.prompts,
        verifier=args.verifier,
        track=args.track,
    )
    print(f"export: {folder}    check it: tlt verify-export {folder}")


def _verify_export(args: argparse.Namespace) -> int:
    from tlt_core.export.verify import passed, verify

    checks = verify(args.folder, target=args.target, other_weights=args.other_weights)
    for check in checks:
        print(f"{check.outcome:8} {check.name:18} {check.text}")
    good = passed(checks)
    print(f"{args.folder}: {'fit to be served' if good else 'REFUSED: do not serve it'}")
    return 0 if good else 1


def _retrain(cfg: RunConfig, _: argparse.Namespace) -> None:
    decision = _run(cfg, "flows.retrain:retrain")
    print(f"{decision.outcome}: {decision.reason}")


def _evaluate(cfg: RunConfig, args: argparse.Namespace) -> None:
    metrics = _run(cfg, "flows.evaluate:evaluate", policy=args.policy)
    _print_metrics(metrics)
    _write_metrics(args.metrics, metrics)


def _bench(cfg: RunConfig, args: argparse.Namespace) -> None:
    command = f"tlt {' '.join(sys.argv[1:])}"
    part = f"-{args.workload}" if args.workload else ""  # a part does not take the whole one's place
    out = args.out or Path("reports") / f"{args.benchmark}{part}.json"
    given = {name: value for name in _BENCH_ONLY if (value := getattr(args, name)) is not None}
    for name in given:
        if args.benchmark not in _BENCH_ONLY[name]:
            option, takers = name.replace("_", "-"), " and ".join(f"'tlt bench {b}'" for b in _BENCH_ONLY[name])
            raise ConfigError(f"--{option}={given[name]}: only {takers} take it; leave it out")
    from tlt_core.machine.precision import settle

    report = _run(settle(cfg), BENCHMARKS[args.benchmark], repeats=args.repeats, out=out, command=command, **given)
    for verdict in report["verdicts"]:
        print(f"{'holds' if verdict['holds'] else 'FAILS'}: {verdict['claim']}: {verdict['value']:.3f}")
    _write_metrics(args.metrics, {v["claim"]: v["value"] for v in report["verdicts"]})
    print(f"report: {out}")


def _generate(args: argparse.Namespace) -> None:
    from tlt_core.generate import generate_file
    from tlt_core.types import SamplingParams

    params = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, max_new_tokens=args.max_new_tokens
    )
    count = generate_file(
        model=args.model,
        prompts=args.prompts,
        out=args.out,
        params=params,
        seed=args.seed,
        dtype=args.dtype,
        batch_size=args.batch_size,
        num_workers=args.num_workers,
        speculation=_speculation(args.speculation),
        system_prompt=args.system_prompt,
    )
    print(f"{count} responses in {args.out}")


def _speculation(choice: str) -> SpeculationConfig:
    """The command-line option as configuration."""
    if choice in ("off", "auto", "ngram"):
        return SpeculationConfig(policy="off" if choice == "off" else "cost_model")
    if not Path(choice).is_dir():
        raise ConfigError(f"--speculation={choice}: choose off, auto, ngram, or the folder of an EAGLE-3 drafter")
    return SpeculationConfig(drafter_path=choice)


def _doctor(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from flows import _announcement
    from tlt_core import doctor
    from tlt_core.machine import precision
    from tlt_core.machine.forecast import ToDo
    from tlt_core.progress import minutes

    # A name that no run has: the forecast is of a run from nothing, whatever an earlier one was computed in.
    cfg = load(args.config or _DEMO, ["name=doctor"]) if args.config or Path(_DEMO).is_file() else None
    table = Table("what", "found", "verdict", "why", box=None, pad_edge=False)
    colors = {"used": "green", "skipped": "yellow", "missing": "red"}
    for row in doctor.findings():
        table.add_row(row.name, row.found, f"[{colors[row.verdict]}]{row.verdict}[/]", row.reason)
    Console().print(table)
    if cfg is None:
        return
    cfg = cfg.with_dtypes(**precision.decide(cfg)._asdict())
    # All of it, so that machines can be compared: what is there already would be skipped.
    todo = ToDo(
        model=True, data=True, cold_start=cfg.coldstart.enabled, first_drafter=cfg.needs_first_drafter, done_steps=0
    )
    print(f"\n{args.config or _DEMO}: {_announcement.kernels_in_words(cfg)}")
    predicted = _announcement.predict(cfg, todo)
    if predicted is None:
        print("how long it would take is not known: only a CPU's speed is measured, for a model that is here")
        return
    print(f"from nothing about {minutes(predicted.total_s)}: {_announcement.stages_in_words(predicted.stages)}")


def _ui(args: argparse.Namespace) -> None:
    from flows.ui import serve

    serve(uri=args.uri, host=args.host, port=args.port)


def _deploy(args: argparse.Namespace) -> None:
    from flows import deploy

    if args.stop:
        print(f"stopped: {', '.join(deploy.stop()) or 'nothing was running'}")
        return
    url = deploy.deploy(port=args.port, file=args.file, notify_url=os.environ.get("TLT_NOTIFY_URL", ""))
    print(f"deployed; pages: {url.removesuffix('/api')}    stop: tlt deploy --stop (make deploy-stop).  Run with")
    print(f"export PREFECT_API_URL={url}")
    print("prefect deployment run 'train/train' -p config=conf/smoke.yaml")


def _recover(args: argparse.Namespace) -> None:
    from flows import deploy

    for run in deploy.recover_here(port=args.port):
        print(f"{run.name} ({run.run_id}) was {run.state} without a process; it is scheduled again")


_BENCH_ONLY = {
    "workload": ("rollout",),
    "device": ("kernels", "sizes"),
    "shape": ("sizes",),
    "planted_acceptance": ("sizes",),
    "peers": ("engines",),
    "instructions": ("engines",),
}
_ON_CONFIG = {
    "params": _params,
    "prepare": _prepare,
    "coldstart": _coldstart,
    "train": _train,
    "warmup": _warmup,
    "retrain": _retrain,
    "evaluate": _evaluate,
    "export": _export,
    "bench": _bench,
}
_OTHERS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "generate": _generate,
    "verify-export": _verify_export,
    "doctor": _doctor,
    "ui": _ui,
    "deploy": _deploy,
    "recover": _recover,
}


def _run(cfg: RunConfig, flow: str, *, before: str = "", **arguments: Any) -> Any:
    """Check what can be checked, then run a flow; Prefect's server starts while the flow's modules are imported.

    before: called first, with the configuration; Prefect, which takes longest, is not imported yet.
    """
    from flows._server import PrivateServer
    from tlt_core import preflight
    from tlt_core.machine import precision

    began_s = time.monotonic()
    preflight.check_run(cfg)
    precision.decide(cfg)
    if before:
        pkgutil.resolve_name(before)(cfg)
    with PrivateServer() as server:
        with Heartbeat(lambda: f"starting Prefect: {time.monotonic() - began_s:.0f} s so far"):
            call = pkgutil.resolve_name(flow)
            server.wait_ready()
        return call(cfg, **arguments)


def _print_metrics(metrics: dict[str, float]) -> None:
    for name, value in sorted(metrics.items()):
        print(f"{name:45} {value:.4f}")


def _write_metrics(path: Path | None, metrics: dict[str, float]) -> None:
    if path is not None:
        from tlt_core.run_summary import write_json

        write_json(path, metrics)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Settings may stand anywhere after CONFIG, also behind options; argparse alone refuses that."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if len(overrides) < len(rest) or (rest and args.command not in _ON_CONFIG):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.command in _ON_CONFIG:
        args.overrides += overrides
    if args.command == "bench" and "=" in args.config:
        args.overrides.insert(0, args.config)
        args.config = _DEMO
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tlt", description="Reinforcement learning of reasoning models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    stages = {}
    for name, text in (
        ("params", "write a configuration as params.yaml, whole: the parameters of dvc.yaml"),
        ("prepare", "fetch or make the model, make the data set"),
        ("coldstart", "supervised warm-up on worked solutions"),
        ("train", "the whole pipeline; started again, it resumes"),
        ("warmup", "train a first drafter on the policy's own rollouts"),
        ("retrain", "train a drafter for the newest policy; it becomes the champion if it is better"),
        ("evaluate", "validate the newest checkpoint of a run"),
    ):
        stages[name] = commands.add_parser(name, help=text, description=text)
        _add_config(stages[name])
    _add_outputs(stages)
    _add_export(commands.add_parser("export", help="policy and drafter as folders that vLLM and SGLang load"))
    _add_verify(commands.add_parser("verify-export", help="may this export be served?  Exit code 0: yes, 1: no"))
    _add_bench(commands.add_parser("bench", help="measure, and write reports/NAME.json"))
    _add_generate(commands.add_parser("generate", help="batch generation: JSONL of prompts in, JSONL out"))
    doctor = commands.add_parser("doctor", help="what this machine has, what is used, and how long a run would take")
    doctor.add_argument("config", nargs="?", metavar="CONFIG", help="of that run (default: conf/demo.yaml)")
    ui = commands.add_parser("ui", help="look at the runs in MLflow")
    ui.add_argument("--uri", help="tracking store (default: the configuration's default)")
    ui.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    ui.add_argument("--port", type=int, default=5000)
    deploy = commands.add_parser("deploy", help="a Prefect server and worker on this machine, with all deployments")
    deploy.add_argument("--stop", action="store_true", help="end them; interrupted runs resume at the next deploy")
    deploy.add_argument("--file", type=Path, default=Path("prefect.yaml"))
    recover = commands.add_parser("recover", help="find runs whose process is gone, so that they are resumed")
    for command in (deploy, recover):
        command.add_argument("--port", type=int, default=4200, help="of the server, where PREFECT_API_URL is not set")
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file, e.g. conf/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings in place of the file's")


def _add_outputs(stages: dict[str, argparse.ArgumentParser]) -> None:
    """Where commands put what a stage of dvc.yaml tracks."""
    stages["params"].add_argument("--out", type=Path, default=Path("params.yaml"), help="default: params.yaml")
    stages["coldstart"].add_argument(
        "--if-enabled", action="store_true", help="do nothing where coldstart.enabled=false"
    )
    stages["warmup"].add_argument("--out", metavar="DIR", help="of the drafter; default: runs/NAME/drafter-eagle3")
    stages["train"].add_argument(
        "--out", type=Path, metavar="DIR", help="leave policy, drafter and records there, and no run folder"
    )
    stages["train"].add_argument("--summary", type=Path, metavar="DIR", help="with --out: figures of the run as files")
    stages["evaluate"].add_argument("--policy", metavar="FOLDER", help="validate this one in place of the run's own")
    for name in ("coldstart", "warmup", "evaluate"):
        stages[name].add_argument("--metrics", type=Path, metavar="FILE", help="write the metrics there, as JSON")


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--policy", metavar="FOLDER", help="default: the run's own, at its newest checkpoint")
    parser.add_argument("--drafter", metavar="FOLDER|none", help="default: the run's own; none: the policy alone")
    parser.add_argument("--out", metavar="DIR", help="default: exports/NAME; an older export there is replaced")
    parser.add_argument("--track", action="store_true", help="version it with DVC (DIR.dvc), and push it to the remote")
    parser.add_argument(
        "--prompts", type=int, default=16, help="held-out prompts that the drafter is measured on; 0: it is not"
    )
    parser.add_argument(
        "--verifier",
        metavar="NAME",
        help="target that 'vllm serve DRAFTER' loads (default: the exported policy's path)",
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="what 'tlt export' wrote, or a drafter's folder")
    parser.add_argument("--target", help="folder, hub name or embedded model (default: the policy in DIR)")
    parser.add_argument(
        "--other-weights", action="store_true", help="the target may have other weights than those that were exported"
    )


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "benchmark",
        choices=list(BENCHMARKS),
        help="step: the phases of a training step; e2e: whole steps without speculation, with a fixed drafter, and "
        "with all of TLT; rollout: decoding under every speculation policy; tuner: those policies on planted "
        "workloads; spot: what the drafter gains by training in idle time; engines: our engine beside transformers, "
        "vLLM, llama.cpp and OpenVINO; kernels: bytes and operations a second of every op, beside the device's own "
        "ceilings; sizes: plain beside adaptive decoding at the shapes of large models, with random weights and "
        "planted acceptance",
    )
    parser.add_argument("config", nargs="?", default=_DEMO, metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--repeats", type=int, default=3, help="times that everything is measured")
    parser.add_argument("--out", type=Path, help="default: reports/BENCHMARK.json, or BENCHMARK-WORKLOAD.json")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="of 'kernels' and 'sizes' (default: cpu)")
    parser.add_argument("--workload", help="of 'rollout': rl, tail, short or raw alone (default: all)")
    parser.add_argument("--shape", help="of 'sizes': qwen2.5-7b (on cuda), llama-3-8b, smollm2-135m or tiny (on cpu)")
    parser.add_argument(
        "--planted-acceptance",
        type=float,
        metavar="TOKENS",
        help="of 'sizes': what the deepest chain gives (default: 4)",
    )
    parser.add_argument(
        "--peers",
        metavar="NAMES",
        help="of 'engines': all, none, or llama.cpp,openvino; each gets an environment of its own, once (default: all)",
    )
    parser.add_argument(
        "--instructions",
        choices=["all", "avx2"],
        help="of 'engines': avx2 keeps every engine that can be limited from AVX-512 (default: all)",
    )
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="write the verdicts' values there, as JSON")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct", help="folder, hub name, or the embedded model")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with 'prompt' or 'token_ids' on each line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="auto: by machine")
    parser.add_argument(
        "--speculation",
        default="auto",
        metavar="off|auto|ngram|FOLDER",
        help="off: plain decoding; auto, ngram: with the n-gram drafter as far as it pays; FOLDER: with the EAGLE-3 "
        "drafter there, too.  The tokens are the same",
    )
    parser.add_argument("--batch-size", type=int, default=16, help="responses decoded at once on a worker")
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--system-prompt", default="")


if __name__ == "__main__":
    sys.exit(main())

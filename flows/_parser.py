"""The command line of `tlt`: commands, arguments, options.  A value out of range is refused before anything starts."""

import argparse
import importlib.util
import json
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from conf.load import ConfigError

DEMO = "conf/demo.yaml"
_MANY = 1_000_000
Benchmark = Literal[
    "step", "e2e", "rollout", "tuner", "idle", "engines", "peers", "learning", "demo", "memory", "kills"
]
_MODULES = {b: f"{b}.command" for b in ("tuner", "idle", "engines", "peers")}
_MODULES |= dict.fromkeys(("step", "demo", "memory"), "one_run")
_MODULES["learning"] = "peers.learning"


def benchmark_function(benchmark: Benchmark) -> str:
    """`module:function`, not imported: the package `bench` may be deleted.  Raises ConfigError where it is."""
    if importlib.util.find_spec("bench") is None:
        raise ConfigError(
            f"benchmark {benchmark}: the package bench is missing; take the folder bench/ from the repository"
        )
    return f"bench.{_MODULES.get(benchmark, benchmark)}:bench_{benchmark}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read a command line; exits with help or an error message as argparse does.

    Settings may stand anywhere after CONFIG, also behind options, which argparse alone refuses.  `overrides` is there
    for the commands that take a configuration.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if len(overrides) < len(rest) or (rest and "overrides" not in args):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if "overrides" in args:
        args.overrides += overrides
    if args.command == "bench" and "=" in args.config:
        args.overrides.insert(0, args.config)
        args.config = DEMO
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
        ("check-drafter", "has the champion's acceptance dropped since its promotion?  Exit code 0: no, 1: yes"),
        ("rollback", "make the champion that was replaced the champion again"),
        ("evaluate", "validate the newest checkpoint of a run"),
    ):
        stages[name] = commands.add_parser(name, help=text, description=text)
        _add_config(stages[name])
    _add_outputs(stages)
    _add_export(commands.add_parser("export", help="policy and drafter as folders that vLLM and SGLang load"))
    _add_verify(commands.add_parser("verify-export", help="may this export be served?  Exit code 0: yes, 1: no"))
    _add_bench(commands.add_parser("bench", help="measure, and write reports/NAME.json"))
    _add_generate(commands.add_parser("generate", help="batch generation: JSONL of prompts in, JSONL out"))
    _add_report(commands.add_parser("report", help="one run as one HTML file: what TLT has saved, curves, timelines"))
    status = commands.add_parser("status", help="where a run is, how long it will take, what went wrong")
    status.add_argument(
        "run", metavar="RUN", nargs="?", default="", help="its folder or configuration (default: newest)"
    )
    status.add_argument("--stacks", action="store_true", help="have its processes write their stacks to RUN/stacks")
    doctor = commands.add_parser("doctor", help="what this machine has, and what memory a run would take")
    doctor.add_argument("config", nargs="?", metavar="CONFIG", help="of that run (default: conf/demo.yaml)")
    doctor.add_argument("--gpu", metavar="GB", help="would the run fit?  Memory of a GPU, or its name: 80, h100, l4")
    port = _number(int, 0, 65535)
    ui = commands.add_parser("ui", help="look at the runs in MLflow")
    ui.add_argument("--uri", help="tracking store (default: the configuration's default)")
    ui.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    ui.add_argument("--port", type=port, default=5000)
    deploy = commands.add_parser("deploy", help="a Prefect server and worker on this machine, with all deployments")
    deploy.add_argument("--stop", action="store_true", help="end them; interrupted runs resume at the next deploy")
    deploy.add_argument("--no-worker", action="store_true", help="start none: the pool's workers are elsewhere")
    deploy.add_argument("--file", type=Path, default=Path("prefect.yaml"))
    recover = commands.add_parser("recover", help="find runs whose process is gone, so that they are resumed")
    recover.add_argument("--alone", action="store_true", help="no worker is elsewhere, though the server may be")
    for command in (deploy, recover):
        command.add_argument("--port", type=port, default=4200, help="of the server, where PREFECT_API_URL is not set")
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file, e.g. conf/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings in place of the file's")


def _number(kind: type[int] | type[float], least: float, most: float, *, above: bool = False) -> Callable[[str], float]:
    """Reads an int or a finite float from `least` (above: greater than it) to `most`."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least - 1)
        if not least <= value <= most or (above and value <= least):
            what = "whole number" if kind is int else "number"
            bounds = f"above {least:g} up to {most:g}" if above else f"from {least:.16g} to {most:.16g}"
            raise argparse.ArgumentTypeError(f"{text!r}: give a {what} {bounds}")
        return value

    return read


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: give a JSON object, such as '{{\"enable_thinking\": false}}'")
    return value


def _output_file(text: str) -> Path:
    """Where a file can be written: not a folder, and its folder is one or can be made."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file, such as {path / 'responses.jsonl'}")
    parent = next(p for p in path.absolute().parents if p.exists())
    if not parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: {parent} is a file; name a file in a folder")
    return path


def _add_outputs(stages: dict[str, argparse.ArgumentParser]) -> None:
    """Options of single stages; most say where to put what a stage of dvc.yaml tracks."""
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
    stages["rollback"].add_argument(
        "--to", type=_number(int, 1, _MANY), metavar="NUMBER", help="this version, an earlier or a later one"
    )
    stages["rollback"].add_argument("--kind", choices=["drafter", "policy"], default="drafter", help="default: drafter")
    for name in ("coldstart", "warmup", "evaluate"):
        stages[name].add_argument("--metrics", type=Path, metavar="FILE", help="write the metrics there, as JSON")


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--policy", metavar="FOLDER", help="default: the run's own, at its newest checkpoint")
    parser.add_argument("--drafter", metavar="FOLDER|none", help="default: the run's own; none: the policy alone")
    parser.add_argument("--out", metavar="DIR", help="default: exports/NAME; an older export there is replaced")
    parser.add_argument("--track", action="store_true", help="version it with DVC (DIR.dvc), and push it to the remote")
    parser.add_argument(
        "--prompts",
        type=_number(int, 0, _MANY),
        default=16,
        help="held-out prompts to measure the drafter on; 0: none",
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


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder (runs/demo), or its configuration file")
    parser.add_argument("--out", type=_output_file, metavar="FILE", help="default: report.html in the run's folder")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "benchmark",
        choices=typing.get_args(Benchmark),
        help="step: the phases of a training step; e2e: whole steps without speculation, with a fixed drafter, and "
        "with all of TLT; rollout: decoding under every speculation policy; tuner: those policies on planted "
        "workloads; idle: what the drafter gains by training in idle time, and what that costs; engines: "
        "our engine beside transformers, vLLM and llama.cpp; peers: whole steps of ours beside TRL's; demo: "
        "what a whole run takes and brings, from its folder (trained first if need be); memory: the plan beside what "
        "workers took; kills: a run whose processes are killed, beside one that is left alone",
    )
    parser.add_argument("config", nargs="?", default=DEMO, metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--repeats", type=_number(int, 1, 1000), default=3, help="times that everything is measured")
    parser.add_argument("--out", type=Path, help="default: reports/BENCHMARK.json, or BENCHMARK-WORKLOAD.json")
    parser.add_argument(
        "--workload",
        help="of 'rollout': rl, tail, short or raw alone; of 'e2e': tail, no-tail or exact alone (default: all)",
    )
    parser.add_argument(
        "--peers",
        metavar="NAMES",
        help="of 'engines': all, none, llama.cpp, which gets an environment of its own, once, or vllm: vLLM beside "
        "itself, without and with the plug-in (default: all)",
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
    parser.add_argument("--out", type=_output_file, required=True)
    parser.add_argument("--temperature", type=_number(float, 0, 100), default=1.0, help="0: greedy")
    parser.add_argument("--top-p", type=_number(float, 0, 1, above=True), default=1.0)
    parser.add_argument("--top-k", type=_number(int, 0, _MANY), default=0, help="0: all tokens")
    parser.add_argument("--max-new-tokens", type=_number(int, 1, _MANY), default=512)
    parser.add_argument("--seed", type=_number(int, 0, 2**31 - 1), default=0)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="auto: by machine")
    parser.add_argument(
        "--speculation",
        default="auto",
        metavar="off|auto|ngram|FOLDER",
        help="off: plain decoding; auto, ngram: with the n-gram drafter as far as it pays; FOLDER: with the EAGLE-3 "
        "drafter there, too.  The tokens are the same",
    )
    parser.add_argument(
        "--batch-size", type=_number(int, 1, 4096), default=16, help="responses decoded at once on a worker"
    )
    parser.add_argument("--num-workers", type=_number(int, 1, 1024), default=1)
    parser.add_argument("--system-prompt", help="default: the chat template's own, as in serving")
    parser.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help="variables of the chat template, e.g. '{\"enable_thinking\": false}'; as data.chat_template_kwargs",
    )

"""`tlt doctor`: what this machine has, and where the memory of a run would go."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from conf.load import load
from conf.run import RunConfig
from flows import _announcement
from tlt_core.machine import doctor, precision
from tlt_core.machine.memory import gpu_bytes, named_gpu_bytes
from tlt_core.model.shapes import shape_of
from tlt_core.rollout.vllm.environment import installed, vllm_python
from tlt_core.run import engine_choice, memory_plan
from tlt_core.run.engine_choice import Choice
from tlt_core.run.memory_plan import MemoryPlan

_COLORS = {"used": "green", "skipped": "yellow", "missing": "red"}
_SMALLEST = 0.01e9  # bytes of an owner that is shown


def show(config: str | None, *, default: str, gpu: str | None) -> None:
    """Print all tables.  gpu: judge the memory plan for this GPU in place of the one that is here.

    Raises ConfigError, ValueError on an unknown GPU, MemoryPlanError where the run does not fit.
    """
    device_bytes = None if gpu is None else named_gpu_bytes(gpu)
    # No run has this name: the precision is the machine's, whatever an earlier run had.
    cfg = load(config or default, ["name=doctor"]) if config or Path(default).is_file() else None
    table = Table("what", "found", "verdict", "why", box=None, pad_edge=False)
    chosen = None if cfg is None else engine_choice.choose(cfg)
    for row in [*doctor.findings(), *_engine(chosen)]:
        table.add_row(row.name, row.found, f"[{_COLORS[row.verdict]}]{row.verdict}[/]", row.reason)
    Console().print(table)
    if cfg is None or chosen is None:
        return
    cfg = cfg.with_engine(chosen.engine)
    if cfg.cluster.device == "cuda":  # GPUs that train models of these sizes compute in bfloat16
        cfg = cfg.with_dtypes(rollout="bfloat16", update="bfloat16", coldstart="bfloat16")
    cfg = cfg.with_dtypes(**precision.decide(cfg)._asdict())
    print(f"\n{config or default}: {_announcement.kernels_in_words(cfg)}")
    _show_memory(cfg, device_bytes)


def _engine(chosen: Choice | None) -> list[doctor.Finding]:
    """vLLM, which has an environment of its own, and the engine that the configuration's rollouts run on."""
    python, wanted = vllm_python(), chosen is not None and chosen.engine == "vllm"
    found = installed(python)
    if found is None:
        why = f"not in {python.parents[1]}: run 'make vllm-env', or set VLLM_PYTHON"
        vllm = doctor.Finding("vllm", "not installed", "missing" if wanted else "skipped", why)
    else:
        why = "with the plug-in tlt_vllm" if wanted else "rollouts run on our own engine"
        vllm = doctor.Finding("vllm", f"{found.version} for {found.device}", "used" if wanted else "skipped", why)
    return [vllm] if chosen is None else [vllm, doctor.Finding("rollout engine", chosen.engine, "used", chosen.why)]


def _show_memory(cfg: RunConfig, named_bytes: int | None) -> None:
    model = shape_of(cfg.model)
    if model is None:
        print("no memory plan: the model's shape is not known here; give a local folder, or download it first")
        return
    plan = memory_plan.memory_plan(cfg, model)
    Console().print(_table(cfg, plan))
    if cfg.cluster.device == "cpu":
        together = plan.peak[1] * cfg.cluster.num_workers / 1e9
        print(f"{cfg.cluster.num_workers} workers: {together:.1f} GB at most, at the {plan.peak[0]}")
        return
    device_bytes = named_bytes or gpu_bytes()
    if device_bytes is None:
        print("no GPU is here: --gpu 80 compares the plan with one of 80 GB")
        return
    memory_plan.check(plan, cfg, device_bytes=device_bytes)
    free = (device_bytes / cfg.cluster.workers_per_gpu - plan.peak[1]) / 1e9
    print(f"it fits into {memory_plan.place(cfg, device_bytes)}: {free:.1f} GB are free at the {plan.peak[0]}")
    if cfg.rollout.engine == "vllm":
        share, most = memory_plan.vllm_room(plan, cfg, model, device_bytes=device_bytes)
        print(f"vLLM gets {share / 1e9:.1f} GB: room for {most} responses of full length at once")


def _table(cfg: RunConfig, plan: MemoryPlan) -> Table:
    """Owners by phases, in GB."""
    where = "GB of a worker's GPU" if cfg.cluster.device == "cuda" else "GB of a worker"
    if cfg.cluster.workers_per_gpu > 1:
        where = f"GB of a worker, {cfg.cluster.workers_per_gpu} to a GPU"
    table = Table(where, *plan.phases, *(["host"] if plan.host else []), box=None, pad_edge=False)
    columns = [*plan.phases.values(), *([plan.host] if plan.host else [])]
    for name in dict.fromkeys(name for owners in columns for name in owners):
        sizes = [owners.get(name, 0) for owners in columns]
        if max(sizes) >= _SMALLEST:
            table.add_row(name, *(f"{size / 1e9:.2f}" if size >= _SMALLEST else "" for size in sizes))
    table.add_row("together", *(f"{sum(owners.values()) / 1e9:.2f}" for owners in columns))
    return table

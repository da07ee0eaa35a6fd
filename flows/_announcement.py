"""Says what a run will do, on which kernels and for how long; afterwards, how long it took."""

import functools
import logging
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

from conf.model import RandomModel
from conf.run import RunConfig
from tlt_core.items import checkpoint
from tlt_core.machine import precision, rates
from tlt_core.model.embedded import EMBEDDED_NAME
from tlt_core.model.shapes import shape_of
from tlt_core.run import coldstart, inputs, resumable
from tlt_core.run.forecast import Forecast, ToDo, forecast, sizes_of
from tlt_core.run.progress import minutes
from tlt_core.run.summary import rows_of
from tlt_core.run.training_pass import layer_pass

log = logging.getLogger(__name__)

_KERNELS = {  # by `native.isa`; others are named by that word
    "amx": "C kernels with matrix tiles (AMX)",
    "avx512_bf16": "C kernels with AVX-512 bf16",
    None: "torch's kernels",
}


def announce(cfg: RunConfig) -> Forecast | None:
    """Log it once in a process.  `tlt train` calls this before it imports Prefect, a deployment's flow calls it itself.

    Returns None when there is no forecast: see `predict`.
    """
    _began_s()
    cfg = cfg.with_dtypes(**precision.decide(cfg)._asdict())
    todo = to_do(cfg)
    _say(f"{cfg.name}: {plan_in_words(cfg, todo)}")
    _say(kernels_in_words(cfg))
    if jump := resumable.rate_jumps(cfg):
        _say(jump, logging.WARNING)
    found = predict(cfg, todo)
    if found is None:
        _say("no forecast: it needs workers on this machine's CPU, and a model that is already here")
    else:
        _say(f"about {minutes(found.total_s)} here: {stages_in_words(found.stages)}")
    return found


def predict(cfg: RunConfig, todo: ToDo) -> Forecast | None:
    """The forecast; None: on GPUs, on other machines, with vLLM, or with a model that is not here yet."""
    model, cluster = shape_of(cfg.model), cfg.cluster
    if model is None or cluster.gpus_per_worker or cluster.address != "local" or cfg.rollout.engine != "own":
        return None
    measured = rates.measure(
        layer_pass,
        workers=cluster.num_workers,
        threads=cluster.threads_per_worker,
        width=model.hidden_size,
        inner=model.intermediate_size,
        update_dtype=cfg.update.dtype,
        rollout_dtype=cfg.rollout.dtype,
    )
    return forecast(cfg, measured, sizes_of(model), todo, known_s=_known_s(cfg.run_dir) if todo.done_steps else None)


def to_do(cfg: RunConfig) -> ToDo:
    """What is still to do."""
    embedded = inputs.artifacts_dir() / "models" / EMBEDDED_NAME / "config.json"
    with checkpoint.newest(cfg.run_dir / "checkpoints") as found:
        done_steps = 0 if found is None else found.state.step
    return ToDo(
        model=not embedded.is_file() and (isinstance(cfg.model, RandomModel) or cfg.model.path == EMBEDDED_NAME),
        data=not (inputs.data_dir(cfg) / "manifest.json").is_file(),
        cold_start=cfg.coldstart.enabled and not (coldstart.output_dir(cfg) / "coldstart.json").is_file(),
        first_drafter=cfg.needs_first_drafter and not (cfg.run_dir / "drafter-eagle3").is_dir(),
        done_steps=done_steps,
    )


def plan_in_words(cfg: RunConfig, todo: ToDo) -> str:
    """ "to do: first drafter, 12 steps, export (already there: model, data, cold start)" """
    wanted = {
        "model": (True, todo.model),
        "data": (True, todo.data),
        "cold start": (cfg.coldstart.enabled, todo.cold_start),
        "first drafter": (cfg.needs_first_drafter, todo.first_drafter),
    }
    left = cfg.num_steps - todo.done_steps
    steps = f"steps {todo.done_steps + 1} to {cfg.num_steps}" if todo.done_steps else f"{cfg.num_steps} steps"
    open_ones = [name for name, (asked, is_open) in wanted.items() if asked and is_open]
    there = [name for name, (asked, is_open) in wanted.items() if asked and not is_open]
    text = f"to do: {', '.join([*open_ones, *([steps] if left > 0 else []), 'export'])}"
    return f"{text} (already there: {', '.join(there)})" if there else text


def kernels_in_words(cfg: RunConfig) -> str:
    """Precision, kernels and threads of the run."""
    cluster, rollout, update = cfg.cluster, cfg.rollout.dtype, cfg.update.dtype
    if cluster.gpus_per_worker:
        shared = f", {cfg.rollout.workers_per_engine} to an engine" if cfg.rollout.workers_per_engine > 1 else ""
        gpus = f", {cluster.workers_per_gpu} to a GPU" if cluster.workers_per_gpu > 1 else " with a GPU each"
        engine = "in vLLM" if cfg.rollout.engine == "vllm" else "on our engine"
        return f"{cluster.num_workers} workers{gpus}{shared}: rollout in {rollout} {engine}, update in {update}"
    isa = precision.kernels_isa() if rollout == "bfloat16" else None
    kernels = _KERNELS.get(isa, f"C kernels ({isa})")
    threads = f"{cluster.threads_per_worker} thread{'s' if cluster.threads_per_worker > 1 else ''}"
    return f"rollout in {rollout} on {kernels}, update in {update} on torch's; {cluster.num_workers} x {threads}"


def stages_in_words(seconds: Mapping[str, float]) -> str:
    """ "cold start 2:10, rollouts 5:03" """
    return ", ".join(f"{name} {minutes(value)}" for name, value in seconds.items())


class Took:
    """How long the stages took, under the forecast's names."""

    def __init__(self) -> None:
        """The first stage begins at the announcement, or here without one."""
        self.stages: dict[str, float] = {}
        self._lap_s = _began_s()
        _began_s.cache_clear()  # for another run of this process

    def lap(self, stage: str) -> None:
        """End a stage, which began where the last one ended."""
        now_s = time.monotonic()
        self._add(stage, now_s - self._lap_s)
        self._lap_s = now_s

    def step(self, metrics: Mapping[str, float]) -> None:
        """End an RL step, or the validation before the first, and add its phases up."""
        now_s = time.monotonic()
        parts = {
            "rollouts": metrics.get("timing_s/gen", 0.0),
            "updates": metrics.get("timing_s/update_actor", 0.0),
            "validations": metrics.get("timing_s/testing", 0.0),
        }
        for stage, seconds in parts.items():
            self._add(stage, seconds)
        self._add("rest of the steps", now_s - self._lap_s - sum(parts.values()))
        self._lap_s = now_s

    def in_words(self, predicted: Forecast | None) -> str:
        """ "took 13:05, forecast 12:10: cold start 2:20 (2:10), ..." """
        total_s = sum(self.stages.values())
        if predicted is None:
            return f"took {minutes(total_s)}: {stages_in_words(self.stages)}"
        both = {name: (self.stages.get(name, 0.0), predicted.stages.get(name, 0.0)) for name in predicted.stages}
        both |= {name: (seconds, 0.0) for name, seconds in self.stages.items() if name not in both and round(seconds)}
        parts = [f"{name} {minutes(taken)} ({minutes(thought)})" for name, (taken, thought) in both.items()]
        return f"took {minutes(total_s)}, forecast {minutes(predicted.total_s)}: {', '.join(parts)}"

    def metrics(self, predicted: Forecast | None) -> dict[str, float]:
        """`forecast/STAGE_s` and `took/STAGE_s` of each stage and of their total."""
        told = {"forecast": dict(predicted.stages) if predicted else {}, "took": dict(self.stages)}
        for stages in told.values():
            if stages:
                stages["total"] = sum(stages.values())
        return {f"{k}/{name.replace(' ', '_')}_s": s for k, stages in told.items() for name, s in stages.items()}

    def _add(self, stage: str, seconds: float) -> None:
        self.stages[stage] = self.stages.get(stage, 0.0) + seconds


def _known_s(run_dir: Path) -> dict[str, float]:
    rows = [row for row in rows_of(run_dir) if "timing_s/step" in row]
    if not rows:
        return {}
    names = {"rollout": "timing_s/gen", "update": "timing_s/update_actor"}
    return {phase: statistics.median(row.get(name, 0.0) for row in rows) for phase, name in names.items()}


@functools.cache
def _began_s() -> float:
    """The monotonic time of the first call."""
    return time.monotonic()


@functools.cache
def _say(text: str, level: int = logging.INFO) -> None:
    log.log(level, "%s", text)

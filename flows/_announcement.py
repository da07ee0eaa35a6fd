"""Says what a run will do, and on which kernels; afterwards, how long it took."""

import functools
import logging
import time
from collections import defaultdict
from collections.abc import Mapping

from conf.model import RandomModel
from conf.run import RunConfig
from tlt_core.items import checkpoint
from tlt_core.machine import precision
from tlt_core.model.embedded import EMBEDDED_NAME
from tlt_core.rollout.engines import ENGINES
from tlt_core.run import coldstart, inputs, resumable
from tlt_core.run.progress import minutes

log = logging.getLogger(__name__)

_KERNELS = {  # by `native.isa`; others are named by that word
    "amx": "C kernels with matrix tiles (AMX)",
    "avx512_bf16": "C kernels with AVX-512 bf16",
    None: "torch's kernels",
}


def announce(cfg: RunConfig) -> None:
    """Log it once in a process.  `tlt train` calls this before it imports Prefect, a deployment's flow itself."""
    _began_s()
    cfg = cfg.with_dtypes(**precision.decide(cfg)._asdict())
    _say(f"{cfg.name}: {plan_in_words(cfg)}")
    _say(kernels_in_words(cfg))
    if jump := resumable.rate_jumps(cfg):
        _say(jump, logging.WARNING)


def plan_in_words(cfg: RunConfig) -> str:
    """ "to do: first drafter, 12 steps, export (already there: model, data, cold start)" """
    embedded = inputs.artifacts_dir() / "models" / EMBEDDED_NAME / "config.json"
    needs_embedded = isinstance(cfg.model, RandomModel) or cfg.model.path == EMBEDDED_NAME
    is_there = {
        "model": embedded.is_file() or not needs_embedded,
        "data": (inputs.data_dir(cfg) / "manifest.json").is_file(),
    }
    if cfg.coldstart.enabled:
        is_there["cold start"] = (coldstart.output_dir(cfg) / "coldstart.json").is_file()
    if cfg.needs_first_drafter:
        is_there["first drafter"] = (cfg.run_dir / "drafter-eagle3").is_dir()
    with checkpoint.newest(cfg.run_dir / "checkpoints") as found:
        done = 0 if found is None else found.state.step
    steps = f"steps {done + 1} to {cfg.num_steps}" if done else f"{cfg.num_steps} steps"
    todo = [name for name in is_there if not is_there[name]] + [steps] * (done < cfg.num_steps)
    text = f"to do: {', '.join([*todo, 'export'])}"
    there = ", ".join(name for name in is_there if is_there[name])
    return f"{text} (already there: {there})" if there else text


def kernels_in_words(cfg: RunConfig) -> str:
    """Precision, kernels and threads of the run."""
    cluster, rollout, update = cfg.cluster, cfg.rollout.dtype, cfg.update.dtype
    if cluster.gpus_per_worker:
        shared = f", {cfg.rollout.workers_per_engine} to an engine" if cfg.rollout.workers_per_engine > 1 else ""
        gpus = f", {cluster.workers_per_gpu} to a GPU" if cluster.workers_per_gpu > 1 else " with a GPU each"
        engine = ENGINES[cfg.rollout.engine].words
        return f"{cluster.num_workers} workers{gpus}{shared}: rollout in {rollout} {engine}, update in {update}"
    isa = precision.kernels_isa() if rollout == "bfloat16" else None
    kernels = _KERNELS.get(isa, f"C kernels ({isa})")
    threads = f"{cluster.threads_per_worker} thread{'s' if cluster.threads_per_worker > 1 else ''}"
    return f"rollout in {rollout} on {kernels}, update in {update} on torch's; {cluster.num_workers} x {threads}"


class Took:
    """How long the stages took."""

    def __init__(self) -> None:
        """The first stage begins at the announcement, or here without one."""
        self.stages: dict[str, float] = defaultdict(float)
        self._lap_s = _began_s()
        _began_s.cache_clear()  # for another run of this process

    def lap(self, stage: str) -> None:
        """End a stage, which began where the last one ended."""
        now_s = time.monotonic()
        self.stages[stage] += now_s - self._lap_s
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
            self.stages[stage] += seconds
        self.stages["rest of the steps"] += now_s - self._lap_s - sum(parts.values())
        self._lap_s = now_s

    def in_words(self) -> str:
        """ "took 13:05: cold start 2:20, rollouts 5:03, ..." """
        stages = ", ".join(f"{name} {minutes(seconds)}" for name, seconds in self.stages.items())
        return f"took {minutes(sum(self.stages.values()))}: {stages}"

    def metrics(self) -> dict[str, float]:
        """`took/STAGE_s` of each stage and of their total."""
        stages = {**self.stages, "total": sum(self.stages.values())}
        return {f"took/{name.replace(' ', '_')}_s": seconds for name, seconds in stages.items()}


@functools.cache
def _began_s() -> float:
    return time.monotonic()


@functools.cache
def _say(text: str, level: int = logging.INFO) -> None:
    log.log(level, "%s", text)

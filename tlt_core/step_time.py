"""How the wall time of one training step splits into phases and orchestration.

    step = rollout + drafter publish + reward wait + update + reference + weight sync + checkpoint + validation
           + overhead

Overhead is what is left: Prefect, Ray, MLflow, files between the stations, packing.  Rollout and update count only
while some worker is in a state (BUSY, IDLE, TRAINING, UPDATING), so the time Ray needs to start a phase and to bring
its results back is overhead too.
"""

from collections.abc import Mapping, Sequence

from tlt_core.types import WorkerSpan

PHASES = ("publish_drafter", "reward", "ref", "update_weights", "save_checkpoint", "testing")  # timed by the driver


def overhead_metrics(values: Mapping[str, float], spans: Sequence[WorkerSpan], *, step_s: float) -> dict[str, float]:
    """`timing_s/step`, `timing_s/overhead`, and the shares of the step that the README quotes.

    values: the step's metrics, with `timing_s/*`; spans: its worker timeline; step_s: its wall time.
    """
    in_phases = sum(values.get(f"timing_s/{phase}", 0.0) for phase in PHASES)
    overhead = max(step_s - in_phases - covered_s(spans), 0.0)
    return {
        "timing_s/step": step_s,
        "timing_s/overhead": overhead,
        "perf/time_per_step": step_s,
        "perf/overhead_share": overhead / step_s,
        "perf/rollout_share": values.get("timing_s/gen", 0.0) / step_s,
    }


def covered_s(spans: Sequence[WorkerSpan]) -> float:
    """Seconds in which at least one worker was in a state: the length of the union of the spans."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start_s):
        total += max(0.0, span.end_s - max(span.start_s, end))
        end = max(end, span.end_s)
    return total

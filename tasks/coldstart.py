"""Task: supervised fine-tuning before RL."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE

from conf.run import RunConfig
from tlt_core.items.store import Ref
from tlt_core.run import coldstart


class ColdStarted(NamedTuple):
    """Folder of the fine-tuned model, and the stage's metrics."""

    model_dir: Path
    metrics: dict[str, float]


@task(task_run_name="cold-start", cache_policy=NO_CACHE)
def cold_start(
    cfg: RunConfig, model_dir: Path, dataset: Ref, on_progress: Callable[[str, int, int, float | None], None]
) -> ColdStarted:
    """Start model in, model that answers in the wanted format out."""
    out_dir = coldstart.output_dir(cfg)
    metrics = coldstart.run(
        cfg, model_dir=model_dir, data_dir=Path(dataset.path), out_dir=out_dir, on_progress=on_progress
    )
    return ColdStarted(out_dir, metrics)

"""Task: train the first drafter on rollouts of the current policy."""

from collections.abc import Callable
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from conf.run import RunConfig
from tlt_core.items.store import Ref
from tlt_core.run import drafter_warmup


@task(task_run_name="warm-up-drafter", cache_policy=NO_CACHE)
def warm_up_drafter(
    cfg: RunConfig,
    policy: Path,
    dataset: Ref,
    out_dir: Path,
    on_progress: Callable[[str, int, int, float | None], None],
) -> dict[str, float]:
    """Write the drafter's folder; returns the metrics."""
    return drafter_warmup.run(cfg, policy=policy, data_dir=Path(dataset.path), out_dir=out_dir, on_progress=on_progress)

"""Station: the first drafter, trained off-line on rollouts of the current policy."""

from collections.abc import Callable
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from conf.schema import RunConfig
from tlt_core import warmup
from tlt_core.store import Ref


@task(task_run_name="warm-up-drafter", cache_policy=NO_CACHE)
def warm_up_drafter(
    cfg: RunConfig,
    policy: Path,
    dataset: Ref,
    out_dir: Path,
    on_progress: Callable[[str, int, int, float | None], None],
) -> dict[str, float]:
    """Policy in, drafter's folder out; returns the metrics."""
    return warmup.run(cfg, policy=policy, data_dir=Path(dataset.path), out_dir=out_dir, on_progress=on_progress)

"""Task: export policy and drafter for serving."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from conf.run import RunConfig
from tlt_core.export import folder
from tlt_core.export.record import Source


@task(task_run_name="export-drafter", cache_policy=NO_CACHE)
def export_drafter(cfg: RunConfig, source: Source, out_dir: Path, *, num_prompts: int, verifier: str | None) -> Path:
    """Policy and drafter in; exported folder out, measured on held-out prompts."""
    return folder.run(cfg, source, out_dir=out_dir, num_prompts=num_prompts, verifier=verifier)

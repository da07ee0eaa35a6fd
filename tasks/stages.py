"""Tasks outside of the RL loop: start model, data set, trial of the rewards, cold start, first drafter, export, and
its version in DVC, which is called here alone (stages of dvc.yaml are tracked by `dvc repro`)."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml
from prefect import task
from prefect.cache_policies import NO_CACHE

from conf.run import RunConfig
from tlt_core.data import dataset
from tlt_core.export import folder
from tlt_core.export.record import Source
from tlt_core.items.store import Ref
from tlt_core.machine.file_lock import exclusive
from tlt_core.model.load import load_config, load_tokenizer
from tlt_core.run import coldstart, drafter_warmup, inputs, preflight, reward_probe

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int, float | None], None]


@task(task_run_name="prepare-model", cache_policy=NO_CACHE)
def prepare_model(cfg: RunConfig) -> Path:
    """Checked folder of the start model."""
    found = inputs.start_model(cfg.model, seed=cfg.seed)
    preflight.check_model(cfg, found)
    return found


@task(task_run_name="prepare-data", cache_policy=NO_CACHE)
def prepare_data(cfg: RunConfig, model_dir: Path) -> Ref:
    """Folder of the data set; the Ref has the number of training prompts and the digest."""
    data_dir, model = inputs.data_dir(cfg), load_config(model_dir)
    manifest = dataset.prepare(
        cfg.data,
        tokenizer=load_tokenizer(model_dir),
        vocab_size=model.vocab_size,
        max_prompt_tokens=cfg.rollout.max_prompt_tokens,
        out_dir=data_dir,
        alone=inputs.making(data_dir),
    )
    if manifest.dropped_long:
        kept = manifest.counts
        log.warning(
            "%d of %d prompts are longer than rollout.max_prompt_tokens=%d tokens and were dropped; %d training and %d "
            "validation prompts are left",
            manifest.dropped_long,
            manifest.dropped_long + sum(kept.values()),
            cfg.rollout.max_prompt_tokens,
            kept["train"],
            kept["validation"],
        )
    preflight.check_context(cfg, model, longest_prompt=manifest.longest_prompt)
    return Ref(str(data_dir), manifest.counts["train"], manifest.digest)


@task(task_run_name="probe-rewards", cache_policy=NO_CACHE)
def probe_rewards(cfg: RunConfig, model_dir: Path, data: Ref) -> None:
    """Warns of rewards that do not tell right from wrong on this data."""
    reward_probe.probe(cfg, data_dir=Path(data.path), model_dir=model_dir, digest=data.sha256)


@task(task_run_name="cold-start", cache_policy=NO_CACHE)
def cold_start(cfg: RunConfig, model_dir: Path, data: Ref, on_progress: OnProgress) -> tuple[Path, dict[str, float]]:
    """Start model in; folder of a model that answers in the wanted format out, and the metrics."""
    out_dir = coldstart.output_dir(cfg)
    return out_dir, coldstart.run(
        cfg, model_dir=model_dir, data_dir=Path(data.path), out_dir=out_dir, on_progress=on_progress
    )


@task(task_run_name="warm-up-drafter", cache_policy=NO_CACHE)
def warm_up_drafter(
    cfg: RunConfig, policy: Path, data: Ref, out_dir: Path, on_progress: OnProgress
) -> dict[str, float]:
    """Train the first drafter on rollouts of the policy, and write its folder; returns the metrics."""
    return drafter_warmup.run(cfg, policy=policy, data_dir=Path(data.path), out_dir=out_dir, on_progress=on_progress)


@task(task_run_name="export-drafter", cache_policy=NO_CACHE)
def export_drafter(cfg: RunConfig, source: Source, out_dir: Path, *, num_prompts: int, verifier: str | None) -> Path:
    """Policy and drafter in; exported folder out, measured on held-out prompts."""
    return folder.run(cfg, source, out_dir=out_dir, num_prompts=num_prompts, verifier=verifier)


class VersionError(RuntimeError):
    """A DVC command failed.  The text has its reason."""


@task(task_run_name="version-folder", cache_policy=NO_CACHE)
def version_folder(folder: Path, *, push: bool = True) -> str:
    """Track the folder's present content, and push it; may be repeated.  Returns its MD5.  Raises VersionError.

    exports/demo -> exports/demo.dvc (its digest, for git) -> bytes in DVC's cache and remote.  Processes take turns,
    where DVC itself would fail.
    """
    root = project_of(folder)
    with exclusive(root / ".dvc" / "tmp" / "tlt.lock", wait=True):
        _dvc(root, "add", str(folder.absolute()))
        pointer = folder.with_name(f"{folder.name}.dvc")
        if push:
            _dvc(root, "push", str(pointer.absolute()))
    md5 = str(yaml.safe_load(pointer.read_text())["outs"][0]["md5"])
    log.info("%s is version %s; commit %s", folder, md5, pointer)
    return md5


def project_of(folder: Path) -> Path:
    """Root of the folder's DVC project.  Raises VersionError."""
    for parent in folder.absolute().parents:
        if (parent / ".dvc").is_dir():
            return parent
    raise VersionError(f"{folder} is in no DVC project; choose a folder in one, or run 'dvc init' there")


def _dvc(root: Path, *arguments: str) -> None:
    """Run a DVC command; waits for other processes' commands."""
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise VersionError(f"dvc {arguments[0]} failed: {done.stderr.strip() or done.stdout.strip()}")

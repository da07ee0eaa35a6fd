"""`tlt train --out`: a whole run as one stage of dvc.yaml.

    OUT/        policy, drafter-eagle3, metrics.jsonl, run.json, config.yaml, samples
    SUMMARY/    train.json, curves.csv, lengths.csv: what `dvc metrics` and `dvc plots` show

The run's folder is named by a digest of all its inputs: after a kill it resumes, after a change of a setting or an
input it starts again.  It is removed when the stage is done.
"""

import hashlib
import json
import logging
import shutil
from pathlib import Path

from conf.load import ConfigError
from conf.run import RunConfig
from flows.train import train
from tlt_core.export.record import weights_digest
from tlt_core.items.store import write_folder_atomically
from tlt_core.machine import precision
from tlt_core.machine.file_lock import exclusive
from tlt_core.run import coldstart, inputs
from tlt_core.run import summary as run_summary

log = logging.getLogger(__name__)

_KEPT = ("policy", "drafter-eagle3", "metrics.jsonl", "run.json", "config.yaml", "samples")


def train_stage(cfg: RunConfig, *, out: Path, summary: Path) -> Path:
    """Train, then fill both folders; returns the policy's."""
    root = Path(cfg.output_dir) / "train"
    with exclusive(root / "lock", wait=True):  # a killed `dvc repro` may have left its stage running
        if out.exists():
            raise ConfigError(f"{out} exists: a stage of dvc.yaml begins without what it makes; remove it first")
        work = cfg.model_copy(update={"output_dir": str(root / _inputs_digest(cfg))})
        for older in (p for p in root.iterdir() if p.is_dir() and p != Path(work.output_dir)):
            log.info("%s belongs to other settings or inputs and is removed", older)
            shutil.rmtree(older)
        train(work)
        first = cfg.rollout.speculation.drafter_path
        if first is not None and not (work.run_dir / "drafter-eagle3").is_dir():  # plain decoding trains none
            shutil.copytree(first, work.run_dir / "drafter-eagle3")
        _summarise(work, summary)
        write_folder_atomically(out, lambda partial: _copy_results(work.run_dir, partial))
        shutil.rmtree(work.output_dir)
    return out / "policy"


def _inputs_digest(cfg: RunConfig) -> str:
    """Digest of the configuration and of the weights that the run starts from.

    `dtype: auto` counts as `auto`: on another kind of machine it is the same run, which resumes or is refused.
    """
    settled = cfg.with_dtypes(**precision.decide(cfg)._asdict())
    start, drafter = coldstart.output_dir(settled), cfg.rollout.speculation.drafter_path
    dataset = inputs.data_dir(cfg) / "manifest.json"
    content = {
        "config": cfg.model_dump(mode="json", exclude={"tracking"}),
        "data": dataset.read_text(errors="replace") if dataset.is_file() else "",
        "start": weights_digest(start) if cfg.coldstart.enabled and start.is_dir() else "",
        "drafter": weights_digest(Path(drafter)) if drafter is not None else "",
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _summarise(cfg: RunConfig, folder: Path) -> None:
    rows = run_summary.rows_of(cfg.run_dir)
    run_summary.write_json(folder / "train.json", run_summary.summary(rows))
    run_summary.write_csv(folder / "curves.csv", run_summary.curves(rows), ["step", *run_summary.CURVES])
    lengths = run_summary.length_histogram(cfg.run_dir, max_new_tokens=cfg.rollout.max_new_tokens)
    run_summary.write_csv(folder / "lengths.csv", lengths, ["tokens", "first", "last"])


def _copy_results(run_dir: Path, out: Path) -> None:
    for source in (run_dir / name for name in _KEPT):
        if source.is_dir():
            shutil.copytree(source, out / source.name)
        elif source.is_file():
            shutil.copy2(source, out / source.name)

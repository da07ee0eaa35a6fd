"""`tlt report`: one run as one HTML file.

What can be wrong with the input is found before anything heavy is imported.
"""

from pathlib import Path

from conf.load import ConfigError, load
from conf.run import RunConfig


def report(run: str, *, out: Path | None) -> tuple[Path, str]:
    """Write the page; returns its path and the verdict.

    run: a run's folder, or a configuration file; out: default RUN/report.html.  Raises ConfigError.
    """
    run_dir, cfg = find(run)
    from tasks.report_page import page
    from tlt_core.items.store import write_atomically
    from tlt_core.run.savings import savings
    from tlt_core.run.summary import rows_of

    rows = rows_of(run_dir)
    text = page(run_dir, cfg, rows)
    target = out or run_dir / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, lambda partial: partial.write_text(text, encoding="utf-8"))
    return target, savings(rows, cfg).verdict


def find(run: str) -> tuple[Path, RunConfig]:
    """Folder and configuration of a run that has recorded something.  Raises ConfigError."""
    path = Path(run)
    if path.is_file():
        named = load(path)
        path = named.run_dir
        if not path.is_dir():
            raise ConfigError(f"{run}: its run has no folder {path} yet; begin it with 'tlt train {run}'")
    elif not path.is_dir():
        raise ConfigError(
            f"{run}: neither a folder nor a file; name a run's folder, such as {example()}, or its configuration file"
        )
    missing = [name for name in ("config.yaml", "metrics.jsonl") if not (path / name).is_file()]
    if missing:
        raise ConfigError(
            f"{path} has no {' and no '.join(missing)}: it is not a run's folder, or its run has not ended a step; "
            f"name a run's folder, such as {example()}, or go on with 'tlt train CONFIG'"
        )
    return path, load(path / "config.yaml")


def example() -> str:
    """The newest run in `runs`, or how one is named."""
    runs = [path.parent for path in Path("runs").glob("*/metrics.jsonl")]
    return str(max(runs, key=lambda folder: folder.stat().st_mtime, default=Path("runs/demo")))

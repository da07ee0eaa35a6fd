"""Failures that a user can cause or must know about, each in one paragraph with a remedy.

Exit code 2: the input is wrong (configuration, model, data); 1: the run failed; 130: Ctrl-C; 143: SIGTERM.
Any other error is a bug and keeps its traceback.
"""

import errno
from pathlib import Path
from typing import NamedTuple

from conf.load import ConfigError
from flows import _logging, _stopping


class Report(NamedTuple):
    """What the command prints, and its exit code."""

    text: str
    exit_code: int


def explain(error: BaseException, *, run_dir: Path | None) -> Report | None:
    """The report of a failure; None for a bug."""
    file = run_dir and _logging.log_file(run_dir)
    see_log = f"  The traceback is in {file}." if file else ""
    if isinstance(error, ConfigError):
        return Report(str(error), 2)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return Report("Interrupted.  The same command goes on from the newest checkpoint.", _stopping.exit_code())
    if _is_disk_full(error):
        where = f" under {run_dir}" if run_dir else ""
        return Report(
            f"The disk is full ({error}).  Free some space{where} (or set output_dir, TLT_HOME or TMPDIR to another "
            f"disk) and start the same command again: it goes on from the newest checkpoint.{see_log}",
            1,
        )
    module = type(error).__module__
    if isinstance(error, ValueError) and module.startswith(("tlt_core.", "flows.")):
        return Report(str(error), 2)
    if module in ("flows._server", "tasks.registry", "tasks.version"):
        return Report(str(error), 1)
    # WorkerDied with the worker's traceback, and failures of vLLM
    if module in ("tlt_core.cluster.group", "tlt_core.rollout.vllm.client", "tlt_core.run.engine_agreement"):
        return Report(f"{error}{see_log}", 1)
    if isinstance(error, PermissionError):
        return Report(f"{error}.  Make the folder writable, or set output_dir or TLT_HOME to one that is.{see_log}", 1)
    return None


def _is_disk_full(error: BaseException) -> bool:
    """safetensors reports a full disk only in words."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return (isinstance(error, OSError) and error.errno in full) or "No space left on device" in str(error)

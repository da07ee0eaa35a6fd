"""Failures that a user can cause or must know about, each in one paragraph with a remedy.

Exit code 2: the input is wrong (configuration, model, data); 1: the run failed; 130: Ctrl-C; 143: SIGTERM.
Any other error is a bug and keeps its traceback.
"""

import errno
import os
from collections.abc import Collection
from pathlib import Path

from conf.load import ConfigError
from flows import _logging, _stopping


def explain(error: BaseException, *, run_dir: Path | None) -> tuple[str, int] | None:
    """What the command prints of a failure, and its exit code; None for a bug."""
    file = run_dir and _logging.log_file(run_dir)
    see_log = f"  The traceback is in {file}." if file else ""
    if isinstance(error, ConfigError):
        return (str(error), 2)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return ("Interrupted.  The same command goes on from the newest checkpoint.", _stopping.exit_code())
    for problem, numbers, remedy in _OF_THE_SYSTEM:
        if _has(error, numbers):
            where = f" under {run_dir}" if run_dir else ""
            text = f"{problem} ({_last_line(error)}).  {remedy.format(where=where)} and start the same command again:"
            return (f"{text} it goes on from the newest checkpoint.{see_log}", 1)
    module = type(error).__module__
    if isinstance(error, ValueError) and module.startswith(("tlt_core.", "flows.")):
        return (str(error), 2)
    if module in ("flows._server", "tasks.registry", "tasks.stages"):
        return (str(error), 1)
    # WorkerDied with the worker's traceback, RayNotStarted, and failures of vLLM
    if module.startswith("tlt_core.cluster.") or module in (
        "tlt_core.rollout.vllm.client",
        "tlt_core.run.engine_agreement",
    ):
        on_gpu = _DEVICE_ASSERT if "device-side assert" in str(error) else ""
        return (f"{error}{on_gpu}{see_log}", 1)
    if isinstance(error, PermissionError):
        return (f"{error}.  Make the folder writable, or set output_dir or TLT_HOME to one that is.{see_log}", 1)
    return None


# Checks on the device end all work on that GPU, whatever operation comes next; its error names that operation.
_DEVICE_ASSERT = (
    "\nA check on the GPU failed in an operation before the one above.  The worker's stderr names the check; that of "
    "coupled_sample means that the policy's logits are NaN or infinite: lower the learning rate, and look at "
    "actor/grad_norm of the last steps.  CUDA_LAUNCH_BLOCKING=1 shows where.  The same command goes on from the newest "
    "checkpoint."
)

_OF_THE_SYSTEM = (
    (
        "The disk is full",
        (errno.ENOSPC, errno.EDQUOT),
        "Free some space{where} (or set output_dir, TLT_HOME or TMPDIR to another disk)",
    ),
    (
        "The disk is read-only",
        (errno.EROFS,),
        "See dmesg (a disk with errors becomes read-only by itself); make it writable{where}, or set output_dir or "
        "TLT_HOME to another disk,",
    ),
    ("The disk fails", (errno.EIO,), "See dmesg; set output_dir or TLT_HOME to another disk"),
    ("Too many files are open", (errno.EMFILE, errno.ENFILE), "Raise the limit (ulimit -n)"),
    (
        "Memory is short",
        (errno.ENOMEM,),
        "Lower rollout.max_live_requests, update.tokens_per_micro_batch or cluster.num_workers, or set "
        "cluster.release_rollout_memory=true or update.activation_checkpointing=true ('tlt doctor CONFIG' says what "
        "takes the memory; a run that goes on may change all of these)",
    ),
)
_IN_OTHER_WORDS = {errno.ENOMEM: "CUDA out of memory"}


def _last_line(error: BaseException) -> str:
    return str(error).strip().rpartition("\n")[2]


def _has(error: BaseException, numbers: Collection[int]) -> bool:
    """safetensors, and workers, report what the system refuses only in words."""
    is_one = isinstance(error, OSError) and error.errno in numbers
    words = [os.strerror(number) for number in numbers] + [_IN_OTHER_WORDS[n] for n in numbers if n in _IN_OTHER_WORDS]
    return is_one or any(word in str(error) for word in words)

"""The matrix: which fault in which phase, and what has to come of it.

The phases of a fault are drawn from a seed, so all faults share their code and each phase meets many of them.
"""

import itertools
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.faults import faults
from tests.faults.faults import Fault
from tests.faults.harness import Run

SEED = 26
COLD = ("cold start",)
START = ("model and data", "starting workers", "loading the model")
STEP = ("evaluate", "rollout", "reward", "update", "publish", "checkpoint", "figures and metrics")
END = ("export", "registry")
PHASES = (*COLD, *START, *STEP, *END)
BETWEEN = "between two starts"
WITH_WORKERS = ("cold start", *STEP)

_INTERRUPTED = "Interrupted.  The same command goes on from the newest checkpoint."
_DIED = "A worker process ended unexpectedly"


class Kind(NamedTuple):
    """A fault, where it may strike, and what has to come of it."""

    strike: Fault
    phases: tuple[str, ...]
    drawn: int  # how many of the phases
    code: int | None  # exit code; None: the run goes on
    says: str = ""  # in the command's output
    lasts_s: float = 0.0  # of a fault that the run survives
    always: tuple[str, ...] = ()  # phases beside those that are drawn
    may_miss: bool = False  # it may find nothing to break: then the run ends by itself, as in peace
    rounds: bool = False  # results may differ in their last bits from then on


class Damage(NamedTuple):
    """What happens to a file while no run is at work, and what the next start does."""

    path: Callable[[Run], Path]
    spoil: Callable[[Path], None]
    code: int | None  # exit code of the next start; None: it goes on
    says: str = ""
    mend: Callable[[Path, bytes], object] = Path.write_bytes  # with the file's path and its old content


class Case(NamedTuple):
    fault: str
    phase: str
    kind: Kind | Damage


KINDS = {
    "driver killed": Kind(faults.driver_gets(signal.SIGKILL), PHASES, 2, -9, always=("cold start", "checkpoint")),
    "driver told to stop (SIGTERM)": Kind(
        faults.driver_gets(signal.SIGTERM), PHASES, 1, 143, _INTERRUPTED, always=("registry",)
    ),
    "driver interrupted (Ctrl-C)": Kind(faults.driver_gets(signal.SIGINT), STEP, 1, 130, _INTERRUPTED),
    "worker killed": Kind(faults.killed("ray::Worker"), WITH_WORKERS, 1, 1, _DIED, always=("loading the model",)),
    "worker stopped for good": Kind(faults.stopped("ray::Worker"), STEP, 1, 1, "No sign of life for cluster.silence_s"),
    "worker's memory limited": Kind(
        faults.limited("ray::Worker", resource.RLIMIT_AS, 0),
        ("rollout", "update"),
        1,
        1,
        "Memory is short",
        may_miss=True,  # the steps that are left may need no new memory
        rounds=True,  # where MKL gets no memory, it takes another kernel
    ),
    "dispatcher killed": Kind(faults.killed("ray::Dispatcher"), STEP, 1, 1, "the dispatcher of requests"),
    "raylet killed": Kind(faults.killed("raylet/raylet"), STEP, 1, 1, "Ray's process raylet on this machine has ended"),
    "Ray's control server (GCS) killed": Kind(
        faults.killed("gcs/gcs_server"), STEP, 1, 1, "Ray's process gcs_server on this machine has ended"
    ),
    "disk full": Kind(faults.disk_full, (*STEP, "export"), 1, 1, "The disk is full", always=("checkpoint",)),
    "disk becomes read-only": Kind(faults.disk_read_only, STEP, 1, 1, "read-only"),
    "driver out of open files": Kind(
        faults.limited("", resource.RLIMIT_NOFILE, 0), ("rollout", "update", "checkpoint"), 1, 1, "files are open"
    ),
    "driver paused for 5 s": Kind(faults.driver_paused, PHASES, 5, None),
    "worker paused for 4 s": Kind(faults.stopped("ray::Worker"), WITH_WORKERS, 5, None, lasts_s=4.0),
    "dispatcher paused for 4 s": Kind(faults.stopped("ray::Dispatcher"), STEP, 3, None, lasts_s=4.0),
    "raylet paused for 4 s": Kind(faults.stopped("raylet/raylet"), STEP, 3, None, lasts_s=4.0),
    "Ray's control server (GCS) paused for 4 s": Kind(faults.stopped("gcs/gcs_server"), STEP, 2, None, lasts_s=4.0),
    "Prefect's server killed": Kind(
        faults.killed("prefect.server.api"),
        (*START, *STEP),
        3,
        None,
        "Prefect's private server ended",
        lasts_s=2.0,
        always=("export",),
    ),
    "Prefect's server silent for 6 s": Kind(
        faults.stopped("prefect.server.api"), (*START, *STEP), 4, None, lasts_s=6.0
    ),
    "MLflow killed, back after 5 s": Kind(faults.mlflow_killed, (*START, *STEP), 4, None, lasts_s=5.0),
    "MLflow silent for 15 s": Kind(faults.mlflow_silent, (*START, *STEP), 3, None, lasts_s=15.0),
    "scoring process killed": Kind(faults.killed("spawn_main"), STEP, 4, None, always=("reward", "rollout")),
    "second run on the folder": Kind(faults.second_run, STEP, 1, None),
}


# ---------------------------------------------------------------------------------------------- between two starts


def _start_anew(path: Path, _: bytes) -> None:
    shutil.rmtree(path.parent)


def _checkpoint(name: str) -> Callable[[Run], Path]:
    return lambda run: faults.newest_checkpoint(run) / name


def _file(name: str) -> Callable[[Run], Path]:
    return lambda run: run.dir / name


def _newest_step(run: Run) -> Path:
    return max((run.dir / "steps").glob("*/scored.safetensors"))


DAMAGES = {
    "newest checkpoint: weights torn": Damage(
        _checkpoint("trainer_0.safetensors"), faults.torn, None, "skipping checkpoint"
    ),
    "newest checkpoint: a bit flipped": Damage(
        _checkpoint("trainer_1.safetensors"), faults.flipped, None, "SHA-256 differs"
    ),
    "newest checkpoint: state torn": Damage(_checkpoint("state.json"), faults.torn, None, "skipping checkpoint"),
    "newest checkpoint: no COMPLETE": Damage(_checkpoint("COMPLETE"), Path.unlink, None, "COMPLETE cannot be locked"),
    "status.json torn": Damage(_file("status.json"), faults.torn, None),
    "config.yaml torn": Damage(_file("config.yaml"), faults.torn, None),
    "scores of the newest step torn": Damage(_newest_step, faults.torn, None),
    "metrics.jsonl ends in half a line": Damage(_file("metrics.jsonl"), faults.half_a_line, None),
    "metrics.jsonl: a line damaged": Damage(_file("metrics.jsonl"), faults.damaged_line, 2, "metrics.jsonl, line 1"),
    "run.json torn": Damage(_file("run.json"), faults.torn, 2, "run.json cannot be read as JSON"),
    "database of Prefect's server damaged": Damage(
        lambda run: run.prefect / "prefect.db",
        faults.damaged_line,
        1,
        "Prefect's private server did not start",
        _start_anew,
    ),
}


def drawn() -> list[Case]:
    """All of them, in an order that needs few starts."""
    chance, found = random.Random(SEED), list[Case]()
    for fault, kind in KINDS.items():
        chosen = {*kind.always, *chance.sample(sorted(kind.phases), kind.drawn)}
        found += [Case(fault, phase, kind) for phase in PHASES if phase in chosen]
    damages = [Case(name, BETWEEN, damage) for name, damage in DAMAGES.items()]
    cold, start, step, end = ([c for c in found if c.phase in part] for part in (COLD, START, STEP, END))
    return [
        *sorted(cold, key=_is_survived),
        *_mixed([c for c in (*step, *start) if not _is_survived(c)][::-1], start, step, damages),
        *sorted(end, key=lambda case: (_is_survived(case), PHASES.index(case.phase))),
    ]


def _is_survived(case: Case) -> bool:
    return case.kind.code is None


def _mixed(ends: list[Case], start: list[Case], step: list[Case], damages: list[Case]) -> Iterator[Case]:
    """Before a case that ends the run come some that it survives; after it the next start is hit, or a file damaged."""
    starts, steps = ([c for c in cases if _is_survived(c)] for cases in (start, step))
    share, damaged = -(-len(steps) // len(ends)), iter(damages)
    for number, case in enumerate(ends):
        yield from steps[number * share : (number + 1) * share]
        yield case
        if number < len(starts):
            yield starts[number]
        else:
            yield from itertools.islice(damaged, 1)
    yield from damaged

"""Decoding engines side by side, each in its own process on the same cores, measured in turn.

    start and warm up every engine -> repeat: every case, every engine -> Measured

Only one process runs at a time; the others are stopped by a signal.
"""

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench.engines.environment import LineProcess, PeerError
from tlt_core.machine.huge_pages import tunables

_PROCESS = Path(__file__).with_name("processes") / "process.py"
_WARM_UP_TOKENS = 8

_log = logging.getLogger(__name__)


class EngineSpec(NamedTuple):
    """How to start an engine.  EngineSpec("plain", Path("builtin.py"), Path("python"), {...}, {"model": ...})"""

    name: str
    file: Path  # in processes/
    python: Path
    environment: Mapping[str, str]
    settings: Mapping[str, Any]
    most_live: int = 0  # most requests at once; 0: any number
    optional: bool = False  # left out with the reason if it fails


class Case(NamedTuple):
    live: int
    temperature: float
    most_tokens: int = 0  # of a burst, whose responses end by themselves; 0: all have the same length


class Measured(NamedTuple):
    tokens_per_s: float  # of all live requests together, without the first token of each
    total_tokens_per_s: float  # with the time for prompts and first tokens
    tokens: list[list[int]]


class Contest(NamedTuple):
    measured: dict[tuple[str, Case], list[Measured]]  # by engine and case, one for each repeat
    described: dict[str, dict[str, Any]]  # version, threads and precision, by engine
    failed: dict[str, str]  # reasons, by optional engine


class _Engine(LineProcess):
    """A running engine, which is stopped by a signal except while it works."""

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        command = [str(spec.python), "-P", str(_PROCESS), str(spec.file)]
        super().__init__(f"engine {spec.name}", command, environment=spec.environment, log=log)
        self.spec = spec

    def takes(self, case: Case) -> bool:
        return not self.spec.most_live or case.live <= self.spec.most_live

    def work(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """As `ask`, while the process may run."""
        self.signal(signal.SIGCONT)
        reply = self.ask(job)
        self.signal(signal.SIGSTOP)
        return reply


def compete(
    specs: Sequence[EngineSpec],
    cases: Sequence[Case],
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    repeats: int,
    seed: int,
    log_dir: Path,
    on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> Contest:
    """Measure every engine on every case that it accepts, `repeats` times; another engine is first in each repeat.

    Each measurement has prompts of its own, as far as there are some: an engine may remember what it has seen.
    on_progress: called with a phase, and with how much of it is done, of how much.  Raises PeerError when an engine
    fails, unless it is optional and fails before the measurements.
    """
    found = Contest({}, {}, {})
    log_dir.mkdir(parents=True, exist_ok=True)

    def job(case: Case, tokens: int, seed: int, start: int = 0) -> dict[str, Any]:
        asked = [list(prompts[index % len(prompts)]) for index in range(start, start + case.live)]
        about = {"temperature": case.temperature, "seed": seed, "natural_ends": case.most_tokens > 0}
        return {"prompts": asked, "new_tokens": tokens, **about}

    with ExitStack() as stack:
        engines: list[_Engine] = []
        for done, spec in enumerate(specs):
            on_progress(f"starting {spec.name}", done, len(specs))
            engine = _Engine(spec, log_dir / f"{spec.name.replace(' ', '-')}.log")
            stack.callback(engine.close)
            try:
                described = engine.work(spec.settings)["ready"]
                for case in filter(engine.takes, cases):
                    engine.work(job(case, min(_WARM_UP_TOKENS, new_tokens), seed))
            except PeerError as error:
                if not spec.optional:
                    raise
                _log.warning("left out: %s", error)
                found.failed[spec.name] = str(error)
                continue
            _log.info("engine %s: %s", spec.name, described)
            found.described[spec.name] = described
            engines.append(engine)
        for turn in range(repeats * len(cases)):
            repeat, case = turn // len(cases), cases[turn % len(cases)]
            on_progress("measurements", turn, repeats * len(cases))
            able = [engine for engine in engines if engine.takes(case)]
            for engine in able[repeat % len(able) :] + able[: repeat % len(able)]:
                start = first_prompt(cases, case) + repeat * sum(c.live for c in cases)
                reply = engine.work(job(case, case.most_tokens or new_tokens, seed + repeat, start))
                decoding_s = max(reply["seconds"] - reply["first_seconds"], 1e-9)
                count = sum(map(len, reply["tokens"]))
                rate, total = (count - case.live) / decoding_s, count / reply["seconds"]
                result = Measured(rate, total, reply["tokens"])
                found.measured.setdefault((engine.spec.name, case), []).append(result)
                _log.info("repeat %d, %s, %s: %.1f tokens/s", repeat, case, engine.spec.name, result.tokens_per_s)
    return found


def first_prompt(cases: Sequence[Case], case: Case) -> int:
    """Of a case's first repeat."""
    return sum(other.live for other in cases[: list(cases).index(case)])


def own_environment(*, threads: int) -> dict[str, str]:
    """Variables for engines in this interpreter's environment, where our packages need not be installed."""
    path = os.pathsep.join([str(_PROCESS.parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    return dict(os.environ) | own | tunables()


def cores(count: int) -> list[int]:
    """The cores that every engine is pinned to.  Raises ValueError if there are fewer."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if len(usable) < count:
        raise ValueError(f"cluster.threads_per_worker={count}, but this machine has {len(usable)} cores: lower it")
    return usable[:count]

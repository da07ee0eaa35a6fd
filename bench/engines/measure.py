"""Decoding engines side by side, each in its own process on the same cores, measured in turn.

    start and warm up every engine -> repeat: every case, every engine -> Measured

Only one process runs at a time; the others are stopped by a signal.  In: engines and what they decode.  Out: figures by
(engine, case), in the order of the repeats.
"""

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bench.engines.environment import PeerError
from bench.engines.line_process import LineProcess

_PROCESS = Path(__file__).with_name("processes") / "process.py"
_WARM_UP_TOKENS = 8

_log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
"""Called with a phase, and with how much of it is done, of how much."""


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
    """What is decoded: the first `live` prompts at a temperature."""

    live: int
    temperature: float


class Measured(NamedTuple):
    """One measurement of one engine on one case."""

    tokens_per_s: float  # of all live requests together, without the first token of each
    total_tokens_per_s: float  # with the time for prompts and first tokens
    tokens: list[list[int]]


class Contest(NamedTuple):
    """Everything that was measured."""

    measured: dict[tuple[str, Case], list[Measured]]  # by engine and case, one for each repeat
    described: dict[str, dict[str, Any]]  # version, threads and precision, by engine
    failed: Mapping[str, str] = MappingProxyType({})  # reasons, by optional engine


class _Engine:
    """A running engine, which is stopped by a signal except while it works."""

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        command = [str(spec.python), "-P", str(_PROCESS), str(spec.file)]
        self.spec, self.described = spec, dict[str, Any]()
        self._process = LineProcess(f"engine {spec.name}", command, environment=spec.environment, log=log)
        self.close = self._process.close

    def start(self) -> None:
        """Load the model.  Raises PeerError."""
        self.described = self._process.ask(self.spec.settings)["ready"]
        self._process.signal(signal.SIGSTOP)

    def takes(self, case: Case) -> bool:
        """Whether the engine accepts this many requests at once."""
        return not self.spec.most_live or case.live <= self.spec.most_live

    def decode(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """See `processes/process.py`."""
        self._process.signal(signal.SIGCONT)
        reply = self._process.ask(job)
        self._process.signal(signal.SIGSTOP)
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
    on_progress: OnProgress = lambda phase, done, total: None,
) -> Contest:
    """Measure every engine on every case that it accepts, `repeats` times; another engine is first in each repeat.

    Raises PeerError when an engine fails, unless it is optional and fails before the measurements.
    """
    measured: dict[tuple[str, Case], list[Measured]] = {}
    warm_ups = [(case, _job(case, prompts, new_tokens=min(_WARM_UP_TOKENS, new_tokens), seed=seed)) for case in cases]
    with _running(specs, warm_ups, log_dir, on_progress) as (engines, failed):
        for repeat in range(repeats):
            for case in cases:
                on_progress("measurements", repeat * len(cases) + cases.index(case), repeats * len(cases))
                able = [engine for engine in engines if engine.takes(case)]
                for engine in able[repeat % len(able) :] + able[: repeat % len(able)]:
                    reply = engine.decode(_job(case, prompts, new_tokens=new_tokens, seed=seed + repeat))
                    result = figures(reply, case, new_tokens=new_tokens)
                    measured.setdefault((engine.spec.name, case), []).append(result)
                    _log.info("repeat %d, %s, %s: %.1f tokens/s", repeat, case, engine.spec.name, result.tokens_per_s)
        described = {engine.spec.name: engine.described for engine in engines}
    return Contest(measured, described, failed)


def figures(reply: Mapping[str, Any], case: Case, *, new_tokens: int) -> Measured:
    """Rates from an engine's reply."""
    decoding_s = max(reply["seconds"] - reply["first_seconds"], 1e-9)
    return Measured(
        tokens_per_s=case.live * (new_tokens - 1) / decoding_s,
        total_tokens_per_s=case.live * new_tokens / reply["seconds"],
        tokens=reply["tokens"],
    )


def own_environment(*, threads: int) -> dict[str, str]:
    """Variables for engines in this interpreter's environment."""
    return dict(os.environ) | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": _import_path()}


def _import_path() -> str:
    """Import path of our packages, which need not be installed."""
    return os.pathsep.join([str(_PROCESS.parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])


def cores(count: int) -> list[int]:
    """The cores that every engine is pinned to.  Raises ValueError if there are fewer."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if len(usable) < count:
        raise ValueError(f"cluster.threads_per_worker={count}, but this machine has {len(usable)} cores: lower it")
    return usable[:count]


@contextmanager
def _running(
    specs: Sequence[EngineSpec],
    warm_ups: Sequence[tuple[Case, Mapping[str, Any]]],
    log_dir: Path,
    on_progress: OnProgress,
) -> Iterator[tuple[list[_Engine], dict[str, str]]]:
    """All engines, started and warmed up, and the reasons of those that failed.  All are ended afterwards."""
    log_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        engines, failed = [], {}
        for done, spec in enumerate(specs):
            on_progress(f"starting {spec.name}", done, len(specs))
            engine = _Engine(spec, log_dir / f"{spec.name.replace(' ', '-')}.log")
            stack.callback(engine.close)
            try:
                engine.start()
                for case, job in warm_ups:
                    if engine.takes(case):
                        engine.decode(job)
            except PeerError as error:
                if not spec.optional:
                    raise
                _log.warning("left out: %s", error)
                failed[spec.name] = str(error)
                continue
            _log.info("engine %s: %s", spec.name, engine.described)
            engines.append(engine)
        yield engines, failed


def _job(case: Case, prompts: Sequence[Sequence[int]], *, new_tokens: int, seed: int) -> dict[str, Any]:
    return {
        "prompts": [list(p) for p in prompts[: case.live]],
        "new_tokens": new_tokens,
        "temperature": case.temperature,
        "seed": seed,
    }

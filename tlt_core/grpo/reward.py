"""Scoring of responses in a pool of processes, while rollout goes on.

    submit(key, prompt, response) ... submit(...)        as responses end
    collect(keys) -> scores                              when they are needed

No reward function can end a run.  A response scores 0 when a function raises, kills its process, exceeds the time
limit (its process is then killed) or its memory (`confinement.py`), or returns a number that is not finite or too
large.  Metrics count these cases.  When a process ends, its response is scored once more: if somebody else has killed
it, the score is what it would have been.  A process that ends without a response breaks its pool, which is replaced.
"""

import logging
import multiprocessing
import os
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from pebble import ProcessExpired, ProcessPool

from conf.reward import RewardConfig
from tlt_core.grpo import confinement, verifiers
from tlt_core.grpo.verifiers import Item, Outcome
from tlt_core.items.types import Prompt, ScoreStatus

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks whether the pool still works
_MAX_WARNINGS = 10  # a message may quote the response, so messages may all be different

_STATUS = {
    verifiers.OK: ScoreStatus.OK,
    verifiers.UNPARSEABLE: ScoreStatus.UNPARSEABLE,
    verifiers.ERROR: ScoreStatus.ERROR,
}


class RewardError(ValueError):
    """A reward function that cannot be used.  The text names it and the remedy."""


class Score(NamedTuple):
    """Score of one response."""

    components: tuple[float, ...]  # one per reward function, before weighting
    total: float  # weighted sum
    status: ScoreStatus
    seconds: float


def check_reward_functions(cfg: RewardConfig) -> None:
    """Load your own functions once, before any expensive work, in a process like those that score.

    Raises RewardError.
    """
    functions = _pairs(cfg)
    own = [path for _, path in functions if path]
    if not own:
        return
    pool = _pool(cfg, processes=1, functions=())
    try:
        bad = pool.submit(verifiers.first_unusable, None, functions).result()
    except ProcessExpired as error:
        bad = ", ".join(own), f"importing it ends the process with exit code {error.exitcode}"
    finally:
        pool.stop()
        pool.join()
    if bad is not None:
        raise RewardError(
            f"reward function {bad[0]!r} cannot be loaded ({bad[1]}); give an importable 'package.module:function' (is "
            f"its folder on PYTHONPATH?){_withheld(cfg)}"
        )


def _pairs(cfg: RewardConfig) -> tuple[tuple[str, str], ...]:
    return tuple((function.kind, function.path) for function in cfg.functions)


def _pool(cfg: RewardConfig, *, processes: int, functions: Sequence[tuple[str, str]]) -> ProcessPool:
    """functions: those that a new process imports before its first task."""
    return ProcessPool(
        max_workers=processes,
        initializer=verifiers.start,  # from a module without torch: a process imports what it unpickles
        initargs=(functions, cfg.max_memory_gb, cfg.pass_variables),
        # spawn: a fork of the driver would copy its threads' locks (Ray, Prefect) in whatever state they are
        context=multiprocessing.get_context("spawn"),
    )


def _withheld(cfg: RewardConfig) -> str:
    """What scoring processes do not see, for a message; empty: they see all."""
    names = confinement.secrets(os.environ, but=cfg.pass_variables)
    listed = f"{', '.join(names)} (reward.pass_variables names those that a function needs)"
    return f"; scoring processes do not see {listed}" if names else ""


class Scorer:
    """Owns the pool, whose processes start in the background.  Raises RewardError."""

    def __init__(self, cfg: RewardConfig) -> None:
        check_reward_functions(cfg)
        self._cfg = cfg
        self._functions = _pairs(cfg)
        self._weights = tuple(f.weight for f in cfg.functions)
        self._items: dict[Hashable, Item] = {}
        self._futures: dict[Hashable, Future[Outcome]] = {}
        self._warned: set[str] = set()
        self._pool = self._new_pool()

    def submit(self, key: Hashable, prompt: Prompt, response: str) -> None:
        """Start scoring one response; `key` names it in `collect`."""
        self._items[key] = Item(prompt.text, response, prompt.answer, prompt.task, prompt.metadata)
        self._futures[key] = self._schedule(self._items[key])

    def collect(self, keys: Sequence[Hashable]) -> list[Score]:
        """Scores in the order of `keys`; waits for those that are not ready, at most the time limit for each."""
        return [self._score(key) for key in keys]

    def is_ready(self, keys: Sequence[Hashable], *, within_s: float = 0.0) -> bool:
        """Whether `collect` would return at once; waits up to `within_s` for that."""
        self._replace_broken_pool()
        return not wait([self._futures[key] for key in keys], timeout=within_s).not_done

    def close(self) -> None:
        """End the pool at once."""
        self._pool.stop()
        self._pool.join()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_pool(self) -> ProcessPool:
        pool = _pool(self._cfg, processes=self._cfg.num_processes, functions=self._functions)
        pool.submit(len, None, ())  # the pool starts with its first task
        return pool

    def _replace_broken_pool(self) -> None:
        """What was not scored is scored by the new one."""
        if self._pool.active:
            return
        log.warning("the scoring processes have ended without a cause of ours; new ones are started")
        self._pool.stop()
        self._pool = self._new_pool()
        for key, future in self._futures.items():
            if not future.done():
                self._futures[key] = self._schedule(self._items[key])

    def _schedule(self, item: Item) -> "Future[Outcome]":
        self._replace_broken_pool()
        return self._pool.submit(verifiers.score_response, self._cfg.timeout_s, self._functions, item)

    def _result(self, key: Hashable) -> Outcome:
        while wait([self._futures[key]], timeout=_LOOK_S).not_done:
            self._replace_broken_pool()
        return self._futures[key].result()

    def _score(self, key: Hashable) -> Score:
        zeros = (0.0,) * len(self._functions)
        try:
            try:
                outcome = self._result(key)
            except (ProcessExpired, BrokenProcessPool):
                self._futures[key] = self._schedule(self._items[key])
                outcome = self._result(key)
        except TimeoutError:
            self._warn(f"scoring took longer than reward.timeout_s={self._cfg.timeout_s} s; the sample scores 0", key)
            return Score(zeros, 0.0, ScoreStatus.TIMEOUT, self._cfg.timeout_s)
        except (ProcessExpired, BrokenProcessPool) as error:
            code = getattr(error, "exitcode", "unknown")
            self._warn(
                f"a scoring process ended with exit code {code}; the sample scores 0 (if memory was short: "
                f"reward.max_memory_gb={self._cfg.max_memory_gb:g})",
                key,
            )
            return Score(zeros, 0.0, ScoreStatus.ERROR, 0.0)
        finally:
            del self._futures[key], self._items[key]
        if outcome.message:
            self._warn(f"a reward function failed: {outcome.message}; the sample scores 0 for it", key)
        total = sum(w * c for w, c in zip(self._weights, outcome.components, strict=True))
        return Score(outcome.components, total, _STATUS[outcome.status], outcome.seconds)

    def _warn(self, message: str, key: Hashable) -> None:
        """Log each failure once, with the first sample it happened to, and only the first few: metrics count them."""
        if message not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(message)
            log.warning("sample %s: %s", key, message)

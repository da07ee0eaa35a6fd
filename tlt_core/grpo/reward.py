"""Scoring of responses in a pool of processes, while rollout goes on.

    submit(key, prompt, response) ... submit(...)        as responses end
    collect(keys) -> scores                              when they are needed

A response whose scoring hangs is killed after its time limit with its process and scores 0; one that raises scores 0;
a scorer that kills its own process costs that one sample.  All of it is counted, none of it ends a run.
"""

import logging
import multiprocessing
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

from pebble import ProcessExpired, ProcessPool

from conf.schema import RewardConfig
from tlt_core.grpo import verifiers
from tlt_core.grpo.verifiers import Item, Outcome
from tlt_core.types import Prompt, ScoreStatus

log = logging.getLogger(__name__)

_MAX_WARNINGS = 10  # a message may quote the response, then each is different

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
    """Resolve every function once, before any expensive work.  Raises RewardError."""
    for function in cfg.functions:
        try:
            verifiers.resolve(function.kind, function.path)
        except (Exception, SystemExit) as error:  # importing runs the user's module, which may raise anything
            raise RewardError(
                f"reward function {function.path!r} cannot be loaded ({type(error).__name__}: {error}); give an "
                "importable 'package.module:function' (is its folder on PYTHONPATH?)"
            ) from error


class Scorer:
    """Owns the pool.  Its processes start in the background: the constructor does not wait for them."""

    def __init__(self, cfg: RewardConfig) -> None:
        check_reward_functions(cfg)
        self._cfg = cfg
        self._functions = tuple((f.kind, f.path) for f in cfg.functions)
        self._weights = tuple(f.weight for f in cfg.functions)
        self._futures: dict[Hashable, Future[Outcome]] = {}
        self._warned: set[str] = set()
        # spawn: a fork of the driver would copy its threads' locks (Ray, Prefect) in whatever state they are
        self._pool = ProcessPool(
            max_workers=cfg.num_processes,
            initializer=verifiers.start,  # from a module without torch: a process imports what it unpickles
            initargs=(self._functions,),
            context=multiprocessing.get_context("spawn"),
        )
        self._pool.submit(len, None, ())  # the pool starts with its first task

    def submit(self, key: Hashable, prompt: Prompt, response: str) -> None:
        """Start scoring one response; `key` names it in `collect`."""
        item = Item(prompt.text, response, prompt.answer, prompt.task, prompt.metadata)
        self._futures[key] = self._pool.submit(verifiers.score_response, self._cfg.timeout_s, self._functions, item)

    def collect(self, keys: Sequence[Hashable]) -> list[Score]:
        """Scores in the order of `keys`; waits for what is not ready, at most the time limit a response."""
        return [self._score(self._futures.pop(key)) for key in keys]

    def is_ready(self, keys: Sequence[Hashable], *, within_s: float = 0.0) -> bool:
        """Would `collect` return at once?  Waits for it as long as that."""
        return not wait([self._futures[key] for key in keys], timeout=within_s).not_done

    def close(self) -> None:
        """End the pool at once."""
        self._pool.stop()
        self._pool.join()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _score(self, future: "Future[Outcome]") -> Score:
        zeros = (0.0,) * len(self._functions)
        try:
            outcome = future.result()
        except TimeoutError:
            self._warn(f"scoring took longer than reward.timeout_s={self._cfg.timeout_s} s; the sample scores 0")
            return Score(zeros, 0.0, ScoreStatus.TIMEOUT, self._cfg.timeout_s)
        except ProcessExpired as error:
            self._warn(f"a scoring process ended with exit code {error.exitcode}; the sample scores 0")
            return Score(zeros, 0.0, ScoreStatus.ERROR, 0.0)
        if outcome.message:
            self._warn(f"a reward function failed: {outcome.message}; the sample scores 0 for it")
        total = sum(w * c for w, c in zip(self._weights, outcome.components, strict=True))
        return Score(outcome.components, total, _STATUS[outcome.status], outcome.seconds)

    def _warn(self, message: str) -> None:
        """The first few different failures: the counts are in the metrics."""
        if message not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(message)
            log.warning("%s", message)

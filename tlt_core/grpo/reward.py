"""Scoring of responses in a pool of processes, while rollout goes on.

A response scores 0 when a function raises, kills its process, exceeds the time limit or its memory (`confinement.py`),
or returns a number that is not finite or too large.  When a process ends, its response is scored once more: somebody
else may have killed it.  A function with `batch` gets all responses that wait when the first score is needed, in one
call; where that fails, each is scored alone.
"""

import logging
import multiprocessing
import os
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from pebble import ProcessExpired, ProcessPool

from conf.reward import RewardConfig, RewardFunction
from tlt_core.grpo import confinement, verifiers
from tlt_core.grpo.reward_styles import Item
from tlt_core.grpo.verifiers import Outcome
from tlt_core.items.types import Earned, Prompt, ScoreStatus

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks whether the pool still works
_OF_TIMEOUT = 0.8  # for the tests of a response: the rest is for starting and ending its process
_MAX_WARNINGS = 10  # a message may quote the response, so messages may all be different

_FAILED = (ScoreStatus.TIMEOUT, ScoreStatus.ERROR)


class RewardError(ValueError):
    """A reward function that cannot be used.  The text names it and the remedy."""


class Score(NamedTuple):
    """Score of one response."""

    components: tuple[float, ...]  # one per reward function, before weighting
    total: float  # weighted sum
    status: ScoreStatus  # the worst over the functions
    seconds: float
    message: str = ""  # why a function failed


@dataclass(eq=False)
class _Call:
    """A call into a scoring process: some terms of one response, or a batch function with many."""

    terms: Sequence[int]  # indexes into `RewardConfig.functions`
    keys: Sequence[Hashable]
    future: "Future[list[Outcome]]"


def require_scores(scores: Sequence[Score]) -> None:
    """Raises RewardError where a function has failed for every response of a step: training on zeros is none."""
    if scores and all(score.status in _FAILED for score in scores):
        why = next((score.message for score in scores if score.message), "no reason is known")
        raise RewardError(
            f"a reward function failed for all {len(scores)} responses of this step ({why}); mend it, or what it needs "
            "(reward.functions, reward.timeout_s, reward.max_memory_gb), and start the same command again"
        )


def check_reward_functions(cfg: RewardConfig, *, environment: str = "") -> None:
    """Load your own functions, and the class of your environment, once, before any expensive work, in a process like
    those that score.

    Raises RewardError.
    """
    terms = tuple((f.kind, f.path, f.batch) for f in cfg.functions) + (("environment", environment, False),) * bool(
        environment
    )
    own = [path for kind, path, _ in terms if path or kind == "code_tests"]
    if not own:
        return
    pool = _pool(cfg, processes=1, functions=())
    try:
        bad = pool.submit(verifiers.first_unusable, None, terms).result()
    except ProcessExpired as error:
        bad = ", ".join(own), f"importing it ends the process with exit code {error.exitcode}"
    finally:
        pool.stop()
        pool.join()
    if bad is not None:
        names = confinement.secrets(os.environ, but=cfg.pass_variables)
        listed = f"{', '.join(names)} (reward.pass_variables names those that a function needs)"
        withheld = f"; scoring processes do not see {listed}" if names else ""
        what = "environment" if bad[0] == environment else "reward function"
        raise RewardError(
            f"{what} {bad[0]!r} cannot be used ({bad[1]}); give an importable 'package.module:name' that takes these "
            f"arguments (is its folder on PYTHONPATH?){withheld}"
        )


def _pool(cfg: RewardConfig, *, processes: int, functions: Sequence[tuple[str, str]]) -> ProcessPool:
    """functions: those that a new process imports before its first task."""
    return ProcessPool(
        max_workers=processes,
        initializer=verifiers.start,  # from a module without torch: a process imports what it unpickles
        initargs=(functions, cfg.max_memory_gb, cfg.pass_variables),
        # spawn: a fork of the driver would copy its threads' locks (Ray, Prefect) in whatever state they are
        context=multiprocessing.get_context("spawn"),
    )


def _settings(function: RewardFunction, cfg: RewardConfig) -> str:
    """What a term needs to know in a scoring process."""
    if function.kind == "code_tests":
        return str(_OF_TIMEOUT * cfg.timeout_s)
    return function.judge.model_dump_json() if function.judge else function.path


class Scorer(AbstractContextManager["Scorer"]):
    """Owns the pool, whose processes start in the background.  Raises RewardError."""

    def __init__(self, cfg: RewardConfig) -> None:
        check_reward_functions(cfg)
        self._cfg = cfg
        self._functions = tuple((f.kind, _settings(f, cfg)) for f in cfg.functions)
        self._weights = tuple(f.weight for f in cfg.functions)
        self._alone = tuple(i for i, f in enumerate(cfg.functions) if not f.batch)
        self._together = tuple(i for i, f in enumerate(cfg.functions) if f.batch)
        self._items: dict[Hashable, Item] = {}
        self._calls: dict[Hashable, dict[int, _Call]] = {}  # by response and first term
        self._waiting: dict[Hashable, None] = {}  # for the next call of batch functions, in order
        self._warned: set[str] = set()
        self._pool = self._new_pool()

    def submit(self, key: Hashable, prompt: Prompt, response: str, earned: Earned | None = None) -> None:
        """Start scoring one response; `key` names it in `collect`.  earned: from an environment."""
        self._items[key] = Item(
            prompt.text, response, prompt.answer, prompt.task, prompt.metadata, prompt.opening, *(earned or ())
        )
        self._calls[key] = {}
        takes = [i for i, function in enumerate(self._cfg.functions) if function.takes(prompt.task)]
        if alone := [i for i in self._alone if i in takes]:
            self._start(alone, [key])
        if self._together:
            self._waiting[key] = None

    def collect(self, keys: Sequence[Hashable]) -> list[Score]:
        """Scores in the order of `keys`; waits for those that are not ready, at most the time limit for each."""
        self._start_batches(keys)
        return [self._score(key) for key in keys]

    def is_ready(self, keys: Sequence[Hashable], *, within_s: float = 0.0) -> bool:
        """Whether `collect` would return at once; waits up to `within_s` for that."""
        self._start_batches(keys)
        self._replace_broken_pool()
        futures = {call.future for key in keys for call in self._calls[key].values()}
        return not wait(futures, timeout=within_s).not_done

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()

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
        for call in {call for calls in self._calls.values() for call in calls.values()}:
            if not call.future.done():
                call.future = self._schedule(call.terms, call.keys)

    def _start_batches(self, keys: Sequence[Hashable]) -> None:
        """Hand all waiting responses to the batch functions, if one of these is among them."""
        if not self._waiting.keys().isdisjoint(keys):
            waiting, self._waiting = list(self._waiting), {}
            for term in self._together:
                takes = self._cfg.functions[term].takes
                if keys := [key for key in waiting if takes(self._items[key].task)]:
                    self._start((term,), keys)

    def _start(self, terms: Sequence[int], keys: Sequence[Hashable]) -> None:
        call = _Call(terms, keys, self._schedule(terms, keys))
        for key in keys:
            self._calls[key][terms[0]] = call

    def _schedule(self, terms: Sequence[int], keys: Sequence[Hashable]) -> "Future[list[Outcome]]":
        self._replace_broken_pool()
        functions = [self._functions[term] for term in terms]
        function = verifiers.score_batch if self._cfg.functions[terms[0]].batch else verifiers.score_each
        return self._pool.submit(
            function, self._cfg.timeout_s * len(keys), functions, [self._items[key] for key in keys]
        )

    def _result(self, call: _Call, key: Hashable) -> Outcome:
        while wait([call.future], timeout=_LOOK_S).not_done:
            self._replace_broken_pool()
        return call.future.result()[call.keys.index(key)]

    def _score(self, key: Hashable) -> Score:
        components, status, seconds, message = [0.0] * len(self._functions), ScoreStatus.OK, 0.0, ""
        for first_term in sorted(self._calls[key]):
            outcome = self._outcome(first_term, key)
            for term, value in zip(self._calls[key][first_term].terms, outcome.components, strict=True):
                components[term] = value
            status, seconds = max(status, ScoreStatus(outcome.status)), seconds + outcome.seconds
            message = message or outcome.message
        if failure := self._items[key].failure:  # the episode has no end that could be judged
            components, status, message = [0.0] * len(components), ScoreStatus.ERROR, failure
        del self._calls[key], self._items[key]
        total = sum(w * c for w, c in zip(self._weights, components, strict=True))
        return Score(tuple(components), total, status, seconds, message)

    def _outcome(self, first_term: int, key: Hashable) -> Outcome:
        call = self._calls[key][first_term]
        zeros = (0.0,) * len(call.terms)
        try:
            try:
                outcome = self._result(call, key)
            except (ProcessExpired, BrokenProcessPool):
                call.future = self._schedule(call.terms, call.keys)
                outcome = self._result(call, key)
        except (TimeoutError, ProcessExpired, BrokenProcessPool) as error:
            if len(call.keys) > 1:
                for one in call.keys:
                    if self._calls.get(one, {}).get(first_term) is call:
                        self._start(call.terms, [one])
                return self._outcome(first_term, key)
            if isinstance(error, TimeoutError):
                why = f"scoring took longer than reward.timeout_s={self._cfg.timeout_s} s"
                self._warn(f"{why}; the sample scores 0", key)
                return Outcome(zeros, verifiers.TIMEOUT, why, self._cfg.timeout_s)
            code = getattr(error, "exitcode", "unknown")
            why = f"a scoring process ended with exit code {code}"
            memory = f"(if memory was short: reward.max_memory_gb={self._cfg.max_memory_gb:g})"
            self._warn(f"{why}; the sample scores 0 {memory}", key)
            return Outcome(zeros, verifiers.ERROR, why, 0.0)
        if outcome.message:
            self._warn(f"a reward function failed: {outcome.message}; the sample scores 0 for it", key)
        return outcome

    def _warn(self, message: str, key: Hashable) -> None:
        """Log each failure once, with the first sample it happened to, and only the first few: metrics count them."""
        if message not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(message)
            log.warning("sample %s: %s", key, message)

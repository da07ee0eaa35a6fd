"""Which draft length the next engine step uses, chosen by the tuner from what earlier steps took.  Knows no vLLM.

    step t      schedule: choose K_t | target's pass, verifies K_t-1 | draft K_t tokens | finish: learn about K_t-1

A choice is made one step before its predecessor's outcome is known; with asynchronous scheduling it is two.  A round of
the tuner is a draft and the pass that verifies it.  Steps that also prefill prompts teach nothing.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tlt_core.items.speculation import OFF, RoundReport, Strategy
from tlt_core.tuner.policies import RecordedTuner, make_tuner
from tlt_vllm.settings import Settings

_log = logging.getLogger("vllm.plugins.tlt")  # vLLM shows INFO of its own loggers only


NGRAM = "ngram"


def strategies(draft_lengths: Sequence[int], drafter: str) -> dict[int, Strategy]:
    """The tuner's name of each draft length, 0 included."""
    return {0: OFF} | {k: Strategy(drafter, depth=k, width=1, tokens=k) for k in draft_lengths}


def beside(draft_lengths: Sequence[int]) -> list[Strategy]:
    """Chains of n-grams beside those of a model: the longest and every second length, since each is tried before it is
    trusted."""
    lengths = sorted({*draft_lengths[1::2], *draft_lengths[-1:]})
    return [Strategy(NGRAM, depth=k, width=1, tokens=k) for k in lengths]


class _Step(NamedTuple):
    began_s: float
    strategy: Strategy  # of the drafts that it verifies
    drafted: Mapping[str, int]  # draft tokens that it verifies, of each request that decodes
    context: int
    prefills: bool


class DraftLengths:
    """One an engine.  `schedule` and `finish` are called for every step that computes something, in order."""

    def __init__(
        self,
        settings: Settings,
        drafter: str,
        *,
        with_ngrams: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """with_ngrams: the engine can draft with n-grams, too."""
        self.by_length = strategies(settings.draft_lengths, drafter)
        self.ngrams = beside(settings.draft_lengths) if with_ngrams else []
        arms = [*(s for s in self.by_length.values() if not s.is_off), *self.ngrams]
        self.tuner: RecordedTuner = make_tuner(
            settings.policy,  # type: ignore[arg-type]  # one of POLICIES
            [self.by_length[max(settings.draft_lengths)]] if settings.policy == "fixed" and arms else arms,
        )
        self.rounds: dict[str, list[float]] = {}  # by strategy: rounds, requests, drafted, accepted, seconds
        self.trace: list[dict[str, Any]] | None = None  # every round, for who wants it and empties it
        self._longest = max(settings.draft_lengths, default=0)
        self._clock, self._log_every_s = clock, settings.log_every_s
        self._chosen = OFF  # in the latest step
        self._steps: deque[_Step] = deque()
        self._rows: dict[str, int] = {}
        self._count = 0
        self._ended_s = 0.0
        self._draft_s = 0.0  # of the latest finished step
        self.has_failed = False  # the tuner; see `_guarded`
        self._logged_s = clock()
        self._logged: dict[str, list[float]] = {}

    def schedule(
        self, drafted: Mapping[str, int], *, next_up: Mapping[str, int], context: int, prefills: bool, began_s: float
    ) -> int:
        """A step begins; returns how many tokens to draft at its end.

        drafted: draft tokens verified now, of each request that decodes.  next_up: tokens known of each request that
        will decode in the next step.  context: tokens known of those that decode now.  prefills: prompts as well.
        """
        self._steps.append(_Step(began_s, self._chosen, dict(drafted), context, prefills))
        if not next_up or not self._longest:
            self._chosen = OFF
        else:
            rows = [self._row(name) for name in next_up]
            self._chosen = self._guarded(lambda: self.tuner.choose(rows, sum(next_up.values())))
        return self._chosen.tokens

    @property
    def chosen(self) -> Strategy:
        """In the latest step."""
        return self._chosen

    def finish(self, emitted: Mapping[str, int], *, draft_s: float | None, late_s: float = 0.0) -> None:
        """The oldest step under way has ended.  emitted: tokens of each request; draft_s: seconds that it drafted for,
        None where they are not measured; late_s: seconds of work that earlier steps have put off."""
        step, now_s = self._steps.popleft(), self._clock()
        seconds = now_s - max(step.began_s, self._ended_s) - late_s
        self._ended_s, before_s = now_s, self._draft_s
        if draft_s is None:
            draft_s = before_s = self._drafting_share(step, seconds)
        self._draft_s = draft_s
        if step.prefills or not step.drafted:
            return
        names = [name for name in step.drafted if name in emitted]
        if not names:
            return
        chains = tuple(step.drafted[name] for name in names)
        accepted = tuple(max(emitted[name] - 1, 0) for name in names)
        verify_s, off = max(seconds - draft_s, 1e-6), step.strategy.is_off
        report = RoundReport(
            strategy=step.strategy,
            live=len(names),
            context=step.context,
            drafted=chains,
            offered=chains,
            accepted=accepted,
            # Without drafts the drafter may still read the new tokens, to keep its keys and values complete.
            draft_s=0.0 if off else before_s,
            verify_s=verify_s + before_s if off else verify_s,
        )
        self._count_round(report)
        rows = [self._row(name) for name in names]
        if self.trace is not None:
            seconds = report.draft_s + report.verify_s
            self.trace.append({"report": report, "rows": rows, "end_s": time.time(), "seconds": seconds})
        self._guarded(lambda: self.tuner.observe(rows, report))
        if self._log_every_s and now_s > self._logged_s + self._log_every_s:
            self._say(now_s)

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            row = self._rows.pop(name, None)
            if row is not None:
                self.tuner.forget(row)

    def changed(self, *, change: float | None = None) -> None:
        """The drafter's weights are new.  change: see `RecordedTuner.notify_change`."""
        drafter = next((s.drafter for s in self.by_length.values() if not s.is_off), "eagle3")
        self.tuner.notify_change(drafter, **({} if change is None else {"change": change}))

    def snapshot(self) -> dict[str, Any]:
        return {"rounds": {name: list(of) for name, of in self.rounds.items()}, "tuner": self.tuner.snapshot()}

    def _row(self, name: str) -> int:
        if name not in self._rows:
            self._count += 1
            self._rows[name] = self._count
        return self._rows[name]

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """An error of the tuner must not end the engine: from then on the longest draft is used."""
        if not self.has_failed:
            try:
                return call()
            except Exception:  # whatever it is, it is logged whole, and requests go on
                self.has_failed = True
                _log.exception("tlt: the tuner failed; %d tokens are drafted in every step from now on", self._longest)
        return self.by_length[self._longest]

    def _drafting_share(self, step: _Step, seconds: float) -> float:
        """Seconds of drafting in a step whose parts nobody measured: by the tuner's estimate of the shares."""
        live = max(len(step.drafted), 1)
        cost = self.tuner.cost
        whole_s = cost.round_seconds(step.strategy, live, float(sum(step.drafted.values())), step.context)
        verify_s = cost.pass_seconds(live, live + sum(step.drafted.values()), step.context)
        return seconds * max(whole_s - verify_s, 0.0) / max(whole_s, 1e-9)

    def _count_round(self, report: RoundReport) -> None:
        of = self.rounds.setdefault(str(report.strategy), [0.0] * 5)
        numbers = (1, report.live, sum(report.drafted), sum(report.accepted), report.draft_s + report.verify_s)
        for i, number in enumerate(numbers):
            of[i] += number

    def _say(self, now_s: float) -> None:
        parts = []
        for name, of in self.rounds.items():
            rounds, live, _, accepted, _ = (a - b for a, b in zip(of, self._logged.get(name, [0.0] * 5), strict=True))
            if rounds:
                parts.append(f"{name} {rounds:.0f} rounds, {1 + accepted / live:.2f} tokens a request")
        if parts:
            _log.info("tlt: %s", "; ".join(parts))
        self._logged = {name: list(of) for name, of in self.rounds.items()}
        self._logged_s = now_s

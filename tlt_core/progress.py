"""What people see of a run: where it is, in words, and sampled responses as text."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt_core.types import FinishReason, Prompt, ScoredBatch, ScoreStatus, WorkerState


class Progress(NamedTuple):
    """Where a run is, several times a second.  Progress(3, 12, "rollout", 41, 96, unit="responses", live=9, ...)"""

    step: int | None  # of RL; None: outside of its steps
    num_steps: int
    phase: str
    finished: int
    total: int  # 1: there is nothing to count
    live: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    worker_states: tuple[WorkerState, ...] = ()
    unit: str = ""  # of what is counted
    note: str = ""  # what else there is to say, e.g. a loss


def in_words(now: Progress, *, elapsed_s: float, left_s: float | None) -> str:
    """One line: "rollout: step 3/12, 41/96 responses, 412 tok/s, about 0:21 left"."""
    words = [] if now.step is None else [f"step {now.step}/{now.num_steps}"]
    if now.total > 1:
        words.append(f"{now.finished}/{now.total} {now.unit}".rstrip())
    if now.tokens:
        words.append(f"{now.tokens_per_s:.0f} tok/s")
    elif now.total > 1 and now.finished and elapsed_s > 0:
        rate = now.finished / elapsed_s
        words.append(f"{rate:.1f} a second" if rate >= 1 else f"{1 / rate:.1f} s each")
    if now.note:
        words.append(now.note)
    words.append(f"{elapsed_s:.0f} s so far" if left_s is None else f"about {minutes(left_s)} left")
    return f"{now.phase}: {', '.join(words)}"


def minutes(seconds: float) -> str:
    """0:21, 12:05 or 1:02:05."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class PhaseClock:
    """How long the phase has been going on, and how long it still will.

    A phase that was there before takes as long again (a rollout's last responses are its longest, so the share that is
    done says little).  In its first time it goes on at its rate, or, where nothing is counted, takes what was forecast.
    """

    def __init__(self, expected_s: Mapping[str, float] = MappingProxyType({})) -> None:
        """expected_s: seconds of a phase, by name."""
        self._expected_s, self._took_s = expected_s, dict[tuple[str, int], float]()
        self._now: Progress | None = None
        self._began_s = 0.0

    def expect(self, expected_s: Mapping[str, float]) -> None:
        """Another forecast."""
        self._expected_s = expected_s

    def show(self, now: Progress, at_s: float) -> None:
        """The phase at `at_s`, a monotonic time."""
        before = self._now
        if before is None or _phase_of(before) != _phase_of(now):
            if before is not None:
                self._took_s[before.phase, before.total] = at_s - self._began_s
            self._began_s = at_s
        self._now = now

    def elapsed_s(self, at_s: float) -> float:
        """Of the phase."""
        return at_s - self._began_s

    def left_s(self, at_s: float) -> float | None:
        """Of the phase; None: not known, or longer than it was thought to be."""
        if self._now is None:
            return None
        now, elapsed_s = self._now, self.elapsed_s(at_s)
        took_s = self._took_s.get((now.phase, now.total))
        if took_s is not None and took_s > elapsed_s:
            return took_s - elapsed_s
        if now.total > 1 and now.finished:
            return elapsed_s * (now.total - now.finished) / now.finished
        expected_s = self._expected_s.get(now.phase, 0.0) if took_s is None else 0.0
        return expected_s - elapsed_s if expected_s > elapsed_s else None


def _phase_of(now: Progress) -> tuple[object, ...]:
    return now.step, now.phase, now.total


def sample_rows(
    scored: ScoredBatch, count: int, *, prompts: Mapping[int, Prompt], decode: Callable[[Tensor], str]
) -> list[dict[str, Any]]:
    """`count` responses spread evenly over the batch, with prompt, text and scores."""
    rollouts, rows = scored.rollouts, []
    for index in torch.linspace(0, len(rollouts) - 1, min(count, len(rollouts))).long().tolist():
        prompt = prompts[int(rollouts.prompt_ids_R[index])]
        rows.append(
            {
                "prompt_id": prompt.id,
                "sample": int(rollouts.samples_R[index]),
                "task": prompt.task,
                "prompt": prompt.text,
                "response": decode(rollouts.completion(index)),
                "answer": prompt.answer,
                "reward": float(scored.rewards_R[index]),
                "status": ScoreStatus(int(scored.status_R[index])).name,
                "advantage": float(scored.advantages_R[index]),
                "num_tokens": int(rollouts.response_lens_R[index]),
                "finish": FinishReason(int(rollouts.finish_R[index])).name,
                "policy_version": int(rollouts.policy_version_R[index]),
            }
        )
    return rows

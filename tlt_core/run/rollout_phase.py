"""The rollout phase: prompts in, responses out.  Validation decodes the same way.

requests -> worker group -> rollouts as they end -> scoring, while others are still being decoded
                 '-> idle workers train the drafter, until rollout (or scoring) has ended everywhere
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from conf.reward import RewardConfig
from conf.run import RunConfig
from tlt_core.cluster.dispatcher import Drained
from tlt_core.cluster.group import Generated, WorkerGroup
from tlt_core.grpo.reward import Score
from tlt_core.idle_training.coordinator import IdleTrainingSettings, PhaseReport
from tlt_core.items.types import GenerationRequest, NoiseKey, Prompt, Rollout, RolloutBatch, SamplingParams
from tlt_core.model.sampling import of_validation
from tlt_core.rollout.engine import RoundTrace
from tlt_core.run.drafter_release import DrafterPublisher, bubble_metrics
from tlt_core.run.episodes import Episodes
from tlt_core.run.progress import Reporter
from tlt_core.run.prompts import Scoring
from tlt_core.run.step_metrics import StepMetrics, greedy_metrics, rollout_metrics, sampled_metrics, spec_metrics
from tlt_core.run.streamed_update import StreamedUpdate

_PATIENCE_S = 0.1  # no drafter training when the rewards arrive within this time


class RolloutPhase:
    def __init__(
        self,
        group: WorkerGroup,
        scoring: Scoring,
        drafter: DrafterPublisher,
        *,
        dispatch: str,
        metrics: StepMetrics,
        reporter: Reporter,
        episodes: Episodes | None = None,
    ) -> None:
        """episodes: None where each request has one response, without an environment."""
        self._group, self._scoring, self._drafter, self._episodes = group, scoring, drafter, episodes
        self._dispatch, self._metrics, self._reporter = dispatch, metrics, reporter
        self._phases: list[PhaseReport] = []  # of the step: its rollouts, and waiting for their rewards
        self._batches: list[RolloutBatch] = []  # of the step's rollouts
        self._seconds = 0.0  # that they took
        self._again: list[Sequence[Sequence[GenerationRequest]]] = []  # what `sample` was asked for in the step
        self.rounds: list[Sequence[RoundTrace]] = []  # of the latest `sample`, by worker

    def begin_step(self) -> None:
        self._phases, self._batches, self._again, self._seconds = [], [], [], 0.0

    def sample(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        params: SamplingParams,
        *,
        step: int,
        phase: str = "rollout",
        stream: StreamedUpdate,
    ) -> RolloutBatch:
        """Responses to train on, with their metrics.  Idle workers train the drafter and compute passes of `stream`."""
        started_s = time.perf_counter()
        with self._metrics.timed("gen"):
            finished, done = self._generate(groups, params, phase=phase, step=step, stream=stream)
            for report in done.reports:
                stream.done.update(report.streamed)
            self.rounds = [report.rounds for report in done.reports]
            self._metrics.log(spec_metrics(done.reports))
            self._metrics.log({"drafter/alarm": sum(bool(report.suspended) for report in done.reports)})
            self._drafter.observe([r.idle_training for r in done.reports if r.idle_training is not None])
            rollouts = RolloutBatch.pack(finished)
        self._batches.append(rollouts)
        self._again.append(groups)
        self._seconds += time.perf_counter() - started_s
        sampled = RolloutBatch.join(self._batches)
        self._metrics.log(rollout_metrics(sampled, seconds=self._seconds))
        self._add(done.phase)
        return rollouts

    def decode(
        self, groups: Sequence[Sequence[GenerationRequest]], params: SamplingParams, *, phase: str, step: int
    ) -> RolloutBatch:
        """Responses that nothing is trained on; they leave no metrics."""
        return RolloutBatch.pack(self._generate(groups, params, phase=phase, step=step, stream=None)[0])

    def compare_with_plain(self, params: SamplingParams, *, step: int) -> dict[str, float]:
        """Decode the step's rollouts once more, plainly and without idle work: are tokens the same, and how much longer
        does it take?"""
        again: list[RolloutBatch] = []
        with self._metrics.timed("gen_plain"):
            for groups in self._again:
                finished, _ = self._generate(
                    groups, replace(params, plain=True), phase="plain", step=step, stream=None, scored=False
                )
                again.append(RolloutBatch.pack(finished))
        seconds = self._metrics.values()
        pairs = [
            torch.equal(first.completion(i), second.completion(i))
            for first, second in zip(self._batches, again, strict=True)
            for i in range(len(first))
        ]
        metrics = {
            "rollout/plain_speedup": seconds["timing_s/gen_plain"] / seconds["timing_s/gen"],
            "rollout/plain_equal_frac": sum(pairs) / len(pairs),
        }
        self._metrics.log(metrics)
        return metrics

    def train_until_scored(self, rollouts: RolloutBatch, *, step: int) -> None:
        """While rewards are outstanding, every worker is idle and trains the drafter."""
        if not self._drafter.is_trained or self._scoring.is_ready(rollouts, within_s=_PATIENCE_S):
            return
        waited = self._group.train_while(
            lambda: not self._scoring.is_ready(rollouts),
            step=step,
            idle_training=self._drafter.idle_training_settings,
        )
        self._drafter.observe(waited.results)
        self._add(waited.phase)

    def _generate(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        params: SamplingParams,
        *,
        phase: str,
        step: int,
        stream: StreamedUpdate | None,
        scored: bool = True,
    ) -> tuple[list[Rollout], Generated]:
        """stream: None for responses that are not trained on.  scored: False where they have their scores already."""
        trains = stream is not None
        finished: list[Rollout] = []
        total, started_s = sum(len(g) for g in groups), time.perf_counter()
        episodes = self._episodes
        if episodes is not None:
            groups = [[episodes.begin(request) for request in group] for group in groups]

        def ended(turns: Sequence[Rollout]) -> Sequence[Rollout]:
            if episodes is None:
                return turns
            whole = episodes.advance(turns, max_new_tokens=params.max_new_tokens)
            ends = bool(whole) and len(finished) + len(whole) == total
            if (more := episodes.requests()) or ends:
                self._group.extend(more, ends=ends)
            return whole

        def on_progress(drained: Drained) -> None:
            whole = ended(drained.finished)
            if scored:
                for rollout in whole:
                    self._scoring.submit(rollout)
            finished.extend(whole)
            if stream is not None:
                stream.add(whole)
                if passes := stream.ready():
                    self._group.offer(passes)
            self._reporter.responses(
                phase,
                len(finished),
                total,
                live=drained.live,
                tokens=drained.tokens,
                tokens_per_s=drained.tokens / (time.perf_counter() - started_s),
            )

        done = self._group.run_phase(
            groups,
            params,
            dispatch=self._dispatch,
            on_progress=on_progress,
            step=step,
            is_training=trains,
            waits=None if episodes is None else lambda: episodes.are_waiting,
            idle_training=self._drafter.idle_training_settings if trains else IdleTrainingSettings(enabled=False),
        )
        return finished, done

    def _add(self, phase: PhaseReport) -> None:
        self._metrics.spans.extend(phase.spans)
        self._phases.append(phase)
        self._metrics.log(bubble_metrics(self._phases))


def requests_for(prompts: Sequence[Prompt], samples: int, *, seed: int, step: int) -> list[list[GenerationRequest]]:
    """`samples` requests of each prompt; their noise depends on seed, step, prompt and sample alone."""
    return [[GenerationRequest(NoiseKey(seed, step, p.id, s), p.tokens) for s in range(samples)] for p in prompts]


class Validation:
    def __init__(
        self,
        cfg: RunConfig,
        prompts: Sequence[Prompt],
        rollout: RolloutPhase,
        scoring: Scoring,
        params: SamplingParams,
        metrics: StepMetrics,
    ) -> None:
        self._cfg, own = cfg, cfg.evaluation
        self._prompts = prompts[: own.num_prompts]
        self._rollout, self._scoring, self._metrics = rollout, scoring, metrics
        self.params = replace(params, max_new_tokens=own.max_new_tokens or params.max_new_tokens)
        self._score: float | None = None

    def is_due(self, step: int) -> bool:
        """Before the first step (0), every `evaluation.every_steps` steps, and after the last."""
        every = self._cfg.evaluation.every_steps
        return every > 0 and (step % every == 0 or step == self._cfg.num_steps)

    def run(self, step: int) -> dict[str, float]:
        samples = self._cfg.evaluation.num_samples
        tasks = [p.task for p in sorted(self._prompts, key=lambda p: p.id)]  # the order of `RolloutBatch`
        with self._metrics.timed("testing"):
            scores = self._decode(step, 1, replace(self.params, temperature=0.0))
            metrics = greedy_metrics(torch.tensor([s.total for s in scores]), tasks)
            if samples:
                scores = self._decode(step, samples, self.params)
                totals_PS = torch.tensor([s.total for s in scores]).view(-1, samples)
                passed_PS = torch.tensor(passes(scores, self._cfg.reward)).view(-1, samples)
                metrics |= sampled_metrics(totals_PS, passed_PS, tasks)
        self._metrics.log(metrics)
        self._score = metrics.get(self._cfg.checkpoint.best_metric)
        return metrics

    def take_score(self) -> float | None:
        """What ranks the next checkpoint: `checkpoint.best_metric` of the newest validation, given out once."""
        score, self._score = self._score, None
        return score

    def _decode(self, step: int, samples: int, params: SamplingParams) -> list[Score]:
        requests = requests_for(self._prompts, samples, seed=self._cfg.seed, step=of_validation(step))
        return self._scoring.collect(self._rollout.decode(requests, params, phase="evaluate", step=step))


def passes(scores: Sequence[Score], cfg: RewardConfig) -> list[bool]:
    """Is each response's main reward full?  The main reward is the first function that is not `format`; 1 is full.

    The weighted sum says less: a wrong answer in the right format has a positive one.
    """
    kinds = [function.kind for function in cfg.functions]
    main = next((index for index, kind in enumerate(kinds) if kind != "format"), 0)
    return [score.components[main] >= 1 for score in scores]

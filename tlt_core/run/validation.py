"""Validation: one greedy response per prompt, and sampled ones for mean@k and pass@k."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from conf.reward import RewardConfig
from conf.run import RunConfig
from tlt_core.grpo.reward import Score
from tlt_core.items.types import Prompt, SamplingParams
from tlt_core.model.sampling import of_validation
from tlt_core.run.prompts import Scoring
from tlt_core.run.rollout_phase import RolloutPhase, requests_for
from tlt_core.run.step_metrics import StepMetrics, greedy_metrics, sampled_metrics


class Validation:
    """Measures the policy on the first `evaluation.num_prompts` validation prompts."""

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
        """Greedy accuracy, and mean@k and pass@k of sampled responses."""
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
        """Scores by prompt and sample."""
        requests = requests_for(self._prompts, samples, seed=self._cfg.seed, step=of_validation(step))
        return self._scoring.collect(self._rollout.decode(requests, params, phase="evaluate", step=step))


def passes(scores: Sequence[Score], cfg: RewardConfig) -> list[bool]:
    """Is each response's main reward full?  The main reward is the first function that is not `format`; 1 is full.

    The weighted sum says less: a wrong answer in the right format has a positive one.
    """
    kinds = [function.kind for function in cfg.functions]
    main = next((index for index, kind in enumerate(kinds) if kind != "format"), 0)
    return [score.components[main] >= 1 for score in scores]

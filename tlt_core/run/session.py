"""The driver's side of one training run: what the tasks of an RL step call, in this order.

    sample_step -> score -> drafter.publish -> update -> publish -> validation.run -> save_checkpoint

`Session` owns the order of prompts, advantages, updates and checkpoints, and holds no model.  To start a run again is
to resume it from the newest valid checkpoint.
"""

import logging
import shutil
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from conf.run import RunConfig
from tlt_core.cluster.group import WorkerGroup
from tlt_core.data.prompt_order import PromptOrder
from tlt_core.grpo import advantage, batch
from tlt_core.grpo.reward import Score, Scorer, require_scores
from tlt_core.items import checkpoint
from tlt_core.items.checkpoint import DriverState, Found
from tlt_core.items.types import GenerationRequest, RolloutBatch, SamplingParams, ScoredBatch
from tlt_core.machine.precision import Precision
from tlt_core.model.load import save_stop_token_ids
from tlt_core.run import resumable, step_files
from tlt_core.run.drafter_release import DrafterPublisher, published_dir
from tlt_core.run.engine_agreement import require_agreement
from tlt_core.run.episodes import episodes
from tlt_core.run.progress import Progress, Reporter
from tlt_core.run.prompts import Prompts, Scoring
from tlt_core.run.rollout_phase import RolloutPhase, Validation, requests_for
from tlt_core.run.step_metrics import StepMetrics, score_metrics
from tlt_core.run.streamed_update import StreamedUpdate
from tlt_core.run.worker_spec import worker_spec

log = logging.getLogger(__name__)

_RESERVE = 1.5  # times the newest checkpoint's seconds, for the one that a stopped run still saves
_FIRST_SAVING_S = 10.0  # assumed until one save was timed


class Session:
    """Context manager: its exit ends the workers and the scoring processes."""

    def __init__(
        self,
        cfg: RunConfig,
        prompts: Prompts,
        group: WorkerGroup,
        scorer: Scorer,
        *,
        start_model: Path,
        reporter: Reporter,
    ) -> None:
        """The session takes over `group` and `scorer`.  start_model: its tokenizer goes into exported policies."""
        self.cfg = cfg
        self.group = group
        self.start_model = start_model
        self.metrics = StepMetrics()
        self.tracker_run_id = ""
        self.completed_steps = 0
        self.resume_attempt = 0
        self.resumed_metrics: dict[str, float] = {}  # of the last completed step, from its checkpoint
        self.order = PromptOrder(prompts.train, seed=cfg.seed)
        self.params = SamplingParams(
            temperature=cfg.rollout.temperature,
            top_p=cfg.rollout.top_p,
            top_k=cfg.rollout.top_k,
            max_new_tokens=cfg.rollout.max_new_tokens,
            stop_token_ids=prompts.stop_token_ids,
        )
        self._scorer, self._reporter = scorer, reporter
        self._resample_rounds = 0
        self._sampled: list[ScoredBatch] = []  # of the step
        self._saving_s = _FIRST_SAVING_S
        self._num_train = len(prompts.train)
        self.scoring = Scoring(scorer, prompts)
        self.drafter = DrafterPublisher(cfg, group, metrics=self.metrics, reporter=reporter)
        self.rollout = RolloutPhase(
            group,
            self.scoring,
            self.drafter,
            dispatch=cfg.rollout.dispatch,
            metrics=self.metrics,
            reporter=reporter,
            episodes=episodes(cfg, prompts),
        )
        self._stream = StreamedUpdate(cfg, scores=self.scoring.if_ready, with_advantages=self._with_advantages)
        self.validation = Validation(cfg, prompts.validation, self.rollout, self.scoring, self.params, self.metrics)

    @classmethod
    def resume_or_init(
        cls,
        cfg: RunConfig,
        *,
        data_dir: Path,
        start_model: Path,
        on_progress: Callable[[Progress], None],
        resume: bool = True,
    ) -> "Session":
        """Start the workers, from the newest valid checkpoint of this run if there is one and `resume` is true.

        Raises CheckpointError when the checkpoint belongs to a run with another configuration.
        """
        assert "auto" not in (*Precision.of(cfg), cfg.rollout.engine), "settle() comes first"
        with resumable.newest(cfg) if resume else nullcontext() as found:
            own = cfg.rollout
            prompts = Prompts.load(data_dir, start_model, num_prompts=own.num_prompts, stops=own.stop_token_ids)
            reporter = Reporter(on_progress, num_steps=cfg.num_steps, num_workers=cfg.cluster.num_workers)
            with ExitStack() as started:  # ends what has started when something that follows fails
                scorer = started.enter_context(Scorer(cfg.reward))
                reporter.phase("starting workers")
                spec = worker_spec(cfg, start_model, longest_prompt=prompts.longest)
                group = started.enter_context(WorkerGroup(cfg.cluster, spec, shared=cfg.run_dir))
                session = cls(cfg, prompts, group, scorer, start_model=start_model, reporter=reporter)
                session._load(found)
                started.pop_all()
        return session

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: object) -> None:
        self._scorer.close()
        self.group.__exit__(error_type, error, trace)

    # ------------------------------------------------------------------------------------------ one step

    def remaining_steps(self) -> range:
        return range(self.completed_steps + 1, self.cfg.num_steps + 1)

    def step_dir(self, step: int) -> Path:
        return step_files.step_dir(self.cfg.run_dir, step)

    def begin_step(self, step: int) -> None:
        """Clear the metrics, and remove what a killed attempt at this step has left."""
        for folder in (self.step_dir(step), published_dir(self.cfg.run_dir, step)):
            shutil.rmtree(folder, ignore_errors=True)
        self.metrics.clear()
        self.rollout.begin_step()
        self.scoring.begin_step()
        self._stream.begin_step()
        self._resample_rounds, self._sampled = 0, []
        self._reporter.step = step or None
        self.metrics.log({"training/global_step": step, "training/epoch": self.order.epoch})

    def sample_step(self, step: int) -> RolloutBatch:
        """Sample the step's groups; finished responses are scored while others are still being decoded."""
        requests = self.next_requests(step, self.cfg.rollout.num_prompts)
        return self.rollout.sample(requests, self.params, step=step, stream=self._stream)

    def next_requests(self, step: int, num_prompts: int) -> list[list[GenerationRequest]]:
        prompts = self.order.take(num_prompts, without=self._stream.pack_of)
        self._stream.plan(prompts)
        return requests_for(prompts, self.cfg.rollout.num_samples, seed=self.cfg.seed, step=step)

    def score(self, step: int, rollouts: RolloutBatch) -> ScoredBatch:
        """Wait for the outstanding scores; shape rewards, compute group-relative advantages."""
        self._reporter.phase("reward")
        with self.metrics.timed("reward"):
            self.rollout.train_until_scored(rollouts, step=step)
            scores = self.scoring.collect(rollouts)
        require_scores(scores)
        scored = self._with_advantages(rollouts, scores)
        self._sampled.append(scored)
        self.metrics.log(score_metrics(ScoredBatch.join(self._sampled), [f.name for f in self.cfg.reward.functions]))
        return self._informative(scored) if self.cfg.algorithm.dynamic_sampling else scored

    def needs_more_groups(self, scored: ScoredBatch) -> bool:
        """Dynamic sampling: does the step lack informative groups, and may it sample once more?"""
        algorithm = self.cfg.algorithm
        may_sample = algorithm.dynamic_sampling and self._resample_rounds < algorithm.max_resample_rounds
        all_sampled = len(self._stream.pack_of) == self._num_train
        return may_sample and not all_sampled and self._missing_groups(scored) > 0

    def resample(self, step: int, scored: ScoredBatch) -> ScoredBatch:
        """One more round of dynamic sampling (DAPO): keep informative groups, sample as many prompts as are missing."""
        self._resample_rounds += 1
        requests = self.next_requests(step, self._missing_groups(scored))
        rollouts = self.rollout.sample(requests, self.params, step=step, phase="resample", stream=self._stream)
        joined = self._informative(ScoredBatch.join([scored, self.score(step, rollouts)]))
        groups = self.cfg.rollout.num_prompts - self._missing_groups(joined)
        self.metrics.log({"training/resample_rounds": self._resample_rounds, "training/informative_groups": groups})
        return joined

    def update(self, step: int, scored: ScoredBatch) -> None:
        """One RL step's optimizer steps on the worker group.  Raises DisagreementError."""
        with self.metrics.timed("update_actor"):
            self._reporter.phase("update")
            kl = self.cfg.algorithm.kl
            shares = batch.make_train_batches(
                scored,
                self.cfg.update,
                self.cfg.algorithm,
                num_workers=self.group.num_workers,
                seed=self.cfg.seed,
                step=step,
                ref_logprobs_T=self._reference_logprobs(scored.rollouts) if kl.coef and kl.place == "loss" else None,
                pack_of=self._stream.pack_of,
                planned_sequences=self._stream.planned_sequences,
                streamed=self._stream.done,
            )
            reports = self.group.update(shares)
        self.metrics.log({**reports[0].metrics, **self._stream.metrics(scored)})
        self.metrics.log({"perf/max_memory_gb": max(report.memory_bytes for report in reports) / 1e9})
        require_agreement(reports[0].metrics, self.cfg.rollout)
        self.metrics.spans += [span for report in reports for span in report.spans]

    def publish(self, step: int) -> int:
        """Load the new weights into the rollout replicas; returns the policy version: the number of RL steps done."""
        self._reporter.phase("publish")
        with self.metrics.timed("update_weights"):
            self.group.publish(step)
        self.metrics.log({"training/policy_version": step})
        return step

    # ------------------------------------------------------------------------------------------ results

    def checkpoint_due(self, step: int) -> bool:
        return step % self.cfg.checkpoint.every_steps == 0 or step == self.cfg.num_steps

    def seconds_left_for_step(self) -> float:
        """Seconds left for the step when the run is asked to stop now: the rest is for saving it."""
        return self.cfg.checkpoint.must_save_by_s - _RESERVE * self._saving_s if self._reporter.step else 0.0

    def save_checkpoint(self, step: int) -> Path:
        """Save all that a resume needs, atomically; prune older checkpoints and step files."""
        self._reporter.phase("checkpoint")
        with self.metrics.timed("save_checkpoint"):
            root, kept = self.cfg.run_dir / "checkpoints", self.cfg.checkpoint
            state = DriverState(
                step=step,
                data_cursor=self.order.cursor,
                policy_version=step,
                tracker_run_id=self.tracker_run_id,
                resume_attempt=self.resume_attempt,
                fingerprint=resumable.fingerprint(self.cfg),
                best_metric=self.validation.take_score(),
                precision=Precision.of(self.cfg)._asdict(),
                engine=self.cfg.rollout.engine,
                metrics=self.metrics.values(),
                num_steps=self.cfg.num_steps,
                **self.drafter.state(),
            )
            folder = checkpoint.save(root, state, lambda partial: self.group.save(partial.resolve()))
            checkpoint.prune(root, keep_last=kept.keep_last, keep_best=kept.keep_best)
            step_files.prune(self.cfg.run_dir, step=step, keep=kept.keep_step_files)
        self._saving_s = self.metrics.values()["timing_s/save_checkpoint"]
        self.completed_steps = step
        return folder

    def export_policy(self, out_dir: Path) -> Path:
        self._reporter.phase("export")
        self.group.export(out_dir.resolve(), tokenizer_from=self.start_model, dtype=self.cfg.rollout.dtype)
        save_stop_token_ids(out_dir, self.params.stop_token_ids)
        return out_dir

    # ------------------------------------------------------------------------------------------ inside

    def _load(self, found: Found | None) -> None:
        if found is not None:
            state = found.state
            self.completed_steps = state.step
            self.resume_attempt = state.resume_attempt + 1
            self.tracker_run_id = state.tracker_run_id
            self.resumed_metrics = state.metrics
            self.order.cursor = state.data_cursor
            self.drafter.restore(state)
            log.info("resuming from %s (attempt %d)", found.folder, self.resume_attempt)
        self._reporter.phase("loading the model")
        self.group.load(*(None, 0) if found is None else (found.folder, found.state.policy_version))

    def _with_advantages(self, rollouts: RolloutBatch, scores: list[Score]) -> ScoredBatch:
        algorithm = self.cfg.algorithm
        scores_R = torch.tensor([s.total for s in scores], dtype=torch.float32)
        rewards_R = scores_R
        if algorithm.kl.coef > 0 and algorithm.kl.place == "reward":
            reference_T = self._reference_logprobs(rollouts)
            rewards_R = rewards_R - advantage.kl_penalty(rollouts, reference_T, kl=algorithm.kl)
        rewards_R = rewards_R - advantage.overlong_penalty(
            rollouts.response_lens_R,
            max_new_tokens=self.cfg.rollout.max_new_tokens,
            buffer_tokens=algorithm.overlong_buffer_tokens,
            penalty=algorithm.overlong_penalty,
        )
        scored = ScoredBatch(
            rollouts=rollouts,
            rewards_R=rewards_R,
            scores_R=scores_R,
            components_RF=torch.tensor([s.components for s in scores], dtype=torch.float32),
            status_R=torch.tensor([int(s.status) for s in scores]),
            reward_s_R=torch.tensor([s.seconds for s in scores], dtype=torch.float32),
            advantages_R=torch.zeros(len(rollouts)),
        )
        return self._compare(scored)

    def _compare(self, scored: ScoredBatch) -> ScoredBatch:
        """The same responses with their advantages over each other; 0 in groups that dynamic sampling drops."""
        advantages_R = advantage.advantages(
            scored.rewards_R, scored.rollouts.prompt_ids_R, kind=self.cfg.algorithm.advantage
        )
        if self.cfg.algorithm.dynamic_sampling:
            advantages_R = advantages_R.where(_is_informative(scored), 0.0)
        return replace(scored, advantages_R=advantages_R)

    def _informative(self, scored: ScoredBatch) -> ScoredBatch:
        """Groups whose scores differ, compared with each other alone.  If there are none: all, with advantages 0."""
        rows = _is_informative(scored).nonzero().flatten().tolist()
        return self._compare(scored.take(rows)) if rows else scored

    def _missing_groups(self, scored: ScoredBatch) -> int:
        groups_G = scored.rollouts.prompt_ids_R[_is_informative(scored)].unique()
        return self.cfg.rollout.num_prompts - len(groups_G)

    def _reference_logprobs(self, rollouts: RolloutBatch) -> Tensor:
        """Log-probs under the model that RL started from, aligned with the rollouts' tokens, [T]."""
        self._reporter.phase("reference")
        with self.metrics.timed("ref"):
            shares = batch.make_forward_batches(rollouts, num_workers=self.group.num_workers)
            return batch.join_logprobs(shares, self.group.reference_logprobs(shares), rollouts)


def _is_informative(scored: ScoredBatch) -> Tensor:
    """Where the scores of a group differ, [R] bool.  Shaping does not count: wrong responses of different lengths teach
    nothing but their length."""
    return advantage.informative(scored.scores_R, scored.rollouts.prompt_ids_R)

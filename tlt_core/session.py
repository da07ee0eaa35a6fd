"""The driver's side of one training run: what the tasks of an iteration call.

    generate -> score -> publish_drafter -> update -> publish -> evaluate -> save_checkpoint        (one RL step)

Owns the worker group and the scorer, decides which prompts a step takes, and gathers the step's metrics.  Holds no
model.  A fresh `Session` continues from the newest valid checkpoint, so starting again and resuming are one thing.
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conf.schema import RolloutConfig, RunConfig
from tlt_core import checkpoint, data
from tlt_core.canary import canary_metrics
from tlt_core.cluster.dispatcher import Drained
from tlt_core.cluster.group import WorkerGroup
from tlt_core.cluster.vllm_replica import VllmSpec
from tlt_core.cluster.worker import TrainerSpec, WorkerSpec
from tlt_core.drafter_release import (
    bubble_metrics,
    decide,
    origin_of,
    outcome_of,
    published_dir,
    results_of,
    spot_metrics,
    why_refused,
)
from tlt_core.engine_agreement import require_agreement
from tlt_core.grpo import advantage, batch
from tlt_core.grpo.reward import Scorer
from tlt_core.machine.precision import Precision, recorded_in
from tlt_core.metrics import StepMetrics, rollout_metrics, score_metrics, validation_metrics
from tlt_core.model.load import load_tokenizer, stop_token_ids
from tlt_core.progress import Progress, sample_rows
from tlt_core.prompt_order import PromptOrder
from tlt_core.rollout.engine import RoundTrace
from tlt_core.serving.vllm_server import vllm_python
from tlt_core.spec_metrics import spec_metrics, vllm_spec_metrics
from tlt_core.spot.coordinator import PhaseReport, SpotSettings
from tlt_core.spot.payoff import Payoff, PayoffSettings
from tlt_core.spot_training import SpotResult
from tlt_core.store import write_atomically
from tlt_core.types import (
    GenerationRequest,
    NoiseKey,
    Prompt,
    Rollout,
    RolloutBatch,
    SamplingParams,
    ScoredBatch,
    WorkerState,
)

log = logging.getLogger(__name__)

_PATIENCE_S = 0.1  # rewards that are there by then are not worth a phase of training

# What a resumed run may change within the sections that count.
_FREE: dict[str, Any] = {
    "rollout": {"speculation", "vllm", "kv_memory_fraction"},
    "update": {"backend": {"gather_bucket_mb"}},
}


class Session:
    """See the module docstring."""

    def __init__(
        self,
        cfg: RunConfig,
        *,
        data_dir: Path,
        start_model: Path,
        on_progress: Callable[[Progress], None],
    ) -> None:
        assert "auto" not in Precision.of(cfg), "settle() comes first"
        self.cfg = cfg
        self.metrics = StepMetrics()
        self.rounds: list[Sequence[RoundTrace]] = []  # of the latest training rollout, by worker
        self.tracker_run_id = ""
        self.completed_steps = 0
        self.resume_attempt = 0
        self.resumed_metrics: dict[str, float] = {}  # of the last completed step, as its checkpoint has them
        self.start_model = start_model
        self._on_progress = on_progress
        self._tokenizer = load_tokenizer(start_model)
        self._train = data.load(data_dir, "train", self._tokenizer)
        self._validation = data.load(data_dir, "validation", self._tokenizer)
        self._require_enough_prompts()
        self._by_id = {p.id: p for p in (*self._train, *self._validation)}
        self._params = SamplingParams(
            temperature=cfg.rollout.temperature,
            top_p=cfg.rollout.top_p,
            top_k=cfg.rollout.top_k,
            max_new_tokens=cfg.rollout.max_new_tokens,
            stop_token_ids=stop_token_ids(start_model, self._tokenizer),
        )
        self._order = PromptOrder(self._train, seed=cfg.seed)
        self._prompts: tuple[int, list[Prompt]] | None = None  # of the latest step
        self._policy_version = 0
        self._drafter_version = self._drafter_policy_version = 0
        spot = cfg.drafter.spot
        self._payoff = Payoff(PayoffSettings(max_slowdown=spot.max_slowdown, lasting_phases=spot.gain_lasts_steps))
        self._trained: list[SpotResult] = []  # by the workers, in the latest rollout
        self._phases: list[PhaseReport] = []  # of the step's rollouts, and of waiting for their rewards
        self._rollout_phase = PhaseReport((), 0.0, (), 0, {})  # the latest
        self._last_best_metric: float | None = None
        self._resample_rounds = 0
        self._step = 0
        self._fingerprint = _fingerprint(cfg)
        self._scorer = Scorer(cfg.reward)
        self._report("starting workers")
        self._group = WorkerGroup(cfg.cluster, self._worker_spec(), shared=cfg.run_dir)

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
        """Start the workers, from the newest valid checkpoint of this run where there is one and it is wanted."""
        newest = checkpoint.newest_valid(cfg.run_dir / "checkpoints") if resume else None
        state = None if newest is None else checkpoint.load_state(newest)
        if state is not None and state.fingerprint != _fingerprint(cfg):
            before = recorded_in(state)
            if before is None or state.fingerprint != _fingerprint(cfg.with_dtypes(**before._asdict())):
                raise checkpoint.CheckpointError(
                    f"{newest} belongs to a run with another model, data set, rollout, algorithm or optimizer "
                    f"configuration; choose another name (name={cfg.name!r} now) or remove {cfg.run_dir}"
                )
            log.warning(
                "going on in another precision, as told (%s; before: %s): results are no longer those of the "
                "uninterrupted run to the bit, and losses differ slightly",
                Precision.of(cfg),
                before,
            )
        session = cls(cfg, data_dir=data_dir, start_model=start_model, on_progress=on_progress)
        if state is not None:
            session.completed_steps = state.step
            session.resume_attempt = state.resume_attempt + 1
            session.tracker_run_id = state.tracker_run_id
            session.resumed_metrics = state.metrics
            session._order.cursor = state.data_cursor
            session._policy_version = state.policy_version
            session._drafter_version = state.drafter_version
            session._drafter_policy_version = state.drafter_policy_version
            if state.payoff:
                session._payoff.load_state_dict(state.payoff)
            log.info("resuming from %s (attempt %d)", newest, session.resume_attempt)
        session._report("loading the model")
        session._group.load(newest, session._policy_version)
        return session

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: object) -> None:
        self._scorer.close()
        self._group.__exit__(error_type, error, trace)

    # ------------------------------------------------------------------------------------------ one step

    def remaining_steps(self) -> range:
        """Steps still to do, counted from 1."""
        return range(self.completed_steps + 1, self.cfg.num_steps + 1)

    def step_dir(self, step: int) -> Path:
        """Folder of a step's saved items."""
        return self.cfg.run_dir / "steps" / f"{step:06d}"

    def begin_step(self, step: int) -> None:
        """Fresh metrics; leftovers of a killed attempt at this step are removed."""
        for folder in (self.step_dir(step), published_dir(self.cfg.run_dir, step)):
            shutil.rmtree(folder, ignore_errors=True)
        self.metrics = StepMetrics()
        self._resample_rounds = 0
        self._phases = []
        self._step = step
        self.metrics.log({"training/global_step": step, "training/epoch": self._order.epoch})

    def generate(self, step: int) -> RolloutBatch:
        """Sample the step's groups; finished responses go to the scorer while others are still being decoded."""
        return self._sample(step, self._prompts_of(step), phase="rollout")

    def rehearse(self, step: int) -> RolloutBatch:
        """The responses that `generate` gives, before it or after it, without training the drafter: nothing is kept of
        them, and nothing learns from them but the tuner.  `timing_s/rehearsal` is what `timing_s/gen` would be.  The
        n-gram drafter has a memory for rehearsals alone.  For benchmarks."""
        count = self.cfg.rollout.num_samples
        self._group.exchange_ngrams()
        with self.metrics.timed("rehearsal"):
            requests = _requests(self._prompts_of(step), count, seed=self.cfg.seed, step=step)
            rollouts = self._decode(requests, self._params, phase="rehearse", step=step, scored_as=count)
        self._group.exchange_ngrams()
        self._scorer.collect([(prompt_id, sample + count) for prompt_id, sample in _keys(rollouts)])
        return rollouts

    def publish_drafter(self, step: int) -> str:
        """What idle workers have taught the drafter goes into every engine, unless it drafts worse; returns what was
        decided.  Nothing where no drafter is trained."""
        trained, self._trained = self._trained, []
        if len(trained) < self._group.num_workers:  # none is trained, or a worker was lost
            return "no drafter is trained" if not trained else "a worker was lost"
        self._report("publish the drafter")
        with self.metrics.timed("publish_drafter"):
            self._payoff.observe(outcome_of(self._rollout_phase, self.rounds, trained))
            decision = decide(trained, errors=self.cfg.drafter.spot.canary_errors)
            published = []
            if any(decision.shares):
                version = self._drafter_version + 1
                published = self._group.publish_drafter(decision.shares, version=version, measured=decision.measured)
                if len(set(published)) > 1:
                    raise RuntimeError(f"workers disagree about drafter {version} ({published}): stop and report this")
                if published[0].accepted:
                    self._drafter_version, self._drafter_policy_version = version, self._policy_version
                    self._keep_drafter(step)
            elif decision.refused:
                self._group.refuse_drafter()
        refused = decision.refused or any(not p.accepted for p in published)
        verified = published[0].canary if published and refused else None
        reason = decision.reason if verified is None else why_refused(verified)
        log.log(logging.INFO if refused else logging.DEBUG, "drafter: %s", reason)
        lag = self._policy_version - self._drafter_policy_version
        told = spot_metrics(trained, decision=decision, published=published, version=self._drafter_version, lag=lag)
        self.metrics.log(told)
        self.metrics.log(self._payoff.metrics())
        return reason

    def score(self, step: int, rollouts: RolloutBatch) -> ScoredBatch:
        """Wait for the outstanding scores; shape rewards, compute group-relative advantages."""
        self._report("reward")
        with self.metrics.timed("reward"):
            self._train_while_scoring(step, _keys(rollouts))
            scores = self._scorer.collect(_keys(rollouts))
        components_RF = torch.tensor([s.components for s in scores], dtype=torch.float32)
        scores_R = torch.tensor([s.total for s in scores], dtype=torch.float32)
        algorithm = self.cfg.algorithm
        if algorithm.kl.coef > 0 and algorithm.kl.place == "reward":
            penalty_R = advantage.kl_penalty(rollouts, self._reference_logprobs(rollouts), kl=algorithm.kl)
        else:
            penalty_R = torch.zeros(len(rollouts))
        rewards_R = (
            scores_R
            - penalty_R
            - advantage.overlong_penalty(
                rollouts.response_lens_R,
                max_new_tokens=self.cfg.rollout.max_new_tokens,
                buffer_tokens=algorithm.overlong_buffer_tokens,
                penalty=algorithm.overlong_penalty,
            )
        )
        scored = ScoredBatch(
            rollouts=rollouts,
            rewards_R=rewards_R,
            scores_R=scores_R,
            components_RF=components_RF,
            status_R=torch.tensor([int(s.status) for s in scores]),
            reward_s_R=torch.tensor([s.seconds for s in scores], dtype=torch.float32),
            advantages_R=advantage.advantages(rewards_R, rollouts.prompt_ids_R, kind=algorithm.advantage),
        )
        self.metrics.log(score_metrics(scored, [f.name for f in self.cfg.reward.functions]))
        return scored

    def needs_more_groups(self, scored: ScoredBatch) -> bool:
        """Dynamic sampling: does the step want more informative groups, and may it still sample?"""
        algorithm = self.cfg.algorithm
        if not algorithm.dynamic_sampling or self._resample_rounds >= algorithm.max_resample_rounds:
            return False
        return len(_informative_groups(scored)) < self.cfg.rollout.num_prompts

    def resample(self, step: int, scored: ScoredBatch) -> ScoredBatch:
        """One more round of dynamic sampling (DAPO): keep informative groups, sample as many prompts as are missing."""
        self._resample_rounds += 1
        kept = _informative_groups(scored)
        missing = self.cfg.rollout.num_prompts - len(kept)
        more = self.score(step, self._sample(step, self._order.take(missing), phase="resample"))
        groups = (kept + _informative_groups(more))[: self.cfg.rollout.num_prompts]
        joined = ScoredBatch.join([scored, more])
        ids = joined.rollouts.prompt_ids_R.tolist()
        self.metrics.log(
            {"training/resample_rounds": self._resample_rounds, "training/informative_groups": len(groups)}
        )
        rows = [row for row, prompt_id in enumerate(ids) if prompt_id in set(groups)]
        return joined.take(rows) if rows else scored  # nothing informative at all: advantages are 0 anyway

    def update(self, step: int, scored: ScoredBatch) -> None:
        """One RL step's optimizer steps on the worker group."""
        with self.metrics.timed("update_actor"):
            self._report("update")
            kl = self.cfg.algorithm.kl
            shares = batch.make_train_batches(
                scored,
                self.cfg.update,
                self.cfg.algorithm,
                num_workers=self._group.num_workers,
                seed=self.cfg.seed,
                step=step,
                ref_logprobs_T=self._reference_logprobs(scored.rollouts) if kl.coef and kl.place == "loss" else None,
            )
            reports = self._group.update(shares)
        self.metrics.log(reports[0].metrics)
        require_agreement(reports[0].metrics, self.cfg.rollout)
        for report in reports:
            self.metrics.spans.extend(report.spans)

    def publish(self, step: int) -> int:
        """New weights into the rollout replicas; returns the policy version (the number of updates)."""
        self._report("publish")
        with self.metrics.timed("update_weights"):
            self._policy_version = step
            self._group.publish(self._policy_version)
        self.metrics.log({"training/policy_version": self._policy_version})
        return self._policy_version

    # ------------------------------------------------------------------------------------------ validation

    def evaluation_due(self, step: int) -> bool:
        """Before the first step (0), every n steps, and after the last."""
        every = self.cfg.evaluation.every_steps
        return every > 0 and (step % every == 0 or step == self.cfg.num_steps)

    def evaluate(self, step: int) -> dict[str, float]:
        """Greedy accuracy, and mean@k and pass@k of sampled responses, on the validation prompts."""
        with self.metrics.timed("testing"):
            evaluation = self.cfg.evaluation
            prompts = self._validation[: evaluation.num_prompts]
            limit = min(evaluation.max_new_tokens or self._params.max_new_tokens, self._params.max_new_tokens)
            params = replace(self._params, max_new_tokens=limit)
            metrics = self._validate(step, prompts, samples=1, params=replace(params, temperature=0.0))
            if evaluation.num_samples:
                metrics |= self._validate(step, prompts, samples=evaluation.num_samples, params=params)
        self.metrics.log(metrics)
        self._last_best_metric = metrics.get(self.cfg.checkpoint.best_metric)
        return metrics

    def _validate(
        self, step: int, prompts: Sequence[Prompt], *, samples: int, params: SamplingParams
    ) -> dict[str, float]:
        requests = _requests(prompts, samples, seed=self.cfg.seed, step=-1 - step)
        rollouts = self._decode(requests, params, phase="evaluate", step=step)
        scores = self._scorer.collect(_keys(rollouts))
        tasks = [self._by_id[prompt_id].task for prompt_id in rollouts.prompt_ids_R[::samples].tolist()]
        return validation_metrics(
            torch.tensor([s.total for s in scores]).view(-1, samples), tasks, greedy=params.temperature == 0
        )

    # ------------------------------------------------------------------------------------------ results

    def checkpoint_due(self, step: int) -> bool:
        """Every n steps and after the last."""
        return step % self.cfg.checkpoint.every_steps == 0 or step == self.cfg.num_steps

    def save_checkpoint(self, step: int) -> Path:
        """Everything a resume needs, atomically; older checkpoints are pruned."""
        self._report("checkpoint")
        with self.metrics.timed("save_checkpoint"):
            root = self.cfg.run_dir / "checkpoints"
            state = checkpoint.DriverState(
                step=step,
                data_cursor=self._order.cursor,
                policy_version=self._policy_version,
                drafter_version=self._drafter_version,
                drafter_policy_version=self._drafter_policy_version,
                payoff=self._payoff.state_dict(),
                tracker_run_id=self.tracker_run_id,
                resume_attempt=self.resume_attempt,
                fingerprint=self._fingerprint,
                best_metric=self._last_best_metric,
                precision=Precision.of(self.cfg)._asdict(),
                metrics=self.metrics.values(),
            )
            self._last_best_metric = None
            folder = checkpoint.save(root, state, lambda partial: self._group.save(partial.resolve()))
            checkpoint.prune(root, keep_last=self.cfg.checkpoint.keep_last, keep_best=self.cfg.checkpoint.keep_best)
        self.completed_steps = step
        return folder

    def export_policy(self, out_dir: Path) -> Path:
        """The policy as a plain Hugging Face folder."""
        self._report("export")
        self._group.export(out_dir.resolve(), tokenizer_from=self.start_model, dtype=self.cfg.rollout.dtype)
        return out_dir

    def export_drafter(self, out_dir: Path) -> Path | None:
        """The drafter in use as a folder that vLLM and SGLang load; None where none is trained.

        `drafter.json` in it says what it began as.
        """
        first = self.cfg.rollout.speculation.drafter_path
        if not self._trains_drafter or first is None:
            return None
        origin = origin_of(Path(first), run=self.cfg.name, steps=self.completed_steps)
        self._group.export_drafter(out_dir.resolve())
        write_atomically(out_dir / "drafter.json", lambda partial: partial.write_text(json.dumps(origin, indent=1)))
        return out_dir

    def sample_texts(self, scored: ScoredBatch, count: int) -> list[dict[str, Any]]:
        """`count` responses spread over the batch, as rows for people to read."""
        return sample_rows(scored, count, prompts=self._by_id, decode=self._text)

    # ------------------------------------------------------------------------------------------ inside

    def _prompts_of(self, step: int) -> list[Prompt]:
        """The same, however often they are asked for."""
        if self._prompts is None or self._prompts[0] != step:
            self._prompts = step, self._order.take(self.cfg.rollout.num_prompts)
        return self._prompts[1]

    def _sample(self, step: int, prompts: Sequence[Prompt], *, phase: str) -> RolloutBatch:
        started_s = time.perf_counter()
        with self.metrics.timed("gen"):
            requests = _requests(prompts, self.cfg.rollout.num_samples, seed=self.cfg.seed, step=step)
            rollouts = self._decode(requests, self._params, phase=phase, step=step)
        seconds = time.perf_counter() - started_s
        self.metrics.log(rollout_metrics(rollouts, seconds=seconds, num_workers=self._group.num_workers))
        self.metrics.log(bubble_metrics(self._phases))
        return rollouts

    @property
    def _trains_drafter(self) -> bool:
        speculation = self.cfg.rollout.speculation
        menu = speculation.menu
        wanted = menu is None or any(s.drafter == "eagle3" for s in menu)
        return (
            self.cfg.drafter.spot.enabled
            and speculation.policy != "off"
            and speculation.drafter_path is not None
            and wanted
        )

    def _decode(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        params: SamplingParams,
        *,
        phase: str,
        step: int,
        scored_as: int = 0,
    ) -> RolloutBatch:
        """Generate on the worker group; every response goes to the scorer as it ends.

        scored_as: added to the sample's number in the scorer's keys, where the same responses are scored twice.
        """
        finished: list[Rollout] = []
        total, started_s = sum(len(g) for g in groups), time.perf_counter()

        def on_progress(drained: Drained) -> None:
            for rollout in drained.finished:
                prompt = self._by_id[rollout.key.prompt_id]
                key = prompt.id, rollout.key.sample + scored_as
                self._scorer.submit(key, prompt, self._text(rollout.completion))
            finished.extend(drained.finished)
            rate = drained.tokens / (time.perf_counter() - started_s)
            self._report(phase, len(finished), total, drained, rate)

        is_training = phase not in ("evaluate", "rehearse")
        reports, workers = self._group.generate(
            groups,
            params,
            dispatch=self.cfg.rollout.dispatch,
            on_progress=on_progress,
            step=step,
            is_training=is_training,
            spot=self._spot_settings(is_training),
        )
        if is_training:
            self.metrics.spans.extend(workers.spans)
            self._phases.append(workers)
            self._rollout_phase = workers
            self.rounds = [report.rounds for report in reports]
            self.metrics.log(spec_metrics(reports) | vllm_spec_metrics(reports))
            self._trained = results_of(reports)
            self.metrics.log(canary_metrics([report.canary for report in reports]))
        return RolloutBatch.pack(finished)

    def _keep_drafter(self, step: int) -> None:
        keep = self.cfg.drafter.spot.keep_published
        if keep:
            folder = published_dir(self.cfg.run_dir, step)
            self._group.export_drafter(folder.resolve())
            for old in sorted(folder.parent.iterdir())[:-keep]:
                shutil.rmtree(old)

    def _train_while_scoring(self, step: int, keys: Sequence[tuple[int, int]]) -> None:
        """Rewards that take their time are idle time too, for every worker."""
        trains = len(self._trained) == self._group.num_workers  # not with vLLM, nor when a worker was lost
        if not trains or self._scorer.is_ready(keys, within_s=_PATIENCE_S):
            return
        settings = replace(self._spot_settings(is_training=True), duty=1.0)  # nobody decodes whom it could slow
        waited = self._group.train_while(lambda: not self._scorer.is_ready(keys), step=step, spot=settings)
        self.metrics.spans.extend(waited.phase.spans)
        self._phases.append(waited.phase)
        self._trained = waited.results
        self.metrics.log(bubble_metrics(self._phases))

    def _spot_settings(self, is_training: bool) -> SpotSettings:
        spot = self.cfg.drafter.spot
        return SpotSettings(
            enabled=is_training and self._trains_drafter,
            min_idle_s=spot.min_idle_s,
            max_steps=spot.max_steps,
            interval=spot.interval,
            duty=self._payoff.duty,
        )

    def _report(
        self, phase: str, done: int = 0, total: int = 1, drained: Drained | None = None, rate: float = 0.0
    ) -> None:
        live = drained.live if drained is not None else (0,) * self.cfg.cluster.num_workers
        updating = phase == "update"
        states = tuple(WorkerState.UPDATING if updating else WorkerState.BUSY if n else WorkerState.IDLE for n in live)
        tokens = drained.tokens if drained is not None else 0
        step = self._step or None  # 0: before the first
        unit = "" if drained is None else "responses"
        self._on_progress(Progress(step, self.cfg.num_steps, phase, done, total, sum(live), tokens, rate, states, unit))

    def _reference_logprobs(self, rollouts: RolloutBatch) -> torch.Tensor:
        """Log-probs under the model RL started from, aligned with the rollouts' tokens, [T]."""
        self._report("reference")
        with self.metrics.timed("ref"):
            shares = batch.make_forward_batches(rollouts, num_workers=self._group.num_workers)
            return batch.join_logprobs(shares, self._group.reference_logprobs(shares), rollouts)

    def _text(self, tokens: torch.Tensor) -> str:
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def _require_enough_prompts(self) -> None:
        needed = self.cfg.rollout.num_prompts
        if len(self._train) < needed:
            raise ValueError(
                f"the data set has {len(self._train)} training prompts, rollout.num_prompts asks for {needed} a step; "
                "lower it or provide more data"
            )

    def _worker_spec(self) -> WorkerSpec:
        cfg = self.cfg
        longest = max(len(p.tokens) for p in self._by_id.values())
        return WorkerSpec(
            model_dir=self.start_model.resolve(),
            rollout=_with_absolute_path(cfg.rollout),
            max_len=longest + cfg.rollout.max_new_tokens,
            trainer=TrainerSpec(
                update=cfg.update,
                algorithm=cfg.algorithm,
                total_steps=cfg.num_steps * cfg.update.num_minibatches * cfg.update.num_epochs,
                max_new_tokens=cfg.rollout.max_new_tokens,
                temperature=cfg.rollout.temperature,
            ),
            threads=cfg.cluster.threads_per_worker,
            device="cuda" if cfg.cluster.gpus_per_worker else "cpu",
            seed=cfg.seed,
            drafter=cfg.drafter,
            spot_dir=(cfg.run_dir / "spot").resolve() if self._trains_drafter else None,
            vllm=VllmSpec(vllm_python(), (cfg.run_dir / "vllm").resolve()) if cfg.rollout.engine == "vllm" else None,
            release_memory=cfg.cluster.release_rollout_memory,
        )


def _requests(prompts: Sequence[Prompt], samples: int, *, seed: int, step: int) -> list[list[GenerationRequest]]:
    return [[GenerationRequest(NoiseKey(seed, step, p.id, s), p.tokens) for s in range(samples)] for p in prompts]


def _with_absolute_path(rollout: RolloutConfig) -> RolloutConfig:
    """Workers of other nodes have another working directory."""
    speculation = rollout.speculation
    if speculation.drafter_path is None:
        return rollout
    speculation = speculation.model_copy(update={"drafter_path": str(Path(speculation.drafter_path).resolve())})
    return rollout.model_copy(update={"speculation": speculation})


def _keys(rollouts: RolloutBatch) -> list[tuple[int, int]]:
    return list(zip(rollouts.prompt_ids_R.tolist(), rollouts.samples_R.tolist(), strict=True))


def _informative_groups(scored: ScoredBatch) -> list[int]:
    """Ids of the prompts whose rewards differ, in data order."""
    mask = advantage.informative(scored.rewards_R, scored.rollouts.prompt_ids_R)
    return list(dict.fromkeys(scored.rollouts.prompt_ids_R[mask].tolist()))


def _fingerprint(cfg: RunConfig) -> str:
    """Digest of what may not change between attempts (of it precision alone may, when told to).  More steps, workers,
    another tracker or other speculation (which changes no token of our engine) are fine, as is the size of ZeRO's
    buckets."""
    sections = {"seed", "model", "data", "coldstart", "rollout", "algorithm", "update"}
    fixed = cfg.model_dump(mode="json", include=sections, exclude=_FREE)
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()

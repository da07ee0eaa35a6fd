"""Drafter warm-up: the first EAGLE-3 drafter, trained before RL on responses of the policy.

    policy -> responses to some training prompts -> draft vocabulary -> hidden states and probabilities -> training
           -> acceptance on held-out prompts -> folder that vLLM and SGLang load

Runs in one process, with the threads of the whole worker group.  The folder also has `drafter.json`.
"""

import json
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import torch

from conf.rollout import SpeculationConfig
from conf.run import RunConfig
from tlt_core.data import dataset
from tlt_core.data.prompt_order import PromptOrder
from tlt_core.drafter.eagle3.acceptance import measure_acceptance
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import choose_draft_vocabulary, default_taps, eagle3_from_target, tap_scales
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.train import Eagle3Trainer, TrainMetrics, TrainSettings
from tlt_core.grpo.passes import fill
from tlt_core.items.store import write_atomically
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import GenerationRequest, NoiseKey, Prompt, Rollout, SamplingParams
from tlt_core.machine import provenance
from tlt_core.machine.driver import driver_device, release
from tlt_core.machine.memory import keep_few_products
from tlt_core.machine.precision import as_torch
from tlt_core.model.decoder import Decoder
from tlt_core.model.load import load_config, load_decoder, load_tokenizer, stop_token_ids
from tlt_core.model.sampling import NoiseStep, stream_key
from tlt_core.rollout import build

_OBSERVED_TOKENS = 2048  # in one pass of the target
_HELD_OUT = 8  # one prompt in this many

OnProgress = Callable[[str, int, int, float | None], None]  # phase, done, total, loss


def run(cfg: RunConfig, *, policy: Path, data_dir: Path, out_dir: Path, on_progress: OnProgress) -> dict[str, float]:
    """Train and write the drafter, on a GPU where workers have one and this machine too; returns its metrics."""
    device = driver_device(cfg.cluster)
    keep_few_products()  # workers inherit the bound, so it is theirs
    try:
        return _run(cfg, policy, data_dir, out_dir, on_progress, device)
    finally:
        release(device)


def _run(
    cfg: RunConfig, policy: Path, data_dir: Path, out_dir: Path, on_progress: OnProgress, device: str
) -> dict[str, float]:
    torch.set_num_threads(cfg.cluster.num_workers * cfg.cluster.threads_per_worker)
    began_s, own = time.perf_counter(), cfg.drafter
    on_progress("loading the model", 0, 1, None)
    default_taps(load_config(policy).num_layers)  # raises where there can be no drafter
    tokenizer = load_tokenizer(policy)
    questions = dataset.load(data_dir, "train", tokenizer)
    prompts = PromptOrder(questions, seed=cfg.seed).take(own.num_prompts)
    dtype, kept_as = as_torch(cfg.update.dtype), as_torch(cfg.rollout.dtype)
    plain = load_decoder(policy, dtype=dtype, device=device)
    stops = stop_token_ids(policy, tokenizer, also=cfg.rollout.stop_token_ids)
    rollouts = _sample(cfg, prompts, load_decoder(policy, dtype=kept_as, device=device), stops, on_progress)
    sampled_s = time.perf_counter() - began_s

    held_ids = {p.id for p in prompts[::_HELD_OUT]}
    apart = [r for r in rollouts if r.key.prompt_id in held_ids]
    rest = [r for r in rollouts if r.key.prompt_id not in held_ids]
    ids_J, coverage = _vocabulary(cfg, plain, stops, questions=questions, rest=rest, apart=apart)

    def on_observed(done: int) -> None:
        on_progress("hidden states", done, len(rollouts), None)

    kept, scales = _observe(plain, rest, ids_J, on_observed, kept_as=kept_as)
    held, _ = _observe(plain, apart, ids_J, lambda done: on_observed(len(rest) + done), kept_as=kept_as)

    settings = TrainSettings(
        learning_rate=own.learning_rate, total_steps=own.num_steps, depth=own.depth, compute_dtype=dtype, loss=own.loss
    )
    model = eagle3_from_target(plain, ids_J, scales=scales, seed=cfg.seed)
    trainer = Eagle3Trainer(model, plain, settings)
    on_progress("drafter before its training", 0, 1, None)
    first = trainer.measure(held)
    last = _train(trainer, kept, cfg, on_progress)
    on_progress("drafter on held-out responses", 0, 1, None)
    save_eagle3(model, out_dir, dtype=kept_as)
    metrics = {
        "drafter/warmup_rollouts": float(len(rollouts)),
        "drafter/warmup_tokens": float(sum(len(s.tokens_L) for s in kept)),
        "drafter/vocab_coverage": coverage,
        "drafter/loss_train": last.loss,
        "drafter/loss_held_out_first": first.loss,
        "timing_s/warmup_rollouts": sampled_s,
        "timing_s/warmup": time.perf_counter() - began_s,
    } | _held_out(trainer, held, cfg)
    report = {
        "policy": str(policy),
        "commit": provenance.commit(),
        "settings": own.model_dump(mode="json"),
        "dtype": {"rollout": cfg.rollout.dtype, "update": cfg.update.dtype},
        "metrics": metrics,
    }
    write_atomically(out_dir / "drafter.json", lambda partial: partial.write_text(json.dumps(report, indent=1)))
    return metrics


def _sample(
    cfg: RunConfig, prompts: Sequence[Prompt], decoder: Decoder, stops: tuple[int, ...], on_progress: OnProgress
) -> list[Rollout]:
    rollout = cfg.rollout
    max_len = max(len(p.tokens) for p in prompts) + rollout.max_new_tokens
    engine = build.make_engine(
        decoder, SpeculationConfig(), max_live=rollout.max_live_requests, max_len=max_len, seed=cfg.seed
    )
    requests = [
        GenerationRequest(NoiseKey(cfg.seed, NoiseStep.WARM_UP, p.id, s), p.tokens)
        for p in prompts
        for s in range(cfg.drafter.num_samples)
    ]
    params = SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=stops,
    )
    on_progress("drafter rollouts", 0, len(requests), None)
    done = count(1)
    return engine.decode_all(
        requests, params, on_finish=lambda _: on_progress("drafter rollouts", next(done), len(requests), None)
    )


def _vocabulary(
    cfg: RunConfig,
    plain: Decoder,
    stops: tuple[int, ...],
    *,
    questions: Sequence[Prompt],
    rest: Sequence[Rollout],
    apart: Sequence[Rollout],
) -> tuple[torch.Tensor, float]:
    """Ids of the draft vocabulary, and the share of the held-out responses' tokens that it has.

    The held-out responses (`apart`) do not choose it: that would flatter what is measured on them.
    """
    tokens = [r.completion for r in rest], [r.completion for r in apart], [q.tokens for q in questions]
    most = plain.config.vocab_size
    counts_V, held_counts_V, prompt_counts_V = (torch.cat(part).long().bincount(minlength=most) for part in tokens)
    size = min(cfg.drafter.vocab_size, most)
    ids_J = choose_draft_vocabulary(counts_V, size, always=stops, prompt_counts_V=prompt_counts_V)
    return ids_J, float(held_counts_V[ids_J].sum() / held_counts_V.sum())


def _observe(
    plain: Decoder,
    rollouts: Sequence[Rollout],
    ids_J: torch.Tensor,
    on_observed: Callable[[int], None],
    *,
    kept_as: torch.dtype,
) -> tuple[list[TrainSequence], tuple[float, ...]]:
    """The target's hidden states and probabilities over the rollouts, and the scales of the hidden states.

    on_observed: gets the number of rollouts done.  kept_as: the type that the engine records hidden states in.
    """
    probe = eagle3_from_target(plain, ids_J, scales=(1.0, 1.0, 1.0), seed=0)
    sequences: list[TrainSequence] = []
    for rows in fill(range(len(rollouts)), lambda row, _: len(rollouts[row].tokens), budget=_OBSERVED_TOKENS):
        part = [rollouts[row] for row in rows]
        sequences += observe(
            plain,
            [r.tokens for r in part],
            probe,
            firsts=[r.prompt_len for r in part],
            dtype=kept_as,
            streams=[stream_key(r.key) for r in part],
        )
        on_observed(len(sequences))
    return sequences, tap_scales(torch.cat([s.taps_LE for s in sequences]))


def _train(
    trainer: Eagle3Trainer, sequences: Sequence[TrainSequence], cfg: RunConfig, on_progress: OnProgress
) -> TrainMetrics:
    own, done, epoch = cfg.drafter, 0, 0
    on_progress("drafter warm-up", 0, own.num_steps, None)
    while True:
        order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(cfg.seed + epoch)).tolist()
        for rows in fill(order, lambda row, _: len(sequences[row].tokens_L), budget=own.tokens_per_step):
            metrics = trainer.step([sequences[row] for row in rows])
            done += 1
            on_progress("drafter warm-up", done, own.num_steps, metrics.loss)
            if done == own.num_steps:
                return metrics
        epoch += 1


def _held_out(trainer: Eagle3Trainer, held: Sequence[TrainSequence], cfg: RunConfig) -> dict[str, float]:
    final, rollout = trainer.measure(held), cfg.rollout
    accepted = measure_acceptance(
        trainer.model,
        trainer.embedding_VD,
        held,
        depth=cfg.drafter.depth,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        compute_dtype=trainer.settings.compute_dtype,
    )
    metrics = {"drafter/loss_held_out": final.loss, "drafter/accept_len_sim": accepted.accept_length}
    return metrics | {f"drafter/overlap_pos_{depth}": x for depth, x in enumerate(final.overlaps, start=1)}

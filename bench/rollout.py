"""`tlt bench rollout`: the speed-up by speculation on this machine, for every policy, on four workloads.

    rl      rollouts of the run's policy (after the cold start, or trained), as one worker decodes them
    tail    the few longest of these responses among short ones
    short   four steps of rl, with every response cut at the median length: no tail
    raw     the start model before the cold start, on word problems (gsm_symbolic) at the same temperature: high
            entropy, so drafts are hardly ever right

All configurations have the same requests, lengths and noise.  Engines run in turn on the threads of one worker.

"adaptive" is the tuner with the state of the previous repeat, as in a run from its second step on; "from nothing" is
the tuner without it.
"""

import dataclasses
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from prefect import flow

from bench.report import write_report
from bench.side_by_side import Measured, Workload, compare, differing, fix_lengths
from bench.verdicts import summarise, verdict
from conf.data import GymData, GymTask
from conf.load import ConfigError
from conf.rollout import SpeculationConfig, StrategyConfig
from conf.run import RunConfig
from flows._terminal import Terminal
from tasks.stages import cold_start, prepare_data, prepare_model
from tlt_core.data import dataset
from tlt_core.data.prompt_order import PromptOrder
from tlt_core.drafter.kinds import strategies_of
from tlt_core.items.types import GenerationRequest, NoiseKey, Prompt, SamplingParams
from tlt_core.machine.precision import as_torch
from tlt_core.model.load import load_decoder, load_tokenizer, stop_token_ids

_RAW_TOKENS = 256  # longest response of the raw model, which rambles
_RAW_PROMPTS, _RAW_SAMPLES, _RAW_LIVE = 8, 4, 16
_RAW_PROMPT_TOKENS = 512  # longest prompt of the raw model
_SHORT_STEPS = 4  # steps whose prompts make up the short workload: one step takes only a second
_LONGEST, _AMONG = 4, 16  # requests of the tail workload
_CLAIMS = {  # ratio of the adaptive engine to plain decoding, and its bound
    "rl": (("tail_tokens_per_s", 2.0), ("tokens_per_s", 1.0)),
    "tail": (("tokens_per_s", 1.7),),
    "short": (("tokens_per_s", 0.97),),
    "raw": (("tokens_per_s", 0.97),),
}
_OF_BEST = 0.97
_KEPT = "cost_model, kept"  # its tuner keeps its state over the repeats, as over the steps of a run


@flow(name="bench-rollout")
def bench_rollout(
    cfg: RunConfig, *, repeats: int, out: Path, command: str, workload: str | None = None
) -> dict[str, Any]:
    """Measure, judge and write the report; returns it.  workload: only this one."""
    if workload not in (None, *_CLAIMS):
        raise ConfigError(f"--workload={workload}: choose one of {', '.join(_CLAIMS)}, or leave it out for all")
    torch.set_num_threads(cfg.cluster.threads_per_worker)
    with Terminal() as show:
        start = prepare_model(cfg)
        data = prepare_data(cfg, start)
        policy = cfg.run_dir / "policy"
        if not policy.is_dir():
            policy = cold_start(cfg, start, data, show.stage)[0] if cfg.coldstart.enabled else start
    rows, verdicts = [], []
    for work in _workloads(cfg, start, policy, Path(data.path)):
        if workload not in (None, work.name):
            continue
        compared = configurations(cfg.rollout.speculation)
        measured = compare(work, compared, repeats=repeats, seed=cfg.seed, kept=[_KEPT])
        rows += [_lengths_row(work, measured), *_rows(work, measured)]
        verdicts += _verdicts(work.name, measured)
    return write_report(out, command=command, repeats=repeats, rows=rows, verdicts=verdicts)


def configurations(base: SpeculationConfig) -> dict[str, SpeculationConfig]:
    """Plain decoding, every adaptive policy, and each strategy by itself."""
    strategies = [StrategyConfig(**strategy._asdict()) for strategy in strategies_of(base)]
    adaptive = base.model_copy(update={"policy": "cost_model"})
    # These two are measured next to each other, because the claim is about their ratio.
    named = {"off": base.model_copy(update={"policy": "off"}), _KEPT: adaptive}
    named |= {"cost_model": adaptive, "beg_mab": base.model_copy(update={"policy": "beg_mab"})}
    for arm, strategy in zip(strategies_of(base), strategies, strict=True):
        named[f"fixed {arm}"] = base.model_copy(update={"policy": "fixed", "strategies": (strategy,)})
    return named


def _word_problems(cfg: RunConfig, tokenizer: Any, *, vocab_size: int) -> list[Prompt]:
    """Made in a temporary folder: stages of dvc.yaml depend only on the run's own data set."""
    tasks = (GymTask(name="gsm_symbolic"),)
    wanted = GymData(kind="reasoning_gym", tasks=tasks, num_train=_RAW_PROMPTS, num_validation=1, seed=cfg.data.seed)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "data"
        dataset.prepare(
            wanted,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_prompt_tokens=_RAW_PROMPT_TOKENS,
            out_dir=folder,
        )
        return dataset.load(folder, "train", tokenizer)


def _workloads(cfg: RunConfig, start: Path, policy: Path, data_dir: Path) -> Sequence[Workload]:
    tokenizer, dtype = load_tokenizer(policy), as_torch(cfg.rollout.dtype)
    prompts = PromptOrder(dataset.load(data_dir, "train", tokenizer), seed=cfg.seed)
    share, *later = (prompts.take(cfg.rollout.num_prompts)[:: cfg.cluster.num_workers] for _ in range(_SHORT_STEPS))
    params = SamplingParams(
        temperature=cfg.rollout.temperature,
        top_p=cfg.rollout.top_p,
        top_k=cfg.rollout.top_k,
        max_new_tokens=cfg.rollout.max_new_tokens,
        stop_token_ids=stop_token_ids(policy, tokenizer, also=cfg.rollout.stop_token_ids),
    )
    decoder = load_decoder(policy, dtype=dtype, device="cpu")
    requests = _requests(share, cfg.rollout.num_samples, seed=cfg.seed)
    rl = Workload("rl", decoder, requests, params, cfg.rollout.max_live_requests)
    rl = fix_lengths(rl, seed=cfg.seed)
    ordered = sorted(rl.requests, key=lambda r: r.max_new_tokens or 0)
    median = ordered[len(ordered) // 2].max_new_tokens or params.max_new_tokens
    short_params = dataclasses.replace(params, max_new_tokens=median)
    short_requests = requests + [
        request
        for step, part in enumerate(later, start=2)
        for request in _requests(part, cfg.rollout.num_samples, seed=cfg.seed, step=step)
    ]
    raw_params = dataclasses.replace(params, max_new_tokens=_RAW_TOKENS)
    problems = _word_problems(cfg, tokenizer, vocab_size=decoder.config.vocab_size)
    raw_requests = _requests(problems, _RAW_SAMPLES, seed=cfg.seed)
    raw = load_decoder(start, dtype=dtype, device="cpu")
    return (
        rl,
        rl._replace(name="tail", requests=ordered[:-_LONGEST][: _AMONG - _LONGEST] + ordered[-_LONGEST:]),
        fix_lengths(Workload("short", decoder, short_requests, short_params, rl.max_live), seed=cfg.seed),
        fix_lengths(Workload("raw", raw, raw_requests, raw_params, _RAW_LIVE), seed=cfg.seed),
    )


def _requests(prompts: Sequence[Prompt], samples: int, *, seed: int, step: int = 1) -> list[GenerationRequest]:
    return [GenerationRequest(NoiseKey(seed, step, p.id, s), p.tokens) for p in prompts for s in range(samples)]


def _lengths_row(workload: Workload, measured: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    """Lengths of the responses, which are the same in every configuration."""
    lengths = torch.tensor([len(r.completion) for r in measured["off"][0].rollouts.values()], dtype=torch.float64)
    p50, p99 = (float(lengths.quantile(q)) for q in (0.5, 0.99))
    figures = {"responses": float(len(lengths)), "tokens": float(lengths.sum()), "p50": p50, "p99": p99}
    return {"workload": workload.name, "configuration": "lengths", **figures, "p99_over_p50": p99 / p50}


def _rows(workload: Workload, measured: Mapping[str, Sequence[Measured]]) -> list[dict[str, Any]]:
    """A row for each configuration.  ratio: tokens per second over those of plain decoding in the same repeat."""
    plain, rows = measured["off"], []
    for name, runs in measured.items():
        for mine, other in zip(runs, plain, strict=True):
            mine.figures["ratio"] = mine.figures["tokens_per_s"] / other.figures["tokens_per_s"]
            mine.figures["differing"] = differing(other.rollouts, mine.rollouts)
        figures = [m.figures for m in runs]
        rows.append({"workload": workload.name, "configuration": name, **summarise(figures, list(figures[0]))})
    return rows


def _verdicts(workload: str, measured: Mapping[str, Sequence[Measured]]) -> list[dict[str, Any]]:
    plain = measured["off"]
    best = max(
        (runs for name, runs in measured.items() if name == "off" or name.startswith("fixed")),
        key=lambda runs: statistics.median(m.figures["tokens_per_s"] for m in runs),
    )
    verdicts = []
    for name, title in ((_KEPT, "adaptive"), ("cost_model", "adaptive from nothing")):
        claims = [(f"over plain, {figure}", figure, plain, bound) for figure, bound in _CLAIMS[workload]]
        claims.append(("over the best fixed strategy, tokens_per_s", "tokens_per_s", best, _OF_BEST))
        for claim, figure, others, bound in claims:
            pairs = zip(measured[name], others, strict=True)
            ratios = [mine.figures[figure] / other.figures[figure] for mine, other in pairs]
            verdicts.append(verdict(f"{workload}: {title} {claim}", ratios, bound))
    return verdicts

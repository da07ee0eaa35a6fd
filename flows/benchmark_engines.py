"""`tlt bench engines`: our engine beside those of others, on the same prompts, threads and cores.

    plain, adaptive                    our engine, without and with speculation as configured
    transformers, transformers lookup  `generate`, and its prompt look-up (one request at a time)
    vllm, vllm eager, vllm ngram, ...  vLLM on CPU in its own environment (`make vllm-env`): compiled as it does by
                                       default, uncompiled, with n-grams, and with the configured EAGLE-3 drafter
    llama.cpp, llama.cpp fp16          in an environment that is made for it, the model converted to GGUF
    openvino                           OpenVINO GenAI in an environment that is made for it, the model converted to IR

bf16 as configured, greedy and at temperature 1, 1 to 32 live requests, a fixed number of new tokens.  The model is the
one that the run starts from; with `rollout.speculation.drafter_path` the run's policy, which the drafter was made for.
What cannot be measured here is a row that says why.  Rows say the precision in which an engine computed.  Where every
engine can be limited, `--instructions avx2` limits it as on a processor without AVX-512; variables that the user has
set for this reach the engines too, and the report names them.
"""

import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow

from conf.load import ConfigError
from conf.schema import RunConfig, SpeculationConfig
from flows._terminal import Terminal
from flows.benchmark import Bound, judge, write_report
from tasks.coldstart import cold_start
from tasks.prepare import prepare_data, prepare_model
from tlt_core import data
from tlt_core.bench_engines import Case, Contest, EngineSpec, Measured, compete, cores, own_environment, own_python
from tlt_core.greedy_agreement import LogProbs, agreement, float32_log_probs
from tlt_core.inputs import artifacts_dir
from tlt_core.model.load import load_tokenizer
from tlt_core.peers.engines import chosen_peers, peers_of
from tlt_core.prompt_order import PromptOrder
from tlt_core.serving import vllm_server
from tlt_core.verdicts import summarise

_LIVE = (1, 4, 16)
_TEMPERATURES = (0.0, 1.0)
_NEW_TOKENS = 128
_KV_CACHE_MB = 1024
_LOOKUP_TOKENS = 10  # transformers' own example
_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
_EAGLE3_TOKENS = 3
_FILES = Path(__file__).parents[1] / "tlt_core" / "engine_processes"
_BOUNDS = (
    ("vllm", ("vllm", "vllm eager"), 1.2),
    ("transformers", ("transformers",), 1.5),
    ("torch's float32 kernels", ("plain float32 torch",), 1.5),
    ("llama.cpp", ("llama.cpp", "llama.cpp fp16"), 1.0),
    ("openvino", ("openvino",), 1.0),
)
_REFERENCE = "transformers"
_NEAR_TIE = 0.5  # nats: bfloat16 logits of 16 to 32 have steps of 0.125, and both tokens' are rounded
_LIMITS = {  # by what `--instructions` says
    "all": {},
    "avx2": {"TLT_NATIVE_KERNELS": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
_TELLING = ("TLT_NATIVE_", "ATEN_", "ONEDNN_", "DNNL_", "GGML_", "OV_", "MKL_", "OMP_", "KMP_")


@flow(name="bench-engines")
def bench_engines(
    cfg: RunConfig, *, repeats: int, out: Path, command: str, peers: str = "all", instructions: str = "all"
) -> dict[str, Any]:
    """Measure, judge, write the report; returns it.

    `rollout.max_new_tokens` and `rollout.max_live_requests` lower the number of new tokens and the largest batch.
    peers: all, none, or names with commas.  instructions: all or avx2.  Raises ConfigError.
    """
    wanted, limits = _peers(peers), _limits(instructions)
    new_tokens = max(2, min(_NEW_TOKENS, cfg.rollout.max_new_tokens))
    lives = [live for live in _LIVE if live <= cfg.rollout.max_live_requests]
    with Terminal() as show:
        model = prepare_model(cfg)
        dataset = prepare_data(cfg, model)
        if cfg.rollout.speculation.drafter_path is not None:
            policy = cfg.run_dir / "policy"
            model = policy if policy.is_dir() else cold_start(cfg, model, dataset, show.stage).model_dir
    train = data.load(Path(dataset.path), "train", load_tokenizer(model))
    prompts = [p.tokens.tolist() for p in PromptOrder(train, seed=cfg.seed).take(max(lives))]
    specs, missing = engines(
        cfg, model, max_live=max(lives), max_len=max(map(len, prompts)) + new_tokens + 32, peer_names=wanted
    )
    contest = compete(
        limited(specs, limits),
        [Case(live, temperature) for temperature in _TEMPERATURES for live in lives],
        prompts,
        new_tokens=new_tokens,
        repeats=repeats,
        seed=cfg.seed,
        log_dir=cfg.run_dir / "bench-engines",
    )
    rows = [{"new_tokens": new_tokens, "model": model.name, **row} for row in rows_of(contest)]
    failed = [{"configuration": name, "reason": f"left out: {reason}"} for name, reason in contest.failed.items()]
    tokenizer = load_tokenizer(model)
    agreements = agreements_of(contest, prompts, enders=tokenizer.all_special_ids, log_probs=float32_log_probs(model))
    return write_report(
        out,
        command=command,
        repeats=repeats,
        rows=[*rows, *agreements, *_left_out(specs), *missing, *failed],
        verdicts=[*verdicts_of(contest), *agreement_verdicts(agreements)],
        environment=_telling(limits),
    )


def engines(
    cfg: RunConfig, model: Path, *, max_live: int, max_len: int, peer_names: Sequence[str] = ()
) -> tuple[list[EngineSpec], list[dict[str, Any]]]:
    """What can be started here, and a row for what cannot."""
    threads = cfg.cluster.threads_per_worker
    common = {
        "model": str(model.absolute()),
        "dtype": cfg.rollout.dtype,
        "threads": threads,
        "cores": cores(threads),
        "max_live": max_live,
        "max_len": max_len,
        "kv_cache_mb": _KV_CACHE_MB,
    }

    def own(name: str, file: str, most_live: int = 0, kernels: str = "", **settings: Any) -> EngineSpec:
        environment = own_environment(threads=threads) | ({"TLT_NATIVE_KERNELS": kernels} if kernels else {})
        return EngineSpec(name, _FILES / file, own_python(), environment, common | settings, most_live)

    off = SpeculationConfig(policy="off").model_dump(mode="json")
    torchs = cfg.update.dtype  # what torch need not emulate here
    specs = [
        own("plain", "own.py", speculation=off),
        own("plain float32 torch", "own.py", kernels="0", dtype="float32", speculation=off),
        own("adaptive", "own.py", speculation=_absolute(cfg.rollout.speculation).model_dump(mode="json")),
        own("transformers", "hf.py", dtype=torchs, lookup_tokens=0),
        own("transformers lookup", "hf.py", most_live=1, dtype=torchs, lookup_tokens=_LOOKUP_TOKENS),
    ]
    found = peers_of(peer_names, common, environments=artifacts_dir() / "peers", work_dir=cfg.run_dir / "bench-engines")
    specs += found.specs
    missing = [{"configuration": name, "reason": reason} for name, reason in found.reasons.items()]
    python = vllm_server.vllm_python()
    kinds = _vllm_kinds(cfg.rollout.speculation)
    if not python.is_file():
        reason = f"left out: {python} does not exist; 'make vllm-env' builds vLLM's environment"
        return specs, [*missing, *({"configuration": name, "reason": reason} for name in kinds)]
    # The scheduler in a process of its own would compete with the computing threads for the same cores.
    environment = vllm_server.environment(python, threads=threads) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for name, settings in kinds.items():
        specs.append(EngineSpec(name, _FILES / "vllm_llm.py", python, environment, common | settings))
    return specs, missing


def limited(specs: Sequence[EngineSpec], limits: Mapping[str, str]) -> list[EngineSpec]:
    """The engines with fewer instructions.  Variables that the user has set stay; engines that fail are left out."""
    if not limits:
        return list(specs)
    return [spec._replace(environment={**limits, **spec.environment}, optional=spec.name != "plain") for spec in specs]


def _limits(instructions: str) -> dict[str, str]:
    if instructions not in _LIMITS:
        raise ConfigError(f"--instructions={instructions}: say {' or '.join(_LIMITS)}")
    return _LIMITS[instructions]


def _peers(names: str) -> tuple[str, ...]:
    try:
        return chosen_peers(names)
    except ValueError as error:
        raise ConfigError(f"--peers={names}: {error}") from None


def _telling(limits: Mapping[str, str]) -> dict[str, str]:
    """Variables that may change what an engine computes with."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_TELLING)}
    return dict(sorted({**limits, **found}.items()))


def _vllm_kinds(speculation: SpeculationConfig) -> dict[str, dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {
        "vllm": {"speculative": None, "eager": False},
        "vllm eager": {"speculative": None, "eager": True},
        "vllm ngram": {"speculative": _NGRAM, "eager": True},
    }
    if speculation.drafter_path is not None:
        drafter = str(Path(speculation.drafter_path).absolute())
        eagle3 = {"method": "eagle3", "model": drafter, "num_speculative_tokens": _EAGLE3_TOKENS}
        kinds["vllm eagle3"] = {"speculative": eagle3, "eager": True}
    return kinds


def _absolute(speculation: SpeculationConfig) -> SpeculationConfig:
    """Other processes may have another working folder."""
    path = speculation.drafter_path
    return speculation.model_copy(update={"drafter_path": path and str(Path(path).absolute())})


def rows_of(contest: Contest) -> list[dict[str, Any]]:
    """One an engine and case.  `over_plain`: tokens per second over plain decoding's in the same repeat; `differing`:
    share of responses whose greedy tokens are not our plain engine's (in bf16 near-ties flip)."""
    rows = []
    for (name, case), runs in contest.measured.items():
        figures = []
        for mine, plain in zip(runs, contest.measured["plain", case], strict=True):
            row = {
                "tokens_per_s": mine.tokens_per_s,
                "total_tokens_per_s": mine.total_tokens_per_s,
                "over_plain": mine.tokens_per_s / plain.tokens_per_s,
            }
            if case.temperature == 0:
                unlike = sum(a != b for a, b in zip(mine.tokens, plain.tokens, strict=True))
                row["differing"] = unlike / case.live
            figures.append(row)
        about = {"configuration": name, "live": case.live, "temperature": case.temperature, **contest.described[name]}
        rows.append({**about, **summarise(figures, list(figures[0]))})
    return rows


def _left_out(specs: Sequence[EngineSpec]) -> list[dict[str, Any]]:
    return [
        {"configuration": s.name, "reason": f"takes {s.most_live} live request at a time: not measured with more"}
        for s in specs
        if s.most_live
    ]


def verdicts_of(contest: Contest) -> list[dict[str, Any]]:
    """Plain decoding over each rival, at the batch sizes that were promised; over the faster one of its variants."""
    verdicts = []
    for rival, variants, bound in _BOUNDS:
        for case in dict.fromkeys(case for _, case in contest.measured if case.live in _LIVE):
            measured = [contest.measured[name, case] for name in variants if (name, case) in contest.measured]
            if measured:
                fastest = max(measured, key=_median_rate)
                ratios = [
                    a.tokens_per_s / b.tokens_per_s
                    for a, b in zip(contest.measured["plain", case], fastest, strict=True)
                ]
                claim = f"plain over {rival}, {case.live} live, temperature {case.temperature:g}"
                verdicts += judge([{"ratio": r} for r in ratios], [Bound(claim, "ratio", bound, at_least=True)])
    return verdicts


def agreements_of(
    contest: Contest, prompts: Sequence[Sequence[int]], *, enders: Collection[int], log_probs: LogProbs
) -> list[dict[str, Any]]:
    """Greedy tokens of every engine beside transformers', on the largest batch: a row each."""
    cases = [case for name, case in contest.measured if name == _REFERENCE and case.temperature == 0]
    if not cases:
        return []
    case = max(cases, key=lambda case: case.live)
    reference = contest.measured[_REFERENCE, case][0].tokens
    rows = []
    for name, other in contest.measured:
        if name != _REFERENCE and other == case:
            theirs = contest.measured[name, case][0].tokens
            found = agreement(prompts[: case.live], reference, theirs, enders=enders, log_probs=log_probs)
            rows.append({"configuration": name, "compared_with": _REFERENCE, "live": case.live, **found._asdict()})
    return rows


def agreement_verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where an engine's greedy tokens part from transformers', the two tokens are nearly as likely."""
    return [
        verdict
        for row in rows
        for verdict in judge(
            [row],
            [Bound(f"{row['configuration']} parts from transformers at near-ties", "largest_gap", _NEAR_TIE, False)],
        )
    ]


def _median_rate(runs: Sequence[Measured]) -> float:
    return statistics.median(m.tokens_per_s for m in runs)

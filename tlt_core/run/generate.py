"""Offline batch generation: JSONL of prompts in, JSONL of responses out.

Each input line has `prompt` (text; the chat template is applied) or `token_ids` (used as they are), and optionally
`id` (default: its number).  Each output line has id, text, token_ids, logprobs, finish_reason.  The same seed gives
the same tokens whatever the batch size and the number of workers.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from conf.rollout import RolloutConfig, SpeculationConfig
from conf.system import ClusterConfig
from tlt_core.cluster.dispatcher import Drained
from tlt_core.cluster.group import WorkerGroup
from tlt_core.cluster.messages import WorkerSpec
from tlt_core.data.dataset import DataError, encode_prompt
from tlt_core.data.file_questions import jsonl_rows
from tlt_core.items.store import write_atomically
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.machine.precision import as_torch, for_rollouts
from tlt_core.model.load import load_decoder, load_tokenizer, resolve, stop_token_ids
from tlt_core.rollout import build

_OFFLINE_STEP = 0  # RL steps count from 1, validation below 0


class Line(NamedTuple):
    """One input line."""

    id: Any
    tokens: torch.Tensor  # [P] int32


def generate_file(
    *,
    model: str,
    prompts: Path,
    out: Path,
    params: SamplingParams,
    seed: int,
    dtype: str,
    batch_size: int,
    num_workers: int,
    speculation: SpeculationConfig,
    system_prompt: str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Generate one response per input line; returns their number.

    `out` is written when all are done, or not at all.  Speculation changes the time, not the tokens.

    Raises DataError (a bad line: file and number), ModelError, ValueError.
    """
    folder = resolve(model)
    tokenizer = load_tokenizer(folder)
    lines = read_prompts(prompts, tokenizer, system_prompt=system_prompt)
    params = SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_new_tokens=params.max_new_tokens,
        stop_token_ids=stop_token_ids(folder, tokenizer),
    )
    requests = [
        GenerationRequest(NoiseKey(seed, _OFFLINE_STEP, index, 0), line.tokens) for index, line in enumerate(lines)
    ]
    max_len = max(len(line.tokens) for line in lines) + params.max_new_tokens
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = WorkerSpec(
        model_dir=folder.resolve(),
        rollout=RolloutConfig(dtype=for_rollouts(dtype, device), max_live_requests=batch_size, speculation=speculation),
        max_len=max_len,
        trainer=None,
        threads=max(1, torch.get_num_threads() // num_workers),
        device=device,
        seed=seed,
    )
    if num_workers == 1:
        rollouts = _generate_here(spec, requests, params, on_progress=on_progress)
    else:
        rollouts = _generate_on_group(spec, requests, params, num_workers=num_workers, on_progress=on_progress)
    rows = [_row(lines[r.key.prompt_id], r, tokenizer) for r in sorted(rollouts, key=lambda r: r.key.prompt_id)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(out, lambda partial: partial.write_text(text, encoding="utf-8"))
    return len(rows)


def read_prompts(path: Path, tokenizer: Any, *, system_prompt: str | None) -> list[Line]:
    """Parse the input file.  Raises DataError naming file, line and remedy."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; --prompts needs a JSONL file with a 'prompt' on each line")
    lines = []
    for number, (where, row) in enumerate(jsonl_rows(path), start=1):
        if not isinstance(row, dict) or not ({"prompt", "token_ids"} & set(row)):
            raise DataError(f"{where}: has neither 'prompt' nor 'token_ids'")
        tokens = row.get("token_ids") or encode_prompt(tokenizer, str(row["prompt"]), system_prompt=system_prompt)
        lines.append(Line(row.get("id", number), torch.as_tensor(tokens, dtype=torch.int32)))
    if not lines:
        raise DataError(f"{path} holds no prompts; write one JSON object with a 'prompt' per line")
    return lines


def _generate_here(
    spec: WorkerSpec,
    requests: Sequence[GenerationRequest],
    params: SamplingParams,
    *,
    on_progress: Callable[[int, int], None],
) -> list[Rollout]:
    """In this process."""
    decoder = load_decoder(spec.model_dir, dtype=as_torch(spec.rollout.dtype), device=spec.device)
    engine = build.make_engine(
        decoder,
        spec.rollout.speculation,
        max_live=spec.rollout.max_live_requests,
        max_len=spec.max_len,
        seed=spec.seed,
    )
    build.calibrate(engine)
    waiting, finished = list(reversed(requests)), []

    def pull(wanted: int) -> list[GenerationRequest]:
        return [waiting.pop() for _ in range(min(wanted, len(waiting)))]

    def on_finish(rollout: Rollout) -> None:
        finished.append(rollout)
        on_progress(len(finished), len(requests))

    engine.decode(pull, on_finish, params)
    return finished


def _generate_on_group(
    spec: WorkerSpec,
    requests: Sequence[GenerationRequest],
    params: SamplingParams,
    *,
    num_workers: int,
    on_progress: Callable[[int, int], None],
) -> list[Rollout]:
    finished: list[Rollout] = []

    def gather(drained: Drained) -> None:
        finished.extend(drained.finished)
        on_progress(len(finished), len(requests))

    cluster = ClusterConfig(num_workers=num_workers, threads_per_worker=spec.threads)
    with WorkerGroup(cluster, spec) as group:
        group.load(None, 0)
        group.run_phase([[r] for r in requests], params, dispatch="pull", on_progress=gather)
    return finished


def _row(line: Line, rollout: Rollout, tokenizer: Any) -> dict[str, Any]:
    tokens = rollout.completion.tolist()
    return {
        "id": line.id,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "token_ids": tokens,
        "logprobs": [round(x, 6) for x in rollout.logprobs.tolist()],
        "finish_reason": rollout.finish.name.lower(),
    }

"""Offline batch generation: JSONL of prompts in, JSONL of responses out.

Each input line has `prompt` (text; the chat template is applied) or `token_ids` (used as they are), and optionally
`id` (default: its number).  Each output line has id, text, token_ids, logprobs, finish_reason.  The same seed gives
the same tokens whatever the batch size and the number of workers.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from conf.rollout import RolloutConfig, SpeculationConfig
from conf.system import ClusterConfig
from tlt_core.cluster.group import WorkerGroup
from tlt_core.cluster.messages import WorkerSpec
from tlt_core.data.chat import check_variables, encode_prompt, require_embedded
from tlt_core.data.question import DataError
from tlt_core.data.response_text import response_text
from tlt_core.data.row_files import jsonl_rows
from tlt_core.drafter.eagle3.files import check_eagle3
from tlt_core.items.store import write_atomically
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.machine.disk import check_writable
from tlt_core.machine.precision import as_torch, for_rollouts
from tlt_core.machine.processors import check_workers
from tlt_core.model.load import load_config, load_decoder, load_tokenizer, resolve, stop_token_ids
from tlt_core.model.sampling import NoiseStep
from tlt_core.rollout import build

_NO_VARIABLES: Mapping[str, Any] = {}


class Input(NamedTuple):
    where: str  # file and line, for messages
    id: Any
    prompt: str | list[int]  # text, or token ids


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
    template_kwargs: Mapping[str, Any] = _NO_VARIABLES,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Generate one response per input line; returns their number.

    `out` is written when all are done, or not at all.  Speculation changes the time, not the tokens.

    Raises DataError (a bad line: file and number), FolderError, ModelError, TooManyWorkers, ValueError.
    """
    check_workers(ClusterConfig(num_workers=num_workers), setting="--num-workers")
    check_writable(out.absolute().parent, setting="the folder of --out")
    folder = resolve(model)
    config = load_config(folder)
    if speculation.drafter_path is not None:
        check_eagle3(Path(speculation.drafter_path), config)
    given = read_inputs(prompts, vocab_size=config.vocab_size)
    tokenizer = load_tokenizer(folder)  # takes seconds to import: what needs none is checked before
    room = config.max_position_embeddings - params.max_new_tokens
    check_variables(tokenizer, template_kwargs, setting="--chat-template-kwargs")
    encode = partial(encode_prompt, tokenizer, system_prompt=system_prompt, template_kwargs=template_kwargs)
    encoded = [_tokens(one, encode, room=room) for one in given]
    for one, tokens in zip(given, encoded, strict=True):
        require_embedded(tokens, tokenizer, vocab_size=config.vocab_size, where=one.where)
    params = replace(params, stop_token_ids=stop_token_ids(folder, tokenizer))
    requests = [
        GenerationRequest(NoiseKey(seed, NoiseStep.OFFLINE, index, 0), torch.tensor(tokens, dtype=torch.int32))
        for index, tokens in enumerate(encoded)
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = WorkerSpec(
        model_dir=folder.resolve(),
        rollout=RolloutConfig(dtype=for_rollouts(dtype, device), max_live_requests=batch_size, speculation=speculation),
        max_len=max(map(len, encoded)) + params.max_new_tokens,
        trainer=None,
        threads=max(1, torch.get_num_threads() // num_workers),
        device=device,
        seed=seed,
    )
    rollouts = _generate(spec, requests, params, num_workers=num_workers, on_progress=on_progress)
    rows = [_row(one.id, r, tokenizer, params.stop_token_ids) for one, r in zip(given, rollouts, strict=True)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(out, lambda partial: partial.write_text(text, encoding="utf-8"))
    return len(rows)


def read_inputs(path: Path, *, vocab_size: int) -> list[Input]:
    """Parse the input file.  Raises DataError naming file, line and remedy."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; --prompts needs a JSONL file with a 'prompt' on each line")
    given = []
    for number, (where, row) in enumerate(jsonl_rows(path), start=1):
        if not isinstance(row, dict) or not ({"prompt", "token_ids"} & set(row)):
            raise DataError(f"{where}: has neither 'prompt' nor 'token_ids'")
        given.append(Input(where, row.get("id", number), _prompt(where, row, vocab_size=vocab_size)))
    if not given:
        raise DataError(f"{path} holds no prompts; write one JSON object with a 'prompt' per line")
    return given


def _tokens(given: Input, encode: Callable[[str], list[int]], *, room: int) -> list[int]:
    """room: most tokens of a prompt.  Raises DataError."""
    tokens = encode(given.prompt) if isinstance(given.prompt, str) else given.prompt
    if len(tokens) > room:
        raise DataError(
            f"{given.where}: a prompt of {len(tokens)} tokens; beside the response the model's context has room for "
            f"{max(0, room)}: shorten the prompt, or lower --max-new-tokens"
        )
    return tokens


def _prompt(where: str, row: Mapping[str, Any], *, vocab_size: int) -> str | list[int]:
    if "token_ids" not in row:
        text = row["prompt"]
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: 'prompt' is {_short(text)}; give a text that is not blank")
        return text
    ids = row["token_ids"]
    if not isinstance(ids, list) or not ids:
        raise DataError(f"{where}: 'token_ids' is {_short(ids)}; give a list of token ids, or 'prompt' for a text")
    wrong = [x for x in ids if type(x) is not int or not 0 <= x < vocab_size]
    if wrong:
        raise DataError(
            f"{where}: 'token_ids' holds {_short(wrong[0])}; give numbers from 0 to {vocab_size - 1}, this model's ids"
        )
    return ids


def _short(value: Any) -> str:
    """For a message: a row may hold anything."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _generate(
    spec: WorkerSpec,
    requests: Sequence[GenerationRequest],
    params: SamplingParams,
    *,
    num_workers: int,
    on_progress: Callable[[int, int], None],
) -> list[Rollout]:
    """In the order of the requests; one worker is this process."""
    finished: list[Rollout] = []

    def keep(ended: Iterable[Rollout]) -> None:
        finished.extend(ended)
        on_progress(len(finished), len(requests))

    if num_workers == 1:
        own = spec.rollout
        decoder = load_decoder(spec.model_dir, dtype=as_torch(own.dtype), device=spec.device)
        engine = build.make_engine(
            decoder, own.speculation, max_live=own.max_live_requests, max_len=spec.max_len, seed=spec.seed
        )
        build.calibrate(engine)
        engine.decode_all(requests, params, on_finish=lambda rollout: keep([rollout]))
    else:
        cluster = ClusterConfig(num_workers=num_workers, threads_per_worker=spec.threads)
        with WorkerGroup(cluster, spec) as group:
            group.load(None, 0)
            groups = [[request] for request in requests]
            group.run_phase(groups, params, dispatch="pull", on_progress=lambda drained: keep(drained.finished))
    return sorted(finished, key=lambda r: r.key.prompt_id)


def _row(given_id: Any, rollout: Rollout, tokenizer: Any, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    tokens = rollout.completion.tolist()
    return {
        "id": given_id,
        "text": response_text(tokenizer, tokens, stop_token_ids=stop_token_ids),
        "token_ids": tokens,
        "logprobs": [round(x, 6) for x in rollout.logprobs.tolist()],
        "finish_reason": rollout.finish.name.lower(),
    }

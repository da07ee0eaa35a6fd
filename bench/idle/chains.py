"""Drafts along a run's recorded responses: how many tokens each drafter's chains would have had accepted.

A *run* is what a chain begun after n tokens gets accepted, for n from the prompt's end to the response's last token but
one, under the response's own noise, which is what the engine accepts (`drafter/eagle3/acceptance`).  A chain cut to
fewer drafts has min(run, drafts) accepted, so one measurement answers for all lengths of chains.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from conf.run import RunConfig
from tlt_core.drafter.eagle3.acceptance import passes, start_runs
from tlt_core.drafter.eagle3.model import Eagle3Model
from tlt_core.drafter.eagle3.windows import whole
from tlt_core.drafter.ngram.drafter import NgramDrafter
from tlt_core.idle_training.buffer import map_sequences
from tlt_core.idle_training.checkpoint import load_checkpoint
from tlt_core.items.speculation import LiveView, Strategy
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import GenerationRequest, SamplingParams
from tlt_core.machine.precision import as_torch


class Recorded(NamedTuple):
    worker: str
    sequence: TrainSequence

    @property
    def id(self) -> str:
        return f"{self.worker}/{self.step}/{self.sequence.key.prompt_id}/{self.sequence.key.sample}"

    @property
    def step(self) -> int:
        return self.sequence.step


Runs = Mapping[str, Tensor]  # accepted drafts of the chain begun at each token, by response


def recorded(idle_training_dir: Path) -> list[Recorded]:
    """Responses that the run's workers have kept, by step; nobody may be training."""
    found: list[Recorded] = []
    for folder in sorted(idle_training_dir.glob("worker_*")):
        saved = load_checkpoint(folder / "training.safetensors")
        for file in saved.values["buffer"]["files"]:
            sequences = map_sequences(folder / file["name"], file["sequences"], nbytes=file["bytes"])
            found += [Recorded(folder.name, sequence) for sequence in sequences]
    return sorted(found, key=lambda r: (r.step, r.worker, r.sequence.key))


def accept_length(runs: Runs, *, drafts: int) -> float:
    """All tokens over all rounds, the target's own among them, with chains of at most so many drafts."""
    cut = [run_P.clamp_max(drafts) for run_P in runs.values()]
    return sum(map(len, cut)) / sum(_rounds(run_P.tolist()) for run_P in cut)


def by_round_error(runs: Runs, *, drafts: int) -> float:
    """Standard error of `accept_length`: by chance alone, had the policy answered the same prompts again.

    Of L = sum_i t_i / R, R = sum_i r_i, tokens over rounds of each response, linearised: with d_i = t_i - L r_i,
    error^2 = sum over prompts of n / (n - 1) sum_i (d_i - mean d)^2 / R^2."""
    sizes = {name: (len(run_P), _rounds(run_P.clamp_max(drafts).tolist())) for name, run_P in runs.items()}
    tokens, rounds = (sum(column) for column in zip(*sizes.values(), strict=True))
    off: dict[str, list[float]] = {}
    for name, (own_tokens, own_rounds) in sizes.items():
        off.setdefault(name.split("/")[2], []).append(own_tokens - own_rounds * tokens / rounds)
    return math.sqrt(sum(len(d) * statistics.variance(d) for d in off.values() if len(d) > 1)) / rounds


def _rounds(run: Sequence[int]) -> int:
    at = rounds = 0
    while at < len(run):
        at += 1 + run[at]
        rounds += 1
    return rounds


def longer(one: Runs, other: Runs) -> Runs:
    """Of two drafters the one that has more accepted, at each token: as if one knew beforehand."""
    return {name: torch.maximum(run_P, other[name]) for name, run_P in one.items()}


def eagle3_runs(
    cfg: RunConfig, model: Eagle3Model, embedding_VD: Tensor, responses: Sequence[Recorded], *, drafts: int
) -> dict[str, Tensor]:
    """Of an EAGLE-3 drafter's chains of so many drafts."""
    params = SamplingParams(temperature=cfg.rollout.temperature, top_p=cfg.rollout.top_p, top_k=cfg.rollout.top_k)
    dtype = as_torch(cfg.update.dtype)
    starts = [window for r in responses for window in whole(r.sequence)]
    parts: dict[int, list[Tensor]] = {id(r.sequence): [] for r in responses}
    for windows in passes(starts):
        runs = start_runs(model, embedding_VD, windows, depth=drafts, params=params, compute_dtype=dtype)
        for window, run_T in zip(windows, runs, strict=True):
            parts[id(window.sequence)].append(run_T)
    return {r.id: torch.cat(parts[id(r.sequence)]) for r in responses}


class NgramReplay:
    """The n-gram drafter beside a run: a worker's samples of one prompt grow side by side, token by token, and stay
    indexed for the prompt's next visits."""

    def __init__(self, cfg: RunConfig) -> None:
        self._cfg = cfg.rollout
        self._drafters: dict[str, NgramDrafter] = {}  # by worker

    def runs(self, responses: Sequence[Recorded], *, drafts: int) -> dict[str, Tensor]:
        """Of chains of so many drafts.  Responses of later steps than those of the call before."""
        found: dict[str, Tensor] = {}

        def visit(r: Recorded) -> tuple[int, str, int]:
            return r.step, r.worker, r.sequence.key.prompt_id

        for _, group in itertools.groupby(sorted(responses, key=visit), key=visit):
            found |= self._visit(sorted(group, key=lambda r: -r.sequence.rows), drafts)
        return found

    def _visit(self, siblings: Sequence[Recorded], drafts: int) -> dict[str, Tensor]:
        """siblings: the longest first, so that the last rows end first."""
        ngram = self._cfg.speculation.ngram
        new = NgramDrafter(max_index_tokens=ngram.max_index_tokens, min_match=ngram.min_match)
        drafter = self._drafters.setdefault(siblings[0].worker, new)
        texts = [r.sequence.tokens_L.long() for r in siblings]
        first = len(texts[0]) - siblings[0].sequence.rows
        params = SamplingParams(temperature=self._cfg.temperature)
        requests = [GenerationRequest(r.sequence.key, r.sequence.tokens_L[:first]) for r in siblings]
        tokens_BL = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        streams_B = torch.tensor([r.sequence.stream for r in siblings])
        for row, request in enumerate(requests):
            drafter.admit(row, request)
        runs: list[list[int]] = [[] for _ in siblings]
        live = len(siblings)
        for length in range(first, len(texts[0])):
            while len(texts[live - 1]) <= length:
                live -= 1
                drafter.release(live, texts[live])
            lengths, room = [length] * live, [drafts + 1] * live
            view = LiveView(requests[:live], tokens_BL[:live], lengths, room, streams_B[:live], params)
            tree = drafter.propose(view, Strategy("ngram", drafts, 1, drafts))
            chains: list[list[int]] = [[] for _ in range(live)]
            for row, token in zip(tree.rows_N.tolist(), tree.tokens_N.tolist(), strict=True):
                chains[row].append(token)
            for own, chain, text_L in zip(runs, chains, texts, strict=False):
                pairs = zip(chain, text_L[length:].tolist(), strict=False)
                own.append(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        for row in reversed(range(live)):
            drafter.release(row, texts[row])
        return {r.id: torch.tensor(run) for r, run in zip(siblings, runs, strict=True)}

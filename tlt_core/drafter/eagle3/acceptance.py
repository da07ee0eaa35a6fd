"""How many tokens of a drafter's chains are accepted, measured exactly on recorded responses, without a target.

A chain begun after n known tokens drafts token n + k from the accepted path so far, which is the response itself, and
with the noise of position n + k, which is the response's own (see `tree`).  So draft k is right exactly when

    arg-max_v (log q_v / T + g_v(n + k)) = token n + k        q: depth k + 1 of `depths` at row n + k - 2

(T = 0: arg-max log q).  Accepted are the drafts before the first wrong one.  Every row is a start, and all rows take
one pass of the layer per depth.  A test shows that the engine accepts the same numbers, token for token.

Shapes: T query rows of a pass, N rows whose chains are right so far, R rows of the pack, D hidden size, J draft
vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.sampling.coupled_sample import gumbel_noise
from tlt_core.drafter.eagle3.depths import drafted_depths
from tlt_core.drafter.eagle3.model import Eagle3Model
from tlt_core.drafter.eagle3.tree import perturbed_scores
from tlt_core.drafter.eagle3.windows import Pack, Window, whole
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import SamplingParams
from tlt_core.model.sampling import row_keys

_PASS_ROWS = 512  # starts of one pass


class AcceptanceMeasure(NamedTuple):
    """Sums over starts."""

    starts: int
    accepted_by_depth: tuple[int, ...]  # entry k: starts whose first k + 1 drafts were right

    @property
    def accept_length(self) -> float:
        """Tokens that a round emits on average, the target's own among them; 1: nothing was accepted."""
        return 1 + sum(self.accepted_by_depth) / self.starts


def measure_acceptance(
    model: Eagle3Model,
    embedding_VD: Tensor,
    sequences: Sequence[TrainSequence],
    *,
    depth: int,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    compute_dtype: torch.dtype = torch.float32,
) -> AcceptanceMeasure:
    """Chains of `depth` drafts from every trained row of the sequences, sampled as the sequences were.

    A chain ends with its response: the last start has one draft.  Exact where the drafter computes in the same
    precision (bfloat16 against float32: near-ties differ).  Raises ValueError when there is no start.
    """
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    starts = [window for s in sorted(sequences, key=lambda s: s.rows) for window in whole(s)]
    if not starts:
        raise ValueError(f"no row of {len(sequences)} sequences to start a draft from: they need three tokens each")
    runs: list[Tensor] = []
    for part in passes(starts):
        runs += start_runs(model, embedding_VD, part, depth=depth, params=params, compute_dtype=compute_dtype)
    accepted_N = torch.cat(runs)
    reached = (accepted_N[:, None] > torch.arange(depth)).sum(0)
    return AcceptanceMeasure(len(accepted_N), tuple(reached.tolist()))


@torch.inference_mode()
def start_runs(
    model: Eagle3Model,
    embedding_VD: Tensor,
    starts: Sequence[Window],
    *,
    depth: int,
    params: SamplingParams,
    compute_dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Accepted drafts of a chain begun at each row of these windows, which must be trained ones: [rows of the window]
    int64 for each, on the CPU, in one pass.

    A chain begun at row p, that is after p + 2 tokens, ends with its response.
    """
    ends = [min(s.end + depth - 1, len(s.sequence.tokens_L) - 2) for s in starts]
    windows = [Window(s.sequence, s.start, end) for s, end in zip(starts, ends, strict=True)]
    pack = Pack.of(windows, model.fc.weight.device)
    first = sum(pack.context)
    positions_T, targets_T, streams_T = pack.positions_R[first:] + 2, pack.targets_T(), pack.streams_T()
    ends_T = torch.tensor([window.end for window in windows]).repeat_interleave(torch.tensor(pack.queries)) + 2
    ends_T = ends_T.to(pack.device)
    ids_J = model.draft_ids_J.to(torch.int32)
    runs_T = torch.zeros_like(positions_T)
    alive_N = torch.arange(len(runs_T), device=pack.device)  # starts whose chain is right so far
    half = compute_dtype == torch.bfloat16
    with torch.autocast(pack.device.type, torch.bfloat16, enabled=half):
        embeds_RD = F.embedding(pack.tokens_R, embedding_VD).float()
        for k, y_TD in enumerate(drafted_depths(model, embeds_RD, pack, depth=depth)):
            rows_N = alive_N + k
            noise_NJ = None
            if params.temperature:
                noise_NJ = gumbel_noise(row_keys(streams_T[rows_N], positions_T[rows_N]), ids_J)
            columns_N = perturbed_scores(model.logits(y_TD[rows_N]), noise_NJ, params)[:, 0].argmax(-1)
            alive_N = alive_N[model.draft_ids_J[columns_N] == targets_T[rows_N]]
            runs_T[alive_N] += 1
            alive_N = alive_N[positions_T[alive_N] + k + 1 < ends_T[alive_N]]  # others end with their responses
            if not len(alive_N):
                break
    return [run_T[: s.rows].cpu() for s, run_T in zip(starts, runs_T.split(pack.queries), strict=True)]


def passes(starts: Sequence[Window]) -> Iterator[list[Window]]:
    """The same starts, cut and gathered into passes of bounded size."""
    part: list[Window] = []
    for window in starts:
        first = window.start
        while first < window.end:
            part.append(Window(window.sequence, first, min(window.end, first + _PASS_ROWS - sum(w.rows for w in part))))
            first = part[-1].end
            if sum(w.rows for w in part) == _PASS_ROWS:
                yield part
                part = []
    if part:
        yield part

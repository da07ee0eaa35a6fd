"""One round: a drafter has guessed several tokens ahead, one pass of the target checks all guesses.

    newest tokens + draft trees -> decoder over the KV cache, each node seeing its ancestors -> the target's own choice
    at every node -> walk along the choices -> emitted tokens; the accepted path's keys and values move into place

A plain round is a round whose trees are empty: each row's newest token is its whole path.

Theorem.  Let pi be the policy after temperature and filters (`model/sampling`), and noise g_p be keyed by (stream,
position p).  Let plain decoding emit x_p = f(x_<p, g_p) with f(x, g) = arg-max_v (log pi(v | x) + g_v).  Then a round
that begins after x_<p emits x_p, .., x_{p+k} for some k >= 0, whatever the tree.  By induction over rounds, so is the
whole response plain decoding's.
Proof.  By induction along the accepted path.  The root is the newest token of x_<p, so the choice there is
f(x_<p, g_p) = x_p: the first emitted token is plain decoding's.  A child is entered only if it carries exactly the
token chosen at its parent; its ancestors then spell x_<=p and nothing else (it attends to its ancestors alone), so its
own choice is f(x_<=p, g_{p+1}) = x_{p+1}.  No acceptance probability and no resampling are needed, because the choice
is never altered, only computed earlier.  The drafter's guesses, its noise and its failures decide how large k is, not
which tokens come.  (Exact in exact arithmetic: two batch shapes round differently, which shows where two
candidates' scores lie within that rounding of each other.)

Since x_p is an exact sample of pi (Gumbel-max), so is the round's output.  Drafting with the *same* noise raises the
chance that the guess is right (Daliri, Musco, Suresh, arXiv 2408.07978).

Shapes: B live rows, T nodes (every row's newest token and its drafts), A tokens that a row may emit.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.sampling.spec_verify import AcceptedPath
from tlt_core.items.hidden_states import PathStates
from tlt_core.items.types import SamplingParams
from tlt_core.model.decoder import Attend, Decoder, PlacedAttend
from tlt_core.model.sampling import choose, choose_no_sync, lognorms, row_keys
from tlt_core.rollout.batch import Emitted
from tlt_core.rollout.kv_cache import SlotCache


class Nodes(NamedTuple):
    """The nodes of one pass, in any order.  Packed (`rounds`) or padded to a fixed shape (`static_pass`)."""

    tokens_T: Tensor  # int64, as are the next four
    rows_T: Tensor
    positions_T: Tensor  # in the sequence
    places_T: Tensor  # in the row's slot of the KV cache
    streams_T: Tensor  # base of the row's noise
    attend: Attend | PlacedAttend  # a node sees the known tokens of its row, its ancestors and itself
    walk: Callable[[Tensor], AcceptedPath]  # the target's choice at each node -> the accepted path of each row
    fixed: bool  # the same operations whatever the values are, so that a graph can hold the round


class RoundResult(NamedTuple):
    emitted: Emitted
    states: PathStates | None  # of the accepted paths; None: no hidden states were asked for


@torch.inference_mode()
def spec_round(
    decoder: Decoder, cache: SlotCache, nodes: Nodes, params: SamplingParams, *, taps: tuple[int, ...] = ()
) -> RoundResult:
    """Verify draft trees that are valid (see `draft_check`).

    The live batch is not changed: the caller commits.  Afterwards the cache holds what plain decoding would have put
    there, for every emitted token but the newest.
    """
    hidden = decoder(nodes.tokens_T, nodes.positions_T, nodes.attend, taps=taps)
    logits_TV = decoder.logits(hidden.last_TD)
    keys_T2 = row_keys(nodes.streams_T, nodes.positions_T + 1)
    choice = (choose_no_sync if nodes.fixed else choose)(logits_TV, keys_T2, params)
    path = nodes.walk(choice.tokens_N)
    cache.keep_path(nodes.places_T, nodes.positions_T, path, fixed=nodes.fixed)
    emitted = Emitted(choice.tokens_N[path.nodes_BA], choice.logprobs_N[path.nodes_BA], path.counts_B)
    if hidden.taps_TE is None:
        return RoundResult(emitted, None)
    path_T = path.nodes_BA.flatten()
    states = PathStates(
        nodes.rows_T[path_T],
        nodes.positions_T[path_T],
        hidden.taps_TE[path_T],
        hidden.last_TD[path_T],
        lognorms(logits_TV, choice, params)[path_T],
    )
    return RoundResult(emitted, states)

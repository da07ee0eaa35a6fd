"""One speculative round: a drafter has guessed several tokens ahead, one pass of the target checks all guesses.

    newest tokens + draft trees -> decoder over the KV cache, each node seeing its ancestors -> the target's own choice
    at every node -> walk along the choices -> emitted tokens; the accepted path's keys and values move into place

Theorem.  Let noise g_p be keyed by (stream, position p), and let plain decoding emit x_p = f(x_<p, g_p) with
f(x, g) = arg-max_v (log pi(v | x) + g_v).  Then a speculative round emits a prefix of that same sequence, at least one
token long, whatever the tree.
Proof.  By induction along the accepted path.  The root is the newest token of x_<p, so the choice there is
f(x_<p, g_p) = x_p: the first emitted token is plain decoding's.  A child is entered only if it carries exactly the
token chosen at its parent; its ancestors then spell x_<=p and nothing else (it attends to its ancestors alone), so its
own choice is f(x_<=p, g_{p+1}) = x_{p+1}.  No acceptance probability and no resampling are needed, because the choice
is never altered, only computed earlier.  The drafter's guesses, its noise and its failures decide how long the prefix
is, not what it holds.  (Exact in exact arithmetic: two batch shapes round differently, which shows where two
candidates' scores lie within that rounding of each other.)

Since x_p is an exact sample of pi (Gumbel-max), so is the round's output.  Drafting with the *same* noise raises the
chance that the guess is right (Daliri, Musco, Suresh, arXiv 2408.07978).

Shapes: B live rows, N draft tokens, T = B + N, W nodes of the largest tree with its root, C cache positions.
"""

import torch

from kernels.spec_verify import accepted_path
from kernels.tree_layout import tree_layout
from tlt_core.model.decoder import Decoder
from tlt_core.rollout.batch import Emitted, LiveBatch, RoundResult
from tlt_core.rollout.kv_cache import SlotCache
from tlt_core.sampling import choose, lognorms, row_keys
from tlt_core.speculation import DraftTree
from tlt_core.types import SamplingParams


@torch.inference_mode()
def spec_round(
    decoder: Decoder,
    cache: SlotCache,
    batch: LiveBatch,
    tree: DraftTree,
    params: SamplingParams,
    *,
    depth: int,
    taps: tuple[int, ...] = (),
) -> RoundResult:
    """Verify a valid tree of at least one draft token (see `draft_check`).  `depth`: of its deepest token, at least.

    The batch is not changed: the caller commits.  The cache then holds what plain decoding would have put there, for
    every emitted token but the newest.
    """
    live = len(batch)
    newest_B, positions_B = batch.newest()
    layout = tree_layout(positions_B, tree.parents_N, tree.rows_N, tree.depths_N, depth=depth)
    tokens_T = torch.cat([newest_B, tree.tokens_N])
    hidden = decoder(tokens_T, layout.positions_T, cache.verify_attend(layout, live), taps=taps)
    keys_T2 = row_keys(batch.streams_B[:live][layout.rows_T], layout.positions_T + 1)
    logits_TV = decoder.logits(hidden.last_TD)
    choice = choose(logits_TV, keys_T2, params)
    nodes_BA, counts_B = accepted_path(
        choice.tokens_N, tree.tokens_N, tree.parents_N, tree.rows_N, num_rows=live, depth=depth
    )
    cache.keep_path(layout, nodes_BA, counts_B)
    emitted = Emitted(choice.tokens_N[nodes_BA], choice.logprobs_N[nodes_BA], counts_B)
    if hidden.taps_TE is None:
        return RoundResult(emitted, counts_B[:0], counts_B[:0], None, hidden.last_TD[:0], choice.lognorms_N[:0])
    on_path_BA = torch.arange(depth + 1, device=counts_B.device) < counts_B[:, None]
    nodes_T = nodes_BA[on_path_BA]
    return RoundResult(
        emitted,
        layout.rows_T[nodes_T],
        layout.positions_T[nodes_T],
        hidden.taps_TE[nodes_T],
        hidden.last_TD[nodes_T],
        lognorms(logits_TV, choice, params)[nodes_T],
    )

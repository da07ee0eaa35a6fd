"""EAGLE-3 as a drafter of the rollout engine: catches up from the engine's hidden states, then drafts level by level.

    propose:  positions that are new since the last time -> one pass of the layer -> y of each row's last position
              y -> logits -> best children (`tree`) -> the children's tokens and y -> next level -> ...

Position t reads the hidden state of token t and the token t + 1.  So a row of n tokens is caught up to position n - 2,
whose y predicts the token at index n.  The engine keeps all hidden states, so nothing is computed again, however long
speculation was off.

Shapes: B live rows, T positions of a catch-up, E tapped width, D hidden size, J draft vocabulary, w width.
"""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from kernels.sampling.coupled_sample import gumbel_noise
from kernels.tree.draft_children import draft_children
from kernels.tree.tree_layout import TreeLayout
from tlt_core.drafter.eagle3.cache import DraftCache, DraftLevels
from tlt_core.drafter.eagle3.files import export_weights, import_weights
from tlt_core.drafter.eagle3.model import Attend, Eagle3Model, blank_eagle3
from tlt_core.drafter.eagle3.native import NativeEagle3
from tlt_core.drafter.eagle3.static import DraftParts, StaticEagle3
from tlt_core.drafter.eagle3.tree import TreeBuilder, draft_keys, perturbed_scores
from tlt_core.items.hidden_states import HiddenStates
from tlt_core.items.speculation import DraftTree, LiveView, Strategy
from tlt_core.items.static_shapes import Inputs
from tlt_core.items.types import GenerationRequest, SamplingParams
from tlt_core.model.decoder import Decoder
from tlt_core.model.packed import PackedLinear, can_pack


class Eagle3Drafter:
    """Implements `tlt_core.items.speculation.Drafter`.  Reads the decoder's embedding in place, never writes it."""

    name = "eagle3"
    backlog_s = 0.0

    def __init__(
        self,
        model: Eagle3Model,
        decoder: Decoder,
        *,
        max_live: int,
        max_len: int,
        room: int = 0,
        error_scale: float = 1.0,
    ) -> None:
        """Takes copies of the model's weights in the decoder's dtype.  error_scale: c of `tree`.

        room: places behind a row's `max_len` that drafts of fixed shape need, see `static.room_for`.
        """
        max_len += room
        weight = decoder.head_weight
        self.taps, self._error_scale = model.config.taps, error_scale
        self._embedding = decoder.embed_tokens
        self._net = blank_eagle3(model.config, dtype=weight.dtype, device=weight.device).requires_grad_(False)
        self._packs = can_pack(decoder)
        self._cache = DraftCache(
            model.config, num_slots=max_live, max_len=max_len, dtype=weight.dtype, device=weight.device
        )
        self._hidden: HiddenStates | None = None
        self._done = [0] * max_live  # positions of each row that the cache holds
        self._noise_ids_J = self._net.draft_ids_J.to(torch.int32)
        self.load_weights(export_weights(model))
        self._native = NativeEagle3.of(self._net)

    @torch.inference_mode()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the weights in place, as `export_weights` or a checkpoint file names them; any floating dtype.

        The draft vocabulary may change, its size may not.  Live rows are caught up anew at the next proposal.
        Raises ModelError, and changes nothing, when a tensor does not fit.
        """
        fitting = list(import_weights(self._net, weights))
        for name, value in fitting:
            module_name, _, _ = name.rpartition(".")
            module = self._net.get_submodule(module_name)
            if isinstance(module, PackedLinear):
                module.set_weight(value)
            elif isinstance(module, nn.Linear) and self._packs:
                setattr(self._net, module_name, PackedLinear(value, None))
            elif module_name:
                self._net.get_parameter(name).copy_(value)
            else:
                self._net.get_buffer(name).copy_(value)
        self._noise_ids_J.copy_(self._net.draft_ids_J)  # in place, as all else: graphs may have been captured
        self._done[:] = [0] * len(self._done)
        self._cache.clear()

    def admit(self, row: int, request: GenerationRequest) -> None:
        """A request begins in a row."""
        self._done[row] = 0

    def borrow(self, hidden: HiddenStates) -> None:
        """Where to read hidden states.  When `propose` is called, those of all tokens but the newest must be there."""
        self._hidden = hidden

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """The request in row `source` is now in row `target`, whose own request has ended."""
        self._cache.move(source, target, self._done[source])
        self._done[target], self._done[source] = self._done[source], 0

    def release(self, row: int, tokens: Tensor) -> None:
        """The request in `row` ended."""
        self._done[row] = 0

    @torch.inference_mode()
    def propose(self, view: LiveView, strategy: Strategy) -> DraftTree:
        """At most strategy.tokens draft tokens a row, none deeper than strategy.depth or than the row's room - 1."""
        limits = [
            min(strategy.depth, room - 1) if length > 1 else 0  # one token: there is no position to run yet
            for length, room in zip(view.lengths, view.room, strict=True)
        ]
        depth = min(strategy.tokens, max(limits, default=0))
        if depth < 1:
            return DraftTree.empty()
        width = min(strategy.width, strategy.tokens, len(self._noise_ids_J))
        lengths_B = torch.tensor(list(view.lengths), device=self._noise_ids_J.device)
        limits_B = torch.tensor(limits, device=lengths_B.device)
        tree = TreeBuilder(
            len(limits), width=width, error_scale=self._error_scale, min_draft_probs=view.min_draft_probs
        )
        y_ND = self._catch_up(view, depth=depth)
        net = None if self._filters(view.params) else self._native
        keys_BL2 = draft_keys(view, lengths_B, depth=depth)
        if width == 1 and net is not None:
            self._draft_chain(net, tree, view, lengths_B, y_ND, keys_BL2)
            return tree.finish(self._net.draft_ids_J, limits_B, tokens=strategy.tokens)
        levels = self._cache.draft([length - 1 for length in view.lengths], levels=depth - 1, width=width)
        for level in range(depth):
            logits_NJ = self._net.logits(y_ND)
            columns_BM = self._add_level(tree, logits_NJ, keys_BL2[:, level], view.params, native=net is not None)
            if level + 1 < depth:
                if tree.is_hopeless():
                    break
                beam_Bw = tree.choose_beam()
                tokens_Bw = self._net.draft_ids_J[columns_BM.gather(1, beam_Bw)]
                y_ND = self._extend(tokens_Bw, y_ND, beam_Bw // width, levels)
        return tree.finish(self._net.draft_ids_J, limits_B, tokens=strategy.tokens)

    def _filters(self, params: SamplingParams) -> bool:
        return params.top_p < 1 or 0 < params.top_k < len(self._noise_ids_J)

    def _draft_chain(
        self, net: NativeEagle3, tree: TreeBuilder, view: LiveView, lengths_B: Tensor, y_BD: Tensor, keys_BL2: Tensor
    ) -> None:
        self._cache.reserve(keys_BL2.shape[1] - 1)
        drafted = net.chain(
            y_BD,
            self._cache.from_position_0(),
            ends_B=lengths_B - 1,
            keys_BL2=keys_BL2,
            ids_J=self._noise_ids_J,
            embeddings_VD=self._embedding.weight,
            rope_C21d=self._cache.rope_C21d,
            settings=(view.params.temperature, self._error_scale, *view.min_draft_probs),
        )
        tree.add_chain(drafted.columns_Nw, drafted.values_Nw)

    def _add_level(
        self, tree: TreeBuilder, logits_NJ: Tensor, keys_B2: Tensor, params: SamplingParams, *, native: bool
    ) -> Tensor:
        """Turn a level's logits into its children; returns their columns, [B, b w].  keys: of the level's noise."""
        ids_J, scale = self._noise_ids_J, self._error_scale
        if not native:
            noise_BJ = gumbel_noise(keys_B2, ids_J) if params.temperature else None
            return tree.add_level(perturbed_scores(logits_NJ, noise_BJ, params))
        keys_N2 = keys_B2.repeat_interleave(len(logits_NJ) // len(keys_B2), dim=0)
        children = draft_children(
            logits_NJ, keys_N2, ids_J, width=tree.width, temperature=params.temperature, error_scale=scale
        )
        return tree.add_children(children)

    def _run(
        self, embeds_TD: Tensor, hidden_TD: Tensor, rope_T21d: Tensor, attend: Attend, layout: TreeLayout
    ) -> Tensor:
        if self._native is None:
            return self._net(embeds_TD, hidden_TD, rope_T21d, attend)
        return self._native(embeds_TD, hidden_TD, rope_T21d, self._cache.from_position_0(), layout)

    def static(self, inputs: Inputs, strategies: Sequence[Strategy]) -> StaticEagle3:
        """See `static_shapes.HasStatic`."""
        assert self._hidden is not None, "the engine lends its hidden states first"
        parts = DraftParts(self._net, self._embedding, self._cache, self._hidden, self._noise_ids_J, self._error_scale)
        return StaticEagle3(
            parts, inputs, strategies, done=self._done, catch_up=lambda view: self._catch_up(view, depth=0)
        )

    @torch.inference_mode()
    def _catch_up(self, view: LiveView, *, depth: int) -> Tensor:
        """Run the known positions that are not in the cache; y of each row's last position, [B, D].

        The last position is run in any case: its y is needed.
        """
        ends = [length - 1 for length in view.lengths]  # position t needs the token at t + 1
        starts = [max(0, min(done, end - 1)) for done, end in zip(self._done, ends, strict=False)]
        todo = self._cache.catch_up(starts, ends)
        assert self._hidden is not None, "the engine lends its hidden states first"
        taps_TE = self._hidden.read(todo.rows_T, todo.positions_T)
        embeds_TD = self._embedding(view.tokens_BC[todo.rows_T, todo.positions_T + 1])
        began_s = time.perf_counter()
        rope_T21d = self._cache.rope_C21d[todo.positions_T]
        y_TD = self._run(embeds_TD, self._net.fuse(taps_TE), rope_T21d, todo.attend, todo.layout)
        # A round that used this drafter leaves at most its depth plus one; the rest was decoded without it.
        usual = len(ends) * (1 + depth)
        self.backlog_s = (time.perf_counter() - began_s) * max(0.0, 1 - usual / len(y_TD))
        self._done[: len(ends)] = ends
        return y_TD[todo.last_B]

    def _extend(self, tokens_Bw: Tensor, y_ND: Tensor, parents_Bw: Tensor, levels: DraftLevels) -> Tensor:
        """y of drafted tokens, given the y of the level above and each token's parent in it; [B w, D] in row order."""
        if tokens_Bw.shape[1] > 1:
            index_BwD = parents_Bw[..., None].expand(-1, -1, y_ND.shape[1])
            y_ND = y_ND.unflatten(0, (len(tokens_Bw), -1)).gather(1, index_BwD).flatten(0, 1)
        embeds_ND = self._embedding(tokens_Bw.flatten())
        rope_N21d, attend = levels.rope(), levels.attend(parents_Bw)
        return self._run(embeds_ND, y_ND, rope_N21d, attend, levels.layout())

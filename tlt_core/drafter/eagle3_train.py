"""Training of the EAGLE-3 drafter with its own outputs as inputs ("training-time test").

    tokens --(target)--> TrainSequence --> training_time_test: y of depth 1, 2, ... --> draft_loss --> AdamW

Depth 1 is the drafter on the target's hidden states.  At depth k + 1, position p takes the drafter's own y of depth k
at p - 1 in the place of the fused hidden state, and sees what it would see when drafting k tokens ahead of position
p - k:

    keys of depth 1 at positions <= p - k;  then of depth j + 1 at position p - k + j, for j = 1 .. k (itself last)

Drafted tokens are the true ones (teacher forcing), and sequences are packed back to back without padding.

Row p of a sequence reads token p + 1 and predicts token p + 2.  Depth k + 1 is trained on rows p for which drafting
began where it can begin: p - k >= max(first - 2, 0), where `first` is the index of the first sampled token.

Shapes: L tokens of one sequence, T = sum (L - 2) rows of the pack, E tapped width, D hidden size, H query heads, K
key/value heads, G = H / K, d head size, V target vocabulary, J draft vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.packed_attention import packed_causal_attention
from tlt_core.drafter.eagle3_loss import draft_loss
from tlt_core.drafter.eagle3_model import Eagle3Model, rope_table
from tlt_core.model.decoder import Decoder


class TrainSequence(NamedTuple):
    """One response with its prompt, as the target saw it."""

    tokens_L: Tensor  # int64, at least 3
    taps_LE: Tensor
    probs_LJ: (
        Tensor  # the target's probability (at temperature 1) of token t + 1 at position t, on the draft vocabulary
    )
    first: int = 0  # index of the first sampled token (the length of the prompt)


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Eagle3Trainer's settings."""

    learning_rate: float = 5e-4
    warmup_steps: int = 20
    total_steps: int = 0  # the rate then decays linearly to a tenth of its peak; 0: constant
    weight_decay: float = 0.0  # of matrices
    max_grad_norm: float = 1.0
    depth: int = 3  # steps of the training-time test
    depth_decay: float = 0.8  # weight of depth k + 1 relative to depth k
    compute_dtype: torch.dtype = torch.float32  # bfloat16: matrix products alone, weights stay float32


class TrainMetrics(NamedTuple):
    """Of one step, before its update."""

    loss: float  # weighted mean over depths
    overlaps: tuple[float, ...]  # mean acceptance probability at depth 1, 2, ...
    rows: int  # positions trained at depth 1
    grad_norm: float  # before clipping
    learning_rate: float


@torch.inference_mode()
def observe(
    decoder: Decoder, sequences: Sequence[Tensor], model: Eagle3Model, *, firsts: Sequence[int], dtype: torch.dtype
) -> list[TrainSequence]:
    """Run the target over whole token sequences ([L] int) in one packed pass; keep what training needs, in `dtype`."""
    device = decoder.head_weight.device
    tokens = [tokens_L.to(device, torch.int64) for tokens_L in sequences]
    lengths = [len(tokens_L) for tokens_L in tokens]
    offsets_S1 = torch.tensor([0, *lengths]).cumsum(0)
    positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        return packed_causal_attention(q_THd, k_TKd, v_TKd, offsets_S1)

    hidden = decoder(torch.cat(tokens), positions_T, attend, taps=model.config.taps)
    assert hidden.taps_TE is not None, "an EAGLE-3 drafter has taps"
    ids_J = model.draft_ids_J.to(device)
    observed = []
    for tokens_L, last_LD, taps_LE, first in zip(
        tokens, hidden.last_TD.split(lengths), hidden.taps_TE.split(lengths), firsts, strict=True
    ):
        probs_LJ = decoder.logits(last_LD).float().softmax(-1)[:, ids_J]  # of one sequence: the vocabulary is large
        observed.append(TrainSequence(tokens_L, taps_LE.to(dtype, copy=True), probs_LJ.to(dtype), first))
    return observed


class _Pack(NamedTuple):
    """Rows of all sequences back to back."""

    tokens_T: Tensor  # read by the row
    taps_TE: Tensor
    probs_TJ: Tensor  # of the token that the row predicts
    positions_T: Tensor
    bounds: list[int]  # start of each sequence's rows, and T at the end
    earliest_T: Tensor  # position at which drafting can begin

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence], model: Eagle3Model) -> "_Pack":
        device = model.fc.weight.device
        kept = [sequence for sequence in sequences if len(sequence.tokens_L) > 2]
        if not kept:
            raise ValueError(f"{len(sequences)} sequences to train on, none of at least 3 tokens")
        rows = [len(sequence.tokens_L) - 2 for sequence in kept]
        earliest = torch.tensor([max(sequence.first - 2, 0) for sequence in kept])
        return cls(
            torch.cat([s.tokens_L[1:-1] for s in kept]).to(device, torch.int64),
            torch.cat([s.taps_LE[:-2] for s in kept]).to(device),
            torch.cat([s.probs_LJ[1:-1] for s in kept]).to(device),
            torch.cat([torch.arange(count) for count in rows]).to(device),
            torch.tensor([0, *rows]).cumsum(0).tolist(),
            earliest.repeat_interleave(torch.tensor(rows)).to(device),
        )


def training_time_test(
    model: Eagle3Model, embeds_TD: Tensor, taps_TE: Tensor, positions_T: Tensor, bounds: list[int], *, depth: int
) -> Iterator[Tensor]:
    """y of depth 1 .. depth, [T, D] each.  Rows at positions below k hold nothing meaningful at depth k + 1."""
    longest = max(end - start for start, end in pairwise(bounds))
    hidden_TD = model.fuse(taps_TE.to(embeds_TD.dtype))
    table = rope_table(model.config, longest, dtype=hidden_TD.dtype, device=hidden_TD.device)  # autocast's dtype
    rope_T21d = table[positions_T]
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        keys.append(k_TKd)
        values.append(v_TKd)
        if len(keys) == 1:
            return packed_causal_attention(q_THd, k_TKd, v_TKd, torch.tensor(bounds))
        return _recurrent_attention(q_THd, keys, values, bounds)

    for _ in range(depth):
        y_TD = model(embeds_TD, hidden_TD, rope_T21d, attend)
        yield y_TD
        hidden_TD = y_TD.roll(1, dims=0)  # across a sequence's start: into a row that means nothing from then on


def _recurrent_attention(q_THd: Tensor, keys: list[Tensor], values: list[Tensor], bounds: list[int]) -> Tensor:
    """Attention of depth k + 1: the keys of depth 1 up to k positions back, then one key of each later depth."""
    k = len(keys) - 1
    num_kv, d = keys[0].shape[1:]
    # Row p reads depth j + 1 at p - (k - j).
    own_TKkd, own_values_TKkd = (
        torch.stack([x.roll(k - j, dims=0) for j, x in enumerate(xs) if j], dim=2) for xs in (keys, values)
    )
    out = []
    for start, end in pairwise(bounds):
        part, rows = slice(start, end), end - start
        q_KGLd = (q_THd[part] * d**-0.5).unflatten(1, (num_kv, -1)).permute(1, 2, 0, 3)
        shared = torch.matmul(q_KGLd, keys[0][part].permute(1, 2, 0)[:, None])  # [K, G, L, L]
        hidden_LL = torch.ones(rows, rows, dtype=torch.bool, device=q_THd.device).triu(1 - k)
        shared = shared.masked_fill(hidden_LL, -torch.inf)
        own = torch.einsum("kgld,lkjd->kglj", q_KGLd, own_TKkd[part])
        weights = torch.cat([shared, own], dim=-1).softmax(-1).to(q_THd.dtype)
        seen = torch.matmul(weights[..., :rows], values[0][part].transpose(0, 1)[:, None])
        recent = torch.einsum("kglj,lkjd->kgld", weights[..., rows:], own_values_TKkd[part])
        out.append((seen + recent).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(out)


class Eagle3Trainer:
    """Trains a float32 drafter in place; the target's embedding is read only.

    trainer = Eagle3Trainer(model, decoder.embed_tokens.weight, TrainSettings());  trainer.step(sequences)
    """

    def __init__(self, model: Eagle3Model, embedding_VD: Tensor, settings: TrainSettings) -> None:
        self.model, self.settings, self.steps = model, settings, 0
        self._embedding_VD = embedding_VD.detach()  # the same memory
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))

    def step(self, sequences: Sequence[TrainSequence]) -> TrainMetrics:
        """One update on these sequences together.  Raises ValueError when none has three tokens."""
        rate = self._learning_rate()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        loss, metrics = self._losses(sequences)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        self._optimizer.step()
        self.steps += 1
        return metrics._replace(grad_norm=float(norm), learning_rate=rate)

    def measure(self, sequences: Sequence[TrainSequence]) -> TrainMetrics:
        """Loss and overlaps without an update, e.g. on held-out sequences; by the same kernels as `step`."""
        return self._losses(sequences)[1]

    def _losses(self, sequences: Sequence[TrainSequence]) -> tuple[Tensor, TrainMetrics]:
        settings, pack = self.settings, _Pack.of(sequences, self.model)
        losses, overlaps, counts = [], [], []
        half = settings.compute_dtype == torch.bfloat16
        with torch.autocast(pack.taps_TE.device.type, torch.bfloat16, enabled=half):
            embeds_TD = F.embedding(pack.tokens_T, self._embedding_VD).float()
            outputs = training_time_test(
                self.model, embeds_TD, pack.taps_TE, pack.positions_T, pack.bounds, depth=settings.depth
            )
            for k, y_TD in enumerate(outputs):
                rows_N = (pack.positions_T - k >= pack.earliest_T).nonzero().squeeze(1)
                result = draft_loss(self.model.logits(y_TD[rows_N]), pack.probs_TJ[rows_N])
                count = max(1, len(rows_N))
                losses.append(result.loss / count)
                overlaps.append(float(result.overlap) / count)
                counts.append(len(rows_N))
        weights = [settings.depth_decay**k for k in range(settings.depth)]
        loss = torch.stack([w * x for w, x in zip(weights, losses, strict=True)]).sum() / sum(weights)
        return loss, TrainMetrics(float(loss.detach()), tuple(overlaps), counts[0], 0.0, 0.0)

    def _learning_rate(self) -> float:
        settings, step = self.settings, self.steps
        if step < settings.warmup_steps:
            return settings.learning_rate * (step + 1) / settings.warmup_steps
        if not settings.total_steps:
            return settings.learning_rate
        progress = (step - settings.warmup_steps) / max(1, settings.total_steps - settings.warmup_steps)
        return settings.learning_rate * (1 - 0.9 * min(1.0, progress))

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a resume needs besides the settings, as tensors by name: fit for one safetensors file."""
        state = {f"model.{name}": value.detach().clone() for name, value in self.model.state_dict().items()}
        state["tap_scales"] = torch.tensor(self.model.tap_scales)
        state["steps"] = torch.tensor(self.steps)
        for name, parameter in self.model.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                state[f"{key}.{name}"] = value.detach().clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on as the trainer would have that returned this from `state_dict`."""
        model_state = {name.removeprefix("model."): v for name, v in state.items() if name.startswith("model.")}
        self.model.load_state_dict(model_state)
        self.model.tap_scales = tuple(state["tap_scales"].tolist())
        self.steps = int(state["steps"])
        self._optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            moments = {key: state.get(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if moments["step"] is not None:
                self._optimizer.state[parameter] = {k: v.clone() for k, v in moments.items() if v is not None}

"""Training of the EAGLE-3 drafter with its own outputs as inputs ("training-time test", see `depths`).

    TrainSequence -> windows --accumulate--> drafted_depths: y of depth 1, 2, ... -> distill_loss -> gradients
                                  --apply--> AdamW

Row p of a sequence reads token p + 1 and predicts token p + 2.  Depth k + 1 is trained on the rows p whose draft began
k rows earlier, at a row where drafting can begin: p - k >= max(first - 2, 0), with `first` the index of the first
sampled token.  With N rows trained at depth 1, all losses are sums over rows:

    loss = sum_k decay^k L_k / (N sum_k decay^k)

so micro-steps add up to the step, however sequences are cut into windows and windows into passes.

This is how EAGLE-3 is trained (Li et al., arXiv 2503.01840), the gradient running through the y of the depths before.
No noise is added to features.

L_k is one of the losses in `kernels/loss/distill_loss`.  The target's p is not renormalised over the draft vocabulary.
That would not change the best q of soft_ce, which is p / m; but so each position is weighted by m, the chance that a
draft can be right at all.  The overlap a is the acceptance probability of an optimally coupled first draft.  Drafting
with the target's own noise reaches at least (1 - tv) / (1 + tv) (Daliri, Musco, Suresh, arXiv 2408.07978).  So tv is
the figure that matters, but its gradient vanishes where q gives no probability to what p expects.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.loss.distill_loss import LossKind, distill_loss
from tlt_core.drafter.eagle3.depths import drafted_depths, pad_rows
from tlt_core.drafter.eagle3.gradients import late_gradients
from tlt_core.drafter.eagle3.model import Eagle3Model
from tlt_core.drafter.eagle3.windows import Pack, Window, whole
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.model.decoder import Decoder
from tlt_core.model.edge_weights import EdgeWeights

log = logging.getLogger(__name__)

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Eagle3Trainer's settings."""

    learning_rate: float = 5e-4
    warmup_steps: int = 20
    total_steps: int = 0  # the rate then decays linearly to a tenth of its peak; 0: constant
    max_grad_norm: float = 1.0
    depth: int = 3  # steps of the training-time test
    depth_decay: float = 0.8  # weight of depth k + 1 relative to depth k
    compute_dtype: torch.dtype = torch.float32  # bfloat16: matrix products alone, weights stay float32
    loss: LossKind = "soft_ce"  # see the module docstring


class TrainMetrics(NamedTuple):
    """Of the rows of some windows, with the weights before any update on them."""

    loss: float  # of a row at depth 1, all depths weighted
    overlaps: tuple[float, ...]  # mean acceptance probability at depth 1, 2, ...
    rows: int  # positions trained at depth 1
    top1: float  # share of them where drafter and policy have the same likeliest token of the draft vocabulary


class Eagle3Trainer:
    """Trains a float32 drafter in place: `step` by step, or `accumulate`d micro-steps and then `apply`."""

    def __init__(
        self,
        model: Eagle3Model,
        target: Decoder | EdgeWeights,
        settings: TrainSettings,
        *,
        heads: Mapping[int, Tensor] | None = None,
    ) -> None:
        """heads: the draft vocabulary's rows of the LM head, by the policy version that sampled a sequence; None: the
        target's as they are, for sequences that it has observed."""
        self.model, self.settings, self.steps = model, settings, 0
        self.rows = 0  # accumulated since the latest update
        self.embedding_VD = target.embed_tokens.weight.detach()  # the same memory
        self._heads = {0: target.head_weight.detach()[model.draft_ids_J]} if heads is None else heads
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, sequences: Sequence[TrainSequence]) -> TrainMetrics:
        """One update on whole sequences together.  Raises ValueError when none of their rows is trained."""
        metrics = self.accumulate([w for s in sequences for w in whole(s)])
        self.apply()
        return metrics

    def accumulate(self, windows: Sequence[Window]) -> TrainMetrics:
        """Add the gradient of these windows' summed loss, in one pass.  Raises ValueError when nothing in them is
        trained."""
        with late_gradients(self.model) as add:
            loss, metrics = self._losses(windows)
            loss.backward()  # type: ignore[no-untyped-call]
            add()
        self.rows += metrics.rows
        return metrics

    def apply(self) -> float:
        """Update with the mean gradient of the rows accumulated; returns its norm before clipping.

        A gradient that is not finite is dropped, with a warning: the weights stay as they are.
        """
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) / self.rows
        if math.isfinite(norm):
            torch._foreach_mul_(gradients, min(1.0, self.settings.max_grad_norm / (norm + 1e-6)) / self.rows)
            self._optimizer.param_groups[0]["lr"] = self.learning_rate
            self._optimizer.step()
        else:
            log.warning("the drafter's gradient norm is %s at its step %d, which changes nothing", norm, self.steps)
        self._optimizer.zero_grad(set_to_none=True)
        self.rows = 0
        self.steps += 1
        return norm

    @torch.no_grad()
    def measure(self, sequences: Sequence[TrainSequence]) -> TrainMetrics:
        """Loss and overlaps without a gradient, e.g. on held-out sequences; by the same kernels as `step`."""
        return self._losses([w for s in sequences for w in whole(s)])[1]

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        settings, step = self.settings, self.steps
        if step < settings.warmup_steps:
            return settings.learning_rate * (step + 1) / settings.warmup_steps
        progress = (step - settings.warmup_steps) / max(1, settings.total_steps - settings.warmup_steps)
        return settings.learning_rate * (1 - 0.9 * min(1.0, progress) * (settings.total_steps > 0))

    def _losses(self, windows: Sequence[Window]) -> tuple[Tensor, TrainMetrics]:
        """Summed loss, and metrics."""
        settings = self.settings
        if not windows:
            raise ValueError("nothing to train: no row predicts a sampled token (a sequence needs three tokens)")
        pack = Pack.of(windows, self.model.fc.weight.device, halo=settings.depth - 1)
        probs_TJ = pack.probs_TJ(self._heads)
        losses, overlaps, counts, top1 = [], [], [], 0.0
        half = settings.compute_dtype == torch.bfloat16
        with torch.autocast(pack.device.type, torch.bfloat16, enabled=half):
            embeds_RD = F.embedding(pack.tokens_R, self.embedding_VD).float()
            for k, y_TD in enumerate(drafted_depths(self.model, embeds_RD, pack, depth=settings.depth)):
                rows_N = pack.counted_N(k)
                y_ND = y_TD.index_select(0, rows_N)
                probs_NJ = probs_TJ[rows_N]
                logits_NJ = self.model.logits(pad_rows(y_ND))[: len(rows_N)]
                if k == 0:
                    agreed_N = logits_NJ.detach().argmax(-1) == probs_NJ.argmax(-1)
                    top1 = float(agreed_N.sum()) / max(1, len(rows_N))
                result = distill_loss(logits_NJ, probs_NJ, kind=settings.loss)
                losses.append(settings.depth_decay**k * result.loss)
                overlaps.append(float(result.overlap) / max(1, len(rows_N)))
                counts.append(len(rows_N))
        loss = torch.stack(losses).sum() / sum(settings.depth_decay**k for k in range(settings.depth))
        return loss, TrainMetrics(float(loss.detach()) / counts[0], tuple(overlaps), counts[0], top1)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a resume needs besides the settings, as tensors by name: fit for one safetensors file.

        Gradients accumulated but not applied are part of it.
        """
        state = {f"model.{name}": value.detach().clone() for name, value in self.model.state_dict().items()}
        state["tap_scales"] = torch.tensor(self.model.tap_scales)
        state["steps"], state["rows"] = torch.tensor(self.steps), torch.tensor(self.rows)
        for name, parameter in self.model.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                state[f"{key}.{name}"] = value.detach().clone()
            if parameter.grad is not None:
                state[f"grad.{name}"] = parameter.grad.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on as the trainer would have that returned this from `state_dict`."""
        model_state = {name.removeprefix("model."): v for name, v in state.items() if name.startswith("model.")}
        self.model.load_state_dict(model_state)
        self.model.tap_scales = tuple(state["tap_scales"].tolist())
        self.steps, self.rows = int(state["steps"]), int(state["rows"])
        self._optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            device = parameter.device
            if f"step.{name}" in state:
                moments = {key: state[f"{key}.{name}"].to(device, copy=True) for key in _MOMENTS}
                self._optimizer.state[parameter] = moments
            gradient = state.get(f"grad.{name}")
            parameter.grad = None if gradient is None else gradient.to(device, copy=True)

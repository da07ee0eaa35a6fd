"""A second implementation of drafter and target, with torch, safetensors and transformers alone.

It shares nothing with the project, so an error in our decoder, in how we read the files, or in how we understand the
EAGLE-3 layer cannot occur in both.  Written straight from the paper and the layout's description: no cache, no
batching, no fused projections.

Shapes: L tokens, E tapped width, D hidden size, J draft vocabulary, V vocabulary, H heads, d head size.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class Drafter:
    """One EAGLE-3 layer from a folder, float32."""

    def __init__(self, folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.taps: list[int] = raw["eagle_aux_hidden_state_layer_ids"]
        self.heads, self.kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
        self.eps = raw["rms_norm_eps"]
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(**raw))
        self.weights = {
            k: v.float() if v.is_floating_point() else v for k, v in load_file(folder / "model.safetensors").items()
        }

    def logits(self, embeds_LD: Tensor, taps_LE: Tensor, known: int) -> Tensor:
        """Draft logits, [L - 1, J].  embeds_LD: embeddings of the sequence's tokens."""
        fused_LD = self._linear("fc", taps_LE)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits, y_D = [], torch.empty(0)
        for position in range(len(embeds_LD) - 1):
            hidden_D = fused_LD[position] if position < known - 1 else y_D
            y_D = self._layer(embeds_LD[position + 1], hidden_D, position, keys, values)
            logits.append(self._linear("lm_head", self._norm("norm", y_D)))
        return torch.stack(logits)

    def _layer(
        self, embed_D: Tensor, hidden_D: Tensor, position: int, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        x = torch.cat([self._norm("midlayer.input_layernorm", embed_D), self._norm("midlayer.hidden_norm", hidden_D)])
        query_Hd = self._heads("q", x, self.heads, position)
        keys.append(self._heads("k", x, self.kv_heads, position))
        values.append(self._linear("midlayer.self_attn.v_proj", x).view(self.kv_heads, -1))
        group = self.heads // self.kv_heads  # query heads that read the same key
        keys_LHd, values_LHd = (torch.stack(seen).repeat_interleave(group, dim=1) for seen in (keys, values))
        weights_HL = torch.einsum("hd,lhd->hl", query_Hd, keys_LHd).div(query_Hd.shape[1] ** 0.5).softmax(-1)
        attended = torch.einsum("hl,lhd->hd", weights_HL, values_LHd).flatten()
        residual_D = hidden_D + self._linear("midlayer.self_attn.o_proj", attended)
        x = self._norm("midlayer.post_attention_layernorm", residual_D)
        gated = F.silu(self._linear("midlayer.mlp.gate_proj", x)) * self._linear("midlayer.mlp.up_proj", x)
        return residual_D + self._linear("midlayer.mlp.down_proj", gated)

    def _heads(self, which: str, x: Tensor, count: int, position: int) -> Tensor:
        """Rotated heads of one position."""
        heads_Hd = self._linear(f"midlayer.self_attn.{which}_proj", x).view(count, -1)
        cos, sin = (table[0, 0] for table in self.rotary(x[None], torch.tensor([[position]])))
        half = heads_Hd.shape[1] // 2
        turned = torch.cat([-heads_Hd[:, half:], heads_Hd[:, :half]], dim=1)
        return heads_Hd * cos + turned * sin

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean() + self.eps).sqrt() * self.weights[f"{name}.weight"]


def tapped(target: Any, tokens_L: Tensor, taps: list[int]) -> tuple[dict[int, Tensor], Tensor]:
    """Residual streams that enter the tapped layers (beyond the last: the final norm), and logits."""
    streams: dict[int, Tensor] = {}
    stations = [*target.model.layers, target.model.norm]
    hooks = [
        stations[tap].register_forward_pre_hook(lambda _, args, tap=tap: streams.update({tap: args[0][0]}))
        for tap in taps
    ]
    logits_LV = target(tokens_L[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return streams, logits_LV


@torch.no_grad()
def results(drafter_dir: Path, target_dir: Path, tokens_L: Tensor, *, known: int) -> dict[str, Tensor]:
    """Of the tokens, the first `known` count as decoded, the rest as the drafted path.

    draft logits      [L - 1]: entry p < known - 1 after the tokens 0 .. p + 1, then after 1, 2, .. tokens of the path
    hidden states     of the target, as they enter the tapped layers: what the drafter reads
    target logits
    """
    drafter = Drafter(drafter_dir)
    target: Any = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32, use_safetensors=True)
    streams, logits_LV = tapped(target, tokens_L, drafter.taps)
    taps_LE = torch.cat([streams[tap] for tap in drafter.taps], dim=-1)
    embeds_LD = target.get_input_embeddings().weight[tokens_L]
    return {
        "draft logits": drafter.logits(embeds_LD, taps_LE, known),
        "hidden states": taps_LE,
        "target logits": logits_LV,
    }

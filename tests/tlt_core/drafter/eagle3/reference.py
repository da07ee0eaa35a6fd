"""EAGLE-3 drafting written down without caches, batches or masks: one row, recomputed for every token."""

import math
from typing import NamedTuple

import torch

from kernels.sampling.coupled_sample import gumbel_noise
from tlt_core.drafter.eagle3.model import Eagle3Config, Eagle3Model, random_eagle3, rope_table
from tlt_core.model.sampling import policy_scores, row_keys


class Node(NamedTuple):
    """A drafted token."""

    token: int
    path: tuple[int, ...]  # tokens above it and its own
    value: float


def lively_model(target_config, ids, *, seed: int = 5) -> Eagle3Model:
    """Random weights, large enough that hidden states, attention and depth all matter."""
    model = random_eagle3(Eagle3Config.for_target(target_config, len(ids)), ids, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.3
            else:
                parameter *= 12
    model.tap_scales = (1.0, 0.5, 0.25)
    return model


def step(model, embed, hidden, position, past):
    """One position of one row; `past` is the list of (key, value) that it sees, and gets its own."""
    rope = rope_table(model.config, position + 1, dtype=embed.dtype, device=embed.device)[position:]

    def attend(q, k, v):
        past.append((k[0], v[0]))
        keys, values = (
            torch.stack(x, 1).repeat_interleave(q.shape[1] // k.shape[1], 0) for x in zip(*past, strict=True)
        )
        scores = torch.einsum("hd,hcd->hc", q[0], keys) / math.sqrt(q.shape[2])
        return torch.einsum("hc,hcd->hd", scores.softmax(-1), values)[None]

    return model(embed[None], hidden[None], rope, attend)[0]


@torch.no_grad()
def logits_after(model, embedding, tokens, taps_LE, path):
    """The drafter's logits for the token after `tokens` and the drafted `path`."""
    fused, past = model.fuse(taps_LE), []
    for t in range(len(tokens) - 1):
        y = step(model, embedding[tokens[t + 1]], fused[t], t, past)
    for k, token in enumerate(path):
        y = step(model, embedding[token], y, len(tokens) - 1 + k, past)
    return model.logits(y[None])[0]


def propose(model, embedding, tokens, taps_LE, stream, params, strategy, room):
    """The nodes that one row should get, by the rules in `tree`: dictionary path -> value."""
    depth = min(strategy.depth, strategy.tokens, room - 1)
    width = min(strategy.width, strategy.tokens)
    ids = model.draft_ids_J
    beam, nodes = [Node(-1, (), 0.0)], []
    for level in range(depth):
        key = row_keys(torch.tensor([stream]), torch.tensor([len(tokens) + level]))
        noise = 0.0 if params.temperature == 0 else gumbel_noise(key, ids.to(torch.int32))[0]
        children = []
        for parent in beam:
            scores = (
                policy_scores(logits_after(model, embedding, tokens, taps_LE, parent.path)[None], params)[0] + noise
            )
            best = scores.topk(width)
            for score, column in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if score > -math.inf:
                    token = int(ids[column])
                    value = parent.value + score - float(scores.logsumexp(0))
                    children.append(Node(token, (*parent.path, token), value))
        nodes += children
        beam = sorted(children, key=lambda node: -node.value)[:width]
    if width == 1:
        return {node.path: node.value for node in nodes[: strategy.tokens]}
    return {node.path: node.value for node in sorted(nodes, key=lambda node: -node.value)[: strategy.tokens]}


def paths(tree, row) -> set[tuple[int, ...]]:
    """Path of every node that a DraftTree gives a row."""
    found: dict[int, tuple[int, ...]] = {-1: ()}
    columns = [tree.tokens_N.tolist(), tree.parents_N.tolist(), tree.rows_N.tolist(), tree.depths_N.tolist()]
    for index, (token, parent, at, depth) in enumerate(zip(*columns, strict=True)):
        if at == row:
            found[index] = (*found[parent], token)
            assert len(found[index]) == depth
    return set(found.values()) - {()}

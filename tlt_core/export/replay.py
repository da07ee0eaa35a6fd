"""The drafter's first guesses on recorded text: as many must be right as at its export.

The probe is a few greedy responses of the target.  A drafter whose parts do not belong together (another draft
vocabulary, another head, another target of the same shape) still loads everywhere, but guesses wrong.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tlt_core.drafter.eagle3.acceptance import measure_acceptance
from tlt_core.drafter.eagle3.model import Eagle3Model
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.export.contents import Refused
from tlt_core.model.decoder import Decoder

PROBE = "probe.json"
_LEFT_OUT = 2  # last tokens of a sequence, which no guess counts for: as in the probes of older exports


class ProbeSequence(NamedTuple):
    tokens: tuple[int, ...]  # of a prompt and the target's answer
    prompt_len: int


class Agreement(NamedTuple):
    """How often the drafter's first guess was the token that followed."""

    agreeing: int
    positions: int


def is_probe(tokens: Sequence[int], prompt_len: int) -> bool:
    """Whether a sequence is long enough to guess some tokens of the response."""
    return prompt_len >= 2 and len(tokens) >= prompt_len + 3 + _LEFT_OUT


def read_probe(raw: Any, *, vocab_size: int) -> tuple[list[ProbeSequence], Agreement]:
    """Parse the content of probe.json.  Raises Refused."""
    try:
        sequences = [ProbeSequence(tuple(map(int, s["tokens"])), int(s["prompt_len"])) for s in raw["sequences"]]
        told = Agreement(int(raw["agreeing"]), int(raw["positions"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"{PROBE} is not a record of probe sequences ({error!r}); export again") from None
    if not all(is_probe(*s) and all(0 <= token < vocab_size for token in s.tokens) for s in sequences):
        raise Refused(f"{PROBE} holds a sequence that is too short or not of this target's vocabulary; export again")
    return sequences, told


def replay(decoder: Decoder, model: Eagle3Model, probe: Sequence[ProbeSequence]) -> Agreement:
    """By our own engine's code.  Counted where the drafter reads the target's states and guesses a response's token."""
    texts = [torch.tensor(s.tokens[:-_LEFT_OUT]) for s in probe]
    observed = observe(decoder, texts, model, firsts=[s.prompt_len for s in probe], dtype=torch.float32)
    measured = measure_acceptance(model, decoder.embed_tokens.weight, observed, depth=1, temperature=0.0)
    return Agreement(measured.accepted_by_depth[0], measured.starts)

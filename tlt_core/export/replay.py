"""An exported drafter computed on recorded text, by our own code here and by `reference.py` in a fresh process.

The probe is a few greedy responses of the target, with the number of positions where the drafter's first guess was the
token that followed.  A drafter whose parts do not belong together (another draft vocabulary, another head, another
target of the same shape) still loads everywhere, but guesses wrong, which is found here.

Shapes: L tokens of one sequence, T of all, E tapped width, D hidden size, J draft vocabulary, V vocabulary.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.attention.packed_attention import packed_causal_attention
from tlt_core.drafter.eagle3.model import Eagle3Model, rope_table
from tlt_core.export.contents import Refused
from tlt_core.model.decoder import Decoder

PROBE = "probe.json"
LOGITS = "draft logits"  # this and the next two name results, here and in messages
_TARGET = "target logits"
_TAP = "hidden states {}"
_PATH = 3  # tokens at the end of a sequence that count as the drafted path
_SYNTHETIC = 24  # tokens of the sequence that replaces a missing probe
_LIMIT_S = 1800.0
_REFERENCE = Path(__file__).with_name("reference.py")


class ProbeSequence(NamedTuple):
    """A prompt and the target's answer."""

    tokens: tuple[int, ...]
    prompt_len: int

    @property
    def known(self) -> int:
        """Tokens before those that are drafted as a chain."""
        return len(self.tokens) - _PATH


class Agreement(NamedTuple):
    """How often the drafter's first guess was the token that followed."""

    agreeing: int
    positions: int


def is_probe(tokens: Sequence[int], prompt_len: int) -> bool:
    """Whether a sequence is long enough: some tokens of the response, and the drafted path."""
    return prompt_len >= 2 and len(tokens) >= prompt_len + _PATH + 2


def synthetic_probe(vocab_size: int) -> list[ProbeSequence]:
    """Meaningless tokens, enough to compare logits where no text is recorded."""
    return [ProbeSequence(tuple((17 + 31 * i) % vocab_size for i in range(_SYNTHETIC)), _SYNTHETIC)]


def read_probe(raw: Any, *, vocab_size: int) -> tuple[list[ProbeSequence], Agreement]:
    """Parse the content of probe.json.  Raises Refused."""
    try:
        sequences = [ProbeSequence(tuple(map(int, s["tokens"])), int(s["prompt_len"])) for s in raw["sequences"]]
        told = Agreement(int(raw["agreeing"]), int(raw["positions"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"{PROBE} is not a record of probe sequences ({error!r}); export again") from None
    for s in sequences:
        if not is_probe(s.tokens, s.prompt_len) or not all(0 <= token < vocab_size for token in s.tokens):
            raise Refused(
                f"{PROBE} holds a sequence that is too short or not of this target's vocabulary; export again"
            )
    return sequences, told


@torch.no_grad()
def replay(decoder: Decoder, probe: Sequence[ProbeSequence], *, model: Eagle3Model | None = None) -> dict[str, Tensor]:
    """Results of our own code by name, float32, sequence after sequence; without a drafter, only target logits."""
    results: dict[str, list[Tensor]] = {}
    taps = model.config.taps if model is not None else ()
    for sequence in probe:
        tokens_L = torch.tensor(sequence.tokens)
        offsets = torch.tensor([0, len(tokens_L)])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor = offsets) -> Tensor:
            return packed_causal_attention(q, k, v, offsets)

        hidden = decoder(tokens_L, torch.arange(len(tokens_L)), attend, taps=taps)
        found = {_TARGET: decoder.logits(hidden.last_TD)}
        if model is not None:
            assert hidden.taps_TE is not None, "an EAGLE-3 drafter has taps"
            embeds_LD = decoder.embed_tokens.weight[tokens_L]
            found[LOGITS] = draft_logits(model, embeds_LD, hidden.taps_TE, known=sequence.known)
            parts = hidden.taps_TE.chunk(len(taps), -1)
            found |= {_TAP.format(tap): part for tap, part in zip(taps, parts, strict=True)}
        for name, value in found.items():
            results.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in results.items()}


def draft_logits(model: Eagle3Model, embeds_LD: Tensor, taps_LE: Tensor, *, known: int) -> Tensor:
    """Draft logits as in `reference.py`, [L - 1, J]."""
    rope = rope_table(model.config, len(embeds_LD), dtype=embeds_LD.dtype, device=embeds_LD.device)
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        keys.append(k_TKd)
        values.append(v_TKd)
        k, v = torch.cat(keys), torch.cat(values)
        offsets, key_offsets = torch.tensor([0, len(q_THd)]), torch.tensor([0, len(k)])
        return packed_causal_attention(q_THd, k, v, offsets, key_offsets_S1=key_offsets)

    hidden = [model(embeds_LD[1:known], model.fuse(taps_LE[: known - 1]), rope[: known - 1], attend)]
    for position in range(known - 1, len(embeds_LD) - 1):
        here = slice(position, position + 1)
        hidden.append(model(embeds_LD[position + 1 : position + 2], hidden[-1][-1:], rope[here], attend))
    return model.logits(torch.cat(hidden))


def agreement(logits_TJ: Tensor, ids_J: Tensor, probe: Sequence[ProbeSequence]) -> Agreement:
    """Counted where the drafter reads the target's hidden states and predicts a token of the response."""
    agreeing = positions = 0
    parts = logits_TJ.split([len(s.tokens) - 1 for s in probe])
    for sequence, part_LJ in zip(probe, parts, strict=True):
        first, end = max(sequence.prompt_len - 2, 0), sequence.known - 1
        came = torch.tensor(sequence.tokens[first + 2 : end + 2])
        agreeing += int((ids_J[part_LJ[first:end].argmax(-1)] == came).sum())
        positions += len(came)
    return Agreement(agreeing, positions)


def replay_elsewhere(target: Path, probe: Sequence[ProbeSequence], *, drafter: Path | None = None) -> dict[str, Tensor]:
    """`replay` by `reference.py`, in a fresh process that cannot import this project.  Raises Refused when it fails."""
    with tempfile.TemporaryDirectory(prefix="tlt-verify-") as scratch:
        given, out = Path(scratch) / "in.safetensors", Path(scratch) / "out.safetensors"
        tensors = {
            "tokens_T": torch.tensor([token for s in probe for token in s.tokens]),
            "lengths_S": torch.tensor([len(s.tokens) for s in probe]),
            "known_S": torch.tensor([s.known for s in probe]),
        }
        save_file(tensors, given)
        # -I: neither this folder nor PYTHONPATH is searched for modules.
        folders = [str(drafter.resolve()) if drafter else "-", str(target.resolve())]
        command = [sys.executable, "-I", str(_REFERENCE), *folders]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        try:
            done = subprocess.run(
                [*command, str(given), str(out)],
                env=offline,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Refused(
                f"the reference implementation did not finish within {_LIMIT_S:.0f} s in a fresh process; verify on a "
                "machine with more memory or less load"
            ) from None
        if done.returncode:
            said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise Refused(
                f"the reference implementation cannot load it in a fresh process ({said[0]}), and servers cannot "
                "either; export again"
            )
        return load_file(out)

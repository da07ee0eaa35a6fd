"""What computes on a GPU where the machine has one, and the configuration asks for it."""

import json
from pathlib import Path

import pytest
import torch

from conf.rollout import SpeculationConfig
from tests.pretended_gpu import GpuTensor, pretended_gpu
from tlt_core.items.types import SamplingParams
from tlt_core.run import generate


def test_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's tokens."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 2 + 3?"}\n{"prompt": "Spell cat."}\n')
    loaded, load_decoder = [], generate.load_decoder

    def remembered(*arguments, **options):
        loaded.append(load_decoder(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(generate, "load_decoder", remembered)

    def generated(out: Path) -> list[list[int]]:
        generate.generate_file(
            model="smollm2-135m-instruct",
            prompts=prompts,
            out=out,
            params=SamplingParams(temperature=0.7, max_new_tokens=8),
            seed=5,
            dtype="float32",
            batch_size=2,
            num_workers=1,
            speculation=SpeculationConfig(policy="off"),
        )
        return [json.loads(line)["token_ids"] for line in out.read_text().splitlines()]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected = generated(tmp_path / "cpu.jsonl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pretended_gpu():
        assert generated(tmp_path / "gpu.jsonl") == expected
        assert [isinstance(decoder.head_weight, GpuTensor) for decoder in loaded] == [False, True]

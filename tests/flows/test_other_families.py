"""A whole run of a model that transformers computes: cold start, drafter, exact drafts, resume, export."""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from tests.flows.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.prefect]


@pytest.fixture(scope="module")
def model(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts with the embedded model's tokenizer."""
    folder: Path = tmp_path_factory.mktemp("moe") / "model"
    vocab = len(AutoTokenizer.from_pretrained(embedded_model))
    config = Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(embedded_model / name, folder / name)
    return folder


def test_a_mixture_of_experts_trains_drafts_resumes_and_is_exported(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("runs")
    it = f"model={{kind: pretrained, path: '{model}'}}"
    whole = Run(root, "whole", it, steps=2).finish()
    drafts = ("rollout.speculation={policy: cost_model}", "drafter={warmup: true}")
    drafting = Run(root, "drafting", it, *drafts, steps=2).finish()
    assert "rollout/spec_accept_length" in drafting.rows[1]
    assert drafting.rows[1]["rollout/checksum"] == whole.rows[1]["rollout/checksum"]
    assert (drafting.folder / "drafter-eagle3" / "model.safetensors").is_file()
    killed = Run(root, "killed", it, steps=2)
    assert killed.start_and_kill(lambda: killed.has_scored(2)).wait(60) == -signal.SIGKILL
    assert killed.finish().digest == whole.digest
    trained = AutoModelForCausalLM.from_pretrained(whole.folder / "policy")
    before = AutoModelForCausalLM.from_pretrained(model)
    moved = [n for (n, a), b in zip(trained.named_parameters(), before.parameters(), strict=True) if not a.equal(b)]
    assert any("experts" in name for name in moved)
    assert any("gate.weight" in name for name in moved)

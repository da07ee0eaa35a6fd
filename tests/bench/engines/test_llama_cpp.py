"""The GGUF file: its rows, types and tokens by hand, and what llama.cpp makes of it (slow)."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from bench.engines import environment, llama_cpp
from bench.engines.llama_cpp import rotated_rows, write_gguf
from bench.engines.measure import Case, EngineSpec, compete, cores, own_environment
from tlt_core.model.config import DecoderConfig
from tlt_core.model.decoder import Decoder
from tlt_core.model.load import random_decoder, save_hf
from tlt_core.run.inputs import artifacts_dir


def strong_decoder(config: DecoderConfig) -> Decoder:
    """With so large weights that attention looks at single tokens: else it would not matter how they are rotated."""
    decoder = random_decoder(config, seed=0, dtype=torch.float32)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10.0)
    return decoder


@pytest.fixture
def folder_of(tmp_path: Path):
    """Writes a model of a configuration with a tokenizer of 64 tokens, of which 0 to 2 are special."""

    def write(config: DecoderConfig) -> Path:
        folder = tmp_path / "model"
        tokens = {chr(0x21 + i): i for i in range(3, 62)} | {"$%": 62, "%&": 63}
        source = tmp_path / "tokenizer"
        source.mkdir()
        special = [{"id": i, "content": name} for i, name in enumerate(("<unk>", "<start>", "<stop>"))]
        tokenizer = {"model": {"vocab": tokens, "merges": [["$", "%"], "% &"]}, "added_tokens": special}
        (source / "tokenizer.json").write_text(json.dumps(tokenizer))
        decoder = strong_decoder(config)
        save_hf(decoder.named_parameters(), config, folder, tokenizer_from=source, dtype=torch.float32)
        return folder

    return write


def test_rows_of_a_head_go_from_halves_to_pairs(tiny_config):
    config = replace(tiny_config, num_heads=2, head_dim=4)
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert rotated_rows(name, rows, config)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert rotated_rows(name.replace("q_", "v_"), rows, config)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert rotated_rows(name, rows, replace(config, family="qwen3"))[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_matrices_are_rounded_and_vectors_are_not(folder_of, tiny_config, tmp_path):
    write_gguf(folder_of(tiny_config), tmp_path / "model.gguf", dtype=torch.bfloat16)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert len(tensors) == 2 + 9 * 2  # embedding and last norm; each layer's
    norms = {name for name in tensors if "norm" in name}
    assert {name for name, t in tensors.items() if t.tensor_type.name == "F32"} == norms
    assert {t.tensor_type.name for name, t in tensors.items() if name not in norms} == {"BF16"}
    embedding = strong_decoder(tiny_config).embed_tokens.weight.detach().to(torch.bfloat16)
    assert tensors["token_embd.weight"].data.tobytes() == embedding.view(torch.uint8).numpy().tobytes()


def test_what_llama_cpp_reads_besides_the_weights(folder_of, tiny_config, tmp_path):
    write_gguf(folder_of(tiny_config), tmp_path / "model.gguf", dtype=torch.float16)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    told = {name: field.contents() for name, field in fields.items()}
    assert (told["llama.attention.head_count"], told["llama.attention.head_count_kv"]) == (4, 2)
    assert told["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    tokens, kinds = told["tokenizer.ggml.tokens"], told["tokenizer.ggml.token_type"]
    assert (len(tokens), tokens[2], tokens[3], tokens[62]) == (64, "<stop>", "$", "$%")
    assert kinds[:4] == [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL]
    assert told["tokenizer.ggml.merges"] == ["$ %", "% &"]
    assert told["tokenizer.ggml.eos_token_id"] == 2


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_llama_cpp_decodes_the_same(folder_of, tiny_config, tmp_path, family):
    """Greedy tokens of it and of our engine, float32, three requests at once."""
    common = {
        "model": str(folder_of(replace(tiny_config, family=family, eos_token_ids=(2,)))),
        "dtype": "float32",
        "threads": 1,
        "cores": cores(1),
        "max_live": 3,
        "max_len": 48,
        "kv_cache_mb": 1024,
    }
    try:
        (peer,) = llama_cpp.specs(common, environments=artifacts_dir() / "peers", work_dir=tmp_path)
    except environment.PeerError as error:
        if os.environ.get("CI"):  # elsewhere there may be no package index
            raise
        pytest.skip(str(error))
    settings = {**common, "speculation": {"policy": "off"}}
    own = EngineSpec(
        "plain", peer.file.with_name("builtin.py"), Path(sys.executable), own_environment(threads=1), settings
    )
    prompts = [[1, 9, 4, 17, 30], [1, 12, 8], [1, 40, 41, 42, 43, 44, 45]]
    case = Case(3, 0.0)
    contest = compete([own, peer], [case], prompts, new_tokens=12, repeats=1, seed=0, log_dir=tmp_path)
    assert contest.measured["plain", case][0].tokens == contest.measured["llama.cpp", case][0].tokens
    assert contest.described["llama.cpp"]["precision"] == "float32 weights and inputs, float32 sums"

"""The GGUF file: its rows, types and tokens by hand, and what llama.cpp makes of it (slow)."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from bench.engines import environment
from bench.engines.gguf_file import rotated_rows, write_gguf
from bench.engines.measure import Case, EngineSpec, compete, cores, own_environment
from tlt_core.model.config import DecoderConfig, ModelError, RopeScaling
from tlt_core.model.decoder import Decoder
from tlt_core.model.load import load_config, random_decoder, save_hf
from tlt_core.run.inputs import artifacts_dir

PROCESSES = Path(__file__).parents[3] / "bench" / "engines" / "processes"


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


def tensors_of(path):
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


def test_rows_of_a_head_go_from_halves_to_pairs(tiny_config):
    config = replace(tiny_config, num_heads=2, head_dim=4)
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert rotated_rows(name, rows, config)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert rotated_rows(name.replace("q_", "v_"), rows, config)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert rotated_rows(name, rows, replace(config, family="qwen3"))[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_matrices_are_rounded_and_vectors_are_not(folder_of, tiny_config, tmp_path):
    write_gguf(folder_of(tiny_config), tmp_path / "model.gguf", dtype=torch.bfloat16)
    tensors = tensors_of(tmp_path / "model.gguf")
    assert len(tensors) == 2 + 9 * 2  # embedding and last norm; each layer's
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert {name for name, kind in kinds.items() if kind == "F32"} == {
        "output_norm.weight",
        *(f"blk.{i}.{norm}_norm.weight" for i in (0, 1) for norm in ("attn", "ffn")),
    }
    assert {kind for kind in kinds.values() if kind != "F32"} == {"BF16"}
    wanted = dict(strong_decoder(tiny_config).named_parameters())
    embedding = next(value for name, value in wanted.items() if "embed" in name).detach().to(torch.bfloat16)
    assert tensors["token_embd.weight"].shape.tolist() == [32, 64]
    assert tensors["token_embd.weight"].data.tobytes() == embedding.view(torch.uint8).numpy().tobytes()


def test_what_llama_cpp_reads_besides_the_weights(folder_of, tiny_config, tmp_path):
    write_gguf(folder_of(tiny_config), tmp_path / "model.gguf", dtype=torch.float16)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    told = {name: field.contents() for name, field in fields.items()}
    assert told["general.architecture"] == "llama"
    assert told["llama.attention.head_count"] == 4
    assert told["llama.attention.head_count_kv"] == 2
    assert told["llama.rope.freq_base"] == 10000.0
    assert np.isclose(told["llama.attention.layer_norm_rms_epsilon"], 1e-5)
    tokens = told["tokenizer.ggml.tokens"]
    assert (len(tokens), tokens[2], tokens[3], tokens[62]) == (64, "<stop>", "$", "$%")
    kinds = told["tokenizer.ggml.token_type"]
    assert kinds[:4] == [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL]
    assert told["tokenizer.ggml.merges"] == ["$ %", "% &"]
    assert told["tokenizer.ggml.eos_token_id"] == 2


def test_a_model_without_a_tokenizer_is_refused(tiny_folder, tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json is no byte-pair tokenizer"):
        write_gguf(tiny_folder, tmp_path / "model.gguf", dtype=torch.float32)


def test_scaled_rotations_are_refused(folder_of, tiny_config, tmp_path):
    scaled = replace(tiny_config, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))
    with pytest.raises(ModelError, match="rope_type llama3"):
        write_gguf(folder_of(scaled), tmp_path / "model.gguf", dtype=torch.float32)


def peer_python(peer):
    """CI must be able to make the environment; elsewhere there may be no package index."""
    try:
        return environment.interpreter(peer, artifacts_dir() / "peers")
    except environment.PeerError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def decoded(name, file, python, weights, folder, tmp_path):
    """Greedy tokens of a peer and of our engine, float32, three requests at once."""
    common = {
        "model": str(folder),
        "dtype": "float32",
        "threads": 1,
        "cores": cores(1),
        "max_live": 3,
        "max_len": 48,
        "kv_cache_mb": 1024,
    }
    peer = EngineSpec(name, PROCESSES / file, python, environment.variables(threads=1), {**common, "weights": weights})
    settings = {**common, "speculation": {"policy": "off"}}
    own = EngineSpec("plain", PROCESSES / "own.py", Path(sys.executable), own_environment(threads=1), settings)
    prompts = [[1, 9, 4, 17, 30], [1, 12, 8], [1, 40, 41, 42, 43, 44, 45]]
    case = Case(3, 0.0)
    contest = compete([own, peer], [case], prompts, new_tokens=12, repeats=1, seed=0, log_dir=tmp_path)
    return contest, contest.measured["plain", case][0].tokens, contest.measured[name, case][0].tokens


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_llama_cpp_decodes_the_same(folder_of, tiny_config, tmp_path, family):
    folder = folder_of(replace(tiny_config, family=family, eos_token_ids=(2,)))
    file = tmp_path / "model.gguf"
    write_gguf(folder, file, dtype=torch.float32)
    python = peer_python(environment.LLAMA_CPP)
    contest, ours, theirs = decoded("llama.cpp", "llama_cpp.py", python, str(file), folder, tmp_path)
    assert load_config(folder).family == family
    assert ours == theirs
    about = contest.described["llama.cpp"]
    assert about["version"].startswith("llama.cpp, xllamacpp ")
    assert about["precision"] == "float32 weights and inputs, float32 sums"


@pytest.mark.slow
@pytest.mark.long
def test_openvino_decodes_the_same(folder_of, tiny_config, tmp_path):
    config = replace(tiny_config, hidden_size=64, head_dim=32, num_heads=2, num_kv_heads=1)
    folder, out = folder_of(config), tmp_path / "ir"
    python = peer_python(environment.OPENVINO)
    export = [str(python), "-P", str(PROCESSES / "openvino_export.py"), str(folder), str(out), "float32"]
    environment.run(export, purpose="the conversion to OpenVINO")
    contest, ours, theirs = decoded("openvino", "openvino_llm.py", python, str(out), folder, tmp_path)
    assert ours == theirs
    assert contest.described["openvino"]["precision"] == "float32 weights, float32 products"

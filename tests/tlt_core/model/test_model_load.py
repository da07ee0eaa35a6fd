"""Folders in and out: bitwise round trips, and errors that name the file and the remedy."""

import dataclasses
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from kernels.attention.packed_attention import packed_causal_attention
from tlt_core.items.store import StoreError
from tlt_core.model.config import ModelError
from tlt_core.model.edge_weights import EdgeWeights
from tlt_core.model.load import (
    check_finite,
    load_config,
    load_decoder,
    load_tokenizer,
    random_decoder,
    resolve,
    save_hf,
    save_stop_token_ids,
    stop_token_ids,
)


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(tiny_folder, tmp_path / "copy")


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", False), ("qwen3", True)])
def test_save_and_load_through_transformers_is_bitwise(tiny_config, tmp_path, family, tied):
    """ours -> save_hf -> AutoModelForCausalLM -> save_pretrained -> ours."""
    config = dataclasses.replace(tiny_config, family=family, tie_word_embeddings=tied)
    ours = random_decoder(config, seed=3, dtype=torch.float32)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += torch.randn(parameter.shape)
    save_hf(ours.named_parameters(), config, tmp_path / "a", tokenizer_from=tmp_path, dtype=torch.float32)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (theirs.config.eos_token_id, theirs.config.bos_token_id, theirs.dtype) == (2, 1, torch.float32)
    theirs.save_pretrained(tmp_path / "b")
    again = load_decoder(tmp_path / "b", dtype=torch.float32)
    assert again.config.family == family
    for (name, a), (_, b) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_save_converts_and_replaces(tiny_config, tiny_decoder, tmp_path):
    out = tmp_path / "model"
    for dtype in (torch.float32, torch.bfloat16):
        save_hf(tiny_decoder.named_parameters(), tiny_config, out, tokenizer_from=tmp_path, dtype=dtype)
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_save_carries_the_tokenizer(embedded_model, tiny_config, tiny_decoder, tmp_path):
    out = tmp_path / "model"
    save_hf(tiny_decoder.named_parameters(), tiny_config, out, tokenizer_from=embedded_model, dtype=torch.float32)
    chat = [{"role": "user", "content": "hello"}]
    texts = [load_tokenizer(f).apply_chat_template(chat, tokenize=False) for f in (out, embedded_model)]
    assert texts[0] == texts[1]


def test_full_disk_leaves_the_old_folder_alone(tiny_config, tiny_decoder, tiny_folder, folder, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tlt_core.model.load.save_file", full)
    with pytest.raises(StoreError, match=r"cannot be written .*No space left on device.*free some space"):
        save_hf(tiny_decoder.named_parameters(), tiny_config, folder, tokenizer_from=tiny_folder, dtype=torch.float32)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    load_decoder(folder, dtype=torch.float32)


def test_incomplete_weights_are_not_saved(tiny_config, tiny_decoder, tmp_path):
    weights = [(n, p) for n, p in tiny_decoder.named_parameters() if n != "layers.1.o_proj.weight"]
    with pytest.raises(AssertionError, match=r"lack model.layers.1.self_attn.o_proj.weight"):
        save_hf(weights, tiny_config, tmp_path / "model", tokenizer_from=tmp_path, dtype=torch.float32)
    assert not list(tmp_path.iterdir())


def test_shards_are_read(tiny_decoder, folder):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load_decoder(folder, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), tiny_decoder.parameters(), strict=True))
    (folder / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"two.safetensors does not exist; the checkpoint is incomplete"):
        load_decoder(folder, dtype=torch.float32)


@pytest.mark.parametrize("elsewhere", ["../outside.safetensors", "sub/../../outside.safetensors", "absolute"])
def test_shards_outside_of_the_folder_are_not_read(folder, elsewhere):
    outside = (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    shard = str(outside) if elsewhere == "absolute" else elsewhere
    index = {"weight_map": dict.fromkeys(load_file(outside), shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"outside.safetensors does not exist; the checkpoint is incomplete"):
        load_decoder(folder, dtype=torch.float32)


def test_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors .*download or copy it again"):
        load_decoder(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), r"layers\.1\.self_attn\.k_proj\.weight"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}),
            r"unexpected .*layers\.2\.mlp\.up_proj\.weight",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), r"model\.norm\.weight .*\(31,\).*\(32,\)"),
        (
            lambda t: t["model.layers.1.mlp.up_proj.weight"][5].fill_(torch.nan),
            r"layers\.1\.mlp\.up_proj\.weight .*NaN",
        ),
    ],
    ids=["missing", "unexpected", "another shape", "NaN"],
)
def test_a_damaged_tensor_is_named(folder, change, said):
    edit_tensors(folder, change)
    with pytest.raises(ModelError, match=said):
        load_decoder(folder, dtype=torch.float32)


def test_redundant_tensors_are_ignored(folder, tiny_decoder):
    head = tiny_decoder.head_weight.detach().clone()
    extra = {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    edit_tensors(folder, lambda t: t.update(extra))
    assert torch.equal(load_decoder(folder, dtype=torch.float32).head_weight, head)


def test_sizes_that_the_tensors_do_not_have_take_no_memory(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 1 << 40}))
    with pytest.raises(ModelError, match=r"gate_proj\.weight .*2199023255552"):
        load_decoder(folder, dtype=torch.float32)


def test_weights_that_are_not_finite_are_found_without_a_decoder(folder):
    check_finite(folder)
    edit_tensors(folder, lambda t: t["model.norm.weight"][5].fill_(-torch.inf))
    with pytest.raises(ModelError, match=r"model\.safetensors: model\.norm\.weight .*train"):
        check_finite(folder)


def test_pickled_checkpoints_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load_decoder(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json cannot be read as JSON"),
        ("[]", "config.json must hold a JSON object, found list"),
        ('{"model_type": "llama"}', "config.json lacks the key 'num_attention_heads'"),
        ('{"model_type": "gpt2"}', "config.json: model_type 'gpt2' is not supported; supported are llama"),
    ],
)
def test_bad_config(folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        load_config(folder)


def test_generation_settings_name_the_stop_tokens(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load_config(folder).eos_token_ids == (5, 6)


def _tied_with_a_head(folder, *, noise: float):
    """As fine-tuning with a saved head leaves a folder whose config.json still says that the two are one."""

    def add(tensors):
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding + noise * torch.randn(embedding.shape)

    edit_tensors(folder, add)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    return folder


def test_a_head_of_its_own_counts_though_the_configuration_ties_it(folder, tmp_path):
    """As in transformers 5 and vLLM; the exported policy has it too."""
    _tied_with_a_head(folder, noise=0.5)
    tokens = torch.arange(3, 40)

    def attend(layer, q, k, v):
        return packed_causal_attention(q, k, v, torch.tensor([0, len(tokens)]))

    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens[None]).logits[0]
        ours = load_decoder(folder, dtype=torch.float32)
        found = ours.logits(ours(tokens, torch.arange(len(tokens)), attend).last_TD)
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-4)
        head_VD = load_file(folder / "model.safetensors")["lm_head.weight"]
        assert torch.equal(EdgeWeights.load(folder, dtype=torch.float32).head_weight, head_VD)
        save_hf(ours.named_parameters(), ours.config, tmp_path / "out", tokenizer_from=folder, dtype=torch.float32)
    assert not load_config(tmp_path / "out").tie_word_embeddings
    assert torch.equal(load_decoder(tmp_path / "out", dtype=torch.float32).head_weight, head_VD)


def test_a_head_that_is_the_embedding_again_changes_nothing(folder):
    assert load_config(_tied_with_a_head(folder, noise=0.0)).tie_word_embeddings
    load_decoder(folder, dtype=torch.float32)


def _as_base_model(embedded_model, out_dir):
    """Its files name <|endoftext|> as the end of a sequence, its chat template ends a turn with <|im_end|>."""
    out = shutil.copytree(embedded_model, out_dir, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("config.json", "generation_config.json"):
        if (out / name).is_file():
            raw = json.loads((out / name).read_text())
            (out / name).write_text(json.dumps(raw | {"eos_token_id": 0}))
    raw = json.loads((out / "tokenizer_config.json").read_text())
    (out / "tokenizer_config.json").write_text(json.dumps(raw | {"eos_token": "<|endoftext|>"}))
    return out


def test_a_response_ends_where_the_chat_template_ends_a_turn(embedded_model, tmp_path):
    base = _as_base_model(embedded_model, tmp_path / "base")
    tokenizer = load_tokenizer(base)
    assert (tokenizer.eos_token_id, load_config(base).eos_token_ids) == (0, (0,))
    assert stop_token_ids(base, tokenizer) == (0, 2)
    assert tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"
    assert stop_token_ids(base, tokenizer, also=(28,)) == (0, 2, 28)
    save_stop_token_ids(base, (0, 2, 28))
    assert load_config(base).eos_token_ids == (0, 2, 28)
    assert GenerationConfig.from_pretrained(base).eos_token_id == [0, 2, 28], "what servers read"
    before = (base / "generation_config.json").stat().st_mtime_ns
    save_stop_token_ids(base, (2,))
    assert (base / "generation_config.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",  # it ends turns with no special token
        "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}",  # it renders no content
        "{{ raise_exception('only prompts') }}",
        None,
    ],
)
def test_a_template_without_an_end_of_turn_adds_no_stop_token(embedded_model, template):
    tokenizer = load_tokenizer(embedded_model)
    tokenizer.chat_template = template
    assert stop_token_ids(embedded_model, tokenizer) == (2,)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./no/such/place", r"\./no/such/place .*give a local folder"),
        ("tests", r"has no config\.json"),
        ("nobody/nothing-7b", r"nobody/nothing-7b.*model\.path=smollm2-135m-instruct"),
    ],
)
def test_a_model_that_is_not_there_is_refused_in_one_paragraph(name, said):
    with pytest.raises(ModelError, match=said) as info:
        resolve(name)
    assert "\n" not in str(info.value)


def test_neither_code_nor_pickles_are_downloaded(monkeypatch, tmp_path):
    """The patterns, on the hub's own matching."""
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **given: asked.update(given) or tmp_path)
    assert resolve("owner/name") == tmp_path
    files = ["model.safetensors", "config.json", "modeling_own.py", "pytorch_model.bin", "a.pkl", "sub/own.py"]
    taken = huggingface_hub.utils.filter_repo_objects(files, allow_patterns=asked.get("allow_patterns"))
    assert list(taken) == files[:2]


def test_the_named_revision_is_asked_for():
    asked = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
        environment.pop("HF_HUB_OFFLINE", None)
        code = "import sys; from tlt_core.model.load import resolve; resolve(sys.argv[1])"
        done = subprocess.run(
            [sys.executable, "-c", code, "owner/name@0123abc"], env=environment, capture_output=True, timeout=120
        )
        hub.shutdown()
    assert b"can it be had from the hub" in done.stderr
    assert [path for path in asked if "owner" in path] == ["/api/models/owner/name/revision/0123abc"]


def test_folder_without_tokenizer(folder):
    with pytest.raises(ModelError, match="has no usable tokenizer"):
        load_tokenizer(folder)

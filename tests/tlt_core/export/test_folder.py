"""What is written: both folders, whole or not at all; the policy as transformers loads it."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.tlt_core.export import reference
from tests.tlt_core.export.conftest import Tiny
from tlt_core.drafter.eagle3.depths import drafted_depths
from tlt_core.drafter.eagle3.files import load_eagle3
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.windows import Pack, whole
from tlt_core.export import folder
from tlt_core.model.config import ModelError
from tlt_core.model.load import load_decoder


def test_the_two_folders(exported):
    files = {p.relative_to(exported).as_posix() for p in exported.rglob("*") if p.is_file()}
    assert files == {
        "policy/config.json",
        "policy/model.safetensors",
        "policy/tokenizer.json",
        "policy/tokenizer_config.json",
        "policy/provenance.json",
        "drafter-eagle3/config.json",
        "drafter-eagle3/model.safetensors",
        "drafter-eagle3/README.md",
        "drafter-eagle3/probe.json",
        "drafter-eagle3/provenance.json",
    }
    assert {(exported / name).stat().st_mode & 0o777 for name in files} == {0o644}


@torch.no_grad()
def test_another_implementation_computes_what_ours_does(exported):
    """transformers for the target, the paper's layer for the drafter: from the same files, along a drafted path too."""
    tokens_L = torch.tensor([3, 9, 27, 17, 51, 25, 8, 40, 12, 33])
    policy, drafter, known = exported / "policy", exported / "drafter-eagle3", 7
    expected = reference.results(drafter, policy, tokens_L, known=known)
    decoder = load_decoder(policy, dtype=torch.float32)
    model = load_eagle3(drafter, decoder.config)
    (observed,) = observe(decoder, [tokens_L], model, firsts=[1], dtype=torch.float32)
    pack = Pack.of(whole(observed), torch.device("cpu"))
    by_depth = [
        model.logits(y) for y in drafted_depths(model, decoder.embed_tokens.weight[pack.tokens_R], pack, depth=3)
    ]
    path = [logits_TJ[known - 2 + k] for k, logits_TJ in enumerate(by_depth[1:], start=1)]
    found = {
        "draft logits": torch.cat([by_depth[0][: known - 1], torch.stack(path)]),
        "hidden states": observed.taps_LE,
        "target logits": decoder.logits(observed.last_PD),
    }
    for name, ours in found.items():
        torch.testing.assert_close(ours, expected[name][: len(ours)], rtol=1e-4, atol=1e-5, msg=name)
    assert AutoTokenizer.from_pretrained(policy).encode("w3 w9") == [3, 9]


def test_provenance(exported, tiny, tiny_config):
    before, after = load_eagle3(tiny.source.drafter, tiny_config), load_eagle3(exported / "drafter-eagle3", tiny_config)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    record = json.loads((exported / "drafter-eagle3" / "provenance.json").read_text())
    manifest = json.loads((tiny.source.data_dir / "manifest.json").read_text())
    assert record["dataset"]["digest"] == manifest["digest"]
    assert (record["run"]["name"], record["run"]["step"]) == ("tiny", 7)
    policy = json.loads((exported / "policy" / "provenance.json").read_text())
    assert policy["target"]["weights_sha256"] == record["target"]["weights_sha256"]
    first = record["measured"]["schedules"][0]["table"]
    assert (first[0][0], first[-1][1]) == (1, 3), "max_live_requests"


def _export(tiny: Tiny, out: Path, **changes: Path | None) -> Path:
    return folder.run(tiny.cfg, replace(tiny.source, **changes), out_dir=out, num_prompts=0)


def _spoilt(folder: Path, copy: Path, tensor: str) -> Path:
    """A copy of a model's folder with one NaN."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors[tensor].view(-1)[7] = torch.nan
    save_file(tensors, copy / "model.safetensors")
    return copy


def test_all_or_nothing(tiny, tmp_path):
    """What is wrong with a drafter comes to light after the policy was written."""
    out = _export(tiny, tmp_path / "out", drafter=None)
    before = (out / "policy" / "provenance.json").read_bytes()
    (tmp_path / "broken").mkdir()
    figures = shutil.copytree(tiny.source.drafter, tmp_path / "figures")  # other programs cannot read a NaN in JSON
    (figures / "drafter.json").write_text(json.dumps({"metrics": {"drafter/loss_train": float("nan")}}))
    policy = _spoilt(tiny.source.policy, tmp_path / "policy", "model.layers.1.mlp.up_proj.weight")
    drafter = _spoilt(tiny.source.drafter, tmp_path / "drafter", "lm_head.weight")
    for changes, said in (
        ({"drafter": tmp_path / "broken"}, "not a readable drafter folder"),
        ({"policy": policy, "drafter": None}, r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"),
        ({"drafter": drafter}, r"drafter: lm_head\.weight holds NaN"),
        ({"drafter": figures}, r"training\.metrics\.drafter/loss_train for provenance\.json is nan"),
    ):
        with pytest.raises(ModelError, match=said):
            _export(tiny, out, **changes)
        assert [p.name for p in out.iterdir()] == ["policy"]
        assert (out / "policy" / "provenance.json").read_bytes() == before


def test_an_older_export_is_replaced_and_nothing_else(tiny, tmp_path):
    out = _export(tiny, tmp_path / "out")
    (out / "policy.dvc").write_text("outs: []")
    _export(tiny, out, drafter=None)
    assert sorted(p.name for p in out.iterdir()) == ["policy", "policy.dvc"]
    (tmp_path / "thesis.tex").write_text("years of work")
    for out in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ModelError, match="so it is not replaced; choose another --out"):
            _export(tiny, out)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_passwords_of_the_command_line_stay_here(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tlt", "export", "tracking.uri=https://me:secret@host/x"])
    out = _export(tiny, tmp_path / "out", drafter=None)
    text = (out / "policy" / "provenance.json").read_text()
    assert "secret" not in text
    assert json.loads(text)["command"] == ["tlt", "export", "tracking.uri=https://***@host/x"]

"""Hostile and broken exports: each is refused, by the check that is meant for it, with the reason and the remedy.

`reseal` rewrites the digests as an attacker would, so that what is tested is the check itself.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tlt_core.export.conftest import WORDS, write_policy
from tlt_core.export.record import write_record
from tlt_core.export.verify import passed, verify
from tlt_core.model.config import ModelError


def reseal(folder: Path) -> None:
    record = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").unlink()
    write_record(folder, record)


def edit_tensors(export: Path, change) -> None:
    path = export / "drafter-eagle3" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refusals(export: Path, **options) -> dict[str, str]:
    return {c.name: c.text for c in verify(export, **{"target": None, **options}) if c.outcome == "REFUSED"}


def test_a_sound_export_passes(exported, tiny):
    checks = verify(exported, target=None)
    assert passed(checks), checks
    told = json.loads((exported / "drafter-eagle3" / "probe.json").read_text())
    assert told["agreeing"] > told["positions"] / 2, "a drafter that guesses nothing tests nothing"
    assert f"guesses {told['agreeing']} of {told['positions']} recorded tokens" in checks[-1].text
    assert passed(verify(exported / "drafter-eagle3", target=str(tiny.source.policy)))
    with pytest.raises(ModelError, match="no policy beside it: say --target"):
        verify(exported / "drafter-eagle3", target=None)
    with pytest.raises(ModelError, match="is not a folder"):
        verify(exported / "nowhere", target=None)


def put(**values):
    return lambda tensors: tensors.update({name.replace("__", "."): value(tensors) for name, value in values.items()})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(d2t=lambda t: t["d2t"] + 1), "name different tokens"),
        (put(d2t=lambda t: t["d2t"] + torch.arange(58)), "must hold offsets"),
        (lambda t: t.pop("t2d"), "tensor t2d is missing"),
        (put(fc__bias=lambda t: torch.zeros(32)), "fc.bias is not part"),
        (put(fc__weight=lambda t: t["fc.weight"][:, :64].clone()), r"fc.weight has shape \(32, 64\)"),
        (put(norm__weight=lambda t: t["norm.weight"].double()), "norm.weight is torch.float64, not torch.float32"),
        (put(fc__weight=lambda t: t["fc.weight"] * torch.nan), "fc.weight holds NaN"),
    ],
)
def test_broken_tensors(export, change, reason):
    edit_tensors(export, change)
    assert "drafter digests" in refusals(export)
    reseal(export / "drafter-eagle3")
    found = refusals(export)
    assert list(found) == ["drafter layout"]
    assert re.search(reason, found["drafter layout"]), found


TAPS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("change", "check", "reason"),
    [
        (lambda c: c["eagle_config"].update({TAPS: [0, 1, 2]}), "layout", r"eagle_config=.*servers need .*-1, 0, 1"),
        (lambda c: c.pop("norm_before_residual"), "layout", "norm_before_residual=None, the servers need False"),
        (lambda c: c.update(quantization_config={"bits": 4}), "layout", "quantization_config="),
        (lambda c: c["transformer_layer_config"].update(hidden_size=16), "layout", "transformer_layer_config is"),
        (lambda c: c["speculators_config"].pop("verifier"), "layout", "speculators_config is incomplete"),
        (lambda c: c["speculators_config"]["verifier"].update(name_or_path="a/b"), "verifier", "would load a/b as"),
        (lambda c: c.update(auto_map={"AutoModel": "evil.Model"}), "contents", "auto_map"),
    ],
)
def test_broken_configurations(export, change, check, reason):
    edit_json(export / "drafter-eagle3" / "config.json", change)
    reseal(export / "drafter-eagle3")
    found = refusals(export)
    assert list(found) == [f"drafter {check}"]
    assert re.search(reason, found[f"drafter {check}"]), found


def index_to(folder, shard):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": shard}}))


BROKEN_CONTENTS = [
    (lambda d: (d / "notes.txt").symlink_to("/etc/hosts"), "notes.txt is a link to /etc/hosts"),
    (lambda d: index_to(d, "/etc/model.safetensors"), "'/etc/model.safetensors', which is not"),
    (lambda d: index_to(d, "../policy/model.safetensors"), "'../policy/model.safetensors', which is not"),
    (lambda d: index_to(d, "a\\b.safetensors"), "not a safetensors file"),
    (lambda d: (d / "modeling.py").write_text("import os"), "modeling.py is code"),
    (lambda d: (d / "more").mkdir(), "more is not a plain file"),
    (lambda d: (d / "pytorch_model.bin").write_bytes(b"x"), "pytorch_model.bin is a pickle"),
    (lambda d: (d / "weights.dat").write_bytes(b"x"), "weights.dat is of no kind that an export has"),
    (lambda d: (d / "extra.json").write_text("{"), "extra.json is not readable as JSON"),
]


@pytest.mark.parametrize(("change", "reason"), BROKEN_CONTENTS, ids=[reason[:30] for _, reason in BROKEN_CONTENTS])
def test_contents_that_lead_elsewhere(export, change, reason):
    change(export / "drafter-eagle3")
    found = refusals(export)
    assert set(found) == {"drafter contents"}
    assert reason in found["drafter contents"]
    change(export / "policy")
    assert "policy contents" in refusals(export)


def test_tampered_and_truncated_weights(export):
    edit_tensors(export, put(fc__weight=lambda t: t["fc.weight"] * 1.001))
    found = refusals(export)
    assert list(found) == ["drafter digests"]
    assert "model.safetensors is not the file that was exported" in found["drafter digests"]
    path = export / "drafter-eagle3" / "model.safetensors"
    shutil.copy(path, path.with_name("other.safetensors"))
    assert "not in other.safetensors" in refusals(export)["drafter layout"]
    path.with_name("other.safetensors").unlink()
    path.write_bytes(path.read_bytes()[:-100])
    assert "not a readable drafter folder" in refusals(export)["drafter layout"]


def test_files_that_came_or_went_after_the_export(export):
    drafter = export / "drafter-eagle3"
    (drafter / "added.txt").write_text("hello")
    assert "added.txt is not listed" in refusals(export)["drafter digests"]
    (drafter / "added.txt").unlink()
    (drafter / "README.md").unlink()
    assert "README.md is missing" in refusals(export)["drafter digests"]
    edit_json(drafter / "provenance.json", lambda p: p["files"].update({"../policy/config.json": "0"}))
    assert "'../policy/config.json'" in refusals(export)["drafter digests"]
    (drafter / "provenance.json").unlink()
    assert "has no provenance.json" in refusals(export)["drafter digests"]


def test_a_root_with_more_than_an_export(export, exported):
    (export / "policy.bak").mkdir()
    assert "policy.bak is no part of an export" in refusals(export)["export"]
    (export / "policy.bak").rmdir()
    shutil.rmtree(export / "policy")
    (export / "policy").symlink_to(exported / "policy")
    checks = verify(export, target=None)
    assert [c.outcome for c in checks] == ["REFUSED", "skipped"], "nothing is read through it"
    assert "policy is a link" in checks[0].text


def test_another_target(exported, tiny_config, tmp_path):
    larger = write_policy(tmp_path / "larger", dataclasses.replace(tiny_config, vocab_size=65))
    found = refusals(exported / "drafter-eagle3", target=str(larger))
    assert "vocab_size is 64, but the target's is 65" in found["drafter layout"]
    swapped = write_policy(tmp_path / "swapped", tiny_config, words=[*WORDS[:10], WORDS[11], WORDS[10], *WORDS[12:]])
    found = refusals(exported / "drafter-eagle3", target=str(swapped), other_weights=True)
    assert list(found) == ["drafter tokenizer"]
    other = str(write_policy(tmp_path / "other", tiny_config, seed=5))
    found = refusals(exported / "drafter-eagle3", target=other)
    assert "say --other-weights if this one is meant" in found["drafter weights"]
    checks = {c.name: c for c in verify(exported / "drafter-eagle3", target=other, other_weights=True)}
    assert checks["drafter weights"].outcome == checks["drafter replay"].outcome == "ok"
    assert "another target's" in checks["drafter replay"].text


def test_what_the_digests_do_not_show(export):
    """Another verifier, which is not on this machine; a drafter's map in which every draft is another token."""
    config = export / "drafter-eagle3" / "config.json"
    edit_json(config, lambda c: c["speculators_config"]["verifier"].update(name_or_path="/moved/policy"))
    reseal(export / "drafter-eagle3")
    checks = {c.name: c for c in verify(export, target=None)}
    assert "'vllm serve DRAFTER' alone won't find it" in checks["drafter verifier"].text
    assert passed(list(checks.values()))
    ids = torch.arange(58) + 5
    allowed = torch.zeros(64, dtype=torch.bool).index_fill_(0, ids, True)
    edit_tensors(export, lambda t: t.update(d2t=ids - torch.arange(58), t2d=allowed))
    reseal(export / "drafter-eagle3")
    found = refusals(export)
    assert list(found) == ["drafter replay"]
    assert re.search(r"guesses 0, at its export it guessed \d\d.* do not belong together", found["drafter replay"])

"""The plug-in's wheel brings one top-level name, and works where nothing else of this project is."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy import plugin_wheel

_TRIED = """
import sys, torch
from tlt_vllm.draft_lengths import DraftLengths
from tlt_vllm.ngram import NgramDrafts
from tlt_vllm.settings import Settings
import tlt_vllm.plugin, tlt_vllm.rows, tlt_vllm.signatures
from tlt_vllm._own.tlt_core.model.sampling import choose, row_keys
from tlt_vllm._own.tlt_core.items.types import SamplingParams
lengths = DraftLengths(Settings(draft_lengths=(1, 3)), "eagle3", with_ngrams=True)
assert lengths.schedule({}, next_up={"a": 5}, context=0, prefills=True, began_s=0.0) in (0, 1, 3)
logits = torch.randn(2, 100)
keys = row_keys(torch.tensor([1, 2]), torch.tensor([7, 8]))
assert choose(logits, keys, SamplingParams()).tokens_N.shape == (2,)
others = {name.split(".")[0] for name in sys.modules} & {"tlt_core", "kernels", "conf", "flows", "tasks", "bench"}
assert not others, others
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plugin_wheel.build(tmp_path_factory.mktemp("dist"))


def test_its_one_name_is_tlt_vllm(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        points = file.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tlt_vllm"}
    assert "tlt = tlt_vllm.plugin:register" in points
    assert wheel.stat().st_size < 200_000


def test_it_works_alone(wheel: Path, tmp_path: Path) -> None:
    """torch and its needs are this environment's; the project itself is an editable install, which -S leaves out."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    here = next(path for path in sys.path if path.endswith("site-packages"))
    room = tmp_path / "elsewhere"
    room.mkdir()
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", _TRIED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), here])},
        cwd=room,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

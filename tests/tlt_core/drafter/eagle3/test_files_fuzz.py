"""Whatever stands in a drafter's folder, it is loaded, or refused with the folder, the problem and the remedy."""

import json
import resource
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.fuzz import cases, fuzz
from tlt_core.drafter.eagle3.files import load_eagle3, save_eagle3
from tlt_core.drafter.eagle3.model import Eagle3Config, random_eagle3, rope_table
from tlt_core.model.config import DecoderConfig, ModelError

IDS = torch.tensor([0, 2, 3, 7, 8, 20, 41, 63])
MOST_MEMORY_KB = 300 << 10  # that refusing may take; the drafter has 60 KB

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from([0, 1, 2, 8, 32, 63, 65, 2**31, 2**63, 10**30, 1e308])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=4), inside, max_size=3),
    max_leaves=5,
)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 8, 16, 32, 64, 96]), max_size=3).map(tuple)
_DTYPES = "float32 float64 float16 bfloat16 float8_e4m3fn float8_e5m2 int8 uint8 int32 int64 uint64 bool complex64"
DTYPES = st.sampled_from([getattr(torch, name) for name in _DTYPES.split()])
ODD_NUMBERS = st.sampled_from([float("nan"), float("inf"), -float("inf"), 3e38, 1e30, 0.0, -1.0, 63.0])


@pytest.fixture
def folder(tiny_config: DecoderConfig, tmp_path: Path) -> Iterator[Path]:
    """Of a drafter that fits.  What refusing it takes of memory is bounded."""
    model = random_eagle3(Eagle3Config.for_target(tiny_config, len(IDS)), IDS, seed=3)
    save_eagle3(model, tmp_path / "good", dtype=torch.float32)
    shutil.copytree(tmp_path / "good", tmp_path / "spoilt-eagle3")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield tmp_path / "spoilt-eagle3"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY_KB


def _loaded(folder: Path, target: DecoderConfig) -> bool:
    """Whether it can be used; it is refused in one paragraph that names the folder otherwise."""
    try:
        model = load_eagle3(folder, target)
    except ModelError as error:
        said = str(error)
        assert str(folder) in said
        assert "\n" not in said
        assert len(said) < 2000
        return False
    ids = model.draft_ids_J
    assert bool(((ids >= 0) & (ids < target.vocab_size)).all())
    assert bool((ids.diff() > 0).all())
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in model.parameters())
    assert all(0 <= tap <= target.num_layers for tap in model.config.taps)
    rope = rope_table(model.config, 2, dtype=torch.float32, device=torch.device("cpu"))
    assert bool(rope.isfinite().all())
    with torch.no_grad():
        embeds, states = torch.ones(2, target.hidden_size), torch.ones(2, 3 * target.hidden_size)
        drafted = model.logits(model(embeds, model.fuse(states), rope, lambda q, k, v: q))
    assert drafted.shape == (2, len(ids))
    return True


def _changed(folder: Path, key: str, value: Any) -> None:
    raw = json.loads((folder.parent / "good" / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(raw | {key: value}), encoding="utf-8")


@cases(few=40, many=2000)
def test_any_value_in_the_configuration(count: int, folder: Path, tiny_config: DecoderConfig) -> None:
    raw = json.loads((folder / "config.json").read_bytes())
    keys = [*raw, "target_hidden_size", "rope_scaling", "head_dim", "layer_types", "quantization_config", "fc_norm"]

    @fuzz(count)
    @given(st.sampled_from(sorted(set(keys))), VALUES)
    def check(key: str, value: Any) -> None:
        _changed(folder, key, value)
        _loaded(folder, tiny_config)

    check()


@cases(few=40, many=1500)
def test_any_change_of_a_tensor(count: int, folder: Path, tiny_config: DecoderConfig) -> None:
    good = load_file(folder.parent / "good" / "model.safetensors")

    @fuzz(count)
    @given(st.sampled_from(sorted(good)), DTYPES, ODD_NUMBERS, SHAPES | st.none(), st.booleans())
    def check(name: str, dtype: torch.dtype, number: float, shape: tuple[int, ...] | None, whole: bool) -> None:
        """Another type, another shape, or one odd number in it, or nothing but that number."""
        value = good[name].clone().float() if shape is None else torch.zeros(shape)
        value.view(-1)[: None if whole else 1] = number
        save_file(good | {name: value.to(dtype)}, folder / "model.safetensors")
        _loaded(folder, tiny_config)

    check()


@cases(few=30, many=1000)
def test_any_map_of_the_vocabulary(count: int, folder: Path, tiny_config: DecoderConfig) -> None:
    good = load_file(folder.parent / "good" / "model.safetensors")
    good.pop("t2d")
    offsets = st.lists(st.integers(-2, 57) | st.integers(-(2**63), 2**63 - 1), min_size=8, max_size=8)

    @fuzz(count)
    @given(offsets, st.booleans())
    def check(found: list[int], ascending: bool) -> None:
        if ascending:
            found = sorted(found)
        save_file(good | {"d2t": torch.tensor(found)}, folder / "model.safetensors")
        ids = [draft + offset for draft, offset in enumerate(found)]
        fits = ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < 64
        assert _loaded(folder, tiny_config) == fits

    check()


@cases(few=60, many=1500)
def test_any_bytes_of_the_files(count: int, folder: Path, tiny_config: DecoderConfig) -> None:
    files = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}
    header = 8 + struct.unpack("<Q", files["model.safetensors"][:8])[0]
    anywhere = st.integers(0, header) | st.integers(0, len(files["model.safetensors"]))

    @fuzz(count)
    @given(st.sampled_from(sorted(files)), anywhere, st.binary(max_size=9), st.integers(0, 9), st.booleans())
    def check(name: str, start: int, content: bytes, cut: int, torn: bool) -> None:
        """Some are replaced, or the file ends there."""
        whole = files[name]
        (folder / name).write_bytes(whole[:start] + content + (b"" if torn else whole[start + cut :]))
        _loaded(folder, tiny_config)
        (folder / name).write_bytes(whole)

    check()

"""A node that does not see what the driver sees is named before a model is loaded."""

from pathlib import Path

import pytest

from tlt_core.cluster.placement import ClusterError, Node
from tlt_core.cluster.shared_folders import expected_files, probe_file, require_seen, unseen

DRIVER, OTHER = Node("a", "10.0.0.1"), Node("b", "10.0.0.2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\0" * 10)
    return folder


def test_what_is_there_is_seen(model: Path) -> None:
    files = expected_files([model])
    assert sorted(path.name for path in files) == ["config.json", "model.safetensors"]
    assert unseen(files) == ()


def test_an_absent_file_and_a_stale_one_are_not(model: Path) -> None:
    files = expected_files([model])
    (model / "config.json").unlink()
    (model / "model.safetensors").write_bytes(b"\0" * 9)
    assert set(unseen(files)) == set(files)


def test_the_probe_is_there_only_for_the_question(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    with probe_file(folder) as first, probe_file(folder) as second:
        assert not first.keys() & second.keys()
        assert unseen(first | second) == ()
    assert unseen(first) == tuple(first)
    assert list(folder.iterdir()) == []


def test_the_error_names_worker_node_folder_and_remedy(model: Path) -> None:
    files = tuple(expected_files([model]))
    require_seen([(), ()], [DRIVER, OTHER], driver=DRIVER)
    with pytest.raises(ClusterError, match=r"worker 1 on node 10\.0\.0\.2 .*model .*10\.0\.0\.1.*output_dir"):
        require_seen([(), files], [DRIVER, OTHER], driver=DRIVER)

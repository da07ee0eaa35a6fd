"""A node that does not see what the driver sees is named before a model is loaded."""

from pathlib import Path

import pytest

from tlt_core.cluster.placement import ClusterError, Node
from tlt_core.cluster.shared_folders import expected_files, require_seen, unseen

DRIVER, OTHER = Node("a", "10.0.0.1"), Node("b", "10.0.0.2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\0" * 10)
    return folder


def test_an_absent_file_and_a_stale_one_are_not(model: Path) -> None:
    files = expected_files([model])
    (model / "config.json").unlink()
    (model / "model.safetensors").write_bytes(b"\0" * 9)
    assert set(unseen(files)) == set(files)


def test_the_error_names_worker_node_folder_and_remedy(model: Path) -> None:
    files = tuple(expected_files([model]))
    require_seen([(), ()], [DRIVER, OTHER], driver=DRIVER)
    with pytest.raises(ClusterError, match=r"worker 1 on node 10\.0\.0\.2 .*model .*10\.0\.0\.1.*output_dir"):
        require_seen([(), files], [DRIVER, OTHER], driver=DRIVER)

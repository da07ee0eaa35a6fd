"""Folders that cannot be written are found before a run begins, and the check leaves nothing behind."""

from pathlib import Path

import pytest

from tlt_core.machine.disk import FolderError, check_writable


def test_a_folder_to_be_made_is_fine_and_not_made(tmp_path: Path) -> None:
    check_writable(tmp_path / "runs" / "demo")
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/demo", "broken/demo", "n" * 300, "a\0b"])
def test_a_name_that_can_be_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FolderError, match="set --out to"):
        check_writable(tmp_path / name, setting="--out")

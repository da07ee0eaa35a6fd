"""A folder becomes a version, with real DVC in a git repository of its own."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks.version import VersionError, version_folder

_CODE = """
import sys
from pathlib import Path
from tasks.version import version_folder
print(version_folder.fn(Path(sys.argv[1])).md5)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """With the patterns that this repository ignores, and a remote beside it."""
    root = tmp_path / "project"
    (root / "exports" / "a").mkdir(parents=True)
    (root / "exports" / "a" / "config.json").write_text("{}")
    (root / ".gitignore").write_text("exports/**\n!exports/**/\n!exports/**/*.dvc\n!exports/**/.gitignore\n")
    for command in ("git init -q", "dvc init -q", "dvc remote add -q -d shared ../remote"):
        program, *rest = command.split()
        subprocess.run(
            [sys.executable, "-m", "dvc", *rest] if program == "dvc" else [program, *rest], cwd=root, check=True
        )
    return root


def test_a_version_is_in_git_s_reach_and_in_the_remote(project: Path) -> None:
    version = version_folder.fn(project / "exports" / "a")
    assert version.pointer == project / "exports" / "a.dvc"
    assert version.md5.endswith(".dir")
    digest = version.md5.removesuffix(".dir")
    assert (project.parent / "remote" / "files" / "md5" / digest[:2] / f"{digest[2:]}.dir").is_file()
    untracked = subprocess.run(["git", "status", "-s", "-uall"], cwd=project, capture_output=True, text=True).stdout
    assert "exports/a.dvc" in untracked
    assert "config.json" not in untracked
    assert version_folder.fn(project / "exports" / "a") == version
    (project / "exports" / "a" / "config.json").write_text("[]")
    assert version_folder.fn(project / "exports" / "a").md5 != version.md5


def test_several_at_once_wait_for_each_other(project: Path) -> None:
    folders = [project / "exports" / name for name in "bcd"]
    for folder in folders:
        folder.mkdir()
        (folder / "model.bin").write_text(folder.name)
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda f: subprocess.run([sys.executable, "-c", _CODE, f], capture_output=True), folders))
    assert [d.returncode for d in done] == [0, 0, 0], b"\n".join(d.stderr for d in done)
    assert len({d.stdout for d in done}) == 3


def test_no_project_and_a_stage_s_output_are_refused(project: Path) -> None:
    with pytest.raises(VersionError, match="dvc init"):
        version_folder.fn(project.parent / "elsewhere" / "a")
    (project / "dvc.yaml").write_text("stages: {export: {cmd: 'true', outs: [exports/a]}}")
    with pytest.raises(VersionError, match="dvc add failed"):
        version_folder.fn(project / "exports" / "a")

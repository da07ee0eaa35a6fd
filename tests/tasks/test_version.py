"""A folder becomes a version, with real DVC in a git repository of its own."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks.stages import VersionError, version_folder

_CODE = """
import sys
from pathlib import Path
from tasks.stages import version_folder
print(version_folder.fn(Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a remote beside it."""
    root: Path = tmp_path_factory.mktemp("dvc") / "project"
    (root / "exports").mkdir(parents=True)
    for name in "ab":
        (root / "exports" / name).mkdir()
        (root / "exports" / name / "model.bin").write_text(name)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], cwd=root, check=True)
    (root / ".dvc" / "config").write_text(
        "[core]\n    remote = shared\n['remote \"shared\"']\n    url = ../../remote\n"
    )
    return root


def test_two_at_once_wait_for_each_other_and_are_in_the_remote(project: Path) -> None:
    folders = [project / "exports" / name for name in "ab"]
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda f: subprocess.run([sys.executable, "-c", _CODE, f], capture_output=True), folders))
    assert [d.returncode for d in done] == [0, 0], b"\n".join(d.stderr for d in done)
    first, second = (d.stdout.decode().strip() for d in done)
    assert first != second
    digest = first.removesuffix(".dir")
    assert (project.parent / "remote" / "files" / "md5" / digest[:2] / f"{digest[2:]}.dir").is_file()
    assert (project / "exports" / "a.dvc").is_file()
    (folders[0] / "model.bin").write_text("changed")
    assert version_folder.fn(folders[0], push=False) not in (first, second)


def test_a_folder_in_no_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VersionError, match="dvc init"):
        version_folder.fn(tmp_path / "elsewhere" / "a")

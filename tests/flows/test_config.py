"""A flow run reads a configuration of its project, and no other file: its parameters come from a server."""

from pathlib import Path

import pytest

from conf.load import ConfigError, load
from flows._config import as_config

TEXT = "name: x\ndata: {kind: reasoning_gym, tasks: [{name: chain_sum}]}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "conf").mkdir(parents=True)
    (folder / "conf" / "x.yaml").write_text(TEXT)
    (folder / "conf" / "x.json").write_text("{}")
    (tmp_path / "outside.yaml").write_text(TEXT)
    (folder / "link.yaml").symlink_to(tmp_path / "outside.yaml")
    monkeypatch.chdir(folder)
    return folder


def test_a_file_of_the_project_is_read_and_no_other(project: Path) -> None:
    assert as_config("conf/x.yaml", ["seed=3"]) == load("conf/x.yaml", ["seed=3"])
    assert as_config(str(project / "conf" / "x.yaml"), None).name == "x"
    for path in ("/etc/hostname", "../outside.yaml", "link.yaml", "conf/../../outside.yaml", "conf/x.json"):
        with pytest.raises(ConfigError, match=r"takes a \.yaml or \.yml file inside its working folder"):
            as_config(path, None)

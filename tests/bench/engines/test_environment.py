"""A peer's environment: made once, anew for other packages, and a reason where it cannot be made."""

import sys

import pytest

from bench.engines import environment
from bench.engines.environment import Peer, PeerError, interpreter


@pytest.fixture
def commands(monkeypatch):
    found = []
    monkeypatch.setattr(environment, "run", lambda command, *, purpose: found.append(command))
    monkeypatch.setattr(environment.Path, "touch", lambda path: (path.parent.mkdir(), path.write_text("")))
    return found


def test_an_environment_is_made_once_and_again_when_it_is_half_made_or_has_other_packages(tmp_path, commands):
    peer = Peer("engine", ("a==1", "b==2"))
    python = interpreter(peer, tmp_path)
    assert commands[0][1:] == ["-m", "venv", str(python.parents[1])]
    assert commands[1][-2:] == ["a==1", "b==2"]
    assert interpreter(peer, tmp_path) == python
    assert len(commands) == 2
    (python.parents[1] / ".made").unlink()
    interpreter(peer, tmp_path)
    assert len(commands) == 4
    assert interpreter(Peer("engine", ("a==2",)), tmp_path) != python


def test_what_cannot_be_made_is_a_reason(tmp_path):
    with pytest.raises(PeerError, match=r"making it failed \(exit code 1\): no room"):
        environment.run([sys.executable, "-c", "raise SystemExit('no room')"], purpose="making it")
    (tmp_path / "file").write_text("")
    with pytest.raises(PeerError, match="cannot be made"):
        interpreter(Peer("engine", ("a==1",)), tmp_path / "file")

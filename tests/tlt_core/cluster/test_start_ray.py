"""A Ray of our own starts in surroundings that are not made for it."""

import os
from pathlib import Path

import pytest
import ray

from conf.system import ClusterConfig
from tlt_core.cluster.placement import start_ray
from tlt_core.machine.disk import socket_folder


def test_ray_starts_under_a_long_tmpdir_and_behind_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a batch job's folder, where a socket's path would have more than the 107 bytes that Linux allows."""
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    try:
        start_ray(ClusterConfig(num_workers=1))
        assert ray.get(ray.remote(lambda: os.environ["TMPDIR"]).remote(), timeout=120) == str(folder)
    finally:
        ray.shutdown()


def test_a_short_folder_stays() -> None:
    assert socket_folder("/scratch", behind="/" + "s" * 98) == "/scratch"
    assert socket_folder("/scratch", behind="/" + "s" * 99) == "/tmp"
    assert socket_folder("/" + "\N{GREEK SMALL LETTER ALPHA}" * 10, behind="/" + "s" * 90) == "/tmp"  # bytes count

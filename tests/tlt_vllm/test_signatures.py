"""The vLLM versions that the plug-in accepts are as it expects.  Of their wheels only sources are fetched."""

import io
import json
import subprocess
import sys
import urllib.request
import zipfile

import pytest

from tlt_vllm.signatures import VERSIONS, differences


class _Remote(io.RawIOBase):
    """A file behind an address, of which parts are read."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
            self._size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    # The base's type is collections.abc.Buffer, which Python 3.11 has not.
    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), self._size - self._at)
        if count <= 0:
            return 0
        part = {"Range": f"bytes={self._at}-{self._at + count - 1}"}
        with urllib.request.urlopen(urllib.request.Request(self._url, headers=part), timeout=60) as answer:
            assert answer.status == 206, "the index answers with parts of a file"
            buffer[:count] = answer.read()
        self._at += count
        return count


def _sources(version: str) -> zipfile.ZipFile:
    asked = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
    told = subprocess.run(
        [*asked, "--only-binary", ":all:", "--report", "-", f"vllm=={version}"],
        check=True,
        capture_output=True,
        text=True,
    )
    url = json.loads(told.stdout)["install"][0]["download_info"]["url"]
    return zipfile.ZipFile(io.BufferedReader(_Remote(url), 1 << 20))


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_that_is_accepted_has_what_the_plug_in_relies_on(version: str) -> None:
    with _sources(f"{version}.0") as wheel:
        assert differences(lambda path: wheel.read(f"vllm/{path}").decode(), version=f"{version}.0") == []


def test_what_has_changed_is_named() -> None:
    def read(path: str) -> str:
        if path == "v1/core/sched/async_scheduler.py":
            return "class AsyncScheduler:\n    def _update_after_schedule(self, output, must=1): ...\n"
        return ""

    found = "\n".join(differences(read, version="0.33.0"))
    assert "AsyncScheduler._update_after_schedule ('self', 'output'), where" in found
    assert "v1/core/sched/scheduler.py: Scheduler.schedule is not there" in found
    assert "v1/worker/gpu_input_batch.py: nothing is called token_ids_cpu" in found

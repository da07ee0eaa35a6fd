"""The CPU's own kernels are compiled and loaded where they can be; where they cannot, the reason names the remedy."""

import shutil
import subprocess

import pytest

from kernels import native

UNFIT = native._lacking() or ("" if any(map(shutil.which, ("cc", "gcc", "clang"))) else "there is no C compiler")
pytestmark = pytest.mark.skipif(bool(UNFIT), reason=UNFIT)


def test_they_load_where_they_can():
    """Not `library`, which would turn a compiler's error into a skip of everything here."""
    assert native.load() is not None
    assert native.library() is not None


def test_instructions_that_are_none_are_refused(monkeypatch):
    monkeypatch.setenv("TLT_NATIVE_KERNELS", "avx3")
    with pytest.raises(native.NativeError, match=r"avx3.* is none of 0, amx, avx512_bf16"):
        native.load()


@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-gcc"), reason="there is no compiler for ARM")
def test_they_compile_for_arm(tmp_path):
    """The same source with NEON's four lanes; that is all that can be shown without such a processor."""
    for source in sorted(native._SOURCES.glob("*.c")):
        built = tmp_path / f"{source.stem}.o"
        flags = [*native._FLAGS, "-Wall", "-Werror", "-c", str(source), "-o", str(built)]
        subprocess.run(["aarch64-linux-gnu-gcc", *flags], check=True)
        assert built.stat().st_size


def test_switched_off_they_say_so(monkeypatch):
    monkeypatch.setenv("TLT_NATIVE_KERNELS", "0")
    with pytest.raises(native.NativeError, match="TLT_NATIVE_KERNELS=0"):
        native.load()


def test_without_a_compiler_they_say_what_helps(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(native.NativeError, match="apt install gcc"):
        native.load()


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_FLAGS", ("--no-such-flag",))
    with pytest.raises(native.NativeError, match="no-such-flag"):
        native.load()
    assert not list((tmp_path / "tlt").iterdir()), "nothing half made is left behind"


def test_a_full_disk_or_no_home_is_no_crash(monkeypatch, tmp_path):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native.tempfile, "TemporaryDirectory", full)
    with pytest.raises(native.NativeError, match="XDG_CACHE_HOME"):
        native.load()
    monkeypatch.undo()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(native.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert native._cache_folder().is_dir()

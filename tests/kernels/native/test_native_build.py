"""The CPU's own kernels are compiled and loaded where they can be; where they cannot, the reason names the remedy."""

import ctypes
import re
import shutil
import subprocess

import pytest

from kernels import native

UNFIT = native._lacking() or ("" if any(map(shutil.which, ("cc", "gcc", "clang"))) else "there is no C compiler")
pytestmark = pytest.mark.skipif(bool(UNFIT), reason=UNFIT)


def test_signatures_are_those_of_the_prototypes():
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    source = "EXPORT void tlt_a(const bf16 *x, int64_t n,\n                  float eps, void *y) {\n}\n"
    source += "EXPORT const char *tlt_b(void) {\n}\nstatic void c(int n) {\n}\n"
    assert native.signatures(source) == {
        "tlt_a": (None, [pointer, integer, number, pointer]),
        "tlt_b": (ctypes.c_char_p, []),
    }
    assert native.signatures(source.replace("float eps", "int64_t m, float eps"))["tlt_a"][1][2] is integer
    struct = "typedef struct {\n    const bf16 *keys, *values;\n    int64_t in;\n    Linear q;\n} A;\n"
    fields = [("keys", pointer), ("values", pointer), ("in", integer), ("q", native.CLinear)]
    assert native.fields(struct, "A") == fields


def test_a_call_that_does_not_fit_its_prototype_is_refused():
    """Otherwise it would read whatever lies where an argument is missing."""
    library = native.load()
    exported = {name for path in native._SOURCES.glob("*.c") for name in re.findall(r"tlt_\w+(?=\()", path.read_text())}
    assert len(exported) > 15
    for name in exported:
        arguments = getattr(library, name).argtypes
        assert arguments is not None
        if arguments:
            with pytest.raises(TypeError, match="at least"):
                getattr(library, name)(*(0 for _ in arguments[1:]))


@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-gcc"), reason="there is no compiler for ARM")
def test_they_compile_for_arm(tmp_path):
    """The same source with NEON's four lanes; that is all that can be shown without such a processor."""
    for source in sorted(native._SOURCES.glob("*.c")):
        built = tmp_path / f"{source.stem}.o"
        flags = [*native._FLAGS, "-Wall", "-Werror", "-c", str(source), "-o", str(built)]
        subprocess.run(["aarch64-linux-gnu-gcc", *flags], check=True)
        assert built.stat().st_size


def _full(*args, **kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda patch: patch.setenv("TLT_NATIVE_KERNELS", "avx3"), r"avx3.* must be one of 0, amx, avx512_bf16"),
        (lambda patch: patch.setattr(native.shutil, "which", lambda name: None), "apt install gcc"),
        (lambda patch: patch.setattr(native, "_FLAGS", ("--no-such-flag",)), "no-such-flag"),
        (lambda patch: patch.setattr(native.tempfile, "TemporaryDirectory", _full), "XDG_CACHE_HOME"),
    ],
    ids=["unknown instructions", "no compiler", "a compiler that fails", "a full disk"],
)
def test_where_they_cannot_be_compiled_the_reason_is_named(monkeypatch, tmp_path, spoil, said):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spoil(monkeypatch)
    with pytest.raises(native.NativeError, match=said):
        native.load()
    assert not list(tmp_path.glob("tlt/*")), "nothing half made is left behind"


def test_without_a_home_they_are_kept_elsewhere(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(native.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert native._cache_folder().is_dir()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache with the library in it, and a second place for what cannot be kept there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    compiled = []

    def compile_(sources, target, flags):
        compiled.append(target)
        target.write_bytes(b"ours")
        target.chmod(0o700)

    monkeypatch.setattr(native, "_compile", compile_)
    native._compiled(())
    assert native._compiled(()) == compiled[0], "made once"
    assert len(compiled) == 1
    return compiled


def give_away(monkeypatch, *paths):
    """These belong to a stranger now; only root could really do that."""
    real = native.Path.lstat

    def lstat(path):
        mode, inode, device, links, owner, *rest = real(path)
        return native.os.stat_result([mode, inode, device, links, 4242 if path in paths else owner, *rest])

    monkeypatch.setattr(native.Path, "lstat", lstat)


def test_a_library_that_is_another_s_or_that_others_may_change_is_made_again(cache, monkeypatch, tmp_path):
    (target,) = cache

    def stranger():
        give_away(monkeypatch, target)

    def link():
        target.unlink()
        target.symlink_to(tmp_path / "other.so")

    for spoil in (lambda: target.chmod(0o720), lambda: target.chmod(0o702), link, stranger):
        target.write_bytes(b"theirs")
        spoil()
        made = len(cache)
        assert native._compiled(()) == target
        assert len(cache) == made + 1
        assert target.read_bytes() == b"ours"


def test_the_folder_of_another_user_is_not_used(cache, monkeypatch, tmp_path):
    private = tmp_path / "tmp" / f"tlt-{native.os.getuid()}"
    give_away(monkeypatch, tmp_path / "tlt")
    assert native._compiled(()).parent == private
    give_away(monkeypatch, tmp_path / "tlt", private)
    with pytest.raises(native.NativeError, match=r"tmp/tlt-\d+ belongs to somebody else.*set XDG_CACHE_HOME to a"):
        native._compiled(())
    assert len(cache) == 2

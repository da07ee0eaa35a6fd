"""C kernels for CPUs: one source for every width of vectors (`lanes.h`), compiled on the machine where they run.

    *.c, *.h  --cc, three seconds, once for each processor-->  ~/.cache/tlt/native-<digest>.so  --ctypes-->  library()

    amx          matrix tiles beside AVX-512          } products of bfloat16 numbers
    avx512_bf16  AVX-512 with bfloat16 products       }
    avx512, avx2, neon                                numbers are bfloat16 in memory, products float32
    portable     the compiler's vectors of four floats

Without a compiler everything runs on torch, and `library` logs that once.  TLT_NATIVE_KERNELS=0 turns the kernels off;
TLT_NATIVE_KERNELS=avx2 (or another name from above) limits them to these instructions.  Where `is_bf16_slow`, that
limit is avx512 unless another one is set.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

_log = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-std=gnu11", "-ffp-contract=off", "-Wno-psabi")
_SWITCH = "TLT_NATIVE_KERNELS"
_PRIVATE = 0o700
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MACHINES = {"x86_64": "-march=native", "amd64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}
_X86 = {  # flags that exclude wider instructions
    "amx": (),
    "avx512_bf16": ("-mno-amx-tile",),
    "avx512": ("-mno-amx-tile", "-mno-avx512bf16"),
    "avx2": ("-mno-amx-tile", "-mno-avx512f"),
    "portable": ("-mno-amx-tile", "-mno-avx512f", "-mno-avx"),
}
_ARM: dict[str, tuple[str, ...]] = {"neon": ()}

_PROTOTYPE = re.compile(r"^EXPORT (.*?)(tlt_\w+)\((.*?)\)", re.DOTALL | re.MULTILINE)
_STRUCT = re.compile(r"^typedef struct \{(.*?)\} (\w+);", re.DOTALL | re.MULTILINE)
_RESULTS = {"void": None, "const char *": ctypes.c_char_p}
_BY_VALUE: dict[str, Any] = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}


class NativeError(RuntimeError):
    """The kernels cannot run here.  The text says why, and the remedy."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot run.  The first call compiles; the reason is logged once."""
    try:
        return load()
    except NativeError as error:
        _log.warning("decoding on torch's CPU kernels: %s", error)
        return None


def load() -> ctypes.CDLL:
    """Load the kernels, compiled first if necessary.  Raises NativeError."""
    if os.environ.get(_SWITCH) == "0":
        raise NativeError(f"{_SWITCH}=0 turns the C kernels off")
    lacking = _lacking()
    if lacking:
        raise NativeError(lacking)
    flags = _flags()
    try:
        path = _compiled(flags)
    except OSError as error:
        raise NativeError(
            f"they cannot be compiled or kept ({error}); set XDG_CACHE_HOME to a folder with room that can be written"
        ) from None
    torch.empty(1)  # loads torch's OpenMP runtime, whose threads the kernels use
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded ({error}); delete it to have it made again") from None
    for name, (result, arguments) in signatures(_source()).items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


@functools.cache
def _source() -> str:
    """All sources, without comments."""
    return re.sub(r"//.*", "", "\n".join(path.read_text() for path in sorted(_SOURCES.glob("*.[ch]"))))


def signatures(source: str) -> dict[str, tuple[Any, list[Any]]]:
    """Types of result and arguments of what a C source exports.  ctypes refuses a call that does not fit them.

    `EXPORT void tlt_pack(const bf16 *w, int64_t out) {` -> {"tlt_pack": (None, [c_void_p, c_int64])}
    """
    return {
        name: (_RESULTS[result.strip()], [_type(one) for one in arguments.split(",") if one != "void"])
        for result, name, arguments in _PROTOTYPE.findall(source)
    }


def _type(declared: str) -> Any:
    """Of "const bf16 *w", "int64_t out" or "Linear qkv"."""
    return ctypes.c_void_p if "*" in declared else _BY_VALUE[declared.split()[0]]


def fields(source: str, struct: str) -> list[tuple[str, Any]]:
    """Names and types of a struct's fields, for ctypes.

    `typedef struct { int64_t n; float *x, *y; } A;` -> [("n", c_int64), ("x", c_void_p), ("y", c_void_p)]
    """
    (body,) = (body for body, name in _STRUCT.findall(source) if name == struct)
    found = []
    for declared in filter(None, map(str.strip, body.split(";"))):
        first, *more = declared.split(",")
        found += [(name.strip(" *"), _type(declared)) for name in (first.split()[-1], *more)]
    return found


def isa() -> str | None:
    """Name of the instructions that the kernels use here (see above); None where they do not run."""
    found = library()
    return None if found is None else found.tlt_isa().decode()


def is_bf16_slow() -> bool:
    """Whether this processor multiplies bfloat16 numbers slower than floats.

    Intel's do without AMX, which a virtual machine may hide: figures in docs/cpu.md.
    """
    about = _processor()
    return "GenuineIntel" in about and "avx512_bf16" in about and "amx_bf16" not in about


def narrower() -> tuple[str, ...]:
    """Names of narrower instructions of this processor, widest first; values of TLT_NATIVE_KERNELS."""
    own, names = isa(), list(_X86)
    return tuple(names[names.index(own) + 1 :]) if own in names else ()


def _lacking() -> str:
    """Why the kernels do not support this machine; empty where they do."""
    if platform.machine().lower() not in _MACHINES or os.name != "posix":
        return (
            f"they are for x86-64 and ARM under Linux and macOS, this is {platform.machine()} under {platform.system()}"
        )
    return ""


def _flags() -> tuple[str, ...]:
    machine = platform.machine().lower()
    limits, most = _X86 if machine in ("x86_64", "amd64") else _ARM, os.environ.get(_SWITCH, "")
    most = most or ("avx512" if is_bf16_slow() else "")
    if most and most not in limits:
        raise NativeError(
            f"{_SWITCH}={most!r} must be one of 0, {', '.join(limits)}; unset it to use all that this processor has"
        )
    return (*_FLAGS, _MACHINES[machine], *(limits[most] if most else ()))


def _compiled(flags: Sequence[str]) -> Path:
    sources = sorted(_SOURCES.glob("*.c"))
    digest = hashlib.sha256()
    for path in (*sources, *sorted(_SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    digest.update(repr((tuple(flags), _processor())).encode())
    target = _cache_folder() / f"native-{digest.hexdigest()[:16]}.so"
    if not _is_ours_alone(target, stat.S_ISREG):
        _compile(sources, target, flags)
    return target


def _is_ours_alone(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Is it there, is it no link, and can nobody else have made or changed it?  What is loaded runs as this user."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return is_kind(found.st_mode) and found.st_uid in (os.getuid(), 0) and not found.st_mode & _OTHERS_MAY_WRITE


def _processor() -> str:
    """The properties of this processor that -march=native depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    wanted = {
        line.partition(":")[0].strip(): line
        for line in lines
        if line.startswith(("vendor_id", "cpu family", "model", "flags"))
    }
    return platform.machine() + "".join(sorted(wanted.values()))


def _cache_folder() -> Path:
    """A folder that nobody else can write."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tlt"
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=_PRIVATE, exist_ok=True)
        folder = folder.resolve()
        if folder.stat().st_uid == os.getuid():
            folder.chmod(_PRIVATE)  # a permissive umask may have made it; what others put there has another owner
        if _is_ours_alone(folder, stat.S_ISDIR) and os.access(folder, os.W_OK):
            return folder
        _log.info("%s is somebody else's or cannot be written: the CPU kernels are kept in a temporary folder", folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        _log.info("no cache folder for the CPU kernels (%s): using a temporary one", error)
    private = Path(tempfile.gettempdir()) / f"tlt-{os.getuid()}"
    private.mkdir(mode=_PRIVATE, exist_ok=True)
    if not _is_ours_alone(private, stat.S_ISDIR):
        raise NativeError(
            f"{private} belongs to somebody else, or can be written by others; remove it, or set XDG_CACHE_HOME to a "
            "folder that only you can write"
        )
    return private


def _compile(sources: Sequence[Path], target: Path, flags: Sequence[str]) -> None:
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise NativeError(
            "there is no C compiler (Debian, Ubuntu: apt install gcc); decoding takes about twice as long"
        )
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / "native.so"
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        commands = [[compiler, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        # Without -fopenmp: a second OpenMP runtime would compete with torch's for the cores.
        commands.append([compiler, "-shared", "-o", str(built), *objects, "-lm"])
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                last = done.stderr.strip().splitlines()[-3:]
                raise NativeError(f"{' '.join(command[:1] + command[-3:])} failed: {' '.join(last)}")
        built.chmod(_PRIVATE)  # whatever the umask: see `_is_ours_alone`
        built.replace(target)  # another process that compiles at the same time makes the same file


def _struct(name: str) -> type[ctypes.Structure]:
    return type(f"C{name}", (ctypes.Structure,), {"_fields_": fields(_source(), name)})


CLinear = _BY_VALUE["Linear"] = _struct("Linear")
CLayer, CShape, CCache, CLayout = map(_struct, ("Layer", "Shape", "Cache", "Layout"))
CChain, CCacheShape = map(_struct, ("Chain", "CacheShape"))

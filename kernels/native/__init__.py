"""C kernels for CPUs: one source for every width of vectors (`lanes.h`), compiled on the machine where they run.

    *.c, *.h  --cc, three seconds, once for each processor-->  ~/.cache/tlt/native-<digest>.so  --ctypes-->  library()

    amx          matrix tiles beside AVX-512          } products of bfloat16 numbers
    avx512_bf16  AVX-512 with bfloat16 products       }
    avx512, avx2, neon                                numbers are bfloat16 in memory, products float32
    portable     the compiler's vectors of four floats

torch's kernels are made for large tensors.  A decode step of a small model is hundreds of operations on a few rows,
where calls, copies and re-arrangements cost more than the arithmetic.

Without a compiler everything runs on torch, and `library` logs that once.  TLT_NATIVE_KERNELS=0 turns the kernels off;
TLT_NATIVE_KERNELS=avx2 (or another name from above) limits them to these instructions.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

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

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "tlt_pack": (_P, _I, _I, _P),
    "tlt_linear": (_P, _I, _P, _P),
    "tlt_layers": (_P, _P, _P, _I, _P, _P, _P, _P),
    "tlt_eagle3_layer": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P),
    "tlt_eagle3_chain": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P),
    "tlt_draft_children": (_P, _P, _P, _I, _I, _F, _F, _I, _P, _P),
    "tlt_rms_norm": (_P, _P, _I, _I, _F, _P),
    "tlt_choose": (_P, _P, _I, _I, _F, _P, _P, _P),
    "tlt_exponential": (_P, _I, _P, _I, _P),
    "tlt_tree_layout": (_P, _I, _P, _P, _P, _I, _I, _P, _P, _P, _P, _P, _P),
    "tlt_accepted_path": (_P, _P, _P, _P, _I, _I, _I, _P, _P),
    "tlt_distill_loss": (_P, _I, _P, _P, _I, _I, _I, _P, _P, _P),
    "tlt_logprob": (_P, _I, _P, _I, _I, _F, _P, _P, _P),
    "tlt_logprob_gradient": (_P, _I, _P, _P, _P, _I, _I, _F),
    "tlt_rms_norm_gradient": (_P, _P, _P, _I, _I, _F, _P, _P),
    "tlt_swiglu": (_P, _I, _I, _P),
    "tlt_swiglu_gradient": (_P, _P, _I, _I, _P),
    "tlt_rotate": (_P, _I, _I, _I, _I, _P, _P, _I, _P),
    "tlt_add_exactly": (_P, _P, _I, _I),
    "tlt_kv_commit": (_P, _P, _P, _P, _P, _P, _I, _I),
}


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
    for name, arguments in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = list(arguments), None
    found.tlt_isa.argtypes, found.tlt_isa.restype = [], ctypes.c_char_p
    return found


def isa() -> str | None:
    """Name of the instructions that the kernels use here (see above); None where they do not run."""
    found = library()
    return None if found is None else found.tlt_isa().decode()


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
    if most and most not in limits:
        raise NativeError(
            f"{_SWITCH}={most!r} is none of 0, {', '.join(limits)}; unset it to use all that this processor has"
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
        line.partition(":")[0].strip(): line for line in lines if line.startswith(("cpu family", "model", "flags"))
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


class CLinear(ctypes.Structure):
    """common.h: Linear."""

    _fields_ = [("panels", _P), ("bias", _P), ("out", _I), ("inputs", _I)]


class CLayer(ctypes.Structure):
    """layers.c: Layer."""

    _fields_ = [
        *((name, CLinear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _P) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
    ]


class CShape(ctypes.Structure):
    """layers.c: Shape."""

    _fields_ = [*((name, _I) for name in ("hidden", "heads", "kv_heads", "dim", "intermediate")), ("eps", _F)]


class CCache(ctypes.Structure):
    """common.h: Cache."""

    _fields_ = [("keys", _P), ("values", _P), ("slot_stride", _I), ("head_stride", _I)]


class CLayout(ctypes.Structure):
    """common.h: Layout."""

    _fields_ = [("tokens", _I), *((name, _P) for name in ("slot", "place", "known", "path", "length")), ("width", _I)]


class CChain(ctypes.Structure):
    """layers.c: Chain."""

    _fields_ = [
        *((name, _P) for name in ("embeddings", "norm", "ids", "rope", "ends", "keys")),
        *((name, _I) for name in ("rows", "levels", "positions")),
        *((name, _F) for name in ("temperature", "error_scale", "token_floor", "level_floor")),
    ]


class CCacheShape(ctypes.Structure):
    """tree.c: CacheShape."""

    _fields_ = [
        (name, _I) for name in ("layers", "kv_heads", "token_bytes", "layer_stride", "slot_stride", "head_stride")
    ]

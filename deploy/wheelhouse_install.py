"""Installs TLT from a kit (`make wheelhouse`) on a machine without a package index.  Every part of it holds this file.

    python3 part-1/install.py --target DIR    and the same for each other part, in any order; without --target the
    python3 part-2/install.py --target DIR    packages go into the environment of the Python that runs this

Each call verifies the checksums of its part and copies it to DIR.parts, so that parts may come one by one and go again.
The call that finds all parts there joins what was split, installs, and imports the project.  The tokenizer goes to
`--home`/models.  Exit codes: 0 done, or waiting for other parts; 1 this part or this machine does not fit.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PIECE = re.compile(r"(.+)\.(\d+)-of-(\d+)")  # of a file that is larger than a part
FIND = (
    "import json, sys; from importlib.metadata import version as v; print(json.dumps({n: v(n) for n in sys.argv[1:]}))"
)
USE = "import flows.train, tlt_core.cluster.worker"


class KitError(Exception):
    """The text says what is wrong, and the remedy."""


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, metavar="DIR", help="folder for the packages; put it on PYTHONPATH")
    parser.add_argument("--home", type=Path, default=os.environ.get("TLT_HOME", "artifacts"), help="TLT_HOME there")
    args = parser.parse_args()
    target, began_s = args.target and args.target.resolve(), time.monotonic()
    kept = Path(sys.prefix) / "tlt.parts" if target is None else target.with_name(f"{target.name}.parts")
    try:
        kit = json.loads((HERE / "kit.json").read_text())
        _require_this_machine(kit)
        if HERE.name not in kit["parts"]:
            raise KitError(f"{HERE}: this folder has another name than when it was made: {', '.join(kit['parts'])}")
        _keep(kit["parts"][HERE.name], kept)
        away = [part for part, files in kit["parts"].items() if not _are_there(files, kept)]
        if away:
            print(f"{HERE.name} is verified and kept in {kept}; still to come: {', '.join(away)}")
            return 0
        _install(_whole_files(kit, kept), target, args.home)
        _check(kit, target)
    except KitError as error:
        print(f"install.py: {error}", file=sys.stderr)
        return 1
    shutil.rmtree(kept)
    print(f"installed in {time.monotonic() - began_s:.0f} s")
    paths = "" if target is None else f"PYTHONPATH={target} PATH={target}/bin:$PATH "
    print(f"export {paths}TLT_HOME={args.home.resolve()}")
    return 0


def _require_this_machine(kit: dict[str, Any]) -> None:
    here = {"python": "{}.{}".format(*sys.version_info), "machine": platform.machine(), "system": sys.platform}
    for name, found in here.items():
        if kit[name] != found:
            remedy = "make wheelhouse PYTHON_VERSION=..." if name == "python" else "make the kit on such a machine"
            raise KitError(f"the kit is for {name} {kit[name]}, this is {found} ({sys.executable}); {remedy}")
    missing = [name for name in kit["relies_on"] if not _version(name)]
    if missing:
        raise KitError(
            f"{', '.join(missing)}: the kit relies on these packages, and {sys.executable} does not have them.  Make "
            "the kit with the list of what is here: 'python3 -m pip list > present.txt', make wheelhouse "
            "PRESENT=present.txt"
        )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _keep(files: dict[str, str], kept: Path) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    for name, checksum in files.items():
        if not (HERE / name).is_file() or _sha256(HERE / name) != checksum:
            raise KitError(f"{HERE / name} is missing or damaged (its SHA-256 is not {checksum}); copy it again")
        shutil.copyfile(HERE / name, kept / name)


def _are_there(files: dict[str, str], kept: Path) -> bool:
    """Also false for files of another kit."""
    return all((kept / name).is_file() and _sha256(kept / name) == checksum for name, checksum in files.items())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _whole_files(kit: dict[str, Any], kept: Path) -> list[Path]:
    """The files of the kit, those that were split put together."""
    names = {name for files in kit["parts"].values() for name in files}
    for piece in list(filter(None, map(PIECE.fullmatch, names))):
        whole, number, count = piece.groups()
        names.remove(piece[0])
        if number == "1":
            names.add(whole)
            with (kept / whole).open("wb") as file:
                file.writelines((kept / f"{whole}.{n}-of-{count}").read_bytes() for n in range(1, int(count) + 1))
    return [kept / name for name in sorted(names)]


def _install(files: list[Path], target: Path | None, home: Path) -> None:
    for archive in (path for path in files if path.suffix == ".zip"):
        shutil.unpack_archive(archive, home / "models")
    command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--no-index"]
    command += ["--no-deps", "--no-compile", "--no-cache-dir", "--quiet", "--upgrade", "--root-user-action=ignore"]
    command += [] if target is None else ["--target", str(target)]
    if subprocess.run([*command, *(str(path) for path in files if path.suffix == ".whl")]).returncode:
        raise KitError(f"pip did not install the kit, see above; the files stay in {files[0].parent}")
    # On all cores; Ray's services, which have seconds to start, should not wait for it.  Some packages have old code.
    folder = target or sysconfig.get_path("purelib")
    subprocess.run([sys.executable, "-W", "ignore", "-m", "compileall", "-q", "-j", "0", folder], capture_output=True)


def _check(kit: dict[str, Any], target: Path | None) -> None:
    """Every package of the kit is found in its version, and the project can be imported."""
    paths = os.pathsep.join(filter(None, [str(target or ""), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": paths}

    def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-P", *arguments]  # -P: not what happens to lie in this folder
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    told = python("-c", FIND, *kit["packages"])
    if told.returncode or json.loads(told.stdout) != kit["packages"]:
        raise KitError(f"not all packages of the kit are found after the installation: {told.stderr or told.stdout}")
    used = python("-c", USE)
    if used.returncode:
        raise KitError(f"the project cannot be imported: {used.stderr}")
    # Others that pip finds missing are no trouble: the kit leaves out what runs do not import.
    doubts = [line for line in python("-m", "pip", "check").stdout.splitlines() if " has requirement " in line]
    print("\n".join(f"a version here is not the one asked for: {line}" for line in doubts) or "all versions fit")


if __name__ == "__main__":
    sys.exit(main())

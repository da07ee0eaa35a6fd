"""What other runs may have left in a checkout: tests must neither read nor write any of it.

    python tests/rubbish.py fill > RECORD     makes runs, artifacts and exports, where there are none
    python tests/rubbish.py check < RECORD    exit code 1, and names: files that have come, gone or changed since

`.ci/run` does both around the tests, in a copy of the checkout.
"""

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from conf.load import load  # noqa: E402
from tlt_core.items import checkpoint  # noqa: E402
from tlt_core.items.checkpoint import DriverState  # noqa: E402
from tlt_core.run import inputs  # noqa: E402

FOLDERS = ("runs", "artifacts", "exports")
# A checkpoint that is whole, of a run in types that no machine chooses together.
ODD = {"rollout": "float32", "update": "bfloat16", "coldstart": "bfloat16"}
FILES = (
    *("status.json", "metrics.jsonl", "metrics.prom", "run.json", "config.yaml", "evaluation.json", "log.txt"),
    *("policy/config.json", "policy/model.safetensors", "drafter-eagle3/config.json", "samples/step_000001.jsonl"),
)


def fill() -> None:
    """Files under the names that the configurations give, and in the folders that they lead to.

    Raises FileExistsError where there is such a folder: it is somebody's.
    """
    for name in FOLDERS:
        (ROOT / name).mkdir()
    for path in sorted((ROOT / "conf").glob("*.yaml")):
        cfg = load(str(path))
        folders = [ROOT / cfg.run_dir, ROOT / "exports" / cfg.name, ROOT / "artifacts" / "models" / cfg.name]
        for file in (folder / name for folder in folders for name in FILES):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("rubbish")
        data = ROOT / inputs.data_dir(cfg)
        data.mkdir(parents=True, exist_ok=True)
        (data / "manifest.json").write_text("rubbish")
        if not (ROOT / cfg.run_dir / "checkpoints").exists():
            state = DriverState(1, 1, 1, "rubbish", 0, "rubbish", None, ODD)
            checkpoint.save(ROOT / cfg.run_dir / "checkpoints", state, lambda _: None)
    (ROOT / "artifacts" / "mlflow.db").write_text("rubbish")
    json.dump(_content(), sys.stdout)


def check() -> int:
    before, after = json.load(sys.stdin), _content()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in changed:
        print(f"a test has changed {name}")
    return 1 if changed else 0


def _content() -> dict[str, str]:
    files = (path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


if __name__ == "__main__":
    sys.exit({"fill": fill, "check": check}[sys.argv[1]]())

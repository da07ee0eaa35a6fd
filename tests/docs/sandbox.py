"""A copy of the project in which the documents' commands run as they stand: what they read there is small.

conf/demo.yaml, and the files built on it: their own settings, with a tiny model, two steps and few prompts
runs, artifacts, exports, tracker: its own; nothing of the checkout is written, and none of its runs is read
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.docs.commands import ROOT, VARIABLE

_OWN = {"runs", "artifacts", "exports", "pipeline", "conf", "docs", "reports", "README.md", "params.yaml"}
_ON_DEMO = ("demo", "bench", "longtail", "dapo_like", "no_tail")
_SMALL: dict[str, Any] = {
    "num_steps": 2,
    "model": {"kind": "random"},
    "data": {"num_train": 32, "num_validation": 16, "tasks": [{"name": "chain_sum"}]},
    "coldstart": {"num_examples": 8, "tokens_per_step": 512},
    "rollout": {"num_prompts": 3, "num_samples": 2, "max_new_tokens": 24, "max_live_requests": 4},
    "drafter": {"vocab_size": 256, "num_prompts": 4, "num_samples": 2, "num_steps": 4},
    "retrain": {"num_prompts": 2, "repeats": 1, "min_speed": 0},
    "evaluation": {"num_prompts": 4, "num_samples": 1, "max_new_tokens": 12},
    "tracking": {"system_metrics": False},
}
_LIMIT_S = 600.0


class Sandbox:
    """`run(["tlt", "status"])`"""

    def __init__(self, folder: Path, *, embedded_model: Path, variables: Mapping[str, str]) -> None:
        """variables: of the environment of every command."""
        self.folder, self._variables = folder, dict(variables)
        for path in ROOT.iterdir():
            if not path.name.startswith(".") and path.name not in _OWN:
                (folder / path.name).symlink_to(path)
        for name in ("docs", "reports", "conf"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("README.md", "params.yaml"):
            shutil.copy(ROOT / name, folder)
        for name in _ON_DEMO:
            file = folder / "conf" / f"{name}.yaml"
            whole = file.rename(file.with_stem(f"{name}-whole"))
            file.write_text(yaml.safe_dump({"base": whole.name, **_SMALL}))
        (folder / "artifacts" / "models").mkdir(parents=True)
        (folder / "artifacts" / "models" / embedded_model.name).symlink_to(embedded_model)
        (folder / "in.jsonl").write_text('{"prompt": "What is 2 + 3?"}\n')

    def run(self, words: Sequence[str]) -> tuple[int, str]:
        """Exit code and output.  words: variables, program, arguments."""
        variables, words = dict(self._variables), list(words)
        while VARIABLE.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words[0] in ("tlt", "python"):
            words[:1] = [sys.executable, *(["-m", "flows.cli"] if words[0] == "tlt" else [])]
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": _LIMIT_S, "check": False}
        done = subprocess.run(words, cwd=self.folder, env=os.environ | variables, **options)
        return done.returncode, done.stdout + done.stderr

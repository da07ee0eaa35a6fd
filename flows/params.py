"""`tlt params`: a configuration with its bases and defaults, as the parameters of dvc.yaml.

The file has every key, so that a stage can name those that it depends on and `dvc exp run -S` can set any.
"""

from pathlib import Path

import yaml

from conf.run import RunConfig
from tlt_core.items.store import write_atomically

_HEAD = """\
# Parameters of dvc.yaml, and a configuration like any other.  Written by: tlt params {source}
# Change values here, or for one experiment: dvc exp run -S rollout.speculation.policy=off
"""


def write(cfg: RunConfig, path: Path, *, source: str) -> None:
    """Write or replace the file."""
    text = _HEAD.format(source=source) + yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False)
    write_atomically(path, lambda partial: partial.write_text(text))

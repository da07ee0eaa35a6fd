"""`tlt params`: a configuration, bases and defaults included, as the parameters of dvc.yaml.

Every key is there, so that a stage can name exactly those that it depends on, and `dvc exp run -S` can set any.
"""

from pathlib import Path

import yaml

from conf.schema import RunConfig
from tlt_core.store import write_atomically

_HEAD = """\
# Parameters of dvc.yaml, and a configuration like any other.  Written by: tlt params {source}
# Change values here, or for one experiment: dvc exp run -S rollout.speculation.policy=off
"""


def write(cfg: RunConfig, path: Path, *, source: str) -> None:
    """Write the file; an older one is replaced."""
    text = _HEAD.format(source=source) + yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False)
    write_atomically(path, lambda partial: partial.write_text(text))

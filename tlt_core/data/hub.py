"""Data sets of the Hugging Face hub, under the addresses that pandas, polars and DuckDB take, too."""

import re
from functools import cache
from pathlib import Path

from tlt_core.data.question import DataError

START = "hf://datasets/"
_ADDRESS = re.compile(re.escape(START) + r"(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?/(?P<pattern>.+)")
_CONVERTED = {"~parquet": "refs/convert/parquet"}  # huggingface_hub's short name of the branch that the hub makes


@cache  # the hub is asked once: a branch may move between two questions
def files(address: str) -> list[Path]:
    """hf://datasets/OWNER/NAME[@REVISION]/PATTERN: the files there, from the cache what is in it already; revision: a
    commit, a tag, a branch, or ~parquet, the hub's own conversion.  Raises DataError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    parts = _ADDRESS.fullmatch(address)
    if parts is None:
        raise DataError(
            f"{address}: write {START}OWNER/NAME/FILES, for example {START}openai/gsm8k/main/train-*.parquet"
        )
    revision = parts["revision"] and _CONVERTED.get(parts["revision"], parts["revision"])
    try:
        folder = snapshot_download(
            parts["name"], repo_type="dataset", revision=revision, allow_patterns=[parts["pattern"]]
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise DataError(
            f"{address} cannot be had from the hub ({type(error).__name__}); check the spelling and the network, or "
            "give a local file"
        ) from None
    found = sorted(path for path in Path(folder).glob(parts["pattern"]) if path.is_file())
    if not found:
        raise DataError(
            f"{address}: no such file there, or, without a network, none in the cache; "
            f"{START}{parts['name']}@~parquet/*/train/*.parquet are the files that the hub has made of it"
        )
    return found

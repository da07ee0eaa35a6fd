"""Does every node see the folders that the run needs?

    driver: expected_files, probe_file  ->  {path: size}  ->  worker on each node: unseen  ->  driver: require_seen

Files are looked up by their full names, not by listing a folder: a network disk may list a new file a minute late.
"""

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tlt_core.cluster.placement import ClusterError, Node


def expected_files(folders: Sequence[Path]) -> dict[Path, int]:
    """The files of these folders, with their sizes."""
    return {path: path.stat().st_size for folder in folders for path in sorted(folder.iterdir()) if path.is_file()}


@contextlib.contextmanager
def probe_file(folder: Path) -> Iterator[dict[Path, int]]:
    """A new file with an unpredictable name, removed at the end of the context."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".seen-by-all-{secrets.token_hex(8)}"
    path.write_text(path.name)
    try:
        yield {path: len(path.name)}
    finally:
        path.unlink()


def unseen(files: Mapping[Path, int]) -> tuple[Path, ...]:
    """The files that this machine does not see, or sees with another size."""
    return tuple(path for path, size in files.items() if not path.is_file() or path.stat().st_size != size)


def require_seen(missing: Sequence[Sequence[Path]], nodes: Sequence[Node], *, driver: Node) -> None:
    """missing: the files that each worker does not see, by rank.  Raises ClusterError when there are any."""
    for rank, (paths, node) in enumerate(zip(missing, nodes, strict=True)):
        if paths:
            raise ClusterError(
                f"worker {rank} on node {node.address} does not see {paths[0].parent} as the driver on "
                f"{driver.address} does ({len(paths)} files, {paths[0].name} first): every node needs the same files "
                "at the same path.  Put output_dir, TLT_HOME and the model on storage that all nodes mount there, "
                "or set cluster.address=local"
            )

"""What was decided about a run's drafters, one JSON object a line."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tlt_core.items.store import read_json_lines, write_atomically


class Journal:
    """`runs/NAME/retrain.jsonl`: one line per decision, the newest last.  `acceptance.jsonl`: per check."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rows(self) -> list[dict[str, Any]]:
        """All lines.  Raises StoreError."""
        return read_json_lines(self._path)

    def last_decided(self) -> dict[str, Any] | None:
        """The newest line that says promoted or refused."""
        decided = [row for row in self.rows() if row["outcome"] in ("promoted", "refused")]
        return decided[-1] if decided else None

    def append(self, row: dict[str, Any]) -> None:
        """Add a line; it is on the disk when this returns."""
        kept = [*self.rows(), {"time": datetime.now(UTC).isoformat(timespec="seconds"), "pid": os.getpid(), **row}]
        text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept)
        write_atomically(self._path, lambda partial: partial.write_text(text, encoding="utf-8"))

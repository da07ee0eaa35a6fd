"""Speaks the protocol of `vllm/process` without vLLM: every response is 5, 6, 2.  Run as a process of its own.

The seed of the settings says what goes wrong: 1: new weights are ignored.  2: it ends at the first request.
"""

import json
import struct
import sys
from pathlib import Path


def main() -> None:
    """Serve until stdin ends."""
    settings = json.loads(sys.stdin.readline())
    _say({"ready": {"version": "none"}})
    live, decoded, version, parts = [], 0, settings["version"], []
    for line in sys.stdin:
        request = json.loads(line)
        match request.pop("ask"):
            case "part":
                parts.append(_names(request["file"]))
                _say({})
            case "weights":
                version = version if settings["seed"] == 1 else request["version"]
                _say({"tensors": 1, "seconds": 0.0})
            case "decode":
                if settings["seed"] == 2:
                    sys.exit("something broke")
                live += request["requests"]
                done, decoded = live.pop(0), decoded + 1
                told = {"id": done["id"], "tokens": [5, 6, 2], "logprobs": [-1, -2, -3], "stopped": True}
                chain = [["ngram", 3, 1, 3], 1, 9, [3], [3], [1], 0.25, 0.5, 0.0]
                rounds = [{"report": chain, "rows": [decoded], "end_s": 10.0, "seconds": 0.75}]
                answer = {"live": len(live), "tokens": 3, "finished": [told | {"states": None}], "rounds": rounds}
                _say(answer | {"version": version})
            case "counters":
                _say({"parts": parts})
            case "tuner":
                if request["call"] == "suspend":
                    _say({"error": "KeyError: no such drafter"})
                else:
                    _say({"answer": {"given": request["arguments"], "options": request["options"]}})


def _names(file: str) -> list[str]:
    """Of the tensors in a safetensors file."""
    with Path(file).open("rb") as content:
        (size,) = struct.unpack("<Q", content.read(8))
        return sorted(json.loads(content.read(size)).keys() - {"__metadata__"})


def _say(value: dict) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()

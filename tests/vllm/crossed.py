"""vLLM's process in which the second worker of a tensor-parallel engine expects the first one's part of each layer.

Run in place of `process.py`.  A check of the weights that did not look at the second worker would not notice.
"""

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tlt_core/rollout/vllm/process.py"


def cross(worker):
    """What comes now is compared with the first worker's parts."""
    from tlt_vllm import weights

    part = weights._part

    def crossed(layer, number):
        own, layer.tp_rank = layer.tp_rank, 0
        try:
            return part(layer, number)
        finally:
            layer.tp_rank = own

    weights._part = crossed


def main():
    """As `process.main`, with that change before the first weights."""
    found = importlib.util.spec_from_file_location("process", SCRIPT)
    process = importlib.util.module_from_spec(found)
    found.loader.exec_module(process)

    class Crossed(process.Server):
        def part(self, *, file):
            self._llm.collective_rpc(cross)
            return super().part(file=file)

    process.Server = Crossed
    sys.modules["process"] = process
    process.main()


if __name__ == "__main__":  # the engine's own processes import this file again
    main()

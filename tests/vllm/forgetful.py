"""vLLM's process as it would be if a sleep lost the drafter's weights.  Run in place of `process.py`."""

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tlt_core/rollout/vllm/process.py"
_found = importlib.util.spec_from_file_location("process", SCRIPT)
process = importlib.util.module_from_spec(_found)
_found.loader.exec_module(process)


def forget(worker):
    """All of the drafter's own parameters become zero."""
    for parameter in worker.model_runner.drafter.model.model.layers.parameters():
        parameter.data.zero_()


class Forgetful(process.Server):
    """Its drafter does not survive."""

    def sleep(self):
        """As usual, and then the loss."""
        super().sleep()
        self._llm.collective_rpc(forget)
        return {}


process.Server = Forgetful
sys.modules["process"] = process
process.main()

"""What importing a part of the project brings with it, in a process of its own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_configuration_needs_neither_torch_nor_prefect() -> None:
    """What makes a wrong key known at once: none of the imports that take seconds.  (Speed itself is not tested.)"""
    loaded = python("import sys, conf.run, conf.load; print(*sys.modules)").stdout.split()
    assert "conf.load" in loaded
    assert not {"torch", "triton", "prefect", "ray", "mlflow", "transformers", "numpy"} & set(loaded)


def test_ops_import_and_run_without_triton() -> None:
    """As on a system that Triton has no package for."""
    done = python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from kernels import dispatch\n"
        "from kernels.sampling.coupled_sample import coupled_sample\n"
        "assert dispatch.triton is None\n"
        "keys = torch.zeros(1, 2, dtype=torch.int32)\n"
        "print(coupled_sample(torch.tensor([[0.0, 99.0]]), keys).tokens_N.tolist())\n"
        "coupled_sample(torch.zeros(1, 2), keys, impl='triton')\n"
    )
    assert done.stdout == "[1]\n", done.stderr
    assert "Triton is not installed" in done.stderr


def test_transformers_loads_beside_a_package_called_kernels() -> None:
    """transformers looks for Hugging Face's `kernels` by name; ours of the same name must not break it."""
    done = python(
        "import kernels.attention.packed_attention, torch\n"
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "config = Qwen3Config(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8,\n"
        "                     num_attention_heads=2, num_key_value_heads=1)\n"
        "print(Qwen3ForCausalLM(config)(torch.tensor([[1, 2]])).logits.shape)\n"
    )
    assert done.stdout == "torch.Size([1, 2, 8])\n", done.stderr

"""A Hugging Face folder as OpenVINO IR, run by the interpreter of OpenVINO's own environment.

python -P openvino_export.py MODEL_FOLDER OUT_FOLDER float32|bfloat16        weights as they are, none quantised
"""

import sys

import torch
from optimum.intel.openvino import OVModelForCausalLM


def main() -> None:
    """Convert."""
    folder, out, dtype = sys.argv[1:]
    model = OVModelForCausalLM.from_pretrained(
        folder,
        export=True,
        compile=False,
        load_in_8bit=False,  # else large models are quantised unasked
        torch_dtype=getattr(torch, dtype),
    )
    model.save_pretrained(out)


if __name__ == "__main__":
    main()

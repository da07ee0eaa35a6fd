"""What a drafter belongs to, as digests: a target's weights and its tokenizer.

Two folders with equal digests are the same model for a drafter, wherever they lie and whatever else is in them.
"""

import hashlib
import json
from pathlib import Path

from tlt_core.model.config import ModelError
from tlt_core.model.load import load_tokenizer
from tlt_core.store import sha256_of

_PROBE = "def f(x):\n    return {'\u00e9t\u00e9': 3.14 * x, \"a  b\": [x]}  # 12345 \u4f60\u597d\n"


def weights_digest(folder: Path) -> str:
    """Over the names and bytes of the folder's safetensors files.  Raises ModelError when there are none."""
    files = {path.name: sha256_of(path) for path in sorted(folder.glob("*.safetensors"))}
    if not files:
        raise ModelError(f"{folder} holds no safetensors; give the Hugging Face folder of the target")
    return _digest(files)


def tokenizer_digest(folder: Path) -> str:
    """Over the vocabulary and the tokens of a sample text: what a token id means.  Raises ModelError.

    Not over the files: settings that change no token (padding, chat template) may differ between copies.
    """
    tokenizer = load_tokenizer(folder)
    sample = tokenizer.encode(_PROBE, add_special_tokens=False)
    return _digest([sorted(tokenizer.get_vocab().items()), sample])


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

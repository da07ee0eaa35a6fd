"""A KV cache that does not fit is refused with what would; its size is what the engine allocates."""

import pytest
import torch

from tests.pretended_gpu import pretended_gpu
from tlt_core.rollout.engine import RolloutEngine
from tlt_core.rollout.kv_memory import check_fits, check_on_device, slot_bytes


def test_bytes_are_those_of_the_cache(decoder):
    slot = slot_bytes(decoder.config, positions=50, dtype=torch.float32)
    assert slot == 2 * 2 * 2 * 50 * 8 * 4  # keys and values, layers, heads, positions, head size, bytes
    assert RolloutEngine(decoder, max_live=3, max_len=50).memory_bytes == 3 * slot


def test_what_does_not_fit_is_refused_with_what_does():
    check_fits(100, max_live=9, positions=10, free=1000, fraction=0.9)  # to the byte
    with pytest.raises(ValueError, match=r"rollout\.max_live_requests=9 fits"):
        check_fits(100, max_live=10, positions=10, free=1000, fraction=0.9)
    with pytest.raises(ValueError, match=r"rollout\.max_new_tokens"):
        check_fits(1000, max_live=2, positions=10, free=1000, fraction=0.9)


def test_a_gpu_that_others_share_is_not_all_free(decoder):
    """17.2 GB, of which the process may take a share."""
    slot = slot_bytes(decoder.config, positions=1 << 20, dtype=torch.float32)
    sizes = {"positions": 1 << 20, "dtype": torch.float32, "fraction": 0.9}
    most = int((1 << 34) * 0.9 / slot)
    with pretended_gpu():
        check_on_device(decoder.config, torch.device("cuda:0"), max_live=most, **sizes)
        torch.cuda.set_per_process_memory_fraction(0.5)
        check_on_device(decoder.config, torch.device("cuda:0"), max_live=most // 2, **sizes)
        with pytest.raises(ValueError, match=r"8\.59 GB free"):
            check_on_device(decoder.config, torch.device("cuda:0"), max_live=most // 2 + 1, **sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_engine_on_a_gpu_is_checked(tiny_decoder):
    with pytest.raises(ValueError, match=r"rollout\.kv_memory_fraction"):
        RolloutEngine(tiny_decoder.cuda(), max_live=1 << 30, max_len=50)

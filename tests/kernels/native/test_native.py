"""The CPU's own kernels against their specifications, and the claim that no token's result depends on the others'."""

import pytest
import torch

from kernels import native
from kernels.layers.packed_linear import Panels, packed_linear_reference
from kernels.layers.rms_norm import rms_norm
from kernels.sampling.coupled_sample import coupled_sample, exponential_noise
from kernels.tree.draft_children import draft_children

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def random(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(("rows", "columns"), [(33, 2), (15, 130), (70, 1536)])
@pytest.mark.parametrize("tokens", [1, 14, 29, 400])
def test_linear(rows, columns, tokens):
    weight, bias = random(rows, columns, scale=columns**-0.5), random(rows, seed=1)
    x = random(tokens, columns, seed=2).bfloat16()
    panels = Panels(weight)
    for given in (None, bias):
        if given is not None:
            panels.set_bias(given)
        wanted = packed_linear_reference(x, weight.bfloat16(), None if given is None else given.bfloat16())
        torch.testing.assert_close(panels(x), wanted, rtol=2**-7, atol=2**-10)


def test_linear_of_a_token_is_the_same_in_every_batch():
    panels, x = Panels(random(96, 576)), random(300, 576, seed=2).bfloat16()
    alone = torch.cat([panels(row[None]) for row in x])
    for size in (2, 7, 13, 14, 15, 28, 41, 300):
        assert torch.equal(torch.cat([panels(part) for part in x.split(size)]), alone), size


def test_linear_and_torch_take_turns():
    """Both may use the processor's matrix tiles, whose configuration is the thread's: each must set its own."""
    panels, x = Panels(random(96, 576)), random(40, 576, seed=2).bfloat16()
    weight = random(200, 576, seed=3).bfloat16()
    ours, theirs = panels(x), torch.nn.functional.linear(x, weight)
    for count in (1, 16, 17, 33, 40):
        assert torch.equal(panels(x[:count]), ours[:count])
        assert torch.equal(torch.nn.functional.linear(x, weight), theirs)


@pytest.mark.parametrize("size", [16, 72, 576])
def test_rms_norm(size):
    x, weight = random(7, 3, size, scale=5).bfloat16(), random(size, seed=1).bfloat16()
    with torch.inference_mode():
        found = rms_norm(x, weight, eps=1e-5)
    wanted = torch.nn.functional.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8 + 1e-5, atol=0)


def test_noise():
    keys = torch.randint(-(2**31), 2**31 - 1, (40, 2), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ids = torch.arange(9_001, dtype=torch.int32)
    found = torch.empty(len(keys), len(ids))
    native.load().tlt_exponential(keys.data_ptr(), len(keys), ids.data_ptr(), len(ids), found.data_ptr())
    torch.testing.assert_close(found, exponential_noise(keys, ids), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("temperature", "vocab"), [(0.0, 1000), (0.6, 49_152), (1.0, 5), (1.7, 16)])
def test_sampling(temperature, vocab):
    logits = random(64, vocab, scale=3).bfloat16()
    keys = torch.randint(-(2**31), 2**31 - 1, (64, 2), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    found = coupled_sample(logits, keys, temperature=temperature)
    wanted = coupled_sample(logits, keys, temperature=temperature, impl="torch")
    assert torch.equal(found.tokens_N, wanted.tokens_N)
    torch.testing.assert_close(found.logprobs_N, wanted.logprobs_N, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(found.lognorms_N, wanted.lognorms_N, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("temperature", "scale", "vocab", "width"), [(0.0, 1.0, 5, 1), (1.0, 1.0, 4096, 4), (0.7, 2.5, 8190, 3)]
)
def test_children_of_drafts(temperature, scale, vocab, width):
    logits = random(20, vocab, scale=3).bfloat16()
    keys = torch.randint(-(2**31), 2**31 - 1, (20, 2), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    ids = torch.randperm(49_152, generator=torch.Generator().manual_seed(2))[:vocab].to(torch.int32)
    settings = {"width": width, "temperature": temperature, "error_scale": scale}
    found, wanted = (draft_children(logits, keys, ids, impl=impl, **settings) for impl in ("native", "torch"))
    if temperature:  # without noise bfloat16 logits are often equal
        assert torch.equal(found.columns_Nw, wanted.columns_Nw)
    torch.testing.assert_close(found.values_Nw, wanted.values_Nw, rtol=1e-5, atol=2e-5)


def test_sampling_takes_the_first_of_equals_and_refuses_nan():
    logits = torch.zeros(1, 100, dtype=torch.bfloat16)
    logits[0, [70, 33, 98]] = 5.0
    keys = torch.zeros(1, 2, dtype=torch.int32)
    assert coupled_sample(logits, keys, temperature=0.0).tokens_N.item() == 33
    logits[0, 50] = torch.nan
    with pytest.raises(RuntimeError, match="NaN"):
        coupled_sample(logits, keys)


def test_threads_change_no_bit():
    panels, x = Panels(random(4096, 64)), random(20, 64, seed=2).bfloat16()
    logits = random(50, 3000, scale=3).bfloat16()
    keys = torch.randint(-(2**31), 2**31 - 1, (50, 2), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append((panels(x), *coupled_sample(logits, keys)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

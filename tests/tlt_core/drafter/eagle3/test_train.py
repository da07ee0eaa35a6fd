"""Training: that it learns, what it leaves alone, and that it resumes, between updates and between micro-steps."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.attention.packed_attention import packed_causal_attention
from tests.tlt_core.drafter.eagle3.reference import lively_model
from tests.tlt_core.drafter.eagle3.training_texts import IDS, lively_decoder, probs_of, texts
from tlt_core.drafter.eagle3.cache import DraftCache
from tlt_core.drafter.eagle3.model import eagle3_from_target, tap_scales
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.train import Eagle3Trainer, TrainSettings
from tlt_core.drafter.eagle3.windows import cut


def learnt(decoder, steps, *, settings, sequences=None, state=None):
    sequences = pupils(decoder) if sequences is None else sequences
    model = eagle3_from_target(decoder, IDS, scales=tap_scales(sequences[0].taps_LE), seed=1)
    trainer = Eagle3Trainer(model, decoder, settings)
    if state is not None:
        trainer.load_state_dict(state)
    return trainer, [trainer.step(sequences) for _ in range(steps)]


def pupils(decoder):
    model = eagle3_from_target(decoder, IDS, scales=(1.0, 1.0, 1.0), seed=1)
    return observe(decoder, texts((12, 9, 15)), model, firsts=[2, 3, 1], dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_a_few_sequences(decoder, dtype):
    """The reachable overlap is the mass that the target puts on the draft vocabulary."""
    sequences = pupils(decoder)
    settings = TrainSettings(learning_rate=5e-3, warmup_steps=10, compute_dtype=dtype)
    trainer, history = learnt(decoder, 80, settings=settings, sequences=sequences)
    reachable = torch.cat([probs_of(s, decoder, IDS) for s in sequences]).sum(-1).mean()
    final = trainer.measure(sequences)
    assert len(final.overlaps) == 3
    assert all(overlap < 0.5 * float(reachable) for overlap in history[0].overlaps)
    assert all(overlap > 0.85 * float(reachable) for overlap in final.overlaps)
    assert history[0].top1 < 0.5 < 0.75 < final.top1
    assert final.rows == (12 - 2) + (9 - 3) + (15 - 2)  # first = 1 trains from token 2 on: there is no row before


def test_a_gradient_that_is_not_finite_changes_nothing(decoder, caplog):
    """And the next one counts: a NaN in the weights would stay for ever."""
    trainer, _ = learnt(decoder, 1, settings=TrainSettings(warmup_steps=0))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    good = pupils(decoder)
    taps_LE = good[0].taps_LE.clone()
    taps_LE[5] = torch.nan
    trainer.step([replace(good[0], taps_LE=taps_LE), *good[1:]])
    assert "gradient norm is nan at its step 1" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    trainer.step(good)
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_step_is_its_micro_steps(decoder):
    """One update on whole sequences, or the same rows in passes of other sizes: the same mean, clipped as one."""
    sequences = pupils(decoder)
    settings = TrainSettings(warmup_steps=0, learning_rate=1e-2, max_grad_norm=0.1)
    whole, (metrics,) = learnt(decoder, 1, settings=settings)
    parts, _ = learnt(decoder, 0, settings=settings)
    windows = [w for s in sequences for w in cut(s, rows=4)]
    sums = [parts.accumulate(windows[i : i + 2]) for i in range(0, len(windows), 2)]
    assert parts.rows == sum(m.rows for m in sums) == metrics.rows
    assert sum(m.loss * m.rows for m in sums) == pytest.approx(metrics.loss * metrics.rows, rel=1e-5)
    norm = parts.apply()
    assert norm > 0.1
    assert (parts.rows, parts.steps) == (0, 1)
    for key, expected in whole.state_dict().items():
        if key.startswith("exp_avg."):  # moments show the gradient; Adam's first update shows its sign alone
            torch.testing.assert_close(parts.state_dict()[key], expected, atol=1e-7, rtol=1e-3)
    moments = torch.cat([v.flatten() for k, v in parts.state_dict().items() if k.startswith("exp_avg.")])
    assert float(moments.norm()) == pytest.approx(0.1 * (1 - 0.9), rel=1e-4)  # the clipped gradient


def test_the_first_update_by_hand(decoder):
    """AdamW's first step is the rate times the gradient's sign; the rate is warmed up, then falls."""
    settings = TrainSettings(learning_rate=3e-3, warmup_steps=4, total_steps=9)
    trainer, _ = learnt(decoder, 0, settings=settings)
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.step(pupils(decoder))
    assert float((trainer.model.lm_head.weight.detach() - before).abs().max()) == pytest.approx(0.75e-3, rel=1e-3)
    rates = []
    for trainer.steps in range(10):
        rates.append(trainer.learning_rate)
    assert rates[:5] == pytest.approx([0.75e-3, 1.5e-3, 2.25e-3, 3e-3, 3e-3])
    assert rates[7] == pytest.approx(3e-3 * (1 - 0.9 * 3 / 5))
    assert rates[9] == pytest.approx(0.3e-3)


@pytest.mark.parametrize("stop", [3, 5])
def test_preempted_between_micro_steps_repeats_to_the_bit(decoder, tmp_path, stop):
    """Killed after any pass, whatever is accumulated by then; a new trainer goes on from the file."""
    windows = [w for _ in range(3) for s in pupils(decoder) for w in cut(s, rows=5)]
    settings = TrainSettings(learning_rate=3e-3, warmup_steps=2)

    def go_on(trainer, first, last):
        for index in range(first, last):
            trainer.accumulate(windows[index : index + 1])
            if index % 3 == 2:
                trainer.apply()

    whole, _ = learnt(decoder, 0, settings=settings)
    go_on(whole, 0, len(windows) - 1)
    part, _ = learnt(decoder, 0, settings=settings)
    go_on(part, 0, stop)
    save_file(part.state_dict(), tmp_path / "trainer.safetensors")
    other = lively_model(decoder.config, IDS, seed=8)
    again = Eagle3Trainer(other, decoder, settings)
    again.accumulate(windows[:1])  # whatever it did before
    again.load_state_dict(load_file(tmp_path / "trainer.safetensors"))
    assert again.rows == part.rows > 0 if stop % 3 else again.rows == 0
    go_on(again, stop, len(windows) - 1)
    assert whole.rows > 0
    same(whole, again)


def same(one, other):
    """Parameters, moments, accumulated gradients, counts: all of it."""
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    assert {name.partition(".")[0] for name in a} >= {"model", "exp_avg", "exp_avg_sq", "step"}
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_starts_as_the_targets_last_layer(tiny_config):
    """With fc's and the embedding's random parts taken out, the drafter is the last layer on the high hidden state: of
    three layers the third, on what the second gives."""
    decoder = lively_decoder(replace(tiny_config, num_layers=3))
    tokens = texts((10,))[0]
    scales = (1.0, 1.0, 0.25)
    model = eagle3_from_target(decoder, torch.arange(64), scales=scales, taps=(0, 1, 2), seed=0)
    with torch.no_grad():
        model.fc.weight.copy_(torch.cat([torch.zeros(32, 64), torch.eye(32)], 1))
        model.qkv_proj.weight[:, :32] = 0

        def attend(q, k, v):
            return packed_causal_attention(q, k, v, torch.tensor([0, 10]))

        hidden = decoder(tokens, torch.arange(10), lambda _, q, k, v: attend(q, k, v), taps=(0, 1, 2))
        cache = DraftCache(model.config, num_slots=1, max_len=10, dtype=torch.float32, device=torch.device("cpu"))
        y = model(decoder.embed_tokens(tokens), model.fuse(hidden.taps_TE), cache.rope_C21d, attend)
        torch.testing.assert_close(model.logits(y), decoder.logits(hidden.last_TD), atol=2e-3, rtol=1e-3)

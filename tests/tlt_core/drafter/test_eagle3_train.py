"""Training: who sees whom, that it trains what drafting does, that it learns, and that it resumes."""

import pytest
import torch
from safetensors.torch import load, save

from kernels.packed_attention import packed_causal_attention
from tests.tlt_core.drafter.eagle3_reference import lively_model, logits_after
from tlt_core.drafter.eagle3_cache import DraftCache
from tlt_core.drafter.eagle3_loss import draft_loss
from tlt_core.drafter.eagle3_model import eagle3_from_target, tap_scales
from tlt_core.drafter.eagle3_train import Eagle3Trainer, TrainSequence, TrainSettings, observe, training_time_test
from tlt_core.model.load import random_decoder

IDS = torch.tensor([0, 2, 3, 5, 7, 8, 11, 13, 20, 21, 30, 41, 42, 50, 61, 63])
LENGTHS = (9, 3, 14, 6)


@pytest.fixture(scope="module")
def decoder(tiny_config):
    decoder = random_decoder(tiny_config, seed=0, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if not name.endswith("norm.weight"):
                parameter *= 10
        decoder.norm.weight *= 4  # distributions with something to learn
    return decoder


@pytest.fixture
def model(tiny_config):
    return lively_model(tiny_config, IDS)


def texts(lengths=LENGTHS, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (length,), generator=generator) for length in lengths]


def teacher_forced(model, decoder, sequences, *, depth):
    """Logits [sequence][depth][row, J] of the trainer's forward pass."""
    rows = [len(s.tokens_L) - 2 for s in sequences]
    embeds = decoder.embed_tokens(torch.cat([s.tokens_L[1:-1] for s in sequences]))
    taps = torch.cat([s.taps_LE[:-2] for s in sequences])
    positions = torch.cat([torch.arange(count) for count in rows])
    bounds = torch.tensor([0, *rows]).cumsum(0).tolist()
    with torch.no_grad():
        levels = [
            model.logits(y).split(rows) for y in training_time_test(model, embeds, taps, positions, bounds, depth=depth)
        ]
    return list(zip(*levels, strict=True))


def test_observe_is_the_target(decoder, model):
    """Packed or alone, the same distributions, restricted but not renormalised."""
    sequences = observe(decoder, texts(), model, firsts=[1, 2, 3, 4], dtype=torch.float32)
    assert [s.first for s in sequences] == [1, 2, 3, 4]
    for tokens, seen in zip(texts(), sequences, strict=True):

        def attend(layer, q, k, v, tokens=tokens):
            return packed_causal_attention(q, k, v, torch.tensor([0, len(tokens)]))

        with torch.inference_mode():
            hidden = decoder(tokens, torch.arange(len(tokens)), attend, taps=model.config.taps)
            probs = decoder.logits(hidden.last_TD).softmax(-1)[:, IDS]
        torch.testing.assert_close(seen.probs_LJ, probs, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(seen.taps_LE, hidden.taps_TE, atol=1e-4, rtol=1e-4)
        assert float(seen.probs_LJ.sum(-1).max()) < 0.999


def test_teacher_forced_logits_equal_a_recomputation(decoder, model):
    """Depth k + 1 at row p: what drafting k tokens ahead of p - k gives when the drafts are the true tokens."""
    sequences = observe(decoder, texts(), model, firsts=[0] * 4, dtype=torch.float32)
    found = teacher_forced(model, decoder, sequences, depth=4)
    worst, compared = 0.0, 0
    for sequence, levels in zip(sequences, found, strict=True):
        tokens = sequence.tokens_L.tolist()
        for k, logits in enumerate(levels):
            for p in range(k, len(tokens) - 2):
                known = p - k + 2  # tokens of the row when drafting began
                path = tokens[known : p + 2]
                expected = logits_after(model, decoder.embed_tokens.weight, tokens[:known], sequence.taps_LE, path)
                worst = max(worst, float((logits[p] - expected).abs().max()))
                compared += 1
    assert compared == sum(max(0, length - 2 - k) for length in LENGTHS for k in range(4))
    assert worst < 2e-5  # fp32, logits of order 1; measured 2.4e-6


def test_teacher_forced_logits_equal_cached_drafting(decoder, model):
    """The same with the drafter's own KV cache, all rows of a batch at once."""
    lengths = [11, 8, 9]
    sequences = observe(decoder, texts(lengths), model, firsts=[0] * 3, dtype=torch.float32)
    found = teacher_forced(model, decoder, sequences, depth=4)
    known = [6, 3, 5]
    ends = [n - 1 for n in known]
    cache = DraftCache(model.config, num_slots=3, max_len=16, dtype=torch.float32, device=torch.device("cpu"))
    embedding, worst = decoder.embed_tokens, 0.0
    with torch.inference_mode():
        todo = cache.catch_up([0, 0, 0], ends)
        at = list(zip(todo.rows_T.tolist(), todo.positions_T.tolist(), strict=True))
        taps = torch.stack([sequences[row].taps_LE[t] for row, t in at])
        read = embedding(torch.stack([sequences[row].tokens_L[t + 1] for row, t in at]))
        y = model(read, model.fuse(taps), cache.rope_C21d[todo.positions_T], todo.attend)[todo.last_B]
        levels = cache.draft(ends, levels=3, width=1)
        for k in range(4):
            expected = torch.stack([found[row][k][end - 1 + k] for row, end in enumerate(ends)])
            worst = max(worst, float((model.logits(y) - expected).abs().max()))
            if k < 3:
                drafted = torch.stack([sequences[row].tokens_L[n + k] for row, n in enumerate(known)])
                rope = levels.rope()
                y = model(embedding(drafted), y, rope, levels.attend(torch.zeros(3, 1, dtype=torch.int64)))
    assert worst < 2e-5


def test_later_positions_and_neighbours_are_not_seen(decoder, model):
    sequences = observe(decoder, texts(), model, firsts=[0] * 4, dtype=torch.float32)
    before = teacher_forced(model, decoder, sequences, depth=3)
    changed = list(sequences)
    tokens, taps = sequences[2].tokens_L.clone(), sequences[2].taps_LE.clone()
    tokens[8] = (tokens[8] + 1) % 64
    taps[7:] += 1
    changed[2] = sequences[2]._replace(tokens_L=tokens, taps_LE=taps)
    after = teacher_forced(model, decoder, changed, depth=3)
    for index in (0, 1, 3):
        for k in range(3):  # rows below k hold nothing meaningful
            assert torch.equal(before[index][k][k:], after[index][k][k:])
    for k in range(3):
        assert torch.equal(before[2][k][k:7], after[2][k][k:7])  # row 7 is the first to read token 8 or hidden state 7
        assert (before[2][k][7:] != after[2][k][7:]).any(1).all()


def test_loss_by_hand():
    """p = (0.5, 0.25) with 0.25 outside; q = (0.8, 0.2): loss = -0.5 ln 0.8 - 0.25 ln 0.2, overlap = 0.5 + 0.2."""
    logits = torch.tensor([[0.8, 0.2], [0.8, 0.2]]).log().add(3.0).double().requires_grad_()
    probs = torch.tensor([[0.5, 0.25], [0.5, 0.25]])
    result = draft_loss(logits, probs)
    assert result.loss.item() == pytest.approx(2 * (0.5 * 0.22314 + 0.25 * 1.60944), abs=1e-4)
    assert float(result.overlap) == pytest.approx(1.4, abs=1e-5)
    (3 * result.loss).backward()
    expected = 3 * (0.75 * torch.tensor([0.8, 0.2]) - torch.tensor([0.5, 0.25]))
    torch.testing.assert_close(logits.grad, expected.double().expand(2, 2), atol=1e-5, rtol=0)


def test_loss_gradient_is_autograds():
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 33, generator=generator) * 20).requires_grad_()  # saturated
    probs = torch.rand(5, 33, generator=generator) / 30
    draft_loss(logits, probs).loss.backward()
    (expected,) = torch.autograd.grad(-(probs * logits.log_softmax(-1)).sum(), logits)
    torch.testing.assert_close(logits.grad, expected, atol=1e-6, rtol=1e-4)


def learnt(decoder, steps, *, settings, sequences=None, state=None):
    sequences = pupils(decoder) if sequences is None else sequences
    model = eagle3_from_target(decoder, IDS, scales=tap_scales(sequences[0].taps_LE), seed=1)
    trainer = Eagle3Trainer(model, decoder.embed_tokens.weight, settings)
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
    reachable = torch.cat([s.probs_LJ[s.first - 1 : -1] for s in sequences]).sum(-1).mean()
    final = trainer.measure(sequences)
    assert len(final.overlaps) == 3
    assert all(overlap < 0.5 * float(reachable) for overlap in history[0].overlaps)
    assert all(overlap > 0.85 * float(reachable) for overlap in final.overlaps)
    assert final.rows == (12 - 2) + (9 - 3) + (15 - 2)  # first = 1 trains from token 2 on: there is no row before


def test_only_the_drafter_learns(decoder):
    before = {name: p.clone() for name, p in decoder.named_parameters()}
    trainer, _ = learnt(decoder, 3, settings=TrainSettings(warmup_steps=0, learning_rate=1e-2))
    assert all(torch.equal(p, before[name]) for name, p in decoder.named_parameters())
    assert all(p.grad is None for p in decoder.parameters())
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in trainer.model.parameters())
    assert trainer.model.draft_ids_J.tolist() == IDS.tolist()


def test_prompts_are_not_trained(decoder, model):
    """Distributions of prompt tokens, and of what would follow the end, do not enter."""
    (sequence,) = observe(decoder, texts((12,)), model, firsts=[5], dtype=torch.float32)
    trainer = Eagle3Trainer(model, decoder.embed_tokens.weight, TrainSettings())
    before = trainer.measure([sequence])
    assert before.rows == 12 - 5
    probs = sequence.probs_LJ.clone()
    probs[:4] = probs[-1] = 1.0
    assert trainer.measure([sequence._replace(probs_LJ=probs)]) == before
    probs[4] = 1.0  # of token 5, the first that was sampled
    assert trainer.measure([sequence._replace(probs_LJ=probs)]) != before


def test_resuming_repeats_to_the_bit(decoder):
    settings = TrainSettings(learning_rate=3e-3, warmup_steps=4, total_steps=9)
    whole, history = learnt(decoder, 8, settings=settings)
    part, _ = learnt(decoder, 3, settings=settings)
    again, rest = learnt(decoder, 5, settings=settings, state=load(save(part.state_dict())))
    assert rest == history[3:]
    assert [m.learning_rate for m in history[:5]] == pytest.approx([0.75e-3, 1.5e-3, 2.25e-3, 3e-3, 3e-3])
    assert history[7].learning_rate == pytest.approx(3e-3 * (1 - 0.9 * 3 / 5))
    for (name, a), (_, b) in zip(whole.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_starts_as_the_targets_last_layer(decoder):
    """With fc's and the embedding's random parts taken out, the drafter is the last layer on the high hidden state."""
    tokens = texts((10,))[0]
    scales = (1.0, 1.0, 0.25)
    model = eagle3_from_target(decoder, torch.arange(64), scales=scales, taps=(0, 1, 1), seed=0)
    with torch.no_grad():
        model.fc.weight.copy_(torch.cat([torch.zeros(32, 64), torch.eye(32)], 1))
        model.qkv_proj.weight[:, :32] = 0

        def attend(q, k, v):
            return packed_causal_attention(q, k, v, torch.tensor([0, 10]))

        hidden = decoder(tokens, torch.arange(10), lambda _, q, k, v: attend(q, k, v), taps=(0, 1, 1))
        cache = DraftCache(model.config, num_slots=1, max_len=10, dtype=torch.float32, device=torch.device("cpu"))
        y = model(decoder.embed_tokens(tokens), model.fuse(hidden.taps_TE), cache.rope_C21d, attend)
        torch.testing.assert_close(model.logits(y), decoder.logits(hidden.last_TD), atol=2e-3, rtol=1e-3)


def test_too_short_to_train(decoder, model):
    trainer = Eagle3Trainer(model, decoder.embed_tokens.weight, TrainSettings())
    short = TrainSequence(torch.tensor([1, 2]), torch.zeros(2, 96), torch.zeros(2, 16))
    with pytest.raises(ValueError, match="none of at least 3"):
        trainer.step([short])
    assert trainer.steps == 0

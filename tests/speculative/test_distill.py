"""Training of drafts against the plain formulas, alone against in company, killed against whole, one process against two."""

import csv
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import tiny_model

from elsi_lib.errors import ElsiError
from elsi_lib.speculative import distill
from elsi_lib.speculative.attention import attend, attend_plain, spans
from elsi_lib.speculative.checkpoint import load_draft
from elsi_lib.speculative.distill import Recipe, TargetPass, batches, gather, loss_positions, train, training_time_test
from elsi_lib.speculative.draft import Draft
from elsi_lib.speculative.loss import soft_cross_entropy
from elsi_lib.speculative.vocabulary import DraftVocabulary
from elsi_lib.targets import Target

STEPS = 3
RECIPE = Recipe(steps=STEPS, batch_tokens=60, learning_rate=3e-3, dtype="float32", epochs=2)


def tiny_target(architecture: str = "llama") -> Target:
    return Target(tiny_model(architecture), name="tiny")


def texts(count: int = 9, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        ids = torch.randint(3, 60, (12 + 3 * i,), generator=generator, dtype=torch.int32)
        mask = torch.arange(len(ids)) >= 5
        mask[7:9] = i % 2 == 0  # every other text: a second turn's prompt
        found.append((ids, mask))
    return found


def drafts(target: Target, *layer_sets: tuple[int, ...], **more) -> dict[str, Draft]:
    vocabulary = DraftVocabulary(torch.arange(1, 60, 2), target.vocab_size)
    return {"-".join(map(str, s)): Draft.for_target(target, s, vocabulary, **more) for s in layer_sets}


def reference(target: Target, draft: Draft, chosen, recipe: Recipe) -> torch.Tensor:
    """Loss of the training-time test with all rows of each text, one mask over all keys, and logits over the whole vocabulary."""
    sums, counts = [0.0] * recipe.steps, [0] * recipe.steps
    for ids, mask in chosen:
        T = len(ids)
        states, logits = target.run(ids)
        p = logits.clone()[:, draft.vocabulary.ids].softmax(-1)
        hidden = draft.fuse([states[j].clone() for j in draft.config.layers])[None, : T - 1]
        cache: list[torch.Tensor] = []
        R, causal = T - 1, torch.ones(T - 1, T - 1, dtype=torch.bool).tril()
        for k in range(recipe.steps):
            tokens = ids[(torch.arange(R) + 1 + k).clamp(max=T - 1)].long()
            seen = torch.cat([causal, *[torch.eye(R, dtype=torch.bool)] * k], 1)[None, None]
            hidden, z = draft(draft.embed(tokens)[None], hidden, seen, torch.arange(R)[None] + k, cache)
            for t in range(R):
                if t + 2 + k < T and mask[t + 2] and mask[t + 2 + k]:
                    sums[k] = sums[k] + F.cross_entropy(z[0, t], p[t + 1 + k])
                    counts[k] += 1
    return sum(recipe.decay**k * sums[k] / max(1, counts[k]) for k in range(recipe.steps))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "falcon", "qwen3"])
@pytest.mark.parametrize("norm", ["none", "each"])
def test_loss_and_gradient_are_those_of_the_plain_formulas(architecture, norm):
    target = tiny_target(architecture)
    draft = drafts(target, (0, 2), norm_before_fc=norm)["0-2"]
    chosen = texts(4)
    expected = reference(target, draft, chosen, RECIPE)
    expected.backward()
    wanted = {name: weight.grad.clone() for name, weight in draft.named_parameters()}
    draft.zero_grad()
    totals = [sum(c) for c in zip(*(loss_positions(mask, STEPS) for _, mask in chosen), strict=True)]
    batch = gather(TargetPass(target, (0, 2), draft.vocabulary), chosen, totals, RECIPE, torch.float32)
    assert batch.counts == totals
    total, losses, _ = training_time_test(draft, batch, stats=True)
    total.backward()
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(torch.stack(losses).detach().sum()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, weight in draft.named_parameters():
        torch.testing.assert_close(weight.grad, wanted[name], rtol=1e-3, atol=1e-6, msg=name)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 3), st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.integers(0, 99),
)  # fmt: skip
def test_fused_attention_is_the_plain_formula_with_its_gradients(lengths, own, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    active = [torch.arange(n)[torch.rand(n, generator=generator) < 0.7] for n in lengths]
    if not sum(map(len, active)):
        active[0] = torch.tensor([0])
    R, A, (q_heads, kv_heads) = sum(lengths), sum(map(len, active)), heads

    def draw(n, heads):
        return torch.randn(1, heads, n, 8, generator=generator, requires_grad=True)

    q, k, v = draw(A, q_heads), draw(R, kv_heads), draw(R, kv_heads)
    pairs = [(draw(A, kv_heads), draw(A, kv_heads)) for _ in range(own)]
    layout, grad = spans(lengths, active, torch.float32), torch.randn(1, q_heads, A, 8, generator=generator)
    leaves = [q, k, v, *(x for pair in pairs for x in pair)]
    fused = attend(q, k, v, pairs, layout)
    got = torch.autograd.grad(fused, leaves, grad)
    n = q_heads // kv_heads
    plain = attend_plain(
        q, k.repeat_interleave(n, 1), v.repeat_interleave(n, 1),
        [(a.repeat_interleave(n, 1), b.repeat_interleave(n, 1)) for a, b in pairs], layout,
    )  # fmt: skip
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    for a, b in zip(got, torch.autograd.grad(plain, leaves, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("block_bytes", [1, 1 << 22])
def test_loss_of_the_head_is_torchs_cross_entropy_with_its_gradients(block_bytes, monkeypatch):
    monkeypatch.setattr("elsi_lib.speculative.loss._BLOCK_BYTES", block_bytes)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, requires_grad=True)
    head = torch.randn(11, 5, generator=generator, requires_grad=True)
    p = torch.randn(4, 11, generator=generator).softmax(-1)
    index, weight = torch.tensor([0, 1, 2, 3, 3, 0, 1]), torch.tensor([1.0, 0.5, 0.0, 2.0, 0.1, 0.0, 1.0])
    z = hidden @ head.T
    expected = (F.cross_entropy(z, p[index], reduction="none") * weight).sum()
    wanted = torch.autograd.grad(3 * expected, (hidden, head))
    loss, hits = soft_cross_entropy(hidden, head, p, index, weight, True)
    got = torch.autograd.grad(3 * loss, (hidden, head))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert int(hits) == sum(int(z[i].argmax() == p[index[i]].argmax()) for i in range(7) if weight[i] > 0)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    silent, _ = soft_cross_entropy(hidden, head, p, index, weight, False)
    for a, b in zip(torch.autograd.grad(3 * silent, (hidden, head)), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@given(st.lists(st.integers(3, 50), min_size=1, max_size=20), st.integers(1, 3), st.integers(1, 80))
def test_every_epoch_holds_every_text_once_and_batches_keep_to_their_size(lengths, epochs, size):
    plan = batches(lengths, Recipe(epochs=epochs, batch_tokens=size))
    assert sorted(i for batch in plan for i in batch) == sorted(list(range(len(lengths))) * epochs)
    assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= size for batch in plan)


def test_rate_rises_then_falls_to_nothing():
    recipe = Recipe(learning_rate=2.0, warmup=0.1)
    rates = [recipe.rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(2.0) and rates[55] == pytest.approx(1.0) and rates[-1] < 0.01
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def run(folder: Path, *layer_sets, recipe=RECIPE, data=None, **options):
    target = tiny_target()
    trained = drafts(target, *layer_sets)
    train(target, trained, data or texts(), recipe, folder, report_every=1, save_every=2, **options)
    return {name: dict(draft.named_parameters()) for name, draft in trained.items()}


def test_a_draft_trained_in_company_is_the_draft_trained_alone(tmp_path):
    together, alone = run(tmp_path / "a", (0, 2), (1,), (3,)), run(tmp_path / "b", (0, 2))
    for name, weight in alone["0-2"].items():
        torch.testing.assert_close(together["0-2"][name], weight, rtol=1e-4, atol=1e-6)


def test_training_learns(tmp_path):
    run(tmp_path, (0, 2), recipe=Recipe(steps=STEPS, batch_tokens=60, dtype="float32", epochs=40, learning_rate=1e-2))
    losses = [float(row["loss"]) for row in csv.DictReader((tmp_path / "training.csv").open())]
    assert losses[-1] < losses[0] - 0.3


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_a_killed_run_ends_with_the_weights_of_a_whole_one(tmp_path, at):
    def kill(step, total):
        assert total == len(batches([len(ids) for ids, _ in texts()], RECIPE)) > 6
        if step == at:
            raise Killed

    whole = run(tmp_path / "whole", (0, 2), (1,))
    with pytest.raises(Killed):
        run(tmp_path / "cut", (0, 2), (1,), watch=kill)
    again = run(tmp_path / "cut", (0, 2), (1,))
    for draft, weights in whole.items():
        for name, weight in weights.items():  # products of unlike alignment in memory differ in the last bit
            torch.testing.assert_close(again[draft][name], weight, rtol=1e-5, atol=1e-7)
    curves = [list(csv.DictReader((tmp_path / run / "training.csv").open())) for run in ("cut", "whole")]
    assert [(row["step"], row["draft"]) for row in curves[0]] == [(row["step"], row["draft"]) for row in curves[1]]
    assert [float(row["loss"]) for row in curves[0]] == pytest.approx([float(row["loss"]) for row in curves[1]], abs=2e-4)
    assert not (tmp_path / "cut" / "state").exists()


def test_a_state_cut_while_it_is_written_is_not_resumed_from(tmp_path, monkeypatch):
    written = distill.write_tensors
    calls = []

    def cut(path, *rest):
        calls.append(path)
        if len(calls) == 4:  # the second draft of the second state
            raise KeyboardInterrupt
        written(path, *rest)

    monkeypatch.setattr(distill, "write_tensors", cut)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", (0, 2), (1,))
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "cut" / "state").glob("step-*")] == ["step-00000002"]
    again, whole = run(tmp_path / "cut", (0, 2), (1,)), run(tmp_path / "whole", (0, 2), (1,))
    for name, weight in whole["1"].items():
        torch.testing.assert_close(again["1"][name], weight, rtol=1e-5, atol=1e-7)


def test_finished_drafts_are_read_and_not_trained_again(tmp_path):
    first = run(tmp_path, (0, 2))
    steps = []
    again = run(tmp_path, (0, 2), watch=lambda *step: steps.append(step))
    assert not steps
    target = tiny_target()
    loaded = dict(load_draft(tmp_path / "0-2", target, layers=(0, 2)).named_parameters())
    for name, weight in first["0-2"].items():
        assert torch.equal(again["0-2"][name], weight) and torch.equal(loaded[name], weight)


def test_a_folder_of_another_run_is_refused(tmp_path):
    run(tmp_path / "done", (0, 2))
    with pytest.raises(ElsiError, match="another training run"):
        run(tmp_path / "done", (0, 2), data=texts(seed=1))
    with pytest.raises(Killed):
        run(tmp_path / "cut", (0, 2), watch=lambda step, _: step == 3 and (_ for _ in ()).throw(Killed))
    with pytest.raises(ElsiError, match="another training run"):
        run(tmp_path / "cut", (0, 2), recipe=Recipe(steps=STEPS, batch_tokens=60, dtype="float32", epochs=2))


def test_nan_stops_with_the_step_and_the_draft_named(tmp_path):
    target = tiny_target()
    trained = drafts(target, (0, 2), (1,))

    def poison(step, _total):
        if step == 2:
            trained["1"].fc.weight.data.fill_(math.nan)

    with pytest.raises(ElsiError, match=r"draft 1 is nan at step 2 of"):
        train(target, trained, texts(), RECIPE, tmp_path, watch=poison)


def test_bad_texts_and_recipes_are_refused(tmp_path):
    target = tiny_target()
    good = drafts(target, (1,))
    for data, words in [
        ([], "no texts"),
        ([(torch.tensor([1, 2, 3]), torch.tensor([True, True]))], "one entry per token"),
        ([(torch.tensor([1, 2, 3, 4]), torch.tensor([True, True, False, False]))], "no token to learn"),
    ]:
        with pytest.raises(ElsiError, match=words):
            train(target, good, data, RECIPE, tmp_path)
    other = Draft.for_target(target, (2,), DraftVocabulary(torch.arange(30), target.vocab_size))
    with pytest.raises(ElsiError, match="different draft vocabularies"):
        train(target, good | {"other": other}, texts(), RECIPE, tmp_path)
    with pytest.raises(ElsiError, match="no drafts"):
        train(target, {}, texts(), RECIPE, tmp_path)
    for wrong in ({"steps": 0}, {"learning_rate": 0.0}, {"warmup": 1.0}, {"dtype": "int8"}, {"clip": math.nan}):
        with pytest.raises(ElsiError, match=next(iter(wrong))):
            Recipe(**wrong)


def test_two_processes_give_the_weights_of_one(tmp_path):
    """The same script under ``accelerate launch`` with two CPU processes (``--multi_gpu`` names its launcher of local processes)."""
    script = Path(__file__).parent / "train_tiny.py"
    run(tmp_path / "one", (0, 2), (1,))
    folders = os.pathsep.join(map(str, Path(__file__).parents[:2]))
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": folders}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip
    done = subprocess.run([*launch, str(script), str(tmp_path / "two")], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "processes 2" in done.stdout
    for name in ("0-2", "1"):
        one, two = (load_file(tmp_path / runs / name / "model.safetensors") for runs in ("one", "two"))
        for key, weight in one.items():
            torch.testing.assert_close(two[key], weight, rtol=1e-4, atol=1e-6, msg=key)

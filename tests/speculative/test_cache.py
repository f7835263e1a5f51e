"""Passes over the cache against passes without one, for every architecture; the attention against its formula."""

import math

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from tiny import ARCHITECTURES, tiny_ids, tiny_model, tiny_target

from elsi_lib.errors import ElsiError
from elsi_lib.speculative import cache as room
from elsi_lib.speculative.cache import TargetCache
from elsi_lib.targets import Target, load_target

T = 14


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def read(cache, target, ids, start=0, slot=0, places=None, **more):
    """Tokens start.. of a text into one slot, in one pass."""
    positions = torch.arange(start, len(ids))[None]
    used = len(ids) if places is None else places
    mask = torch.arange(used) <= positions[0, :, None]
    return cache.forward(target, torch.tensor([ids[start:]]), positions, mask[None, None], [slot], **more)


def close(found, expected, tolerance=2e-5):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_gives_the_logits_and_states_of_a_pass_without_a_cache(architecture):
    target, ids = tiny_target(architecture), tiny_ids(T)
    states, logits = target.run(ids)
    cache = TargetCache(3, T)
    first, _ = read(cache, target, ids[:5], slot=1)
    found = [first]
    for n in range(6, T + 1):  # every other pass takes the places beyond the text along, unseen
        step, tapped = read(cache, target, ids[:n], n - 1, slot=1, places=T if n % 2 else None, states_of=(0, 3), last_only=True)
        found.append(step)
        for j in (0, 3):
            close(tapped[j][0, 0], states[j][n - 1])
    close(torch.cat(found, 1)[0], logits)


def test_the_grouped_attention_serves_all_but_falcon_whose_own_serves_it():
    for architecture in ARCHITECTURES:
        target = tiny_target(architecture)
        read(TargetCache(1, 4), target, tiny_ids(4))
        assert room._GROUPED[target.model] == (architecture != "falcon")


def test_the_own_attention_of_an_eager_model_gets_a_mask_to_add():
    target, ids = tiny_target("falcon"), tiny_ids(T)
    target.model.set_attn_implementation("eager")
    close(read(TargetCache(1, T), target, ids)[0][0], target.run(ids)[1])


def test_slots_hold_unequal_texts_read_and_written_together():
    target = tiny_target()
    texts = {0: tiny_ids(9, 1), 3: tiny_ids(4, 2), 2: tiny_ids(12, 3), 1: tiny_ids(6, 4)}
    for chosen in ([0, 3, 2], [2, 3], [1], [0, 1, 2, 3]):
        cache = TargetCache(4, 12)
        for slot in chosen:
            read(cache, target, texts[slot][:-1], slot=slot)
        places = torch.tensor([[len(texts[slot]) - 1] for slot in chosen])
        mask = (torch.arange(12) <= places)[:, None, None]
        ids = torch.tensor([texts[slot][-1:] for slot in chosen])
        logits, states = cache.forward(target, ids, places, mask, None if chosen == [0, 1, 2, 3] else chosen, states_of=[2])
        for row, slot in enumerate(chosen):
            expected_states, expected = target.run(texts[slot])
            close(logits[row, 0], expected[-1])
            close(states[2][row, 0], expected_states[2][-1])


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral", "gpt2", "falcon"])
def test_rows_of_a_tree_see_their_ancestors_only_and_the_accepted_path_is_kept(architecture):
    """Prompt of 6, a tree of two branches over it, then the text goes on from the second branch."""
    target, prompt = tiny_target(architecture), tiny_ids(6)
    parents, tokens = [-1, -1, 0, 1, 3, 0], [11, 12, 13, 14, 15, 16]
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    cache = TargetCache(2, 16)
    read(cache, target, prompt, slot=1)
    mask = torch.zeros(6, 12, dtype=torch.bool)
    mask[:, :6] = True
    for node, path in enumerate(paths):
        mask[node, [6 + i for i in path]] = True
    positions = torch.tensor([[5 + len(path) for path in paths]])
    write = torch.arange(6, 12)[None]
    logits, _ = cache.forward(target, torch.tensor([tokens]), positions, mask[None, None], [1], write=write)
    for node, path in enumerate(paths):
        close(logits[0, node], target.run([*prompt, *(tokens[i] for i in path)])[1][-1])
    cache.keep(1, 6, [6 + i for i in paths[4]])
    text = [*prompt, *(tokens[i] for i in paths[4]), 20, 21]
    close(read(cache, target, text, 9, slot=1)[0][0], target.run(text)[1][9:])


def test_a_change_of_size_and_a_move_between_slots_keep_the_text():
    target, ids = tiny_target("gemma2"), tiny_ids(T)
    cache = TargetCache(2, 8)
    read(cache, target, ids[:8], slot=1)
    cache.resize(T)
    read(cache, target, ids[:-1], 8, slot=1)
    cache.move(1, 0, T - 1)
    cache.grow(T + 3)
    cache.resize(T)
    for slot in (0, 1):
        close(read(cache, target, ids, T - 1, slot=slot)[0][0], target.run(ids)[1][-1:])
    assert cache.keys[0].shape == (2, 2, T, 8) and cache.capacity == T


def test_last_only_gives_the_last_row():
    target, ids = tiny_target(), tiny_ids(T)
    close(read(TargetCache(1, T), target, ids, last_only=True)[0][0], target.run(ids)[1][-1:])
    assert not target.model.get_output_embeddings()._forward_pre_hooks


@given(
    st.sampled_from([(4, 2), (6, 2), (3, 3), (5, 1)]), st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.booleans(),
    st.sampled_from([None, 0.3]), st.sampled_from([None, 2.0]),
)  # fmt: skip
def test_the_attention_is_its_formula(heads, n, rows, places, gaps, scaling, softcap):
    heads, pairs = heads
    g = torch.Generator().manual_seed(n * 100 + rows * 10 + places)
    query, key, value = (torch.randn(n, h, t, 4, generator=g) for h, t in ((heads, rows), (pairs, places + 2), (pairs, places + 2)))
    key, value = (x[:, :, :places] if gaps else x[:, :, :places].contiguous() for x in (key, value))
    mask = torch.rand(n, 1, rows, places, generator=g) > 0.4
    mask[..., 0] = True
    cache = TargetCache(n, places)
    cache._windows, cache._biases = {}, {}
    room._AT_WORK.append(cache)
    try:
        found, none = room.grouped_attention(None, query, key, value, mask, 0.0, scaling, softcap)
    finally:
        room._AT_WORK.pop()
    expected = torch.zeros(n, rows, heads, 4, dtype=torch.float64)
    for b in range(n):
        for h in range(heads):
            k, v = (x[b, h * pairs // heads].double() for x in (key, value))
            for t in range(rows):
                scores = k @ query[b, h, t].double() * (scaling or 0.5)
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                weights = scores.exp() * mask[b, 0, t]
                expected[b, t, h] = weights @ v / weights.sum()
    assert none is None and torch.allclose(found.double(), expected, atol=1e-5)


def test_the_target_is_as_it_was_after_a_pass_and_after_one_that_failed():
    target = tiny_target()
    config = target.model.config
    before = config._attn_implementation
    cache = TargetCache(1, 4)
    read(cache, target, tiny_ids(4), states_of=[1])
    handle = target.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read(cache, target, tiny_ids(4), states_of=[1], last_only=True)
    handle.remove()
    assert config._attn_implementation == before and not room._AT_WORK
    assert not any(block._forward_hooks for block in target.blocks)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"positions": torch.zeros(1, 3, dtype=torch.long)}, "shapes"),
        ({"write": torch.tensor([[0, 4]])}, "places 0 to 4 of 4"),
        ({"mask": torch.ones(1, 1, 2, 9, dtype=torch.bool)}, "in a cache of 8"),
        ({"mask": torch.ones(1, 1, 2, 4)}, "float32"),
        ({"mask": torch.ones(2, 1, 2, 4, dtype=torch.bool)}, r"\(2, 1, 2, 4\)"),
        ({"slots": [2]}, "slots \\[2\\]"),
        ({"slots": [0, 1]}, "for 1 texts"),
        ({"states_of": [4]}, r"layers \[4\]"),
        ({"states_of": [-1]}, r"layers \[-1\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    given = {"ids": torch.tensor([[3, 4]]), "positions": torch.tensor([[0, 1]]), "mask": torch.ones(1, 1, 2, 4, dtype=torch.bool)}
    with pytest.raises(ElsiError, match=words):
        TargetCache(2, 8).forward(tiny_target(), **(given | change))


def test_sizes_and_moves_outside_the_cache_are_refused():
    for slots, capacity in ((0, 4), (4, 0)):
        with pytest.raises(ElsiError, match="at least 1"):
            TargetCache(slots, capacity)
    cache = TargetCache(2, 8)
    for slot, start, places in ((2, 0, [1]), (0, 7, [1, 2]), (0, 0, [8]), (0, -1, [1])):
        with pytest.raises(ElsiError, match="the cache has 2 slots of 8 places"):
            cache.keep(slot, start, places)
    with pytest.raises(ElsiError, match="at least 1"):
        cache.resize(0)
    with pytest.raises(ElsiError, match="of 8 places cannot grow to 7"):
        cache.grow(7)


def test_attention_with_sinks_and_windows():
    """gpt-oss: a learned logit per head in every softmax, every other layer with a window."""
    config = tf.GptOssConfig(
        num_hidden_layers=4, hidden_size=32, intermediate_size=32, vocab_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4, pad_token_id=0, initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target, ids = Target(tf.AutoModelForCausalLM.from_config(config).float()), tiny_ids(T)
    for layer in target.model.model.layers:
        assert float(layer.self_attn.sinks.abs().min()) > 0
    cache = TargetCache(1, T)
    expected = target.run(ids)[1]
    close(read(cache, target, ids[:9])[0][0], expected[:9])
    close(read(cache, target, ids, 9)[0][0], expected[9:])


def test_architectures_that_cannot_be_served_are_refused_by_name():
    windowed = tiny_model("falcon")
    windowed.config.sliding_window = 4
    for model in (tiny_model("falcon", alibi=True), windowed):
        with pytest.raises(ElsiError, match=r"odd \(FalconForCausalLM\): .*not supported"):
            read(TargetCache(1, 4), Target(model, name="odd"), tiny_ids(4))


def test_kinds_of_layers_without_keys_of_every_token_are_refused():
    target = tiny_target("qwen2")
    target.model.config.layer_types[1] = "linear_attention"
    with pytest.raises(ElsiError, match="linear_attention"):
        read(TargetCache(1, 4), target, tiny_ids(4))


def test_bfloat16_stays_close_to_a_pass_without_a_cache():
    target = Target(tiny_model().to(torch.bfloat16))
    ids = tiny_ids(T)
    expected = target.run(ids)[1].float()
    cache = TargetCache(1, T)
    read(cache, target, ids[:-1])
    found = read(cache, target, ids, T - 1)[0][0].float()
    assert (found - expected[-1:]).abs().max() < 0.1 * expected.abs().max() and math.isfinite(float(found.sum()))


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"])
def test_real_targets_in_float32(name):
    target = load_target(name, dtype="float32")
    ids = torch.randint(0, 40_000, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    states, logits = target.run(ids)
    cache = TargetCache(2, 24)
    read(cache, target, ids[:20], slot=1)
    found, tapped = read(cache, target, ids, 20, slot=1, states_of=[target.num_layers - 1])
    close(found[0], logits[20:], 1e-4)
    close(tapped[target.num_layers - 1][0], states[-1][20:], 1e-4)
    assert room._GROUPED[target.model]

"""The draft against a float64 reference written out in NumPy, its checkpoint, and every refusal."""

import json
import math
import re

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import ARCHITECTURES, tiny_model, tiny_target

from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.fingerprint import read_tensors, write_tensors
from elsi_lib.speculative.checkpoint import FORMAT, load_draft, read_draft, save_draft
from elsi_lib.speculative.draft import Draft, DraftConfig
from elsi_lib.speculative.tree import expand
from elsi_lib.speculative.vocabulary import DraftVocabulary
from elsi_lib.targets import Target

SETS = [(3,), (0, 3), (1, 2, 3), (0, 1, 2, 3)]
H, A, KV, HEAD, MLP, V, D = 32, 4, 2, 8, 64, 64, 20
IDS = torch.arange(0, 3 * D, 3)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def make(target, layers=(1, 2, 3), **changes):
    """A draft whose every weight is random: norms that are all 1 would hide a norm in the wrong place."""
    draft = Draft.for_target(target, layers, DraftVocabulary(IDS, V), **({"rope_theta": 500.0} | changes))
    generator = torch.Generator().manual_seed(len(layers))
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.2 if weight.ndim == 2 else 0.3) + (weight.ndim == 1))
    return draft.eval()


def inputs(layers, rows=7, seed=0):
    rng = torch.Generator().manual_seed(seed)
    states = [torch.randn(1, rows, H, generator=rng) * 3**i for i, _ in enumerate(layers)]
    return states, torch.randint(0, V, (1, rows + 1), generator=rng)


# The reference: float64, one row at a time, from FIELD's description


def rms(x, weight, eps):
    return weight * x / np.sqrt((x * x).mean() + eps)


def rotate(x, position, theta):
    """Pairs (x_i, x_{i + half}) turned by position * theta^(-2 i / head)."""
    half, out = len(x) // 2, np.empty_like(x)
    for i in range(half):
        a = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(a) - x[i + half] * math.sin(a)
        out[i + half] = x[i + half] * math.cos(a) + x[i] * math.sin(a)
    return out


def reference(weights, config, embeddings, hidden, visible, positions):
    """Rows of embeddings and hidden (T, H) -> states and logits; ``visible[t]`` are the rows that row t attends to."""
    W = {name: tensor.double().numpy() for name, tensor in weights.items()}
    eps, theta = config["rms_norm_eps"], config["rope_theta"]
    queries, keys, values = [], [], []
    for e, h, position in zip(embeddings, hidden, positions, strict=True):
        x = np.concatenate(
            [rms(e, W["midlayer.input_layernorm.weight"], eps), rms(h, W["midlayer.hidden_norm.weight"], eps)]
        )
        q = (W["midlayer.self_attn.q_proj.weight"] @ x).reshape(A, HEAD)
        k = (W["midlayer.self_attn.k_proj.weight"] @ x).reshape(KV, HEAD)
        queries.append([rotate(head, position, theta) for head in q])
        keys.append([rotate(head, position, theta) for head in k])
        values.append((W["midlayer.self_attn.v_proj.weight"] @ x).reshape(KV, HEAD))
    states, logits = [], []
    for t, h in enumerate(hidden):
        mixed = []
        for a in range(A):
            group = a // (A // KV)
            scores = np.array([queries[t][a] @ keys[s][group] / math.sqrt(HEAD) for s in visible[t]])
            p = np.exp(scores - scores.max())
            p /= p.sum()
            mixed.append(sum(share * values[s][group] for share, s in zip(p, visible[t], strict=True)))
        middle = h + W["midlayer.self_attn.o_proj.weight"] @ np.concatenate(mixed)
        y = rms(middle, W["midlayer.post_attention_layernorm.weight"], eps)
        gate, up = W["midlayer.mlp.gate_proj.weight"] @ y, W["midlayer.mlp.up_proj.weight"] @ y
        states.append(middle + W["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up))
        logits.append(W["lm_head.weight"] @ rms(states[-1], W["norm.weight"], eps))
    return np.array(states), np.array(logits)


def causal(rows):
    return [range(t + 1) for t in range(rows)]


def close(found, expected):
    torch.testing.assert_close(found.detach().double(), torch.from_numpy(expected), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("norm", ["none", "each", "concat"])
@pytest.mark.parametrize("layers", SETS)
def test_equals_the_reference(target, layers, norm):
    draft = make(target, layers, norm_before_fc=norm)
    states, ids = inputs(layers)
    weights, config = draft.state_dict(), json.loads(json.dumps(draft.config.llama()))
    W = {name: tensor.double().numpy() for name, tensor in weights.items()}
    eps = config["rms_norm_eps"]
    parts = [state[0].double().numpy() for state in states]
    if norm == "each":
        parts = [np.array([rms(x, W[f"fc_norm.{i}.weight"], eps) for x in part]) for i, part in enumerate(parts)]
    joined = np.concatenate(parts, 1)
    if norm == "concat":
        joined = np.array([rms(x, W["input_norm.weight"], eps) for x in joined])
    fused = joined @ W["fc.weight"].T
    embeddings = target.model.get_input_embeddings().weight[ids[0, 1:]].double().numpy()
    expected = reference(weights, config, embeddings, fused, causal(7), range(7))

    hidden = draft.fuse(states)
    close(hidden[0], fused)
    assert torch.equal(hidden, draft.fuse(torch.cat(states, -1)))
    state, logits = draft(draft.embed(ids[:, 1:]), hidden)
    close(state[0], expected[0])
    close(logits[0], expected[1])

    # Two more steps at the last row: the state before the norm comes back, the position goes on.
    cache = []
    draft(draft.embed(ids[:, 1:]), hidden, cache=cache)
    last, rows = state[:, -1:], (embeddings, fused)
    for token in (5, 9):
        e = target.model.get_input_embeddings().weight[token].double().numpy()
        rows = np.vstack([rows[0], e]), np.vstack([rows[1], last[0, 0].detach().double().numpy()])
        n = len(rows[0])
        expected = reference(weights, config, *rows, causal(n), range(n))
        last, logits = draft(draft.embed(torch.tensor([[token]])), last, cache=cache)
        close(last[0, 0], expected[0][-1])
        close(logits[0, 0], expected[1][-1])


def test_explicit_positions_and_masks_are_those_of_a_tree(target):
    draft, rows = make(target, (2,)), 4
    states, ids = inputs((2,), rows)
    cache = []
    state, _ = draft(draft.embed(ids[:, 1:]), draft.fuse(states), cache=cache)
    # Two children of the last row, and a child of each: 4 and 5 at position 4, 6 under 5 and 7 under 4 at position 5.
    tokens, positions = [11, 12, 13, 14], [4, 4, 5, 5]
    seen = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 2, 3, 5, 6], [0, 1, 2, 3, 4, 7]]
    hidden = torch.randn(1, 4, H, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(1, 1, 4, 8, dtype=torch.bool)
    for i, row in enumerate(seen):
        mask[0, 0, i, row] = True
    found, logits = draft(draft.embed(torch.tensor([tokens])), hidden, mask, torch.tensor([positions]), [c.clone() for c in cache])
    weight = target.model.get_input_embeddings().weight
    e = torch.cat([weight[ids[0, 1:]], weight[tokens]]).double().numpy()
    h = torch.cat([draft.fuse(states)[0], hidden[0]]).detach().double().numpy()
    expected = reference(draft.state_dict(), draft.config.llama(), e, h, [*causal(4), *seen], [0, 1, 2, 3, *positions])
    close(found[0], expected[0][4:])
    close(logits[0], expected[1][4:])
    # A float mask says the same, and so does a branch alone with the cache cut to it.
    additive = torch.zeros(1, 1, 4, 8).masked_fill(~mask, -math.inf)
    again = draft(draft.embed(torch.tensor([tokens])), hidden, additive, torch.tensor([positions]), [c.clone() for c in cache])
    torch.testing.assert_close(again[0], found)
    alone, branch = draft(draft.embed(torch.tensor([[12, 13]])), hidden[:, 1:3], cache=[c.clone() for c in cache])
    torch.testing.assert_close(alone, found[:, 1:3], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(branch, logits[:, 1:3], rtol=1e-4, atol=1e-5)


def test_a_tree_drafted_level_by_level_scores_its_paths_as_chains(target):
    """Expansion with cache, tree mask and recurrent states, against each path drafted alone, without a cache."""
    draft, prefix = make(target), 5
    states, ids = inputs((1, 2, 3), prefix)
    embeddings, hidden = draft.embed(ids[:, 1:]), draft.fuse(states)

    def step(state, frontier):
        if frontier is None:
            cache = []
            found, logits = draft(embeddings, hidden, cache=cache)
            seen = torch.zeros(1, 0, dtype=torch.bool)  # what the last row sees beyond the prefix
        else:
            before, seen, cache = state
            n = len(frontier.tokens)
            seen = torch.cat([seen[frontier.parents], torch.eye(n, dtype=torch.bool)], 1)
            mask = torch.cat([torch.ones(n, prefix, dtype=torch.bool), seen], 1)[None, None]
            positions = torch.full((1, n), prefix - 1 + frontier.depth)
            found, logits = draft(draft.embed(frontier.tokens[None]), before[:, frontier.parents], mask, positions, cache)
        found, logits = (found[:, -1:], logits[:, -1:]) if frontier is None else (found, logits)
        return logits[0].log_softmax(-1), (found, seen, cache)

    with torch.no_grad():
        nodes = expand(step, None, depth=3, top_k=3, ids=draft.vocabulary.ids)
        assert len(nodes) == 3 + 3 * 9
        for node in range(len(nodes)):
            path, at = [], node
            while at >= 0:
                path, at = [int(nodes.tokens[at]), *path], int(nodes.parents[at])
            total, e, h = 0.0, embeddings, hidden
            for token in path:
                state, logits = draft(e, h)
                total += float(logits[0, -1].log_softmax(-1)[draft.vocabulary.draft_ids[token]])
                e, h = torch.cat([e, draft.embed(torch.tensor([[token]]))], 1), torch.cat([h, state[:, -1:]], 1)
            assert float(nodes.scores[node]) == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("cuts", [(1,) * 7, (3, 4), (6, 1), (2, 2, 3)])
def test_cached_pieces_equal_the_whole(target, cuts):
    draft = make(target)
    states, ids = inputs((1, 2, 3))
    embeddings, hidden = draft.embed(ids[:, 1:]), draft.fuse(states)
    state, logits = draft(embeddings, hidden)
    cache, at, found = [], 0, []
    for cut in cuts:
        found.append(draft(embeddings[:, at : at + cut], hidden[:, at : at + cut], cache=cache))
        at += cut
        assert [tuple(part.shape) for part in cache] == [(1, KV, at, HEAD)] * 2
    torch.testing.assert_close(torch.cat([s for s, _ in found], 1), state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([x for _, x in found], 1), logits, rtol=1e-4, atol=1e-5)


def test_causal_batched_and_relative(target):
    draft = make(target)
    states, ids = inputs((1, 2, 3))
    embeddings, hidden = draft.embed(ids[:, 1:]), draft.fuse(states)
    state, _ = draft(embeddings, hidden)
    for t in range(7):  # nothing before row t sees it
        changed = hidden.clone()
        changed[:, t] += 1
        other, _ = draft(embeddings, changed)
        assert torch.equal(other[:, :t], state[:, :t]) and not torch.allclose(other[:, t:], state[:, t:])
    shifted, _ = draft(embeddings, hidden, positions=torch.arange(7)[None] + 40)
    torch.testing.assert_close(shifted, state, rtol=1e-3, atol=1e-4)  # rotary attention knows distances only
    spread, _ = draft(embeddings, hidden, positions=torch.arange(7)[None] * 3)
    assert not torch.allclose(spread, state, atol=1e-2)
    both, _ = draft(torch.cat([embeddings, embeddings.flip(1)]), torch.cat([hidden, hidden.flip(1)]))
    torch.testing.assert_close(both[:1], state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["none", "each", "concat"])
@pytest.mark.parametrize("layers", SETS)
def test_names_and_sizes_are_those_of_eagle(target, layers, norm):
    draft, n = make(target, layers, norm_before_fc=norm), len(layers)
    expected = {
        "fc.weight": (H, n * H),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (A * HEAD, 2 * H),
        "midlayer.self_attn.k_proj.weight": (KV * HEAD, 2 * H),
        "midlayer.self_attn.v_proj.weight": (KV * HEAD, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, A * HEAD),
        "midlayer.mlp.gate_proj.weight": (MLP, H),
        "midlayer.mlp.up_proj.weight": (MLP, H),
        "midlayer.mlp.down_proj.weight": (H, MLP),
        "norm.weight": (H,),
        "lm_head.weight": (D, H),
        "d2t": (D,),
        "t2d": (V,),
    }
    expected |= {f"fc_norm.{i}.weight": (H,) for i in range(n)} if norm == "each" else {}
    expected |= {"input_norm.weight": (n * H,)} if norm == "concat" else {}
    assert {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()} == expected
    count = n * H * H + 3 * A * HEAD * H + 4 * KV * HEAD * H + 3 * MLP * H + D * H + 4 * H + (norm != "none") * n * H
    assert sum(p.numel() for p in draft.parameters()) == count
    assert torch.equal(draft.d2t + torch.arange(D), IDS) and torch.equal(draft.t2d.nonzero()[:, 0], IDS)


def test_the_weights_of_two_layer_sets_start_equal_but_for_fc(target):
    vocabulary = DraftVocabulary(IDS, V)
    torch.manual_seed(1)
    one = Draft.for_target(target, (1, 2, 3), vocabulary).state_dict()
    torch.manual_seed(2)
    two = Draft.for_target(target, (0, 3), vocabulary).state_dict()
    other = Draft.for_target(target, (0, 3), vocabulary, seed=1).state_dict()
    for name, weight in one.items():
        assert torch.equal(weight, two[name]) == (name != "fc.weight"), name
        assert torch.equal(two[name], other[name]) == (weight.ndim == 1), name
    assert one["fc.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(one["midlayer.mlp.gate_proj.weight"], one["midlayer.mlp.up_proj.weight"])


def test_the_embedding_is_the_targets_own_and_frozen(target):
    draft, weight = make(target), target.model.get_input_embeddings().weight
    assert draft.embedding.data_ptr() == weight.data_ptr() and not draft.embedding.requires_grad
    ids = torch.tensor([[3, 0, 63]])
    assert torch.equal(draft.embed(ids)[0], weight[[3, 0, 63]])
    half = make(target).to(torch.bfloat16)
    assert half.embed(ids).dtype == torch.bfloat16 and half.embedding.dtype == torch.float32
    states, tokens = inputs((1, 2, 3))
    state, logits = half(half.embed(tokens[:, 1:]), half.fuse(states), positions=torch.arange(7)[None] + 1000)
    exact, _ = draft(draft.embed(tokens[:, 1:]), draft.fuse(states), positions=torch.arange(7)[None] + 1000)
    assert state.dtype == logits.dtype == torch.bfloat16
    assert (state - exact).norm() < 0.03 * exact.norm()  # angles are not rounded to bfloat16, where 1001 is 1000
    draft(draft.embed(tokens[:, 1:]), draft.fuse(states))[1].sum().backward()
    assert weight.grad is None and all(p.grad is not None for p in draft.parameters())


def test_the_head_can_start_from_the_targets(target):
    draft, head = make(target), target.model.get_output_embeddings().weight
    draft.copy_head(head)
    assert torch.equal(draft.lm_head.weight, head[IDS]) and draft.lm_head.weight.requires_grad


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_target_gets_a_llama_style_draft(architecture):
    target = tiny_target(architecture)
    draft = Draft.for_target(target, (3, 0), DraftVocabulary(IDS, V))
    own, text = draft.config, target.model.config.get_text_config()
    assert own.layers == (0, 3) and (own.hidden_size, own.vocab_size, own.num_target_layers) == (H, V, 4)
    assert own.head_dim == 8 and own.num_attention_heads == 4 and own.rope_theta == 10_000.0
    assert own.intermediate_size == (4 * H if architecture in ("gpt2", "falcon") else 2 * H)
    assert own.rms_norm_eps == (getattr(text, "rms_norm_eps", None) or 1e-6) and own.max_position_embeddings == 128
    states, _ = target.run([1, 2, 3, 4, 5])
    state, logits = draft(draft.embed(torch.tensor([[2, 3, 4, 5, 6]])), draft.fuse([states[j][None] for j in own.layers]))
    assert state.shape == (1, 5, H) and logits.shape == (1, 5, D) and torch.isfinite(logits).all()


def test_options_and_wrong_sizes(target):
    changed = DraftConfig.for_target(target, (1,), D, num_key_value_heads=1, intermediate_size=48, rope_theta=1e6)
    assert (changed.num_key_value_heads, changed.intermediate_size, changed.rope_theta) == (1, 48, 1e6)
    assert changed.llama()["rope_theta"] == 1e6 and changed.llama()["architectures"] == ["LlamaForCausalLMEagle3"]
    for layers, changes, message in [
        ((), {}, "an empty layer set"),
        ((1, 4), {}, r"layer set \(1, 4\) outside 0..3 of tiny-llama"),
        ((1, 1), {}, "names a layer twice"),
        ((1,), {"norm_before_fc": "both"}, "norm_before_fc = 'both': one of none, each, concat"),
        ((1,), {"intermediate_size": 0}, "intermediate_size = 0"),
        ((1,), {"rope_theta": 0.0}, "rope_theta = 0.0"),
        ((1,), {"num_key_value_heads": 3}, "4 attention heads of 8 over 3 key-value heads"),
        ((1,), {"head_dim": 7}, "even head_dim"),
        ((1,), {"draft_vocab_size": 65}, "draft vocabulary of 65 ids, but the target has 64"),
    ]:
        with pytest.raises(ElsiError, match=message):
            DraftConfig.for_target(target, layers, **({"draft_vocab_size": D} | changes))
    config, weight = DraftConfig.for_target(target, (1,), D), target.model.get_input_embeddings().weight
    with pytest.raises(ElsiError, match=r"draft vocabulary of 5 of 64 ids does not fit a draft of 20 of 64"):
        Draft(config, DraftVocabulary(torch.arange(5), V), weight)
    with pytest.raises(ElsiError, match=r"draft vocabulary of 20 of 99 ids does not fit"):
        Draft(config, DraftVocabulary(IDS, 99), weight)
    with pytest.raises(ElsiError, match=r"embedding of shape \(64, 16\)"):
        Draft(config, DraftVocabulary(IDS, V), weight[:, :16])
    with pytest.raises(ElsiError, match=r"64 features for a draft of layers \(1, 2, 3\), which reads 96"):
        make(target).fuse([torch.zeros(1, 2, H)] * 2)


# Checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(target, tmp_path, dtype):
    draft = make(target, norm_before_fc="each").to(dtype)
    folder = save_draft(draft, tmp_path / "new" / "draft", {"training": {"steps": 7, "losses": (1.5, 0.5)}, "note": "é"})
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    back = load_draft(folder, target, layers=(3, 2, 1))
    assert back.config == draft.config and back.vocabulary.ids.tolist() == IDS.tolist()
    assert back.passport["training"] == {"steps": 7, "losses": [1.5, 0.5]} and back.passport["target"]["name"] == "tiny-llama"
    for name, tensor in draft.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor) and back.state_dict()[name].dtype == tensor.dtype
    assert all(p.requires_grad for p in back.parameters())
    states, ids = inputs((1, 2, 3))
    found, expected = (d(d.embed(ids[:, 1:]), d.fuse(states)) for d in (back, draft))
    assert torch.equal(found[1], expected[1])
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(draft.state_dict())
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["draft_vocab_size"], config["elsi"]["config"]["layers"]) == (1, D, [1, 2, 3])
    again = save_draft(back, tmp_path / "again")
    assert load_file(again / "model.safetensors").keys() == draft.state_dict().keys() and back.passport == read_draft(again)[3]


def test_other_targets_and_layers_are_refused(target, tmp_path):
    folder = save_draft(make(target), tmp_path / "draft")
    with pytest.raises(ElsiError, match=re.escape("is a draft of layers (1, 2, 3), not of (0, 1)")):
        load_draft(folder, target, layers=(1, 0))
    with pytest.raises(ElsiError, match=r"layer set \(1, 9\) outside"):
        load_draft(folder, target, layers=(1, 9))
    for other, what in [
        (tiny_target("qwen2"), "architecture"),
        (tiny_target("llama", layers=5), "num_layers"),
        (tiny_target("llama", hidden=64), "hidden_size"),
        (tiny_target("llama", vocabulary=80), "vocab_size"),
        (tiny_target("llama", intermediate_size=48), "parameters"),
        (tiny_target("llama", seed=1), "embedding_norms"),
    ]:
        with pytest.raises(ElsiError, match=f"belongs to target tiny-llama, not to {other.name} \\({what}"):
            load_draft(folder, other)
    rounded = Target(tiny_model("llama").to(torch.bfloat16), name="the-same-in-bfloat16")
    assert load_draft(folder, rounded).config.layers == (1, 2, 3)
    first, second = (Target(tiny_model("llama"), name="tiny", revision=revision) for revision in ("a" * 40, "b" * 40))
    save_draft(make(first), folder)
    assert load_draft(folder, first) and load_draft(folder, target)  # a target made in memory has no revision
    with pytest.raises(ElsiError, match="revision aaa"):
        load_draft(folder, second)


def test_damaged_files_are_refused(target, tmp_path):
    draft = make(target)
    folder = save_draft(draft, tmp_path / "draft")
    weights, config = (folder / name for name in ("model.safetensors", "config.json"))
    whole, text = weights.read_bytes(), config.read_text()

    def refused(message):
        with pytest.raises(ElsiError, match=message) as caught:
            load_draft(folder, target)
        assert "\n" not in str(caught.value)
        weights.write_bytes(whole)
        config.write_text(text)

    for length in (0, 7, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:length])
        refused("truncated or damaged")
    weights.unlink()
    refused("cannot be read as a draft")
    config.unlink()
    refused("no draft at")
    for broken in ("", text[: len(text) // 2], "[1]", "{}", '{"elsi": 3}', text.replace(FORMAT, "elsi-draft-0")):
        config.write_text(broken)
        refused("config.json")
    config.write_text(text.replace('"rope_theta": 500.0', '"rope_theta": 10000.0'))
    refused("was edited")
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused("was edited")
    save_file(load_file(weights), weights)  # without the header
    refused("is not a draft")
    save_draft(make(target, (0,)), tmp_path / "other")
    weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())  # killed between the two files
    refused("the writing was cut short")
    assert load_draft(folder, target)


def resealed(folder, change):
    """The draft with other tensors or fields and a hash that fits them: what another version or a careless converter writes."""
    from elsi_lib.speculative.checkpoint import _digest

    content = json.loads((folder / "config.json").read_text())
    tensors, _ = read_tensors(folder / "model.safetensors", FORMAT, "a draft")
    del content["elsi"]["sha256"]
    change(tensors, content)
    digest = _digest(tensors, content)
    write_tensors(folder / "model.safetensors", tensors, {"format": FORMAT, "sha256": digest})
    content["elsi"]["sha256"] = digest
    (folder / "config.json").write_text(json.dumps(content))


def _drop(name):
    return lambda tensors, content: tensors.pop(name)


def _put(name, value):
    return lambda tensors, content: tensors.update({name: value})


@pytest.mark.parametrize(
    "change, message",
    [
        (_drop("d2t"), "lacks d2t or t2d"),
        (_put("d2t", IDS), "holds plain target ids, not offsets"),
        (_put("t2d", torch.ones(V, dtype=torch.bool)), "t2d of .* marks 64 ids, not the 20"),
        (lambda t, c: t.update(d2t=torch.zeros(5).long(), t2d=torch.arange(V) < 5), "vocabulary of 5 of 64 ids does not fit"),
        (_drop("norm.weight"), "Missing key.*norm.weight"),
        (_put("fc.weight", torch.zeros(H, H)), "size mismatch for fc.weight"),
        (_put("midlayer.self_attn.q_norm.weight", torch.ones(HEAD)), "Unexpected key.*q_norm"),
        (lambda t, c: c["elsi"]["config"].update(rope_scaling=2), "rope_scaling.*another version wrote it"),
        (lambda t, c: c["elsi"]["config"].pop("layers"), "another version wrote it"),
    ],
)
def test_drafts_that_do_not_fit_are_refused(target, tmp_path, change, message):
    folder = save_draft(make(target), tmp_path / "draft")
    resealed(folder, change)
    with pytest.raises(ElsiError, match=message) as caught:
        load_draft(folder, target)
    assert "\n" not in str(caught.value)


def test_a_failed_write_leaves_the_old_draft(target, tmp_path, monkeypatch):
    folder = save_draft(make(target), tmp_path / "draft")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("elsi_lib.fingerprint.save_file", full)
    with pytest.raises(AssetError, match="cannot be written.*space"):
        save_draft(make(target, (0,)), folder)
    assert load_draft(folder, target).config.layers == (1, 2, 3) and len(list(folder.iterdir())) == 2
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(AssetError, match="cannot be written"):
        save_draft(make(target), tmp_path / "file" / "draft")

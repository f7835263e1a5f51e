"""Block outputs against forwards run by hand; layer names against FIELD's table; every refusal."""

import os
import re
import shutil

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import ARCHITECTURES, TEMPLATE, tiny_folder, tiny_gguf, tiny_ids, tiny_model, tiny_target, tiny_tokenizer
from torch import nn

from elsi_lib import assets, loading
from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.layers import CONVENTIONS, engine_ids, from_layer_ids, layer_ids
from elsi_lib.targets import Target, find_blocks, load_target

CASES = [*((name, 4) for name in ARCHITECTURES), ("qwen3", 36), ("llama", 32)]


def final_norm(model):
    decoder = model.get_decoder()
    return next(getattr(decoder, name) for name in ("norm", "ln_f", "final_layer_norm") if hasattr(decoder, name))


# Taps


@pytest.mark.parametrize(("architecture", "layers"), CASES)
def test_states_are_the_raw_block_outputs(architecture, layers):
    """Blocks called one after the other outside the model, each on what the one before gave."""
    target = tiny_target(architecture, layers=layers)
    ids = torch.tensor([tiny_ids()])
    calls = []
    handles = [
        block.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        for block in target.blocks
    ]
    with torch.inference_mode():
        reference = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    for handle in handles:
        handle.remove()

    states, logits = target.run(tiny_ids())

    assert len(states) == layers == target.num_layers
    assert all(state.shape == (ids.shape[1], target.hidden_size) for state in states)
    torch.testing.assert_close(logits, reference.logits[0], rtol=0, atol=0)
    with torch.inference_mode():
        by_hand = calls[0][0][0]
        torch.testing.assert_close(by_hand, reference.hidden_states[0], rtol=0, atol=0)
        for j, (block, (args, kwargs)) in enumerate(zip(target.blocks, calls, strict=True)):
            out = block(by_hand, *args[1:], **kwargs)
            by_hand = out[0] if isinstance(out, tuple) else out
            torch.testing.assert_close(states[j], by_hand[0], rtol=1e-6, atol=1e-6, msg=f"block {j}")
        for j in range(layers - 1):
            torch.testing.assert_close(states[j], reference.hidden_states[j + 1][0], rtol=0, atol=0)
        torch.testing.assert_close(final_norm(target.model)(states[-1]), reference.hidden_states[-1][0])
    assert not torch.allclose(states[-1], reference.hidden_states[-1][0], atol=1e-3)  # the trap: entry N is normed


def test_llama_against_plain_tensor_algebra():
    """The published Llama block, written out: no module of the model is called."""
    target = tiny_target("llama", layers=3)
    weights = {name: value.double() for name, value in target.model.state_dict().items()}
    ids, heads, groups, width = torch.tensor(tiny_ids(11)), 4, 2, 8
    eps = target.model.config.rms_norm_eps

    def norm(x, w):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w

    angle = torch.arange(11, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    cos, sin = (f(torch.cat([angle, angle], -1)) for f in (torch.cos, torch.sin))

    def turn(x):
        return x * cos + torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1) * sin

    h = weights["model.embed_tokens.weight"][ids]
    expected = []
    for j in range(3):
        w = {name.split(".", 3)[3]: v for name, v in weights.items() if name.startswith(f"model.layers.{j}.")}
        x = norm(h, w["input_layernorm.weight"])
        q, k, v = (
            (x @ w[f"self_attn.{p}_proj.weight"].T).view(11, n, width).transpose(0, 1)
            for p, n in (("q", heads), ("k", groups), ("v", groups))
        )
        k, v = (t.repeat_interleave(heads // groups, 0) for t in (turn(k), v))
        scores = (turn(q) @ k.mT / width**0.5).masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
        h = h + (scores.softmax(-1) @ v).transpose(0, 1).reshape(11, -1) @ w["self_attn.o_proj.weight"].T
        x = norm(h, w["post_attention_layernorm.weight"])
        gate = nn.functional.silu(x @ w["mlp.gate_proj.weight"].T)
        h = h + (gate * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        expected.append(h)
    states, logits = target.run(ids)
    for state, by_hand in zip(states, expected, strict=True):
        torch.testing.assert_close(state.double(), by_hand, rtol=1e-4, atol=1e-4)
    head = norm(h, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    torch.testing.assert_close(logits.double(), head, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_consumed_in_the_hook_as_when_kept(architecture):
    """Clones taken inside the hooks equal the views kept: no architecture writes into a block's output later."""
    target = tiny_target(architecture)
    seen = []
    states, logits = target.run(tiny_ids())
    none, same = target.run(tiny_ids(), on_block=lambda j, state: seen.append((j, state.clone())))
    assert none is None and torch.equal(logits, same)
    assert [j for j, _ in seen] == list(range(target.num_layers))
    assert all(torch.equal(state, kept) for (_, state), kept in zip(seen, states, strict=True))


def test_on_block_keeps_no_reference():
    import weakref

    target, refs, alive = tiny_target(layers=6), [], []

    def watch(j, state):
        alive.append(sum(ref() is not None for ref in refs))
        refs.append(weakref.ref(state))

    target.run(tiny_ids(), on_block=watch)
    assert max(alive) <= 1 and all(ref() is None for ref in refs)


def test_states_are_views_without_gradients():
    target = tiny_target()
    outputs = []
    handle = target.blocks[1].register_forward_hook(lambda _m, _i, out: outputs.append(out))
    states, _ = target.run(tiny_ids())
    handle.remove()
    out = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    assert states[1].data_ptr() == out.data_ptr() and states[1].is_inference()
    assert not any(p.requires_grad for p in target.model.parameters()) and not target.model.training


def test_hooks_are_gone_after_success_and_after_a_failure():
    target = tiny_target()

    def broken(j, _state):
        if j == 2:
            raise KeyError("in the middle")

    with pytest.raises(KeyError, match="in the middle"):
        target.run(tiny_ids(), on_block=broken)
    assert not any(block._forward_hooks for block in target.blocks)
    target.run(tiny_ids())
    assert not any(block._forward_hooks for block in target.blocks)


def test_lists_and_tensors_of_ids_alike():
    target = tiny_target()
    states, logits = target.run(tiny_ids())
    again, same = target.run(torch.tensor(tiny_ids(), dtype=torch.int32))
    assert torch.equal(logits, same) and all(map(torch.equal, states, again))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty prompt"),
        ([3, 64], "token id 64 outside 0..63 of tiny-llama"),
        ([-1, 3], "token id -1 outside 0..63"),
        ([0] * 129, "a prompt of 129 tokens, but tiny-llama takes at most 128"),
        (torch.zeros(1, 4, dtype=torch.long), r"shape \(1, 4\)"),
        ([0.5], "float32"),
    ],
)
def test_bad_prompts(ids, message):
    with pytest.raises(ElsiError, match=message):
        tiny_target().run(ids)


def test_blocks_that_skip_or_change_shape_are_refused():
    target = tiny_target()
    target.hidden_size = 31
    with pytest.raises(ElsiError, match=r"block 0 of tiny-llama gives \(1, 20, 32\)"):
        target.run(tiny_ids())
    target = tiny_target()
    target.blocks = nn.ModuleList([target.blocks[1], target.blocks[0], *target.blocks[2:]])
    with pytest.raises(ElsiError, match="block 1 of tiny-llama ran where block 0 was due"):
        target.run(tiny_ids())
    target = tiny_target()
    target.num_layers = 5
    with pytest.raises(ElsiError, match="only 4 of the 5 blocks"):
        target.run(tiny_ids())


# Which models


def test_blocks_are_not_experts():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(3))
    assert find_blocks(model, 3) is model.layers
    model.others = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    with pytest.raises(ElsiError, match="more than one list of 3"):
        find_blocks(model, 3)
    with pytest.raises(ElsiError, match=r"the model \(Module\) has no list of 5 decoder blocks"):
        find_blocks(model, 5)


def test_model_without_the_expected_blocks():
    model = tiny_model()
    model.config.num_hidden_layers = 7
    with pytest.raises(ElsiError, match=r"\(LlamaForCausalLM\) has no list of 7 decoder blocks"):
        Target(model)


def test_encoder_decoder(tmp_path):
    config = tf.T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=2)
    tf.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ElsiError, match="is an encoder-decoder model .t5."):
        load_target(tmp_path)


def bert(cls):
    config = tf.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
    )
    return cls(config).eval()


def test_encoder(tmp_path):
    bert(tf.BertForMaskedLM).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ElsiError, match=r"\(bert\) is not causal"):
        load_target(tmp_path, dtype="float32")
    with pytest.raises(ElsiError, match="is not causal"):
        Target(bert(tf.BertLMHeadModel))


def test_model_of_no_causal_class(tmp_path):
    config = tf.ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8)
    tf.ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(ElsiError, match="cannot be loaded as a causal language model"):
        load_target(tmp_path)


def test_weights_without_a_head_are_not_drawn_at_random(tmp_path):
    tiny_folder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ElsiError, match="lack or misshape 1 tensors of LlamaForCausalLM, first lm_head.weight"):
        load_target(tmp_path)


def test_truncated_weights(tmp_path):
    tiny_folder(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ElsiError, match="cannot be loaded") as caught:
        load_target(tmp_path)
    assert "\n" not in str(caught.value)


def test_vocabulary_mismatch():
    with pytest.raises(ElsiError, match="ids up to 79, its embedding 64 rows"):
        Target(tiny_model(), tiny_tokenizer(80))


def test_added_token_beyond_the_embedding():
    """Gemma 3's text models ship one for images: harmless unless template or special roles can produce it."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<image>"])
    target = Target(tiny_model(), tokenizer)
    with pytest.raises(ElsiError, match="token id 64 outside 0..63"):
        target.run(tokenizer("a<image>")["input_ids"])
    tokenizer.chat_template = TEMPLATE + "<image>"
    with pytest.raises(ElsiError, match="ids up to 64, its embedding 64 rows"):
        Target(tiny_model(), tokenizer)


# Loading


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ELSI_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ELSI_ASSETS", raising=False)
    return tmp_path / "cache"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_folder(tmp_path, dtype):
    target = load_target(tiny_folder(tmp_path / "some model", "qwen3"), dtype=dtype, device="cpu")
    assert str(target.dtype) == f"torch.{dtype}" and {p.dtype for p in target.model.parameters()} == {target.dtype}
    states, logits = target.run(tiny_ids())
    assert {state.dtype for state in states} == {target.dtype} and logits.shape == (20, 64)
    about = target.describe()
    assert re.fullmatch("[0-9a-f]{64}", about.pop("revision"))
    assert about == {
        "name": "some-model",
        "source": "some model",
        "architecture": "Qwen3ForCausalLM",
        "num_layers": 4,
        "hidden_size": 32,
        "vocab_size": 64,
        "dtype": dtype,
        "parameters": tiny_model("qwen3").num_parameters(),
        "transformers": tf.__version__,
    }


def test_folder_revision_follows_the_weights(tmp_path):
    one, same, other = (tiny_folder(tmp_path / n, seed=seed) for n, seed in (("one", 0), ("same", 0), ("other", 1)))
    revisions = [loading.find(str(path)).revision for path in (one, same, other)]
    assert revisions[0] == revisions[1] != revisions[2]


def test_hub_snapshot_folder_gives_its_commit(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert loading.find(str(tiny_folder(tmp_path / "snapshots" / commit))).revision == commit


def test_hub_id(tmp_path, monkeypatch):
    """The hub is asked for the id and revision; code files only when the user trusts them."""
    asked = []
    folder = tiny_folder(tmp_path / "snapshots" / ("ab" * 20))
    monkeypatch.setattr(assets, "fetch_hub", lambda repo, *_: asked.append(repo) or folder)
    target = load_target("some/Model-1", dtype="float32", revision="main")
    assert (target.name, target.source, target.revision) == ("Model-1", "some/Model-1", "ab" * 20)
    loading.find("some/Model-1", trust_remote_code=True)
    assert [repo.repo for repo in asked] == ["some/Model-1"] * 2 and asked[0].revision == "main"
    assert "*.py" not in asked[0].patterns and "*.py" in asked[1].patterns


def test_code_of_a_folder_is_not_run(tmp_path):
    tiny_folder(tmp_path)
    config = (tmp_path / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "own"')
    config = config.replace("{", '{"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"},', 1)
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ElsiError, match="comes with code of its own, which is not run: .*trust_remote_code=True"):
        load_target(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no such file or folder: ./nowhere"),
        ("models/deep/nowhere", "no such file or folder"),
        ("nowhere.gguf", "no such file or folder: nowhere.gguf"),
        ("smollm2-135m-instrct", "did you mean smollm2-135m-instruct"),
        ("unheard-of", "or name a hub id"),
        ("sharegpt", "sharegpt is data, not a target"),
    ],
)
def test_unknown_names(name, message, cache, monkeypatch):
    monkeypatch.chdir(cache.parent)
    with pytest.raises(ElsiError, match=message):
        load_target(name)


def test_folders_and_files_that_are_no_model(tmp_path):
    with pytest.raises(ElsiError, match="config.json and"):
        load_target(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ElsiError, match="model.bin is no model"):
        load_target(tmp_path / "model.bin")
    with pytest.raises(ElsiError, match="revision 'v1' given for the local"):
        load_target(tmp_path, revision="v1")
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ElsiError, match="name one of its .gguf files"):
        load_target(tmp_path)


def test_dtype_and_device():
    cpu = torch.device("cpu")
    assert loading.pick_dtype("auto", cpu) in (torch.float32, torch.bfloat16)
    with pytest.raises(ElsiError, match="dtype 'int8': use auto, float32, bfloat16, float16"):
        loading.pick_dtype("int8", cpu)
    with pytest.raises(ElsiError, match="device 'nothing' cannot be used"):
        loading.pick_device("nothing")


@pytest.mark.parametrize(
    ("flags", "expected"), [({"amx_bf16": True}, "bfloat16"), ({"avx512_bf16": True}, "bfloat16"), ({}, "float32")]
)
def test_auto_dtype_follows_the_processor(monkeypatch, flags, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
    assert loading.pick_dtype("auto", torch.device("cpu")) == getattr(torch, expected)


# GGUF


def test_gguf_becomes_dense_and_is_converted_once(tmp_path, cache, monkeypatch, capfd):
    path = tiny_gguf(tmp_path / "tiny Q8.gguf")
    target = load_target(path, dtype="bfloat16")
    assert {type(m) for m in target.model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
    assert {p.dtype for p in target.model.parameters()} == {torch.bfloat16}
    assert (target.name, target.source) == ("tiny-Q8", "tiny Q8.gguf")
    assert target.revision == assets.sha256_file(path) and target.num_layers == 2
    assert capfd.readouterr().err == ""

    monkeypatch.setattr(loading, "_convert", lambda *_: pytest.fail("converted twice"))
    again = load_target(path, dtype="bfloat16")
    assert torch.equal(target.run(tiny_ids())[1], again.run(tiny_ids())[1])
    assert target.tokenizer("ab <s>\n")["input_ids"] == again.tokenizer("ab <s>\n")["input_ids"]
    assert [p.name for p in (cache / "converted").iterdir()] == [f"{target.revision[:16]}-bfloat16-{tf.__version__}"]


def test_gguf_values(tmp_path, cache):
    """The dequantised matrices are those of gguf's own reader; q and k also undo llama.cpp's order of rows."""
    from gguf import GGUFReader, dequantize

    path = tiny_gguf(tmp_path / "tiny.gguf")
    weights = load_target(path, dtype="float32").model.state_dict()
    stored = {t.name: torch.tensor(dequantize(t.data, t.tensor_type)) for t in GGUFReader(path).tensors}
    for theirs, ours in {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
        "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    }.items():
        torch.testing.assert_close(weights[f"{ours}.weight"], stored[f"{theirs}.weight"], rtol=0, atol=0)
    q = stored["blk.0.attn_q.weight"].view(4, 4, 2, 32).transpose(1, 2).reshape(32, 32)
    torch.testing.assert_close(weights["model.layers.0.self_attn.q_proj.weight"], q, rtol=0, atol=0)


def test_folder_of_one_gguf(tmp_path, cache):
    (tmp_path / "m").mkdir()
    tiny_gguf(tmp_path / "m" / "tiny.gguf")
    assert load_target(tmp_path / "m").source == "tiny.gguf"


@pytest.mark.parametrize("sign", [{"rope_freqs": True}, {"rope_type": "yarn"}])
def test_gguf_that_would_lose_its_rope_scaling(tmp_path, cache, sign):
    path = tiny_gguf(tmp_path / "tiny.gguf", **sign)
    with pytest.raises(ElsiError, match="tiny.gguf scales its RoPE .*use the model's safetensors"):
        load_target(path)
    assert not (cache / "converted").exists()


def test_truncated_gguf(tmp_path, cache):
    path = tiny_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ElsiError, match="tiny.gguf cannot be loaded"):
        load_target(path)
    assert not (cache / "converted").exists()


def test_damaged_copy_says_what_to_delete(tmp_path, cache):
    path = tiny_gguf(tmp_path / "tiny.gguf")
    load_target(path, dtype="float32")
    (folder,) = (cache / "converted").iterdir()
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(AssetError, match=f"delete {re.escape(str(folder))}"):
        load_target(path, dtype="float32")
    shutil.rmtree(folder)
    load_target(path, dtype="float32")


def test_conversion_that_cannot_be_kept(tmp_path, cache, monkeypatch):
    path = tiny_gguf(tmp_path / "tiny.gguf")

    def full(*_args, **_kwargs):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(tf.PreTrainedModel, "save_pretrained", full)
    with pytest.raises(AssetError, match="No space left on device.*set ELSI_CACHE"):
        load_target(path)
    assert not list((cache / "converted").iterdir())


# Names of layers


layer_sets = st.integers(1, 80).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1, max_size=min(n, 6)))
)


@given(layer_sets, st.sampled_from(sorted(CONVENTIONS)))
def test_ids_come_back(case, convention):
    num_layers, layers = case
    named = engine_ids(layers, num_layers)[convention]
    if isinstance(named, str):
        with pytest.raises(ElsiError, match=f"^{convention} "):
            layer_ids(layers, num_layers, convention)
    else:
        assert named == layer_ids(layers, num_layers, convention) == tuple(sorted(named))
        assert from_layer_ids(named, num_layers, convention) == tuple(sorted(layers))


@given(st.integers(8, 200))
def test_the_rule_of_eagle_3_in_every_tongue(n):
    """FIELD section 1: EAGLE's and vLLM's [2, N//2, N-3] are SGLang's [1, N//2-1, N-4] are our {1, N//2-1, N-4}."""
    ours = (1, n // 2 - 1, n - 4)
    for convention in ("eagle", "vllm", "speculators", "transformers"):
        assert from_layer_ids([2, n // 2, n - 3], n, convention) == ours
        assert layer_ids(ours, n, convention) == (2, n // 2, n - 3)
    for convention in ("sglang", "specforge", "dflash", "elsi"):
        assert from_layer_ids([1, n // 2 - 1, n - 4], n, convention) == ours
        assert layer_ids(ours, n, convention) == (1, n // 2 - 1, n - 4)


def test_transformers_ids_index_its_hidden_states():
    target = tiny_target(layers=5)
    states, _ = target.run(tiny_ids())
    with torch.inference_mode():
        theirs = target.model(torch.tensor([tiny_ids()]), output_hidden_states=True).hidden_states
    layers = (0, 2, 3)
    for j, i in zip(layers, layer_ids(layers, 5, "transformers"), strict=True):
        assert torch.equal(states[j], theirs[i][0])


def test_the_last_block():
    named = engine_ids([35, 5, 23], 36)
    assert named["elsi"] == (5, 23, 35) and named["vllm"] == named["speculators"] == (6, 24, 36)
    assert named["transformers"] == (
        "transformers cannot name layer 35 of 36: entry N of hidden_states is taken after the final norm: "
        "hook the last block instead"
    )
    assert "captures the input of block idx" in named["eagle"]
    assert all("cannot name layer 35" in named[c] for c in ("sglang", "specforge", "dflash"))
    for convention, last in (("transformers", 36), ("eagle", 36), ("sglang", 35)):
        with pytest.raises(ElsiError, match=f"{convention} ids .*outside"):
            from_layer_ids([5, last], 36, convention)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_ids([1], 4, "megatron"), "no layer convention 'megatron': use one of elsi, transformers"),
        (lambda: layer_ids([2, 40], 30, "vllm"), r"\(2, 40\) outside 0..29"),
        (lambda: layer_ids([2, 2], 30, "vllm"), "names a layer twice"),
        (lambda: layer_ids([1, 2], 30, "specforge"), "specforge takes exactly 3 layers"),
        (lambda: from_layer_ids([1, 2, 3, 4], 30, "specforge"), "specforge takes exactly 3 layers"),
        (lambda: from_layer_ids([0], 30, "vllm"), r"vllm ids \(0,\) outside 1..30"),
        (lambda: from_layer_ids([31], 30, "vllm"), r"outside 1..30"),
        (lambda: from_layer_ids([2, 2, 1], 4, "eagle"), "names a layer twice"),  # the rule on a model of 4 layers
        (lambda: from_layer_ids([], 4, "eagle"), "empty layer set"),
        (lambda: engine_ids([4], 4), r"\(4,\) outside 0..3"),
    ],
)
def test_bad_ids(call, message):
    with pytest.raises(ElsiError, match=message):
        call()


def test_every_convention_says_where_it_was_read():
    assert list(CONVENTIONS) == ["elsi", "transformers", "eagle", "vllm", "speculators", "sglang", "specforge", "dflash"]
    assert all(convention.note for convention in CONVENTIONS.values())


# The embedded targets


@pytest.mark.real
def test_smollm2_for_real():
    target = load_target("smollm2-135m", dtype="float32")
    assert target.describe() == {
        "name": "smollm2-135m-instruct",
        "source": "smollm2-135m-instruct",
        "revision": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "architecture": "LlamaForCausalLM",
        "num_layers": 30,
        "hidden_size": 576,
        "vocab_size": 49152,
        "dtype": "float32",
        "parameters": 134_515_008,
        "transformers": tf.__version__,
    }
    ids = target.tokenizer("The capital of France is Paris. The capital of Germany is")["input_ids"]
    states, logits = target.run(ids)
    assert target.tokenizer.decode([int(logits[-1].argmax())]) == " Berlin"
    norms = torch.stack([state.norm(dim=1) for state in states])
    assert (norms[11:28, 0] > 20_000).all() and (norms[:, 1:].median(1).values < 1_000).all()  # FIELD 4: the sink
    assert all(bool(state.isfinite().all()) for state in states)


@pytest.mark.real
def test_qwen_coder_for_real():
    target = load_target("qwen2.5-coder-0.5b", dtype="bfloat16")
    about = target.describe()
    assert about["revision"] == "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (24, 896, 151_936)
    assert target.model.lm_head.weight.data_ptr() != target.model.get_input_embeddings().weight.data_ptr()
    states, logits = target.run(target.tokenizer("def add(a, b):\n    return a +")["input_ids"])
    assert target.tokenizer.decode([int(logits[-1].argmax())]) == " b"
    assert len(states) == 24 and {state.dtype for state in states} == {torch.bfloat16}
    assert all(bool(state.isfinite().all()) for state in states)

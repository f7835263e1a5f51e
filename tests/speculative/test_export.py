"""Exports: names, shapes, dtypes and ids as the loaders of other projects state them, refusals, the model card."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import tiny_target
from transformers import AutoConfig, LlamaConfig

from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.speculative.checkpoint import read_draft, save_draft
from elsi_lib.speculative.draft import Draft
from elsi_lib.speculative.export import DTYPES, LOADERS, export_config, export_draft, loader_ids
from elsi_lib.speculative.vocabulary import DraftVocabulary

H, V, D, N, KEY = 32, 64, 20, 8, "eagle_aux_hidden_state_layer_ids"
IDS = torch.tensor([0, 2, 3, 5, 8, 9, 12, 13, 20, 21, 30, 33, 40, 41, 42, 50, 55, 60, 61, 63])


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", layers=N)


def draft(target, layers=(1, 3, 5), **changes):
    return Draft.for_target(target, layers, DraftVocabulary(IDS, V), **changes)


def saved(target, folder, layers=(1, 3, 5), passport=None, **changes):
    return save_draft(draft(target, layers, **changes), folder / "draft", passport)


def read(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


# Tensors, as EAGLE's release names them (FIELD, section 2)


def release(m, heads=4, pairs=2, head=8, mlp=64):
    return {
        "fc.weight": (H, m * H),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (heads * head, 2 * H),
        "midlayer.self_attn.k_proj.weight": (pairs * head, 2 * H),
        "midlayer.self_attn.v_proj.weight": (pairs * head, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, heads * head),
        "midlayer.mlp.gate_proj.weight": (mlp, H),
        "midlayer.mlp.up_proj.weight": (mlp, H),
        "midlayer.mlp.down_proj.weight": (H, mlp),
        "norm.weight": (H,),
        "lm_head.weight": (D, H),
        "d2t": (D,),
        "t2d": (V,),
    }


@pytest.mark.parametrize("layers", [(2,), (0, 6), (1, 3, 5), (0, 2, 4, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_those_of_the_release(target, tmp_path, layers, dtype):
    made = export_draft(saved(target, tmp_path, layers), tmp_path / "new" / "out", dtype=dtype)
    assert sorted(path.name for path in made.folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config, tensors = read(made.folder)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == release(len(layers))
    assert config["torch_dtype"] == dtype == made.dtype
    kind = getattr(torch, dtype)
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {kind}
    for name, own in read_draft(tmp_path / "draft")[2].items():
        assert torch.equal(tensors[name], own.to(kind) if own.is_floating_point() else own)
    with safe_open(made.folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # what transformers asks of a file


def test_the_vocabulary_is_offsets_and_a_mask(target, tmp_path):
    _, tensors = read(export_draft(saved(target, tmp_path), tmp_path / "out").folder)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (tensors["d2t"] + torch.arange(D)).tolist() == IDS.tolist() and tensors["d2t"][:4].tolist() == [0, 1, 1, 2]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == IDS.tolist()


def test_norms_have_the_names_of_the_engines(target, tmp_path):
    for norm, names, key in [
        ("each", {f"fc_norm.{i}.weight": (H,) for i in range(3)}, "fc_norm"),
        ("concat", {"input_norm.weight": (3 * H,)}, "norm_before_fc"),
    ]:
        made = export_draft(saved(target, tmp_path / norm, norm_before_fc=norm), tmp_path / norm / "out")
        config, tensors = read(made.folder)
        assert {name: tuple(t.shape) for name, t in tensors.items()} == release(3) | names
        assert config[key] is True and len({"fc_norm", "norm_before_fc"} & config.keys()) == 1
    assert not {"fc_norm", "norm_before_fc", "norm_output"} & export_config(draft(target).config).keys()


# Configuration


def test_configuration_is_a_llama_with_the_keys_of_every_engine(target, tmp_path):
    made = export_draft(saved(target, tmp_path, rope_theta=500.0), tmp_path / "out")
    config, _ = read(made.folder)
    assert config | {"elsi": None} == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "draft_vocab_size": D,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
        "elsi": None,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": H,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_aux_hidden_states": 3,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": V,
    }
    loaded = AutoConfig.from_pretrained(made.folder)
    assert isinstance(loaded, LlamaConfig) and loaded.rope_parameters == {"rope_theta": 500.0, "rope_type": "default"}
    assert loaded.dtype == torch.bfloat16 and loaded.head_dim == 8 and not loaded.tie_word_embeddings
    assert loaded.eagle_config == config["eagle_config"] and loaded.eagle_aux_hidden_state_layer_ids == [2, 4, 6]
    assert (loaded.draft_vocab_size, loaded.num_aux_hidden_states, loaded.num_hidden_layers) == (D, 3, 1)


@pytest.mark.parametrize(
    ("layers", "norm", "can"),
    [  # written out by hand from FIELD's table and the loaders' sources; ids 2, N // 2, N - 3 are blocks 1, 3, 4 of 8
        ((1, 3, 5), "none", {"sglang": (1, 3, 5), "vllm": (2, 4, 6), "specforge": (1, 3, 5), "speculators": (2, 4, 6)}),
        (
            (1, 3, 4),
            "none",
            {"sglang": (1, 3, 4), "vllm": (2, 4, 5), "specforge": (1, 3, 4), "speculators": (2, 4, 5), "eagle": (2, 4, 5)},
        ),
        ((1, 3, 4), "each", {"sglang": (1, 3, 4), "vllm": (2, 4, 5), "specforge": (1, 3, 4), "speculators": (2, 4, 5)}),
        ((1, 3, 4), "concat", {"sglang": (1, 3, 4), "vllm": (2, 4, 5), "speculators": (2, 4, 5)}),
        ((0, 1, 7), "none", {"vllm": (1, 2, 8), "speculators": (1, 2, 8)}),
        ((0, 6), "none", {"sglang": (0, 6), "vllm": (1, 7), "speculators": (1, 7)}),
        ((4,), "none", {"vllm": (5,), "speculators": (5,)}),
        ((0, 2, 4, 6), "none", {"sglang": (0, 2, 4, 6), "vllm": (1, 3, 5, 7), "speculators": (1, 3, 5, 7)}),
    ],
)
def test_who_can_take_a_draft(target, tmp_path, layers, norm, can):
    config = draft(target, layers, norm_before_fc=norm).config
    found = loader_ids(config)
    assert list(found) == list(LOADERS)
    assert {name: ids for name, ids in found.items() if not isinstance(ids, str)} == can
    for name in found.keys() - can:
        assert found[name].startswith(f"{name} ") and "\n" not in found[name]
    content = export_config(config)
    assert content.get(KEY) == (list(can["vllm"]) if "vllm" in can else None)
    assert content["eagle_config"].get(KEY) == (list(can["sglang"]) if "sglang" in can else None)
    assert content["num_aux_hidden_states"] == len(layers)
    made = export_draft(saved(target, tmp_path, layers, norm_before_fc=norm), tmp_path / "out", engines=tuple(can))
    assert made.ids == can and made.reasons.keys() == found.keys() - can and made.layers == layers


def test_eagle_wants_heads_that_divide_the_hidden_size(target):
    assert "heads have 32 / 4 features, not 16" in loader_ids(draft(target, (1, 3, 4), head_dim=16).config)["eagle"]


# Refusals


@pytest.mark.parametrize(
    ("layers", "norm", "engine", "message"),
    [
        ((0, 6), "none", "specforge", "specforge takes exactly 3 layers, not the 2 of (0, 6); leave out --engine specforge"),
        ((1, 3, 7), "none", "sglang", "sglang cannot name layer 7 of 8: its Llama and Qwen loops"),
        ((2,), "none", "sglang", "sglang cannot take this draft: it applies fc only where"),
        ((1, 3, 5), "concat", "specforge", "specforge cannot take this draft: it has no norm over the concatenation before fc"),
        ((1, 3, 5), "none", "eagle", "eagle cannot take this draft: its code captures ids 2, 4, 5 of a target of 8 layers"),
        ((1, 3, 4), "each", "eagle", "eagle cannot take this draft: it has no norm before fc"),
        ((1, 3, 5), "none", "dflash", "no engine 'dflash' to export for: one of sglang, vllm, specforge, speculators, eagle"),
    ],
)
def test_engines_that_cannot_are_refused(target, tmp_path, layers, norm, engine, message):
    folder = saved(target, tmp_path, layers, norm_before_fc=norm)
    with pytest.raises(ElsiError, match=re.escape(message)) as caught:
        export_draft(folder, tmp_path / "out", engines=("vllm", engine))
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_only_an_earlier_export_is_written_over(target, tmp_path):
    folder, out = saved(target, tmp_path), tmp_path / "out"
    out.mkdir()
    export_draft(folder, out)
    (out / "notes.txt").write_text("mine")
    first = (out / "config.json").read_text()
    other = saved(target, tmp_path / "other", (0, 2, 6))
    export_draft(other, out)
    assert (out / "config.json").read_text() != first and read(out)[0]["elsi"]["layers"] == [0, 2, 6]
    assert (out / "notes.txt").read_text() == "mine"
    refused = {"draft": folder, "model": tmp_path / "model", "text": tmp_path / "text", "damaged": tmp_path / "damaged"}
    for name, content in [("model", '{"model_type": "llama"}'), ("damaged", "{"), ("text", None)]:
        refused[name].mkdir()
        (refused[name] / ("a.txt" if content is None else "config.json")).write_text(content or "x")
    for place in refused.values():
        before = {path.name: path.read_bytes() for path in place.iterdir()}
        with pytest.raises(ElsiError, match="holds something else than an export"):
            export_draft(other, place)
        assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    with pytest.raises(ElsiError, match="is a file: name a new folder"):
        export_draft(folder, tmp_path / "text" / "a.txt")


def test_other_bad_input(target, tmp_path, monkeypatch):
    folder = saved(target, tmp_path)
    with pytest.raises(ElsiError, match="dtype 'int8' of an export: one of bfloat16"):
        export_draft(folder, tmp_path / "out", dtype="int8")
    with pytest.raises(ElsiError, match="no draft at"):
        export_draft(tmp_path / "none", tmp_path / "out")
    made = draft(target)
    with torch.no_grad():
        made.fc.weight[3, 7] = 1e5
    large = save_draft(made, tmp_path / "large")
    with pytest.raises(ElsiError, match=r"fc.weight of the draft reaches 1e\+05, beyond float16"):
        export_draft(large, tmp_path / "out", dtype="float16")
    assert export_draft(large, tmp_path / "fits", dtype="bfloat16")
    with torch.no_grad():
        made.fc.weight[0, 0] = torch.nan
    with pytest.raises(ElsiError, match="fc.weight of the draft holds values that are not finite"):
        export_draft(save_draft(made, tmp_path / "nan"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(AssetError, match="cannot be written"):
        export_draft(folder, tmp_path / "file" / "out")


def test_an_export_is_no_draft(target, tmp_path):
    made = export_draft(saved(target, tmp_path), tmp_path / "out")
    with pytest.raises(ElsiError, match="is of format 'elsi-export-1', expected 'elsi-draft-1'"):
        read_draft(made.folder)


# Model card


def table_of(card, heading):
    section = card.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[2:]}


def test_card(target, tmp_path):
    passport = {
        "training": {"steps": 700, "losses": [3.0] * 30 + [1.25], "data": "/home/somebody/texts/a.jsonl", "recipe": {"lr": 1e-3}},
        "note": "<script>alert(1)</script> | `x`\n# heading",
        "tau": [{"data": "own prompts", "nodes": 60, "tau": 1.734}, {"data": "own prompts", "nodes": 30, "tau": 1.68}],
    }
    made = export_draft(saved(target, tmp_path, (0, 1, 7), passport), tmp_path / "out")
    card = (made.folder / "README.md").read_text()
    assert card.startswith("---\ntags:\n- eagle3\n") and "base_model" not in card
    assert table_of(card, "Target")["name"] == ["tiny-llama"] and table_of(card, "Target")["num layers"] == ["8"]
    layers = table_of(card, "Layers")
    assert layers["this project"][0] == "0, 1, 7" and layers["vLLM"] == ["1, 2, 8", f"`{KEY}`"]
    assert layers["speculators"][0] == "1, 2, 8"
    assert layers["SGLang"][0] == "none" and layers["SGLang"][1].startswith("cannot name layer 7 of 8")
    assert "Do not load this draft in SGLang" in card and "sglang.launch_server" not in card and "SpecForge reads" not in card
    speculative = json.loads(re.search(r"--speculative-config '(.*)'", card)[1])
    assert speculative["method"] == "eagle3" and "vllm serve TARGET" in card
    convert = json.loads(re.search(r"--algorithm-kwargs '(.*)'", card)[1])
    assert convert == {KEY: [1, 2, 8]}
    compile(re.search(r"```python\n(.*?)```", card, re.S)[1], "card", "exec")
    facts = table_of(card, "Training")
    assert facts["training, steps"] == ["700"] and facts["training, recipe, lr"] == ["0.001"]
    assert facts["training, losses"] == ["3, 3, 3, 3, 3, 3, 3, 3, ... (31 in all, the last 1.25)"]
    assert facts["training, data"] == ["a.jsonl"] and "somebody" not in card
    assert "<script>" not in card and "\n# heading" not in card
    assert re.search(r"^\| own prompts \| 60 \| 1.734 \|$", card, re.M) and "tau, " not in card
    assert "Not tested here" in card and "not known here" in card


def test_card_of_other_drafts(target, tmp_path):
    made = export_draft(saved(target, tmp_path / "a", (0, 6), norm_before_fc="each"), tmp_path / "a" / "out")
    card = (made.folder / "README.md").read_text()
    assert "sglang.launch_server --model-path TARGET" in card and "--speculative-num-draft-tokens 60" in card
    assert "older ones expect three layers and no norm" in card and "Do not convert it with speculators 0.9.0" in card
    assert "fc_norm=True" in card and f"{KEY}=[1, 7]" in card and "None is recorded" in card
    known = {"target": {"name": "qwen3-4b-instruct", "source": "qwen3-4b-instruct", "revision": "c" * 40}, "tau": 2.5}
    made = export_draft(saved(target, tmp_path / "b", passport=known), tmp_path / "b" / "out")
    card = (made.folder / "README.md").read_text()
    assert card.startswith("---\nbase_model: Qwen/Qwen3-4B-Instruct-2507\n") and "TARGET" not in card
    assert "vllm serve Qwen/Qwen3-4B-Instruct-2507 " in card and "(Apache-2.0, as far as known here)" in card
    assert re.search(r"^\| tau \| 2.5 \|$", card, re.M) and "c" * 40 in card
    hub = {"target": {"name": "x", "source": "some-body/x.y"}}
    card = (export_draft(saved(target, tmp_path / "c", passport=hub), tmp_path / "c" / "out").folder / "README.md").read_text()
    assert "base_model: some-body/x.y\n" in card


def test_the_engines_are_tried_beside_the_locked_torch():
    root = Path(__file__).resolve().parents[2]
    tried = (root / "tests" / "engines" / "requirements.txt").read_text().splitlines()
    versions = dict(line.split("==") for line in tried if "==" in line)
    assert f"torch=={versions['torch']}" in (root / "requirements.lock").read_text().splitlines()
    assert f"speculators {versions['speculators']}:" in LOADERS["speculators"].read

"""Random tiny models and a tiny tokenizer. They have real architectures and no knowledge: for tests only."""

from pathlib import Path

import numpy as np
import torch
import transformers as tf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

VOCABULARY = 64
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,\n"
SPECIAL = ("<unk>", "<s>", "</s>", "<user>", "<assistant>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ARCHITECTURES = {  # name -> configuration class and what it needs beyond the sizes that all share
    "llama": (tf.LlamaConfig, _HEADS),
    "qwen2": (tf.Qwen2Config, _HEADS),
    "qwen3": (tf.Qwen3Config, _HEADS | {"head_dim": 8}),
    "gemma3": (tf.Gemma3TextConfig, _HEADS | {"head_dim": 8, "sliding_window": 4}),
    "mistral": (tf.MistralConfig, _HEADS | {"sliding_window": 4}),
    "phi3": (tf.Phi3Config, _HEADS | {"pad_token_id": 0}),
    "olmo2": (tf.Olmo2Config, _HEADS),
    "gemma2": (tf.Gemma2Config, _HEADS | {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 3.0}),
    "gpt2": (tf.GPT2Config, {"num_attention_heads": 4}),
    "gpt_neox": (tf.GPTNeoXConfig, {"num_attention_heads": 4}),
    "falcon": (tf.FalconConfig, {"num_attention_heads": 4}),
}


def tiny_config(architecture: str = "llama", layers: int = 4, hidden: int = 32, vocabulary: int = VOCABULARY, **more):
    cls, own = ARCHITECTURES[architecture]
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,  # states that differ from layer to layer
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if architecture not in ("gpt2", "falcon"):
        sizes["intermediate_size"] = 2 * hidden
    return cls(**(sizes | own | more))


def tiny_model(architecture: str = "llama", layers: int = 4, hidden: int = 32, seed: int = 0, **more):
    """A causal language model of the architecture with random float32 weights, the same for the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tf.AutoModelForCausalLM.from_config(tiny_config(architecture, layers, hidden, **more))
    return model.to(torch.float32).eval()


def tiny_tokenizer(vocabulary: int = VOCABULARY, template: str | None = TEMPLATE):
    """One token per character of CHARACTERS, special tokens first, filled up to ``vocabulary`` tokens."""
    names = [*SPECIAL, *CHARACTERS]
    names += [f"<filler{i}>" for i in range(vocabulary - len(names))]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.add_special_tokens(list(SPECIAL))
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_target(architecture: str = "llama", layers: int = 4, hidden: int = 32, seed: int = 0, **more):
    """The same as a Target, tokenizer included."""
    from elsi_lib.targets import Target

    name = f"tiny-{architecture}"
    return Target(tiny_model(architecture, layers, hidden, seed, **more), tiny_tokenizer(), name=name, source=name)


def tiny_folder(path: Path, architecture: str = "llama", **more) -> Path:
    """Model and tokenizer as a folder of safetensors."""
    tiny_model(architecture, **more).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def tiny_ids(length: int = 20, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def tiny_gguf(path: Path, layers: int = 2, hidden: int = 32, rope_freqs: bool = False, rope_type: str = "none") -> Path:
    """A GGUF file of the Llama architecture with Q8_0 matrices and a byte-level vocabulary."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer = GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // 4)
    writer.add_vocab_size(len(tokens))
    if rope_type != "none":
        writer.add_string("llama.rope.scaling.type", rope_type)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = random.normal(0.0, 0.2, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, 1 + values)
        else:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), hidden)
    add("output.weight", len(tokens), hidden)
    add("output_norm.weight", hidden)
    if rope_freqs:
        add("rope_freqs.weight", hidden // 8)
    for j in range(layers):
        for part, shape in {
            "attn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (hidden // 2, hidden),
            "attn_v": (hidden // 2, hidden),
            "attn_output": (hidden, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate": (2 * hidden, hidden),
            "ffn_up": (2 * hidden, hidden),
            "ffn_down": (hidden, 2 * hidden),
        }.items():
            add(f"blk.{j}.{part}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

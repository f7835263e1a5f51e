"""Sampling depends on contents and seed alone; tokens are what the target's own template gives, BOS once."""

import hashlib
import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from elsi_lib import prompts
from elsi_lib.errors import ElsiError
from elsi_lib.prompts import Conversation, Prompt, encode, find_source, load_prompts, sample_conversations

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }} \n{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
STRICT = (  # as of Gemma 1 or Mistral 0.1
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
)


def tokenizer(template=None, adds_bos=True):
    """One token per character; adds BOS to plain text, as Llama 3's does."""
    vocabulary = {chr(i): i for i in range(32, 127)} | {"\n": 10, "<unk>": 0, "<s>": 1, "<|start|>": 2, "<|end|>": 3}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    out = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", unk_token="<unk>", additional_special_tokens=["<|start|>", "<|end|>"]
    )
    out.chat_template = template
    return out


def chars(text):
    return [ord(c) for c in text]


def talk(*turns, id="c"):
    return Conversation(id, tuple({"role": role, "content": content} for role, content in turns))


def row(text, id="x"):
    return {"id": id, "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "ok"}]}


def write(path, rows, jsonl=False):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) if jsonl else json.dumps(rows))
    return path


# --- sampling


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=12),
    n=st.integers(1, 8),
    seed=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
    jsonl=st.booleans(),
)
def test_sample_depends_on_contents_and_seed_alone(tmp_path, texts, n, seed, order, jsonl):
    rows = [row(text, id=str(i)) for i, text in enumerate(texts)]
    again = rows + [dict(order.choice(rows), id=f"again {i}") for i in range(3)]
    order.shuffle(again)
    first, counts = sample_conversations(write(tmp_path / "a.json", rows), n, seed)
    other, again_counts = sample_conversations(write(tmp_path / "b.json", again, jsonl), n, seed)
    assert [c.messages for c in first] == [c.messages for c in other]
    assert again_counts["duplicates"] == counts["duplicates"] + 3
    assert counts["sampled"] == len(first) == min(n, counts["conversations"] - counts["duplicates"])


def test_sample_is_the_bottom_n_of_the_hash(tmp_path):
    rows = [row(f"text {i}") for i in range(50)]
    everything, _ = sample_conversations(write(tmp_path / "a.json", rows), 99, 7)
    assert len(everything) == 50
    hashes = [hashlib.sha256(f"7:{c.key}".encode()).hexdigest() for c in everything]
    assert hashes == sorted(hashes)
    for n in (1, 2, 49, 50):
        assert sample_conversations(tmp_path / "a.json", n, 7)[0] == everything[:n]
    assert sample_conversations(tmp_path / "a.json", 50, 8)[0] != everything


def test_smallest_id_of_duplicates_wins_in_any_order(tmp_path):
    rows = [row("same", id=id) for id in "bac"]
    for _ in range(4):
        random.Random(_).shuffle(rows)
        assert sample_conversations(write(tmp_path / "a.json", rows), 3, 0)[0][0].id == "a"


@pytest.mark.parametrize("n", [0, -1])
def test_sample_of_nothing_is_refused(tmp_path, n):
    with pytest.raises(ElsiError, match=f"a sample of {n} conversations"):
        sample_conversations(write(tmp_path / "a.json", [row("x")]), n, 0)


# --- tokens


def test_bos_is_not_doubled():
    tok = tokenizer(LLAMA3)
    rendered = tok.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert tok(rendered)["input_ids"][:2] == [1, 1]  # the trap: rendering and tokenising again
    ids = encode(tok, talk(("user", "hi"), ("assistant", "yo")), 100)
    assert ids == [1, 2, *chars("user \nhi"), 3, 2, *chars("assistant \nyo"), 3]


def test_plain_text_that_brings_its_own_bos():
    assert encode(tokenizer(), talk(("user", "<s>hi")), 100) == [1, *chars("hi")]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_base_model_without_a_template(adds_bos):
    ids = encode(tokenizer(adds_bos=adds_bos), talk(("system", "s"), ("user", "q"), ("assistant", "a")), 100)
    assert ids == [1] * adds_bos + chars("s\n\nq\n\na")


def test_a_tokenizer_that_returns_a_bare_list():
    class Old:
        chat_template, bos_token_id = "x", 1

        def apply_chat_template(self, messages, tokenize, tokenizer_kwargs):
            return [1, 5, 6]

    assert encode(Old(), talk(("user", "q")), 2) == [1, 5]


@pytest.mark.parametrize("template", [LLAMA3, None])
def test_truncation_keeps_the_start_and_is_counted(template):
    counts = prompts.Counts()
    whole = encode(tokenizer(template), talk(("user", "long text")), 100, counts)
    assert counts["truncated"] == 0
    assert encode(tokenizer(template), talk(("user", "long text")), len(whole), counts) == whole
    assert counts["truncated"] == 0
    assert encode(tokenizer(template), talk(("user", "long text")), 5, counts) == whole[:5]
    assert counts["truncated"] == 1


def test_system_text_goes_into_the_users_turn_where_the_template_refuses_it():
    counts = prompts.Counts()
    ids = encode(tokenizer(STRICT), talk(("system", "s"), ("user", "q"), ("assistant", "a")), 100, counts)
    assert ids == [1, 2, *chars("s\n\nq"), 3, 2, *chars("a"), 3]
    assert counts == {"system turn merged": 1}


def test_system_text_in_the_middle_and_at_the_end():
    middle = talk(("user", "q"), ("assistant", "a"), ("system", "s"), ("user", "r"))
    assert encode(tokenizer(STRICT), middle, 100) == [1, 2, *chars("q"), 3, 2, *chars("a"), 3, 2, *chars("s\n\nr"), 3]
    end = talk(("user", "q"), ("assistant", "a"), ("system", "s"))
    assert encode(tokenizer(STRICT), end, 100) == [1, 2, *chars("q"), 3, 2, *chars("a"), 3, 2, *chars("s"), 3]


def test_user_turns_in_a_row_are_merged_for_the_template():
    assert encode(tokenizer(STRICT), talk(("user", "q"), ("user", "r")), 100) == [1, 2, *chars("q\n\nr"), 3]


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ none + 1 }}", "{{ missing.field.deeper }}"])
def test_a_template_that_refuses_altogether(template):
    with pytest.raises(ElsiError, match="the chat template of .* refuses conversation c: ") as err:
        encode(tokenizer(template), talk(("system", "s"), ("user", "q")), 100)
    assert "\n" not in str(err.value)


def test_ids_do_not_depend_on_the_day():
    ids = encode(
        tokenizer("{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}{{ messages[0]['content'] }}"),
        talk(("user", "q")),
        100,
    )
    assert ids == chars("26 Jul 2024q")


@pytest.mark.parametrize("max_tokens", [0, -3])
def test_max_tokens_below_one(max_tokens):
    with pytest.raises(ElsiError, match=f"max_tokens = {max_tokens}"):
        encode(tokenizer(), talk(("user", "q")), max_tokens)


# --- prompts


def test_prompts_are_the_first_usable_of_the_sample(tmp_path):
    path = write(tmp_path / "a.json", [row("x" * i, id=str(i)) for i in range(1, 41)])
    found, counts = load_prompts(path, 10, 3, tokenizer(), max_tokens=30, min_tokens=20)
    order, _ = sample_conversations(path, 40, 3)
    # x...x, blank line, "ok" and BOS: i + 5 tokens
    usable = [c for c in order if int(c.id) + 5 >= 20][:10]
    assert [(p.id, p.key) for p in found] == [(c.id, c.key) for c in usable]
    assert [len(p.ids) for p in found] == [min(int(c.id) + 5, 30) for c in usable]
    assert all(isinstance(p, Prompt) and isinstance(p.ids, tuple) for p in found)
    assert (counts["asked"], counts["used"]) == (10, 10)
    assert counts["too short"] == order.index(usable[-1]) + 1 - 10
    assert counts["truncated"] == sum(int(c.id) > 25 for c in usable)


def test_fewer_than_asked_is_counted(tmp_path):
    path = write(tmp_path / "a.json", [row("one"), row("two")])
    found, counts = load_prompts(path, 5, 0, tokenizer(LLAMA3), 100)
    assert len(found) == 2
    assert (counts["asked"], counts["used"], counts["reserve exhausted"]) == (5, 2, 0)


def test_a_second_reserve_finds_rare_long_conversations(tmp_path):
    rows = [row(f"{i} " + "x" * 90 * (i % 200 == 0), id=str(i)) for i in range(1000)]
    path = write(tmp_path / "a.json", rows)
    found, counts = load_prompts(path, 5, 0, tokenizer(), 100, min_tokens=50)
    assert sorted(int(p.id) for p in found) == [0, 200, 400, 600, 800]
    assert counts["reserve exhausted"] == 0


def test_a_conversation_the_template_refuses_is_skipped(tmp_path):
    template = "{% if 'bad' in messages[0]['content'] %}{{ raise_exception('bad') }}{% endif %}{{ messages[0]['content'] }}"
    path = write(tmp_path / "a.json", [row("good"), row("bad")])
    found, counts = load_prompts(path, 2, 0, tokenizer(template), 100)
    assert [p.ids for p in found] == [tuple(chars("good"))]
    assert counts["template refused"] == 1


def test_none_usable_says_what_to_lower(tmp_path):
    path = write(tmp_path / "a.json", [row("hi")])
    with pytest.raises(ElsiError, match="min_tokens = 50 tokens, the longest 7, 0 refused.*lower min_tokens"):
        load_prompts(path, 1, 0, tokenizer(), 100, min_tokens=50)
    with pytest.raises(ElsiError, match="1 refused by the chat template .*: no"):
        load_prompts(path, 1, 0, tokenizer("{{ raise_exception('no') }}"), 100)


@pytest.mark.parametrize(
    ("n", "max_tokens", "min_tokens", "message"),
    [
        (0, 10, 1, "0 prompts of"),
        (1, 10, 11, "min_tokens = 11 has to lie between 1 and max_tokens = 10"),
        (1, 10, 0, "min_tokens = 0"),
    ],
)
def test_impossible_sizes(tmp_path, n, max_tokens, min_tokens, message):
    with pytest.raises(ElsiError, match=message):
        load_prompts(write(tmp_path / "a.json", [row("hi")]), n, 0, tokenizer(), max_tokens, min_tokens)


# --- naming the source


def test_source_by_path_and_by_asset(tmp_path, monkeypatch):
    assets = pytest.importorskip("elsi_lib.assets")
    path = write(tmp_path / "a.json", [row("hi")])
    assert find_source(str(path)) == path
    monkeypatch.setattr(assets, "fetch", lambda name, progress=True: {"sharegpt": path, "ultrachat": tmp_path}[name])
    assert find_source("ShareGPT") == path
    assert find_source("ultrachat") == path  # the one JSON file of a snapshot
    write(tmp_path / "b.jsonl", [row("hi")])
    with pytest.raises(ElsiError, match="ultrachat: 2 JSON files in"):
        find_source("ultrachat")


@pytest.mark.parametrize(("source", "message"), [("nothing.json", "no prompt file nothing.json"), (".", "is a folder")])
def test_wrong_source_names_the_assets(source, message):
    with pytest.raises(ElsiError, match=f"{message}.*sharegpt, spec-bench, ultrachat"):
        find_source(source)


def test_a_target_is_no_source():
    with pytest.raises(ElsiError, match="no prompt file smollm2-135m-instruct"):
        find_source("smollm2-135m-instruct")


# --- the real thing


@pytest.fixture(scope="module")
def smollm2():
    from transformers import AutoTokenizer

    from elsi_lib import assets

    path = Path(assets.fetch("smollm2-135m-instruct"))
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.real
def test_smollm2_writes_its_own_template(smollm2):
    ids = encode(smollm2, talk(("system", "Be brief."), ("user", "Grüße, 漢字!"), ("assistant", "Hi")), 200)
    assert smollm2.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße, 漢字!<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
    )
    assert ids[0] == smollm2.bos_token_id != ids[1]


@pytest.mark.real
def test_real_sharegpt_prompts(smollm2):
    found, counts = load_prompts("sharegpt", 20, 0, smollm2, max_tokens=256, min_tokens=128)
    assert len({p.key for p in found}) == counts["used"] == counts["asked"] == 20
    assert all(128 <= len(p.ids) <= 256 and p.ids[0] == smollm2.bos_token_id != p.ids[1] for p in found)
    assert counts["rows"] == 17_671

"""Dialogues in ids against the template rendered as a whole, for templates of every habit."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import TEMPLATE, tiny_target, tiny_tokenizer

from elsi_lib.conversations import Conversation
from elsi_lib.errors import ElsiError
from elsi_lib.speculative.dialogue import (
    end_of_turn,
    eos_ids,
    following,
    opening,
    own_dialogues,
    sharegpt_dialogues,
    spec_bench_dialogues,
    split,
)
from elsi_lib.targets import load_target

# One token per character, so that the ids of a text are known without the library.
TEMPLATES = {
    "plain": TEMPLATE,
    "trims": TEMPLATE.replace("m['content']", "m['content'] | trim"),
    "no system": TEMPLATE.replace(
        "{% for m", "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{% for m"
    ),
    "system before": TEMPLATE.replace("{% for", "{% if messages[0]['role'] != 'system' %}be kind{{ eos_token }}{% endif %}{% for", 1),
    "line after": TEMPLATE.replace("{{ eos_token }}{% endfor %}", "{{ eos_token }}\n{% endfor %}"),
    "space before": TEMPLATE.replace("{{ eos_token }}{% endfor %}", " {{ eos_token }}{% endfor %}"),
    "no end": TEMPLATE.replace("{{ eos_token }}", ""),
    "date": TEMPLATE.replace("{% for", "{{ strftime_now('%d %b').lower() }}{% for", 1),
}
WORDS = st.text("abc xyz", min_size=1, max_size=8).map(str.strip).filter(bool)


def tokens(text, tokenizer):
    """Ids of a text in which special tokens are written out: character by character, two line feeds are unknown."""
    pieces = re.findall(r"<s>|</s>|<user>|<assistant>|\n\n|.|\n", text)
    return [tokenizer.get_vocab().get(piece, 0) for piece in pieces]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", TEMPLATES)
@given(texts=st.lists(WORDS, min_size=3, max_size=3), ended=st.booleans())
def test_prompts_and_answers_join_to_the_template_of_the_whole(name, texts, ended):
    tokenizer = tiny_tokenizer(template=TEMPLATES[name])
    first, said, second = texts
    answer = tokens(said, tokenizer) + ([2] if ended and name != "no end" else [])
    whole = tokenizer.apply_chat_template(
        [user(first), assistant(said), user(second)], tokenize=False, add_generation_prompt=True, **pinned(name)
    )
    if ended:  # an answer that wrote no blank before its end gets none
        whole = whole.replace(f"<assistant>{said} </s>", f"<assistant>{said}</s>")
    found = opening(tokenizer, [user(first)]) + answer + following(tokenizer, answer, [user(second)])
    assert found == tokens(whole, tokenizer)


def pinned(name):
    if name != "date":
        return {}
    return {"chat_template": TEMPLATES[name].replace("strftime_now('%d %b').lower()", "'26 jul 2024'")}


def test_the_system_text_opens_the_dialogue_or_the_user_s_turn():
    messages = [{"role": "system", "content": "be"}, user("hi")]
    for name, expected in (("plain", "<s><system>be</s><user>hi</s><assistant>"), ("no system", "<s><user>be\n\nhi</s><assistant>")):
        tokenizer = tiny_tokenizer(template=TEMPLATES[name])
        assert opening(tokenizer, messages) == tokens(expected, tokenizer)


def test_a_bos_of_template_and_tokenizer_is_not_doubled():
    tokenizer = tiny_tokenizer(template="{{ bos_token }}" + TEMPLATE)
    assert opening(tokenizer, [user("a")]) == tokens("<s><user>a</s><assistant>", tokenizer)


def test_without_a_template_texts_are_joined_by_blank_lines():
    tokenizer = tiny_tokenizer(template=None)
    assert opening(tokenizer, [user("ab")]) == tokens("ab\n\n", tokenizer)
    assert following(tokenizer, tokens("c", tokenizer), [user("d")]) == tokens("\n\nd\n\n", tokenizer)
    assert end_of_turn(tokenizer) == {2}


def test_an_answer_that_ended_otherwise_than_the_template_is_closed_by_the_template():
    tokenizer = tiny_tokenizer()
    assert following(tokenizer, [9, 1], [user("b")]) == tokens("</s><user>b</s><assistant>", tokenizer)
    assert following(tokenizer, [], [user("b")]) == tokens("</s><user>b</s><assistant>", tokenizer)


@pytest.mark.parametrize("messages", [[], [assistant("a")], [user("a"), assistant("b")]])
def test_a_turn_ends_with_the_user(messages):
    for make in (lambda: opening(tiny_tokenizer(), messages), lambda: following(tiny_tokenizer(), [2], messages)):
        with pytest.raises(ElsiError, match="without a user message at its end"):
            make()


def test_templates_that_refuse_or_hide_are_named():
    refuses = tiny_tokenizer(template="{{ raise_exception('not today') }}")
    with pytest.raises(ElsiError, match="refuses a dialogue: not today"):
        opening(refuses, [user("a")])
    hides = tiny_tokenizer(template="{{ messages[-1]['content'] }}")
    with pytest.raises(ElsiError, match="an earlier answer 0 times"):
        following(hides, [2], [user("a")])
    shouts = tiny_tokenizer(template=TEMPLATE.replace("m['content']", "m['content'] | replace('b', 'c')"))
    with pytest.raises(ElsiError, match="changes what is said in conversation odd"):
        split(shouts, Conversation("odd", (user("ab"), assistant("a"))), 100)


@pytest.mark.parametrize("name", [*TEMPLATES, "none"])
@given(texts=st.lists(WORDS, min_size=1, max_size=5), system=st.booleans(), limit=st.integers(1, 80))
def test_the_loss_mask_covers_the_answers_and_their_ends(name, texts, system, limit):
    tokenizer = tiny_tokenizer(template=TEMPLATES.get(name))
    messages = [{"role": "system", "content": "be kind"}] * system
    messages += [make(text) for make, text in zip(itertools.cycle([user, assistant]), texts, strict=False)]
    ids, mask = split(tokenizer, Conversation("one", tuple(messages)), 10_000)
    end = [] if name in ("none", "no end") else [2]
    blank = tokens(" ", tokenizer) if name == "space before" else []
    answers = [tokens(text, tokenizer) + ([] if blank else end) for text in texts[1::2]]
    runs = [[i for i, _ in run] for inside, run in itertools.groupby(zip(ids, mask, strict=True), lambda pair: pair[1]) if inside]
    assert runs == answers
    if name != "none" and not (system and name == "no system"):
        assert ids == tokens(tokenizer.apply_chat_template(messages, tokenize=False, **pinned(name)), tokenizer)
    assert split(tokenizer, Conversation("one", tuple(messages)), limit) == (ids[:limit], mask[:limit])


def test_what_split_refuses():
    with pytest.raises(ElsiError, match="max_tokens = 0"):
        split(tiny_tokenizer(), Conversation("a", (user("a"),)), 0)
    slow = tiny_tokenizer()
    type(slow).is_fast, before = False, type(slow).is_fast
    try:
        with pytest.raises(ElsiError, match="no offsets"):
            split(slow, Conversation("a", (user("a"),)), 5)
    finally:
        type(slow).is_fast = before


def test_ids_that_end_an_answer():
    target = tiny_target()
    assert eos_ids(target) == {2}
    target.model.generation_config.eos_token_id = [5, 2]
    target.tokenizer.chat_template = TEMPLATE.replace("{{ eos_token }}", "<s>")  # a special token closes the turn
    assert eos_ids(target) == {1, 2, 5}
    target.tokenizer.chat_template = TEMPLATE.replace("{{ eos_token }}", "a")  # a letter does not
    assert eos_ids(target) == {2, 5}
    target.tokenizer = None
    target.model.generation_config.eos_token_id = None
    with pytest.raises(ElsiError, match="never end"):
        eos_ids(target)


def test_own_prompts_by_turn():
    dialogues = own_dialogues()
    assert len(dialogues) == 81 and len({d.category for d in dialogues}) == 13
    assert {len(d.turns) for d in dialogues} == {1, 2}
    assert all(len(turn) == 1 and turn[0]["role"] == "user" for d in dialogues for turn in d.turns)
    assert dialogues[0].turns[0][0]["content"].startswith("Translate this German sentence")


def test_spec_bench_has_480_questions_of_560_turns():
    try:
        dialogues = spec_bench_dialogues()
    except ElsiError as error:
        pytest.skip(f"Spec-Bench is not here: {error}")
    assert len(dialogues) == 480 and sum(len(d.turns) for d in dialogues) == 560
    assert len({d.id for d in dialogues}) == 480 and len({d.category for d in dialogues}) == 13


def test_user_turns_of_conversations(tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text(
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},'
        ' {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}]}\n'
        '{"messages": [{"role": "user", "content": "f"}, {"role": "assistant", "content": "g"}, {"role": "system", "content": "h"}]}\n'
    )
    long, short = sorted(sharegpt_dialogues(path, 5, 0, 2), key=lambda d: -len(d.turns))
    assert long.turns == (({"role": "system", "content": "s"}, user("a")), (user("c"),))
    assert short.turns == ((user("f"),),)
    assert len(long.id) == 16 and long.id != short.id
    assert [len(d.turns) for d in sharegpt_dialogues(path, 5, 0, 9)] in ([3, 1], [1, 3])
    with pytest.raises(ElsiError, match="max_turns = 0"):
        sharegpt_dialogues(path, 5, 0, 0)


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"])
def test_real_templates(name):
    tokenizer = load_target(name).tokenizer
    said = "The *answer*:\n\n  42 — ja, 四十二."
    answer = tokenizer(said, add_special_tokens=False)["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages = [user("Why?\n"), assistant(said), user("And\nthen?")]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for ids in (answer, [*answer, end]):
        found = opening(tokenizer, messages[:1]) + ids + following(tokenizer, ids, messages[2:])
        assert found == tokenizer(whole, add_special_tokens=False)["input_ids"]
    ids, mask = split(tokenizer, Conversation("one", tuple(messages)), 1000)
    assert [i for i, inside in zip(ids, mask, strict=True) if inside] == [*answer, end]
    assert end in end_of_turn(tokenizer)

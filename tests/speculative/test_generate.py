"""The generator against a loop without a cache, one text at a time, one ``noise.pick`` per token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import ARCHITECTURES, tiny_ids, tiny_target

from elsi_lib.errors import ElsiError
from elsi_lib.speculative.generate import Answer, Request, generate, run
from elsi_lib.speculative.noise import pick
from elsi_lib.targets import load_target

EOS = 2


def alone(target, request, max_new_tokens, temperature, seed, context):
    """The reference: a whole pass of the target for every token."""
    text, start = list(request.ids), len(request.ids)
    while True:
        text.append(pick(target.run(text)[1][-1], temperature, seed, request.key, len(text)))
        for finish, reached in (
            ("eos", text[-1] == EOS),
            ("length", len(text) - start == max_new_tokens),
            ("context", len(text) == context),
        ):
            if reached:
                return Answer(tuple(text[start:]), finish)


def requests(lengths):
    return [Request(f"text {i}", tuple(tiny_ids(length, i))) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_text_is_the_one_written_alone(architecture, temperature):
    target, asked = tiny_target(architecture), requests([3, 40, 8, 13, 1, 21])
    options = {"max_new_tokens": 16, "temperature": temperature, "seed": 5}
    expected = {r.key: alone(target, r, 16, temperature, 5, 44) for r in asked}
    for batch in (1, 4):
        found = list(generate(target, iter(asked), batch=batch, capacity=44, **options))
        assert dict(found) == expected and len(found) == len(asked)
    assert expected["text 1"].finish in ("context", "eos") and {a.finish for a in expected.values()} >= {"length"}


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 20), st.sampled_from([0, 0.7, 1.5]), st.integers(0, 3),
    st.integers(1, 8), st.integers(61, 90),
)  # fmt: skip
def test_neither_batch_nor_company_nor_lengths_change_a_text(lengths, max_new_tokens, temperature, seed, batch, context):
    target, asked = TARGET, requests(lengths)
    found = generate(target, asked, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, batch=batch, capacity=context)
    assert dict(found) == {r.key: alone(target, r, max_new_tokens, temperature, seed, context) for r in asked}


TARGET = tiny_target("llama", layers=2)


def test_the_target_s_own_context_ends_an_answer():
    request = Request("long", tuple(tiny_ids(125)))
    [(key, answer)] = generate(TARGET, [request], max_new_tokens=50, temperature=0, seed=0)
    assert (key, answer.finish, len(answer.ids)) == ("long", "context", 3)  # 128 positions


def test_requests_are_taken_as_slots_become_free_and_a_text_goes_on_in_its_slot():
    """Each answer brings the next prompt of its text; keys and values of the text are not computed again."""
    taken, waiting, urgent, read = [], requests([30, 20, 10]), [], []
    texts = {r.key: r.ids for r in waiting}

    def pull():
        request = urgent.pop() if urgent else waiting.pop(0) if waiting else None
        if request:
            taken.append(request.key)
        return request

    handle = TARGET.blocks[0].register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0].shape[1]))
    try:
        rounds, answers = dict.fromkeys(texts, 0), {}
        for key, answer in run(TARGET, pull, max_new_tokens=4, temperature=1.0, seed=1, batch=2):
            texts[key] += answer.ids
            answers[key, rounds[key]] = answer
            rounds[key] += 1
            if rounds[key] < 3:
                texts[key] += (7, 8, 9)
                urgent.append(Request(key, texts[key]))
    finally:
        handle.remove()
    assert sorted(read, reverse=True)[:3] == [30, 20, 10] and set(read) - {30, 20, 10} == {
        1,
        4,
    }  # 3 new ids and the last of the answer
    assert rounds == dict.fromkeys(texts, 3) and taken[:2] == ["text 0", "text 1"]
    for r in requests([30, 20, 10]):
        ids = r.ids
        for k in range(3):
            expected = alone(TARGET, Request(r.key, ids), 4, 1.0, 1, 128)
            assert answers[r.key, k] == expected
            ids += (*expected.ids, 7, 8, 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"batch": 0}, "batch = 0"),
        ({"temperature": -1}, "temperature -1"),
        ({"requests": [Request("empty", ())]}, "prompt empty: at least one id"),
        ({"requests": [Request("odd", (3, 64))]}, "prompt odd: .*0..63"),
        ({"requests": [Request("odd", (3, -1))]}, "prompt odd: .*0..63"),
        ({"requests": [Request("full", tuple(tiny_ids(128)))]}, "prompt full has 128 tokens of a context of 128"),
        ({"requests": [Request("full", tuple(tiny_ids(9)))], "capacity": 9}, "9 tokens of a context of 9"),
    ],
)
def test_what_cannot_be_generated_is_refused(change, words):
    options = {"requests": requests([3]), "max_new_tokens": 3, "temperature": 0, "seed": 0, "batch": 2}
    with pytest.raises(ElsiError, match=words):
        list(generate(TARGET, **(options | change)))


def test_nothing_to_do_gives_nothing():
    assert list(generate(TARGET, [], max_new_tokens=3, temperature=0, seed=0)) == []


@pytest.mark.real
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_real_target_in_float32(temperature):
    target = load_target("smollm2-135m-instruct", dtype="float32")
    asked = [
        Request(
            text,
            tuple(target.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]),
        )
        for text in ("What is two plus two?", "Name three rivers of France.", "Hi")
    ]
    found = dict(generate(target, asked, max_new_tokens=10, temperature=temperature, seed=3, batch=2))
    assert found == {r.key: alone(target, r, 10, temperature, 3, 8192) for r in asked}
    with torch.inference_mode():
        ids = torch.tensor([asked[0].ids])
        own = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)[
            0, ids.shape[1] :
        ].tolist()
    if temperature == 0:
        assert list(found[asked[0].key].ids) == own

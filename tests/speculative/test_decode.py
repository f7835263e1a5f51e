"""Live decoding: the target's own text, token for token, in the steps that replay gives, on any target, and every way it ends."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ARCHITECTURES, tiny_ids, tiny_target

from elsi_lib import load_target
from elsi_lib.errors import ElsiError
from elsi_lib.speculative.answers import Answered, Turn
from elsi_lib.speculative.decode import Decoder
from elsi_lib.speculative.dialogue import opening
from elsi_lib.speculative.draft import Draft
from elsi_lib.speculative.generate import Request, generate
from elsi_lib.speculative.noise import pick
from elsi_lib.speculative.replay import prompt_lookup, replay
from elsi_lib.speculative.vocabulary import DraftVocabulary

V = 64
seeds = st.integers(0, 2**32 - 1)


@functools.cache
def made(architecture="llama", seed=0):
    return tiny_target(architecture, seed=seed)


def make_draft(target, layers=(0, 3), ids=range(V), seed=0, **changes):
    draft = Draft.for_target(target, layers, DraftVocabulary(torch.tensor(list(ids)), V), **changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2 + (weight.ndim == 1))
    return draft.eval()


def knowing(target, text, ids=range(V)):
    """A draft that has learnt the first-step predictions of one text by heart."""
    draft, text = make_draft(target, (0, 1, 3), ids), torch.tensor(text)
    states = [states.clone() for states in target.run(text)[0]]
    wanted = draft.vocabulary.draft_ids[text[2:]]
    known, optimiser = wanted >= 0, torch.optim.Adam(draft.parameters(), 0.01)
    for _ in range(60):
        hidden = draft.fuse([states[j][None, :-2] for j in draft.config.layers])
        _, logits = draft(draft.embed(text[None, 1:-1]), hidden)
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(logits[0][known], wanted[known]).backward()
        optimiser.step()
    return draft.eval().requires_grad_(False)


def alone(target, ids, n, temperature, seed, question):
    """The target's own text: a pass over everything for every token, without a cache."""
    text = list(ids)
    end = min(len(ids) + n, target.max_tokens)
    while len(text) < end and (len(text) == len(ids) or text[-1] != 2):
        text.append(pick(target.run(text)[1][-1], temperature, seed, question, len(text)))
    return tuple(text[len(ids) :])


def replayed(target, draft, ids, answer, **options):
    answered = Answered("q", "qa", (Turn(tuple(ids), tuple(answer), "length"),))
    nodes = (options.pop("nodes"),)
    if draft == "prompt lookup":
        return prompt_lookup(answered, {2}, nodes)[0]["tokens"]
    return replay(target, {"a": draft}, answered, nodes, **options)[0]["tokens"]


@settings(max_examples=12)
@given(
    seed=seeds,
    architecture=st.sampled_from(["llama", "qwen3", "gemma2"]),
    length=st.integers(1, 20),
    layers=st.sampled_from([(3,), (0, 3), (0, 1, 2)]),
    norm=st.sampled_from(["none", "each", "concat"]),
    ids=st.sampled_from([range(V), range(0, V, 2), range(10, 20)]),
    options=st.fixed_dictionaries({
        "nodes": st.integers(2, 30), "depth": st.integers(0, 4), "top_k": st.integers(1, 6), "root_counts": st.booleans(),
    }),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
)  # fmt: skip
def test_the_text_is_the_targets_and_the_steps_are_those_of_replay(
    seed, architecture, length, layers, norm, ids, options, temperature
):
    target = made(architecture)
    draft = make_draft(target, layers, ids, seed % 1000, norm_before_fc=norm)
    prompt = np.random.default_rng(seed).integers(3, V, length).tolist()
    found = Decoder(target, draft, **options).decode(prompt, max_new_tokens=25, temperature=temperature, seed=seed, question="q")
    assert found.ids == alone(target, prompt, 25, temperature, seed, "q")
    assert found.steps == replayed(target, draft, prompt, found.ids, **options)
    assert sum(found.steps) == len(found.ids) - 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture):
    target = made(architecture)
    prompt = tiny_ids(9, seed=3)
    answer = alone(target, prompt, 20, 0, 0, "q")
    draft = knowing(target, [*prompt, *answer])
    for temperature in (0, 1):
        expected = alone(target, prompt, 20, temperature, 5, "q")
        for source in (draft, "prompt lookup", None):
            found = Decoder(target, source, nodes=12, depth=3, top_k=4).decode(
                prompt, max_new_tokens=20, temperature=temperature, seed=5, question="q"
            )
            assert found.ids == expected, source
            shape = {"depth": 3, "top_k": 4} if source is draft else {}
            alike = replayed(target, source, prompt, expected, nodes=12, **shape) if source else [1] * (len(expected) - 1)
            assert found.steps == alike


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_draft_that_knows_the_text_takes_long_steps(temperature):
    """Words outside its vocabulary end a step and nothing else."""
    target, prompt = made(), tiny_ids(12, seed=1)
    answers = {seed: alone(target, prompt, 60, temperature, seed, "q") for seed in range(4)}
    seed, answer = max(answers.items(), key=lambda item: len(item[1]))
    taus = []
    for ids in (range(V), sorted(set(range(V)) - {answer[5], answer[15]})):
        draft = knowing(target, [*prompt, *answer], ids)
        found = Decoder(target, draft, nodes=40, depth=4, top_k=6).decode(
            prompt, max_new_tokens=60, temperature=temperature, seed=seed, question="q"
        )
        assert found.ids == answer
        assert found.steps == replayed(target, draft, prompt, answer, nodes=40, depth=4, top_k=6)
        taus.append(np.mean(found.steps))
    assert taus[0] > 1.8 and taus[0] >= taus[1] > 1.2


def test_ends_as_the_batched_generator_does():
    """The same ids and the same words for the end, whether it is EOS (also when drafted), the length, or the context."""
    target, seen = made(), set()
    draft = knowing(target, [*tiny_ids(10, seed=0), *[2] * 20])  # proposes EOS everywhere
    decoders = [Decoder(target, source, nodes=8, depth=2, top_k=3) for source in (draft, "prompt lookup", None)]
    for seed in range(8):
        prompt = tiny_ids([10, 40, 119, 127][seed % 4], seed=seed)
        n = [1, 2, 30, 100][seed // 2]
        ((_, expected),) = generate(target, [Request("7", tuple(prompt))], max_new_tokens=n, temperature=1, seed=seed)
        for decoder in decoders:
            found = decoder.decode(prompt, max_new_tokens=n, temperature=1, seed=seed, question=7)
            assert (found.ids, found.finish) == (expected.ids, expected.finish)
            assert sum(found.steps) == len(found.ids) - 1 and min(found.steps, default=1) >= 1
            assert 0 < found.prompt_seconds <= found.seconds
        seen.add(expected.finish)
    assert seen == {"eos", "length", "context"}


def test_second_turns_go_on_with_the_text_and_a_decoder_can_be_used_again():
    target, prompt = made(), tiny_ids(8, seed=2)
    draft = make_draft(target)
    decoder = Decoder(target, draft, nodes=10, depth=2, top_k=4)
    options = {"max_new_tokens": 15, "temperature": 1, "seed": 3, "question": "q"}
    first = decoder.decode(prompt, **options)
    more = [*prompt, *first.ids, 7, 8, 9]
    second = decoder.decode(more, **options)
    turns = (Turn(tuple(prompt), first.ids, "length"), Turn((7, 8, 9), second.ids, "length"))
    rows = replay(target, {"a": draft}, Answered("q", "qa", turns), (10,), depth=2, top_k=4)
    assert [row["tokens"] for row in rows] == [first.steps, second.steps]
    assert decoder.decode(prompt, **options).ids == first.ids
    decoder.decode(tiny_ids(100, seed=4), **options)
    assert decoder.decode(more, **options).steps == second.steps


def test_refusals():
    target = made()
    draft = make_draft(target)
    options = {"max_new_tokens": 5, "temperature": 0, "seed": 0, "question": 0}
    with pytest.raises(ElsiError, match="a tree of 1 nodes: at least 2"):
        Decoder(target, draft, nodes=1)
    with pytest.raises(ElsiError, match="a tree of depth -1"):
        Decoder(target, draft, depth=-1)
    with pytest.raises(ElsiError, match="a target with 4 layers, but tiny-llama has 6"):
        Decoder(tiny_target(layers=6), draft)
    with pytest.raises(ElsiError, match="draft 'lookup': a Draft, 'prompt lookup', or None"):
        Decoder(target, "lookup")
    decoder = Decoder(target, draft)
    for ids, message in [
        ([], "a prompt of 0 ids: at least one is needed"),
        ([1, 64], r"a prompt of 2 ids: .* all in 0\.\.63"),
        ([-1], r"all in 0\.\.63"),
        ([1] * 128, "a prompt of 128 tokens of a context of 128"),
    ]:
        with pytest.raises(ElsiError, match=message):
            decoder.decode(ids, **options)
    with pytest.raises(ElsiError, match="max_new_tokens = 0: at least 1"):
        decoder.decode([1], **(options | {"max_new_tokens": 0}))
    for temperature in (-0.5, float("nan")):
        with pytest.raises(ElsiError, match=f"temperature {temperature}"):
            decoder.decode([1], **(options | {"temperature": temperature}))


@pytest.mark.real
def test_smollm2_in_float32():
    """Replay, live decoding and the target alone agree on a real target. The untrained draft knows five words of the answer, so that
    some are always proposed."""
    target = load_target("smollm2-135m-instruct", dtype="float32")
    prompt = opening(target.tokenizer, [{"role": "user", "content": "Count from one to twenty in words."}])
    tree = {"nodes": 30, "depth": 1}
    for temperature in (0, 1):
        options = {"max_new_tokens": 12, "temperature": temperature, "seed": 1}
        ((_, expected),) = generate(target, [Request("81", tuple(prompt))], **options)
        ids = torch.tensor(sorted(set(expected.ids[1:6])))
        draft = Draft.for_target(target, (2, 15, 27), DraftVocabulary(ids, target.vocab_size))
        draft.copy_head(target.model.get_output_embeddings().weight)
        found = Decoder(target, draft, **tree).decode(prompt, question="81", **options)
        assert (found.ids, found.finish) == (expected.ids, expected.finish)
        assert found.steps == replayed(target, draft, prompt, expected.ids, **tree) and found.steps[:2] == [3, 3]
        for source in ("prompt lookup", None):
            assert Decoder(target, source).decode(prompt, question="81", **options).ids == expected.ids

"""Dialogues as token ids under the target's chat template: the first prompt, what follows an answer, and whole conversations.

An answer is the ids that the target produced. It is never decoded and encoded again, because another split of the same text would be
another text to the target. What stands between an answer and the next prompt is found by rendering the template around a mark.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from elsi_lib.conversations import Conversation, merged, read_conversations
from elsi_lib.errors import ElsiError
from elsi_lib.prompts import _DATE, _without_system, find_source, sample_conversations
from elsi_lib.targets import Target

Message = dict[str, str]  # {"role": system | user | assistant, "content": text}
OWN_PROMPTS = Path(__file__).parents[2] / "data" / "prompts" / "own.jsonl"


@dataclass(frozen=True)
class Dialogue:
    """What the users of one conversation say: per turn the messages before the target's answer."""

    id: str
    category: str
    turns: tuple[tuple[Message, ...], ...]


def opening(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Ids of the first prompt, up to where the answer begins. The same care as :func:`elsi_lib.prompts.encode` takes: the date is
    pinned, BOS is not doubled, system text moves into the user's turn where the template refuses a system role. Base models without
    a template get the contents and a blank line.

    Raises:
        ElsiError: no user message at the end, or a template that refuses the messages.
    """
    if not messages or messages[-1]["role"] != "user":
        raise ElsiError("a prompt without a user message at its end: the target has nothing to answer")
    if not tokenizer.chat_template:
        ids = tokenizer("\n\n".join([m["content"] for m in messages] + [""]), verbose=False)["input_ids"]
    else:
        ids = tokenizer(_render(tokenizer, messages, answer=True), add_special_tokens=False, verbose=False)["input_ids"]
    return _one_bos(tokenizer, ids)


def following(tokenizer: Any, answer_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
    """Ids between an answer and the next one: the end of the answer's turn, unless the answer wrote it, then ``messages`` and the
    start of the next answer.

    Raises:
        ElsiError: no user message at the end, or a template that refuses the messages or hides earlier answers.
    """
    if not messages or messages[-1]["role"] != "user":
        raise ElsiError("a turn without a user message at its end: the target has nothing to answer")
    if not tokenizer.chat_template:
        text = "\n\n".join(["", *(m["content"] for m in messages), ""])
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    mark = _mark(messages)
    before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
    text = _render(tokenizer, [*before, *messages], answer=True)
    if text.count(mark) != 1:
        raise ElsiError(f"{_name(tokenizer)} shows an earlier answer {text.count(mark)} times: dialogues of several turns need once")
    ids = tokenizer(text.split(mark)[1], add_special_tokens=False, verbose=False)["input_ids"]
    closing = _closing(tokenizer, ids)
    return ids[closing + 1 :] if closing is not None and answer_ids and answer_ids[-1] == ids[closing] else ids


def split(tokenizer: Any, conversation: Conversation, max_tokens: int) -> tuple[list[int], list[bool]]:
    """A conversation as it is, at most ``max_tokens`` ids from its start, and the loss mask: true on the ids of the assistant's turns,
    the end of turn that closes each included.

    Raises:
        ElsiError: max_tokens < 1, a tokenizer without offsets, a template that refuses the conversation or changes its contents.
    """
    if max_tokens < 1:
        raise ElsiError(f"max_tokens = {max_tokens}: at least 1")
    if not getattr(tokenizer, "is_fast", False):
        raise ElsiError(f"{_name(tokenizer)} gives no offsets of its tokens: a fast tokenizer is needed")
    messages = merged(list(conversation.messages))
    templated = bool(tokenizer.chat_template)
    text, spans = _spans(tokenizer, messages, conversation.id) if templated else _plain_spans(messages)
    encoded = tokenizer(text, add_special_tokens=not templated, return_offsets_mapping=True, verbose=False)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    ends, starts = end_of_turn(tokenizer), [start for start, _ in offsets]
    mask = [False] * len(ids)
    for low, high in spans:
        first, last = bisect_left(starts, low), bisect_left(starts, high)
        last += last < len(ids) and ids[last] in ends
        mask[first:last] = [True] * (last - first)
    kept = _one_bos(tokenizer, ids)
    mask = mask[len(ids) - len(kept) :]
    return kept[:max_tokens], mask[:max_tokens]


def end_of_turn(tokenizer: Any) -> frozenset[int]:
    """Ids that close an answer under the template: the tokenizer's EOS, and the special token that the template puts there."""
    ends = {tokenizer.eos_token_id} - {None}
    if tokenizer.chat_template:
        mark = _mark([])
        text = _render(tokenizer, [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}], answer=False)
        ids = tokenizer(text.rpartition(mark)[2], add_special_tokens=False, verbose=False)["input_ids"]
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        if ids and ids[0] in special:
            ends.add(ids[0])
    return frozenset(ends)


def eos_ids(target: Target) -> frozenset[int]:
    """Ids that end an answer of the target: those of its generation configuration, and :func:`end_of_turn`.

    Raises:
        ElsiError: none is known.
    """
    config = getattr(target.model, "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    ends = set(named if isinstance(named, list | tuple) else [named]) - {None}
    if target.tokenizer is not None:
        ends |= end_of_turn(target.tokenizer)
    if not ends:
        raise ElsiError(f"{target.name} names no end-of-text token: its answers would never end")
    return frozenset(ends)


def spec_bench_dialogues(path: str | Path | None = None) -> list[Dialogue]:
    """The questions of Spec-Bench, from a file or the asset: 480 dialogues of 560 turns, in the file's order.

    Raises:
        ElsiError, AssetError: as :func:`elsi_lib.prompts.find_source` and :func:`elsi_lib.conversations.read_conversations`.
    """
    return _questions(find_source("spec-bench" if path is None else path))


def own_dialogues() -> list[Dialogue]:
    """This project's own prompts, which are not Spec-Bench."""
    return _questions(OWN_PROMPTS)


def sharegpt_dialogues(source: str | Path, n: int, seed: int, max_turns: int) -> list[Dialogue]:
    """User turns of a sample of conversations (:func:`elsi_lib.prompts.sample_conversations`), in the sample's order; system texts
    stay with the user's message that follows them. The id is the start of the content's key.

    Raises:
        ElsiError: n or max_turns below 1; a file that cannot be read.
    """
    if max_turns < 1:
        raise ElsiError(f"max_turns = {max_turns}: at least 1")
    conversations, _ = sample_conversations(find_source(source), n, seed)
    return [Dialogue(c.key[:16], c.category, _user_turns(c)[:max_turns]) for c in conversations]


def _user_turns(conversation: Conversation) -> tuple[tuple[Message, ...], ...]:
    turns, waiting = [], []
    for message in [*conversation.messages, {"role": "assistant", "content": ""}]:
        if message["role"] != "assistant":
            waiting.append(message)
        elif waiting and waiting[-1]["role"] == "user":
            turns.append(tuple(waiting))
            waiting = []
    return tuple(turns)


def _questions(path: Path) -> list[Dialogue]:
    rows = read_conversations(path, "spec-bench")
    return [Dialogue(c.id, c.category, tuple((message,) for message in c.messages)) for c in rows]


def _render(tokenizer: Any, messages: Sequence[Message], *, answer: bool) -> str:
    """The template's text; ``answer`` adds what opens the assistant's turn."""
    template = tokenizer.chat_template
    dated = {"chat_template": _DATE + template} if isinstance(template, str) and "strftime_now" in template else {}
    plain = merged(list(messages))
    attempts = [plain] if (other := _without_system(plain)) == plain else [plain, other]
    for attempt in attempts:
        try:
            return tokenizer.apply_chat_template(attempt, tokenize=False, add_generation_prompt=answer, **dated)
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            failure = error
    raise ElsiError(f"{_name(tokenizer)} refuses a dialogue: {failure}".replace("\n", " ")) from failure


def _spans(tokenizer: Any, messages: Sequence[Message], name: str) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation, and from where to where each assistant's content stands in it."""
    text = _render(tokenizer, messages, answer=False)
    shaped = messages
    mark = _mark(messages)
    for shaped in (messages, _without_system(list(messages))):
        marked = [{"role": m["role"], "content": f"{mark}{i}{mark}"} for i, m in enumerate(shaped)]
        pieces = _render(tokenizer, marked, answer=False).split(mark)
        if pieces[1::2] != [str(i) for i in range(len(shaped))]:
            continue
        for contents in ([m["content"] for m in shaped], [m["content"].strip() for m in shaped]):
            built, spans = pieces[0], []
            for message, content, between in zip(shaped, contents, pieces[2::2], strict=True):
                if message["role"] == "assistant":
                    spans.append((len(built), len(built) + len(content)))
                built += content + between
            if built == text:
                return text, spans
    raise ElsiError(f"{_name(tokenizer)} changes what is said in conversation {name}: its answers cannot be told from its prompts")


def _plain_spans(messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
    text, spans = "", []
    for message in messages:
        text += "\n\n" if text else ""
        if message["role"] == "assistant":
            spans.append((len(text), len(text) + len(message["content"])))
        text += message["content"]
    return text, spans


def _mark(messages: Sequence[Message]) -> str:
    """A word that no message contains."""
    text = "".join(m["content"] for m in messages)
    number = 0
    while (mark := f"mark{number}mark") in text:
        number += 1
    return mark


def _closing(tokenizer: Any, ids: Sequence[int]) -> int | None:
    """Where the end of a turn stands in what follows an answer, with nothing but white space before it."""
    ends = end_of_turn(tokenizer)
    for i, token in enumerate(ids):
        if token in ends:
            return i
        if tokenizer.decode(list(ids[: i + 1])).strip():
            return None
    return None


def _one_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    bos = getattr(tokenizer, "bos_token_id", None)
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def _name(tokenizer: Any) -> str:
    return f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the target'}"

"""Texts of other kinds than ShareGPT's conversations, to see whether a choice of layers transfers.

Every text is put to the target in the same way, as a user's message under its chat template, and cut at the same length, so that
corpora differ in what they say and not in how they are wrapped. Short texts of a kind are joined until they fill that length.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from elsi_lib.conversations import Conversation, read_conversations
from elsi_lib.errors import ElsiError
from elsi_lib.prompts import Prompt, encode, find_source, load_prompts, sample_conversations
from elsi_lib.targets import Target

CONVERSATIONS = "conversations"  # what the other corpora are compared with
AGAIN = "other conversations"  # a second sample of the same: how far apart two samples of one kind are
SPEC_BENCH = {
    "mathematics": ("math_reasoning", "math"),
    "translation": ("translation",),
    "long documents": ("summarization", "rag"),
    "Spec-Bench": (),  # all categories
}
CORPORA = (CONVERSATIONS, AGAIN, "code", "other languages", *SPEC_BENCH)
_POOL = 20_000  # conversations searched for those of another script
_JOIN = "\n\n"


def load_corpus(
    name: str, target: Target, n: int, *, seed: int, max_tokens: int, min_tokens: int, prompts: str = "sharegpt"
) -> list[Prompt]:
    """The first n prompts of a corpus, each of at least ``min_tokens`` and at most ``max_tokens`` tokens.

    Args:
        name: one of :data:`CORPORA`: two disjoint samples of ``prompts``; source code (modules of Python's standard library);
            conversations of ``prompts`` most of whose letters are of another script than Latin; mathematics, translation, long
            documents (articles to summarise, passages to answer from) and all kinds of questions from Spec-Bench.

    Raises:
        ElsiError: an unknown name, or no prompt of that length.
        AssetError: Spec-Bench cannot be fetched.
    """
    if name not in CORPORA:
        raise ElsiError(f"corpus {name!r} unknown: one of {', '.join(CORPORA)}")
    if name in (CONVERSATIONS, AGAIN):
        found, _ = load_prompts(prompts, 2 * n, seed, target.tokenizer, max_tokens, min_tokens, progress=False)
        return found[:n] if name == CONVERSATIONS else found[n:]
    if name == "code":
        texts = _ordered(_modules(), seed)
        conversations = (_user(f"code-{i}", text) for i, text in enumerate(texts))
    elif name == "other languages":
        conversations = (c for c in sample_conversations(find_source(prompts), _POOL, seed, progress=False)[0] if _foreign(c))
    else:
        conversations = _questions(name, target, seed, max_tokens)
    found = []
    for conversation in conversations:
        ids = encode(target.tokenizer, conversation, max_tokens)
        if len(ids) >= min_tokens:
            found.append(Prompt(conversation.id, conversation.key, tuple(ids), name))
        if len(found) == n:
            return found
    if not found:
        raise ElsiError(f"corpus {name}: no text of {min_tokens} tokens under {target.name}'s tokenizer: lower rho or block")
    return found


def _user(name: str, text: str) -> Conversation:
    return Conversation(name, ({"role": "user", "content": text},))


def _ordered(texts: Sequence[str], seed: int) -> list[str]:
    """An order that depends on the texts and the seed alone."""
    return sorted(texts, key=lambda text: hashlib.sha256(f"{seed}:".encode() + text.encode("utf-8", "surrogatepass")).digest())


def _modules() -> list[str]:
    """Modules of the standard library, without what is generated or only names things."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py")))
    return [text for text in texts if len(text) > 2000]


def _foreign(conversation: Conversation) -> bool:
    letters = [c for message in conversation.messages for c in message["content"][:2000] if c.isalpha()]
    return len(letters) > 100 and sum(c > "\u024f" for c in letters) > len(letters) / 2  # beyond the Latin blocks


def _questions(name: str, target: Target, seed: int, max_tokens: int) -> Iterator[Conversation]:
    """Spec-Bench's questions of the corpus' categories, neighbours of one category joined until they fill a prompt."""
    wanted = SPEC_BENCH[name]
    by_category: dict[str, list[str]] = {}
    for conversation in read_conversations(find_source("spec-bench"), "spec-bench"):
        if not wanted or conversation.category in wanted:
            text = _JOIN.join(message["content"] for message in conversation.messages)
            by_category.setdefault(conversation.category, []).append(text)

    def length(text: str) -> int:
        return len(target.tokenizer(text, verbose=False)["input_ids"])

    filled = {category: list(_filled(_ordered(texts, seed), length, max_tokens)) for category, texts in by_category.items()}
    for turn in range(max(map(len, filled.values()))):  # categories take turns
        for category, texts in filled.items():
            if turn < len(texts):
                yield _user(f"{category}-{turn}", texts[turn])


def _filled(texts: Sequence[str], length: Callable[[str], int], max_tokens: int) -> Iterator[str]:
    """Texts joined until the next prompt is full; the last may be shorter."""
    parts: list[str] = []
    tokens = 0
    for text in texts:
        parts.append(text)
        tokens += length(text)
        if tokens >= max_tokens:
            yield _JOIN.join(parts)
            parts, tokens = [], 0
    if parts:
        yield _JOIN.join(parts)

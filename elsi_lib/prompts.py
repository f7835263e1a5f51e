"""Prompts: a file of conversations -> a sample of them -> token ids of one target.

The sample depends on the contents and the seed alone; memory holds the sample and 16 bytes per distinct conversation. How
files are read, and what becomes of each oddity in them, is in :mod:`elsi_lib.conversations`.
"""

import hashlib
import heapq
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from jinja2.exceptions import TemplateError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from elsi_lib.conversations import Conversation, Counts, check_file, merged, read_conversations
from elsi_lib.errors import ElsiError
from elsi_lib.progress import watched

__all__ = [
    "Conversation", "Counts", "Prompt", "encode", "find_source", "load_prompts", "read_conversations",
    "sample_conversations",
]  # fmt: skip

# Templates such as Llama 3.1's print today's date; ids must not depend on the day, so they get the date of that template.
_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"


@dataclass(frozen=True)
class Prompt:
    """Token ids of one conversation for one target; `key` is the conversation's, so it names the text in any target."""

    id: str
    key: str
    ids: tuple[int, ...]
    category: str = ""


def sample_conversations(
    path: str | Path, n: int, seed: int, format: str = "auto", *, progress: bool = True
) -> tuple[list[Conversation], Counts]:
    """The `n` distinct conversations with the smallest sha256(f"{seed}:{key}"), smallest first; fewer if it has fewer.

    A uniform sample without replacement that depends on the set of contents and the seed alone: not on file order, ids,
    duplicates, or JSON against JSONL. Samples are nested: that of n is the start of that of n + 1. Of duplicates the
    smallest id is reported. A progress bar is drawn if stderr is a terminal.

    Raises ElsiError: n < 1, and all of :func:`read_conversations`.
    """
    if n < 1:
        raise ElsiError(f"a sample of {n} conversations of {path}: ask for at least 1")
    path, counts = check_file(path, format), Counts()
    heap: list[tuple[int, str]] = []  # (-hash, key): the largest hash on top
    kept: dict[str, Conversation] = {}
    seen: set[bytes] = set()
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    show = progress and watched()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not show) as bar:
        task = bar.add_task(f"reading {path.name}", total=path.stat().st_size)
        for conversation in read_conversations(path, format, counts, tick=lambda size: bar.advance(task, size)):
            key = conversation.key
            digest = bytes.fromhex(key)[:16]
            if digest in seen:
                counts["duplicates"] += 1
                if key in kept:
                    kept[key] = min(kept[key], conversation, key=lambda c: (c.id, c.category))
                continue
            seen.add(digest)
            rank = -int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest(), "big")
            if len(heap) < n:
                heapq.heappush(heap, (rank, key))
            elif rank > heap[0][0]:
                del kept[heapq.heapreplace(heap, (rank, key))[1]]
            else:
                continue
            kept[key] = conversation
    counts["sampled"] = len(heap)
    return [kept[key] for _, key in sorted(heap, reverse=True)], counts


def _without_system(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """System text put in front of the user turn that follows (a turn of its own if none does)."""
    out, waiting = [], []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user" and waiting:
            out.append({"role": "user", "content": "\n\n".join([*waiting, message["content"]])})
            waiting = []
        else:
            out.append(message)
    return merged([*out, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else out)


def encode(tokenizer, conversation: Conversation, max_tokens: int, counts: Counter | None = None) -> list[int]:
    """Token ids of a whole conversation as the target would see it: at most `max_tokens`, the start is kept.

    With a chat template, the template writes every special token. Neighbouring user turns (Spec-Bench) are merged; a
    template that refuses a system role gets the system text in the user's turn. Without a template (base models) the
    contents are joined by blank lines and the tokenizer adds what it adds to plain text. BOS is never doubled. Templates
    that print today's date get 26 July 2024, so ids do not depend on the day.

    Raises ElsiError: max_tokens < 1; the template refuses the conversation, or cannot render it.
    """
    if max_tokens < 1:
        raise ElsiError(f"max_tokens = {max_tokens}: at least 1")
    counts = Counter() if counts is None else counts
    messages = merged(list(conversation.messages))
    quiet = {"verbose": False}  # no warning for texts longer than the model's window: they are cut below
    if getattr(tokenizer, "chat_template", None):
        attempts = [messages, _without_system(messages)]
        template = tokenizer.chat_template
        dated = {"chat_template": _DATE + template} if isinstance(template, str) and "strftime_now" in template else {}
        for attempt in attempts:
            try:
                out = tokenizer.apply_chat_template(attempt, tokenize=True, tokenizer_kwargs=quiet, **dated)
                break
            except (TemplateError, TypeError, KeyError, ValueError) as err:  # a template is a program: it may also just fail
                if attempt is attempts[-1] or attempts[0] == attempts[1]:
                    raise ElsiError(
                        f"the chat template of {getattr(tokenizer, 'name_or_path', 'the target')} refuses "
                        f"conversation {conversation.id}: {err}".replace("\n", " ")
                    ) from err
        if attempt is not messages:
            counts["system turn merged"] += 1
    else:
        out = tokenizer("\n\n".join(m["content"] for m in messages), **quiet)
    ids = list(out["input_ids"] if hasattr(out, "keys") else out)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and ids[:2] == [bos, bos]:
        del ids[0]
    if len(ids) > max_tokens:
        counts["truncated"] += 1
    return ids[:max_tokens]


def find_source(source: str | Path) -> Path:
    """The file behind a data asset's name or alias ("sharegpt", "ultrachat", "spec-bench"; fetched if needed) or a path.

    Raises ElsiError for a folder or a missing file, naming the data assets; AssetError where an asset cannot be fetched.
    """
    from elsi_lib import assets

    name = str(source).strip().lower()
    name = assets.ALIASES.get(name, name)
    if name in assets.ASSETS and assets.ASSETS[name].kind == "data":
        path = Path(assets.fetch(name))
        if path.is_dir():  # a hub snapshot
            files = sorted(p for p in path.rglob("*") if p.suffix in (".json", ".jsonl") and p.stat().st_size > 0)
            if len(files) != 1:
                raise ElsiError(f"{name}: {len(files)} JSON files in {path}: name one file by its path")
            path = files[0]
        return path
    path = Path(source).expanduser()
    if path.is_file():
        return path
    known = ", ".join(sorted(name for name, asset in assets.ASSETS.items() if asset.kind == "data"))
    problem = f"{source} is a folder: name one file in it" if path.is_dir() else f"no prompt file {source}"
    raise ElsiError(f"{problem}; or one of the data assets: {known}")


def load_prompts(
    source: str | Path,
    n: int,
    seed: int,
    tokenizer,
    max_tokens: int,
    min_tokens: int = 1,
    *,
    format: str = "auto",
    progress: bool = True,
) -> tuple[list[Prompt], Counts]:
    """The first `n` conversations, in the sample's order, that give at least `min_tokens` tokens (after truncation).

    `source` is a data asset's name or a path (:func:`find_source`). A reserve of 3n + 100 conversations is sampled,
    because some are too short; if it does not suffice, one of 16 times that, and if that falls short too, "reserve
    exhausted" is counted. Fewer than `n` is no error: compare ``counts["used"]`` with ``counts["asked"]``.

    Raises ElsiError: nothing usable; min_tokens > max_tokens; and all of :func:`sample_conversations`.
    """
    if n < 1:
        raise ElsiError(f"{n} prompts of {source}: ask for at least 1")
    if not 1 <= min_tokens <= max_tokens:
        raise ElsiError(f"min_tokens = {min_tokens} has to lie between 1 and max_tokens = {max_tokens}")
    path = find_source(source)
    for reserve in (3 * n + 100, 16 * (3 * n + 100)):
        conversations, counts = sample_conversations(path, reserve, seed, format, progress=progress)
        prompts, longest, refusal = [], 0, ""
        for conversation in conversations:
            if len(prompts) == n:
                break
            done: Counter = Counter()
            try:
                ids = encode(tokenizer, conversation, max_tokens, done)
            except ElsiError as err:
                counts["template refused"] += 1
                refusal = f" ({err})"
                continue
            longest = max(longest, len(ids))
            if len(ids) < min_tokens:
                counts["too short"] += 1
                continue
            counts.update(done)
            prompts.append(Prompt(conversation.id, conversation.key, tuple(ids), conversation.category))
        if len(prompts) == n or len(conversations) < reserve:
            break
    else:
        counts["reserve exhausted"] = 1
    counts["asked"], counts["used"] = n, len(prompts)
    if not prompts:
        raise ElsiError(
            f"{source}: none of {counts['sampled']:,} conversations gives min_tokens = {min_tokens} tokens, the longest "
            f"{longest}, {counts['template refused']} refused by the chat template{refusal}: lower min_tokens or name "
            "another source"
        )
    return prompts, counts

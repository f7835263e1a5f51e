"""The target's answers on disk: training data for drafts, and the trajectories from which tau is replayed.

One JSON object per line: first the passport, then a dialogue per line as it is done. Each line carries the hash of itself and of the
line before it, so an edited file is told apart from one that was cut short; a cut is repaired on resuming. The text of a dialogue is
prompt 0, answer 0, prompt 1, answer 1, ... as ids; its id is the key of the noise, and positions count from the start of that text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.progress import track
from elsi_lib.speculative.checkpoint import _SIZES
from elsi_lib.speculative.dialogue import Dialogue, eos_ids, following, opening
from elsi_lib.speculative.draft import target_identity
from elsi_lib.speculative.generate import FINISHES, Answer, Request, context_of, run
from elsi_lib.speculative.noise import check_temperature
from elsi_lib.targets import Target

FORMAT = "elsi-answers-1"
_START = b'{"passport":'
_WINDOW = 8  # batches of dialogues that are sorted by length together


@dataclass(frozen=True)
class Turn:
    """Ids that were appended before the answer, the answer's ids with the one that ended it, and "eos", "length" or "context"."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    finish: str


@dataclass(frozen=True)
class Answered:
    """A dialogue with its answers."""

    id: str
    category: str
    turns: tuple[Turn, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """The whole text."""
        return tuple(i for turn in self.turns for part in (turn.prompt, turn.answer) for i in part)


@dataclass(frozen=True)
class Answers:
    """What a file holds: its passport, the dialogues that are done in the order in which they were asked for, the hash of its last
    line; ``skipped`` names dialogues that were too long."""

    passport: dict[str, Any]
    dialogues: list[Answered]
    sha256: str
    skipped: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every dialogue asked for is done or skipped."""
        return len(self.dialogues) + len(self.skipped) == len(self.passport["ids"])


def record(
    target: Target,
    dialogues: Sequence[Dialogue],
    path: str | Path,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    max_turns: int,
    source: str,
    batch: int = 64,
    capacity: int | None = None,
    skip_long: bool = False,
) -> Answers:
    """Answer dialogues turn by turn, each turn going on from the target's own answers; append each to ``path`` when it is done.

    A file that is there is continued: dialogues in it are not answered again.

    Args:
        dialogues: with distinct ids.
        max_new_tokens: per answer.
        temperature, seed: of the picks.
        max_turns: turns taken of each dialogue.
        source: where the dialogues are from, for the passport.
        batch: slots of the generator; the text does not depend on it (in float32).
        capacity: tokens a dialogue may have; None is the target's limit.
        skip_long: leave out dialogues whose first prompt leaves no room for an answer of ``max_new_tokens``, and end a dialogue before
            a later turn that leaves none; without it such a prompt is an error.

    Raises:
        ElsiError: a prompt that is too long, ids used twice, a file of another target, template, seed, temperature or of other
            dialogues, an edited file.
        AssetError: the file cannot be written.
    """
    passport = _passport(target, dialogues, max_new_tokens, temperature, seed, max_turns, source, capacity, skip_long)
    book = _Book(Path(path), passport, target)
    work = _Work(target, dialogues, book, max_new_tokens, max_turns, batch, context_of(target, capacity), skip_long)
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "batch": batch, "capacity": capacity}
    with book:
        for done in track(f"answers of {target.name}", len(work.waiting))(work.run(options)):
            book.append(done)
    return load_answers(path, target)


def load_answers(path: str | Path, target: Target | None = None) -> Answers:
    """Read a file of answers; a half-written last line is left out.

    Raises:
        ElsiError: no such file, another format, an edited line, answers of another target or template than ``target``.
    """
    passport, lines, digest, _ = _read(Path(path))
    if target is not None:
        _check_target(path, passport, target)
    found = {line["id"]: line for line in lines}
    dialogues = [_answered(found[i], path) for i in passport["ids"] if i in found and found[i]["turns"]]
    skipped = tuple(i for i in passport["ids"] if i in found and not found[i]["turns"])
    return Answers(passport, dialogues, digest, skipped)


def training_texts(answers: Answers) -> list[tuple[Tensor, Tensor]]:
    """Per dialogue its ids (T,) int32 and the loss mask (T,) bool, true on the answers' ids."""
    texts = []
    for dialogue in answers.dialogues:
        mask = [inside for turn in dialogue.turns for inside in [False] * len(turn.prompt) + [True] * len(turn.answer)]
        texts.append((torch.tensor(dialogue.ids, dtype=torch.int32), torch.tensor(mask)))
    return texts


def template_hash(target: Target) -> str | None:
    """sha256 of the chat template; None for a target without one."""
    template = getattr(target.tokenizer, "chat_template", None)
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest() if template else None


class _Work:
    """Dialogues still to be answered, in an order that puts prompts of similar length side by side."""

    def __init__(
        self,
        target: Target,
        dialogues: Sequence[Dialogue],
        book: _Book,
        max_new_tokens: int,
        max_turns: int,
        batch: int,
        context: int | None,
        skip_long: bool,
    ) -> None:
        self.target, self.max_turns, self.skip_long, self.book = target, max_turns, skip_long, book
        self.limit = math.inf if context is None else context - max_new_tokens
        self.by_id = {d.id: d for d in dialogues}
        left = [(d.id, tuple(opening(target.tokenizer, d.turns[0]))) for d in dialogues if d.id not in book.done]
        kept = [(i, ids) for i, ids in left if self._fits(i, 0, len(ids))]
        self.skipped = [i for i, ids in left if len(ids) > self.limit]
        size = _WINDOW * batch
        windows = [sorted(kept[k : k + size], key=lambda item: -len(item[1])) for k in range(0, len(kept), size)]
        self.waiting = deque(item for window in windows for item in window)
        self.turns: dict[str, list[Turn]] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.texts: dict[str, tuple[int, ...]] = {}

    def run(self, options: dict[str, Any]) -> Iterator[Answered]:
        """Dialogues as they are done."""
        for name in self.skipped:
            yield Answered(name, self.by_id[name].category, ())
        urgent: deque[str] = deque()

        def pull() -> Request | None:
            if urgent:
                return Request(name := urgent.pop(), self.texts[name])
            if not self.waiting:
                return None
            name, ids = self.waiting.popleft()
            self.turns[name], self.prompts[name], self.texts[name] = [], ids, ids
            return Request(name, ids)

        for name, answer in run(self.target, pull, **options):
            if self._goes_on(name, answer):
                urgent.append(name)
            else:
                yield Answered(name, self.by_id[name].category, tuple(self.turns.pop(name)))
                del self.prompts[name], self.texts[name]

    def _goes_on(self, name: str, answer: Answer) -> bool:
        """Take down an answer, and prepare the next prompt if there is one."""
        turns, asked = self.turns[name], self.by_id[name].turns[: self.max_turns]
        turns.append(Turn(self.prompts[name], answer.ids, answer.finish))
        if len(turns) == len(asked):
            return False
        prompt = tuple(following(self.target.tokenizer, answer.ids, asked[len(turns)]))
        text = self.texts[name] + answer.ids + prompt
        self.prompts[name], self.texts[name] = prompt, text
        return self._fits(name, len(turns), len(text))

    def _fits(self, name: str, turn: int, length: int) -> bool:
        if length > self.limit and not self.skip_long:
            raise ElsiError(
                f"dialogue {name}: {length} tokens up to turn {turn + 1}, at most {self.limit} leave room for the answer in the "
                f"context of {self.target.name}: leave it out, lower max_new_tokens, or skip long dialogues"
            )
        return length <= self.limit


class _Book:
    """The file, open for appending inside ``with``."""

    def __init__(self, path: Path, passport: dict[str, Any], target: Target) -> None:
        self.path, self.passport, self.file = path, passport, None
        self.done: set[str] = set()
        self.digest, self.size = "", 0
        if self._begun():
            found, lines, self.digest, self.size = _read(path)
            _check_target(path, found, target, ("dtype",))
            for name in passport:
                if name != "target" and found.get(name) != passport[name]:
                    shown = "" if isinstance(passport[name], list) else f" ({found.get(name)}, asked for {passport[name]})"
                    raise ElsiError(f"{path} was recorded with other {name}{shown}: name another file, or ask for the same")
            self.done = {line["id"] for line in lines}

    def _begun(self) -> bool:
        """Whether the file has its first line; a part of one is left for the new one to replace, anything else is not ours."""
        try:
            with self.path.open("rb") as file:
                first = file.readline()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._failure(error) from error
        if not first.endswith(b"\n") and first[: len(_START)] != _START[: len(first)]:
            raise ElsiError(f"{self.path} is not a file of recorded answers: name another one")
        return first.endswith(b"\n")

    def __enter__(self) -> _Book:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("ab")
            self.file.truncate(self.size)
            if not self.size:
                self._write({"passport": self.passport})
        except OSError as error:
            raise self._failure(error) from error
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    def append(self, done: Answered) -> None:
        """Write one dialogue."""
        turns = [{"prompt": list(t.prompt), "answer": list(t.answer), "finish": t.finish} for t in done.turns]
        try:
            self._write({"id": done.id, "category": done.category, "turns": turns})
        except OSError as error:
            raise self._failure(error) from error

    def _write(self, content: dict[str, Any]) -> None:
        self.digest = _chained(self.digest, content)
        line = json.dumps(content | {"sha256": self.digest}, separators=(",", ":")) + "\n"
        self.file.write(line.encode())
        self.file.flush()

    def _failure(self, error: OSError) -> AssetError:
        return AssetError(f"{self.path} cannot be written ({error.strerror}): check permissions and the space on the disk")


def _passport(
    target: Target,
    dialogues: Sequence[Dialogue],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    max_turns: int,
    source: str,
    capacity: int | None,
    skip_long: bool,
) -> dict[str, Any]:
    if max_turns < 1 or max_new_tokens < 1:
        raise ElsiError(f"max_turns = {max_turns}, max_new_tokens = {max_new_tokens}: both are at least 1")
    if target.tokenizer is None:
        raise ElsiError(f"{target.name} has no tokenizer: its prompts cannot be encoded")
    ids = [d.id for d in dialogues]
    if not ids or len(set(ids)) < len(ids):
        twice = next((i for i in ids if ids.count(i) > 1), None)
        raise ElsiError(f"dialogue {twice} is there twice: ids name the texts" if twice else "no dialogue to answer")
    if empty := [d.id for d in dialogues if not d.turns]:
        raise ElsiError(f"dialogue {empty[0]} has no turn")
    content = json.dumps([[d.id, d.category, d.turns[:max_turns]] for d in dialogues], sort_keys=True)
    passport = {
        "format": FORMAT,
        "target": target_identity(target),
        "template_sha256": template_hash(target),
        "eos_ids": sorted(eos_ids(target)),
        "temperature": check_temperature(temperature),
        "seed": int(seed),
        "max_new_tokens": max_new_tokens,
        "max_turns": max_turns,
        "capacity": capacity,
        "skip_long": skip_long,
        "source": source,
        "dialogues_sha256": hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest(),
        "ids": ids,
    }
    return json.loads(json.dumps(passport))


def _chained(before: str, content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], str, int]:
    """Passport, lines, hash of the last whole line, and the size in bytes up to its end."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ElsiError(f"no answers at {path} ({error.strerror}): record them first") from error
    whole = raw[: raw.rfind(b"\n") + 1]
    digest, passport, lines = "", None, []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            content = json.loads(line)
            stated = content.pop("sha256")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ElsiError(f"line {number} of {path} is not a line of recorded answers, or is damaged: record them again") from error
        if number == 1 and content.get("passport", {}).get("format") != FORMAT:
            raise ElsiError(f"{path} is not of format {FORMAT!r}: another version wrote it, or something else")
        digest = _chained(digest, content)
        if digest != stated:
            raise ElsiError(f"line {number} of {path} was edited, or one before it taken out: its hash does not fit; record it again")
        if passport is None:
            passport = content["passport"]
        else:
            lines.append(content)
    if passport is None:
        raise ElsiError(f"{path} holds no recorded answers: the writing was cut short; record them again")
    return passport, lines, digest, len(whole)


def _answered(line: dict[str, Any], path: str | Path) -> Answered:
    turns = tuple(Turn(tuple(t["prompt"]), tuple(t["answer"]), t["finish"]) for t in line["turns"])
    if any(turn.finish not in FINISHES for turn in turns):
        raise ElsiError(f"dialogue {line['id']} of {path} ended in an unknown way: another version wrote it")
    return Answered(line["id"], line["category"], turns)


def _check_target(path: str | Path, passport: dict[str, Any], target: Target, also: Sequence[str] = ()) -> None:
    recorded, given = passport["target"], target_identity(target)
    different = [name for name in (*_SIZES, *also) if recorded.get(name) != given[name]]
    if recorded.get("revision") and given["revision"] and recorded["revision"] != given["revision"]:
        different.append("revision")
    norms = (torch.tensor(identity["embedding_norms"]) for identity in (recorded, given))
    if not different and not torch.isclose(*norms, rtol=0.01, atol=1e-6).all():
        different.append("embedding_norms")
    if different:
        name = different[0]
        raise ElsiError(
            f"{path} holds answers of target {recorded.get('name')}, not of {target.name} ({name} {recorded.get(name)} against "
            f"{given[name]}): load that target, or record answers of this one"
        )
    if passport["template_sha256"] != template_hash(target):
        raise ElsiError(f"{path} was recorded with another chat template than {target.name} has now: record it again")

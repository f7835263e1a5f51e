"""Live decoding of a few questions: seconds beside the target alone and beside prompt lookup, and the memory that each takes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from elsi_lib.errors import AssetError
from elsi_lib.files import Lines
from elsi_lib.progress import track
from elsi_lib.speculative.answers import Answered
from elsi_lib.speculative.checkpoint import load_draft, weights_hash
from elsi_lib.speculative.decode import Decoder
from elsi_lib.speculative.packing import packed
from elsi_lib.speculative.replay import PROMPT_LOOKUP
from elsi_lib.targets import Target, load_target

TREES = ({"nodes": 8, "depth": 2, "top_k": 4}, {"nodes": 60})  # one that suits few cores, and EAGLE's
_MEMORY = "memory"


def decode_live(
    target: Target,
    drafts: Mapping[str, Path],
    dialogues: Sequence[Answered],
    path: Path,
    *,
    named: str,
    max_new_tokens: int,
    seed: int = 0,
) -> pd.DataFrame:
    """Seconds of live decoding of first turns at T = 0: the target alone, prompt lookup, and each draft with each of ``TREES``, one
    after the other on each question, so that a slow minute of the machine meets all of them; and the memory that each takes.

    Args:
        drafts: name of the row -> folder of its draft.
        dialogues: the questions; only their first prompts are read.
        path: a line for each question is kept there as it is done, and a later call goes on from it.
        named: the target as :func:`~elsi_lib.targets.load_target` takes it, for the processes that measure memory.
        max_new_tokens: of each answer.

    Returns:
        Columns question_id, category, method, nodes, temperature, tokens, steps, seconds, peak_mb.

    Raises:
        ElsiError: ``path`` holds results of other drafts, questions or lengths.
        AssetError: the process that measures memory failed.
    """
    ways: list[tuple[str, Any, dict[str, int]]] = [("plain", None, {}), (PROMPT_LOOKUP, PROMPT_LOOKUP, {})]
    read = {name: load_draft(folder, target).to(target.dtype) for name, folder in drafts.items()}
    ways += [(name, draft, tree) for tree in TREES for name, draft in read.items()]
    options = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "seed": seed}
    key = {
        "drafts": {name: weights_hash(draft) for name, draft in read.items()}, "questions": [a.id for a in dialogues],
        "trees": list(TREES), **options,
    }  # fmt: skip
    book = Lines(path, key)
    left = [answered for answered in dialogues if answered.id not in book.done]
    with packed(target):
        for answered in track("live decoding", len(left))(left):
            rows = []
            for method, draft, tree in ways:
                done = Decoder(target, draft, **tree).decode(answered.turns[0].prompt, question=answered.id, **options)
                rows.append({
                    "question_id": answered.id, "category": answered.category, "method": method, "nodes": tree.get("nodes", 0),
                    "temperature": 0.0, "tokens": len(done.ids), "steps": len(done.steps), "seconds": done.seconds,
                })  # fmt: skip
            book.add(answered.id, rows)
    if _MEMORY not in book.done:
        longest = max((answered.turns[0].prompt for answered in dialogues), key=len)
        sources = [drafts.get(method, draft) for method, draft, _ in ways]
        peaks = [peak_memory(named, source, tree, longest, options) for source, (*_, tree) in zip(sources, ways, strict=True)]
        found = zip(ways, peaks, strict=True)
        book.add(_MEMORY, [{"method": m, "nodes": tree.get("nodes", 0), "peak_mb": peak} for (m, _, tree), peak in found])
    rows = pd.DataFrame([row for name, rows in book.done.items() if name != _MEMORY for row in rows])
    return rows.merge(pd.DataFrame(book.done[_MEMORY]), on=["method", "nodes"])


def peak_memory(target: str, draft: Path | str | None, tree: dict[str, int], ids: Sequence[int], options: dict[str, Any]) -> float:
    """The most memory, in MB, that a process of its own holds which loads the target and one draft and decodes one question: of the
    device where there is one, else resident memory, the libraries' code included.

    Args:
        target: as :func:`~elsi_lib.targets.load_target` takes it.
        draft: a draft's folder, or what else :class:`~elsi_lib.speculative.decode.Decoder` takes for one.
        tree, options: of the decoder, and of its ``decode``.
        ids: the prompt.

    Raises:
        AssetError: that process failed.
    """
    told = {"target": target, "folder": None, "draft": draft, "tree": tree, "ids": list(ids), "options": options}
    if isinstance(draft, Path):
        told |= {"folder": str(draft), "draft": None}
    done = subprocess.run([sys.executable, "-m", __name__], input=json.dumps(told), capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise AssetError(f"the process that measures memory failed: {last}")
    return float(done.stdout.split()[-1])


def _decode_alone(
    target: str, folder: str | None, draft: str | None, tree: dict[str, int], ids: list[int], options: dict[str, Any]
) -> float:
    loaded = load_target(target, progress=False)
    source = load_draft(folder, loaded).to(loaded.dtype) if folder else draft
    Decoder(loaded, source, **tree).decode(ids, question="memory", **options)
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status")
    if status.is_file():  # the kernel's other count, ru_maxrss, starts from what the parent held
        return next(int(line.split()[1]) * 1024 / 1e6 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


if __name__ == "__main__":
    print(_decode_alone(**json.load(sys.stdin)))

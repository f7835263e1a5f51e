"""What a training run will take, expected from a short trial of each stage."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from elsi_lib.errors import ElsiError
from elsi_lib.settings import Settings
from elsi_lib.speculative.dialogue import opening, sharegpt_dialogues
from elsi_lib.speculative.distill import Text, batches, train
from elsi_lib.speculative.draft import Draft
from elsi_lib.speculative.generate import Request, generate
from elsi_lib.speculative.grid import Row
from elsi_lib.speculative.vocabulary import DraftVocabulary
from elsi_lib.study import BATCH, PROMPT_TOKENS, recipe_of
from elsi_lib.targets import Target

_TRIAL = 4  # tokens of an answer that a plan tries
_BYTES = 4 * 4 + 2 * 2  # of a parameter in training: weight, gradient and two moments in float32; copy and gradient in bfloat16


@dataclass(frozen=True)
class Plan:
    """What a training run will take: tokens of prompts and at most of answers, steps of the optimiser, bytes of memory, seconds."""

    drafts: int
    prompts: int
    prompt_tokens: int
    answer_tokens: int
    steps: int
    parameters: int
    memory: int
    seconds_answers: float
    seconds_training: float


def plan_training(target: Target, settings: Settings, rows: Sequence[Row]) -> Plan:
    """Expect a run from a short trial of each stage; answers are taken at their full length, so it is an upper bound.

    Answers that an earlier run left in the cache are not counted out.
    """
    limit = settings.size("answer_tokens")
    dialogues = sharegpt_dialogues(settings.prompts, settings.size("dialogues"), settings.seed, 1)
    prompts = [tuple(opening(target.tokenizer, dialogue.turns[0])) for dialogue in dialogues]
    prompts = [ids for ids in prompts if len(ids) <= PROMPT_TOKENS]
    if not prompts:
        raise ElsiError(f"{settings.prompts}: no prompt of at most {PROMPT_TOKENS} tokens")
    lengths = [len(ids) + limit for ids in prompts]
    recipe = recipe_of(settings)

    trial = [Request(str(i), ids) for i, ids in enumerate(prompts[:BATCH])]
    few = min(_TRIAL, limit)
    start = time.monotonic()
    written = list(generate(target, trial, max_new_tokens=few, temperature=1.0, seed=settings.seed, batch=BATCH))
    answers = (time.monotonic() - start) / len(trial) / few * limit * len(prompts)

    ids = torch.tensor([*prompts[0], *next(a.ids for key, a in written if key == "0"), *prompts[0]][: recipe.batch_tokens])
    text = (ids.int(), torch.ones(len(ids), dtype=torch.bool))
    vocabulary = DraftVocabulary(torch.arange(min(settings.size("draft_vocabulary"), target.vocab_size)), target.vocab_size)
    seconds, parameters = trial_seconds(target, settings, rows, vocabulary, text)
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    return Plan(
        drafts=len({row.draft for row in rows}),
        prompts=len(prompts),
        prompt_tokens=sum(map(len, prompts)),
        answer_tokens=limit * len(prompts),
        steps=len(batches(lengths, recipe)),
        parameters=parameters,
        memory=weights + parameters * _BYTES,
        seconds_answers=answers,
        seconds_training=seconds / len(ids) * sum(lengths) * recipe.epochs,
    )


def trial_seconds(
    target: Target, settings: Settings, rows: Sequence[Row], vocabulary: DraftVocabulary, text: Text
) -> tuple[float, int]:
    """Seconds of one step of a training run on one text, and the parameters of all its drafts."""
    made = {row.draft: Draft.for_target(target, row.layers, vocabulary, norm_before_fc=row.norm_before_fc) for row in rows}
    marks: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        recipe = replace(recipe_of(settings), epochs=3)
        train(target, made, [text], recipe, scratch, watch=lambda *_: marks.append(time.monotonic()), report_every=1000)
    return marks[-1] - marks[-2], sum(p.numel() for draft in made.values() for p in draft.parameters())

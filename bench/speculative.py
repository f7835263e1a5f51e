"""Speed of drafts, each as a ratio measured side by side in one run: `make bench`.

(d) eight drafts trained together against one after the other;                         goal: at least 2 times faster
(e) share of matrix products in the time of a training step;                           goal: at least half
(f) the library's generator against generate() of transformers at the same batch;      goal: at least 4 times the tokens/s:
    answers all of one length, so that neither side waits, and ShareGPT prompts as a study has them answered;
(g) replay of a draft on recorded answers against decoding them live;                  goal: at least 20 times cheaper
(h) live decoding with a draft against the target alone and prompt lookup;             goal: faster than both

(g) and (h) need a trained draft: `--draft FOLDER`; without one they say so. Numbers, not a test.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from elsi_lib.live import TREES
from elsi_lib.settings import Settings
from elsi_lib.speculative.answers import Answers, load_answers, record, training_texts
from elsi_lib.speculative.checkpoint import load_draft
from elsi_lib.speculative.decode import Decoder
from elsi_lib.speculative.dialogue import Dialogue, eos_ids, opening, own_dialogues, sharegpt_dialogues
from elsi_lib.speculative.distill import Recipe, TargetPass, Text, gather, loss_positions, train, training_time_test
from elsi_lib.speculative.draft import Draft
from elsi_lib.speculative.generate import Request, generate
from elsi_lib.speculative.packing import packed
from elsi_lib.speculative.replay import PROMPT_LOOKUP, replay
from elsi_lib.speculative.vocabulary import DraftVocabulary
from elsi_lib.study import BATCH, PROMPT_TOKENS, TEMPERATURES
from elsi_lib.targets import Target, load_target

MATRIX = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product_flash_attention_for_cpu")
NODES = (30, 60)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def spread(ratios: list[float]) -> str:
    return f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def drafts_of(target: Target, count: int) -> dict[str, Draft]:
    """Drafts of triples spread over the target, with a draft vocabulary of 8,192 ids or all."""
    size = min(8192, target.vocab_size)
    vocabulary = DraftVocabulary(torch.arange(size), target.vocab_size)
    N = target.num_layers
    sets = [(i, i + N // 3, i + 2 * N // 3) for i in range(count)]
    return {str(i): Draft.for_target(target, layers, vocabulary) for i, layers in enumerate(sets)}


def bench_training(target: Target, texts: list[Text], recipe: Recipe, count: int, repeats: int) -> None:
    """Whole runs, checkpoints and all; the two ways take turns, so that a slow spell falls on both."""
    ratios, tokens = [], sum(len(ids) for ids, _ in texts)
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as scratch:
            places = (Path(scratch) / str(i) for i in range(count + 1))
            together = seconds(lambda p=places: train(target, drafts_of(target, count), texts, recipe, next(p)))
            made = drafts_of(target, count)
            alone = 0.0
            for name, draft in made.items():
                alone += seconds(lambda p=places, one={name: draft}: train(target, one, texts, recipe, next(p)))
        ratios.append(alone / together)
    print(f"(d) {count} drafts, {tokens:,} tokens, {recipe.steps} steps of the training-time test, {torch.get_num_threads()} threads")
    print(f"    together {tokens / together:,.0f} tokens/s; one after the other / together {spread(ratios)}; goal at least 2")


def bench_products(target: Target, texts: list[Text], recipe: Recipe) -> None:
    draft = drafts_of(target, 1)["0"]
    totals = [sum(c) for c in zip(*(loss_positions(mask, recipe.steps) for _, mask in texts), strict=True)]
    working = draft.to(target.dtype)
    batch = gather(TargetPass(target, draft.config.layers, draft.vocabulary), texts, totals, recipe, target.dtype)

    def step() -> None:
        training_time_test(working, batch)[0].backward()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step()
    events = trace.key_averages()
    products = sum(e.self_cpu_time_total for e in events if e.key.removesuffix("_backward") in MATRIX)
    print(f"(e) matrix products {products / sum(e.self_cpu_time_total for e in events):.2f} of a training step; goal at least 0.5")


def bench_generation(target: Target, dialogues: list[Dialogue], batch: int, new_tokens: int, repeats: int) -> None:
    """Greedy, the same prompts, all answers of the same length: neither side may stop at the end of a text."""
    prompts = [opening(target.tokenizer, d.turns[0]) for d in dialogues]
    prompts = sorted((prompts * (batch // len(prompts) + 1))[:batch], key=len)
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    ratios = []
    for _ in range(repeats):
        theirs = transformers_rate(target, prompts, batch, options)
        ours = own_rate(target, prompts, batch, new_tokens, 0.0)
        ratios.append(ours / theirs)
    print(f"(f) batch {batch}, prompts of up to {len(prompts[-1])} tokens, {new_tokens} new ones: {ours:,.0f} tokens/s")
    print(f"    against generate() of transformers, {theirs:,.0f} tokens/s: {spread(ratios)}; goal at least 4")


def bench_regeneration(target: Target, batch: int, batches: int) -> None:
    """A study's own work: ShareGPT prompts, answers that end where the target ends them or at the preset's limit."""
    settings = Settings()
    limit = settings.size("answer_tokens")
    found = sharegpt_dialogues(settings.prompts, 2 * batches * batch, settings.seed, 1)
    prompts = [ids for d in found if len(ids := opening(target.tokenizer, d.turns[0])) <= PROMPT_TOKENS][: batches * batch]
    prompts = sorted(prompts, key=len)  # least padding: the kindest order for generate(), and the library's own
    for temperature in TEMPERATURES:
        options: dict = {"max_new_tokens": limit, "do_sample": False}
        if temperature:
            options |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        theirs = transformers_rate(target, prompts, batch, options)
        ours = own_rate(target, prompts, batch, limit, temperature)
        print(f"    {len(prompts)} ShareGPT prompts, at most {limit} new tokens, T = {temperature:g}: {ours:,.0f} tokens/s")
        print(f"    against generate(), {theirs:,.0f} tokens/s: {ours / theirs:.2f}; goal at least 4")


def transformers_rate(target: Target, prompts: list[list[int]], batch: int, options: dict) -> float:
    """Tokens per second of generate(), batch after batch, padded on the left; what follows the end of an answer does not count."""
    ends = eos_ids(target)
    pad, count = min(ends), 0
    start = time.perf_counter()
    for i in range(0, len(prompts), batch):
        part = prompts[i : i + batch]
        longest = max(map(len, part))
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in part])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part])
        whole = target.model.generate(input_ids=ids, attention_mask=mask, pad_token_id=pad, eos_token_id=sorted(ends), **options)
        written = whole[:, longest:].tolist()
        count += sum(next((j + 1 for j, t in enumerate(row) if t in ends), len(row)) for row in written)
    return count / (time.perf_counter() - start)


def own_rate(target: Target, prompts: list[list[int]], batch: int, new_tokens: int, temperature: float) -> float:
    requests = [Request(str(i), tuple(p)) for i, p in enumerate(prompts)]
    start = time.perf_counter()
    written = generate(target, requests, max_new_tokens=new_tokens, temperature=temperature, seed=0, batch=batch)
    count = sum(len(answer.ids) for _, answer in written)
    return count / (time.perf_counter() - start)


def bench_replay(target: Target, draft: Draft, answers: Answers) -> None:
    """Both tree sizes from one replay, as the study has it; live, each size is a decoding of its own."""
    tokens = sum(len(turn.answer) for a in answers.dialogues for turn in a.turns[:1])
    first = [type(a)(a.id, a.category, a.turns[:1]) for a in answers.dialogues]
    length = answers.passport["max_new_tokens"]
    replayed = seconds(lambda: [replay(target, {"draft": draft}, a, NODES) for a in first])
    live = 0.0
    for nodes in NODES:
        decoder = Decoder(target, draft, nodes=nodes)
        for a in first:
            live += decoder.decode(a.turns[0].prompt, max_new_tokens=length, temperature=0.0, seed=0, question=a.id).seconds
    print(f"(g) {len(first)} answers of {tokens:,} tokens, nodes {NODES}: replay {replayed:.1f} s, live {live:.1f} s")
    print(f"    live / replay {live / replayed:.1f} for one draft, whose replay pays the target's whole pass; goal for the grid: 20")


def bench_live(target: Target, draft: Draft, answers: Answers) -> None:
    """Question by question, all ways in turn; speed-up is the mean over questions, as in Spec-Bench."""
    ways: dict[str, tuple] = {"plain": (None, {}), PROMPT_LOOKUP: (PROMPT_LOOKUP, {})}
    ways |= {f"draft, {tree['nodes']} nodes": (draft, tree) for tree in TREES}
    decoders = {name: Decoder(target, source, **tree) for name, (source, tree) in ways.items()}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    length = answers.passport["max_new_tokens"]
    with packed(target):
        for a in answers.dialogues:
            for name, decoder in decoders.items():
                done = decoder.decode(a.turns[0].prompt, max_new_tokens=length, temperature=0.0, seed=0, question=a.id)
                rates[name].append(len(done.ids) / done.seconds)
    plain = np.array(rates["plain"])
    print(f"(h) {len(plain)} prompts live, T = 0: the target alone {plain.mean():.1f} tokens/s; goal above 1 and prompt lookup")
    for name in list(ways)[1:]:
        print(f"    {name} / plain {np.mean(np.array(rates[name]) / plain):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices="defgh", help="one of the five")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--draft", type=Path, help="a trained draft of the target, for (g) and (h)")
    parser.add_argument("--prompts", type=int, default=13, help="of our own prompts, for answers to train and to decode")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    wanted = options.only or "defgh"
    target, dialogues = load_target(options.target), own_dialogues()[:: max(1, 81 // options.prompts)]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "answers.jsonl"
        record(target, dialogues, path, max_new_tokens=96, temperature=0.0, seed=0, max_turns=1, source="own prompts")
        answers = load_answers(path, target)
    texts, recipe = training_texts(answers), Recipe(steps=3, batch_tokens=512)
    if "d" in wanted:
        bench_training(target, texts, recipe, 8, options.repeats)
    if "e" in wanted:
        bench_products(target, texts[:6], recipe)
    if "f" in wanted:
        bench_generation(target, dialogues, BATCH, 64, options.repeats)
        bench_regeneration(target, BATCH, 2)
    if not options.draft:
        print("(g), (h) not measured: they need a trained draft, --draft FOLDER")
        return
    draft = load_draft(options.draft, target).to(target.dtype)
    if "g" in wanted:
        bench_replay(target, draft, answers)
    if "h" in wanted:
        bench_live(target, draft, answers)


if __name__ == "__main__":
    main()

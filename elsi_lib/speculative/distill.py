"""Distillation: many drafts learn from one pass of the target over each text (EAGLE-3's training-time test).

Row t has the target's states of token t and the embedding of token t + 1, and is taught the target's distribution after token t + 1.
Step k shifts embeddings and distributions k further on; the hidden state is then the draft's own, of step k - 1. Every text is run
unpadded. Each draft has its own weights, gradients and optimiser, so a draft trained in company is the draft trained alone.

Several processes (``accelerate launch``) share the texts of each batch and add up their gradients; all hold the same weights.
"""

from __future__ import annotations

import copy
import csv
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor

from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.files import replaced
from elsi_lib.fingerprint import read_tensors, write_tensors
from elsi_lib.loading import DTYPES
from elsi_lib.speculative.attention import Span, attend, spans
from elsi_lib.speculative.checkpoint import save_draft
from elsi_lib.speculative.draft import Draft, target_identity
from elsi_lib.speculative.loss import soft_cross_entropy
from elsi_lib.speculative.vocabulary import DraftVocabulary
from elsi_lib.targets import Target

STATE = "elsi-training-1"
CURVE = "training.csv"
Text = tuple[Tensor, Tensor]  # token ids (T,), and whether each is one to learn (T,)


@dataclass(frozen=True)
class Recipe:
    """How drafts are trained. EAGLE-3's values are in brackets where ours differ.

    Raises:
        ElsiError: a value out of range.
    """

    steps: int = 4  # of the training-time test [7]
    decay: float = 0.8  # weight of step k's loss: decay^k
    epochs: int = 1  # [40]
    batch_tokens: int = 2048  # texts are gathered up to so many tokens for one step of the optimiser
    learning_rate: float = 1e-3  # at its height [5e-5]; from there a cosine down to 0
    warmup: float = 0.03  # share of the steps in which it rises
    clip: float = 0.5  # norm of a draft's gradient
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    seed: int = 0  # of the order of the texts
    dtype: str = "auto"  # of the matrix products: bfloat16 where the target has it, else float32; weights are kept in float32

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ElsiError(f"{name} = {getattr(self, name)} of a training run: at least 1")
        for name in ("learning_rate", "clip", "decay"):
            if not 0 < getattr(self, name) < math.inf:
                raise ElsiError(f"{name} = {getattr(self, name)} of a training run: a number above 0")
        if not 0 <= self.warmup < 1:
            raise ElsiError(f"warmup = {self.warmup} of a training run: a share of its steps, from 0 to below 1")
        if self.dtype not in ("auto", *DTYPES):
            raise ElsiError(f"dtype {self.dtype!r} of a training run: auto, {', '.join(DTYPES)}")

    def rate(self, step: int, total: int) -> float:
        """Learning rate of step 0 .. total - 1."""
        rising = max(1, round(self.warmup * total))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


def batches(lengths: Sequence[int], recipe: Recipe) -> list[list[int]]:
    """Texts of each step of the optimiser, all epochs; a new order in each epoch, that depends on seed and epoch alone."""
    found: list[list[int]] = []
    for epoch in range(recipe.epochs):
        generator = torch.Generator().manual_seed(recipe.seed * 100_003 + epoch)
        batch: list[int] = []
        for i in torch.randperm(len(lengths), generator=generator).tolist():
            if batch and sum(lengths[j] for j in batch) + lengths[i] > recipe.batch_tokens:
                found.append(batch)
                batch = []
            batch.append(i)
        found.append(batch)
    return found


# What the target gives


class TargetPass:
    """States of some layers, and the target's distribution over a draft vocabulary, from one pass over a text.

    Only the rows of the head that the draft vocabulary keeps are computed where that gives the model's own logits, which is tried
    once; models that do more after the head than cap it go the long way over the whole vocabulary.
    """

    def __init__(self, target: Target, layers: Sequence[int], vocabulary: DraftVocabulary) -> None:
        self.target, self.layers, self.ids = target, tuple(layers), vocabulary.ids.to(target.device)
        model, config = target.model, target.model.config.get_text_config()
        self.cap = getattr(config, "final_logit_softcapping", None)
        head = model.get_output_embeddings()
        self.weight = head.weight[self.ids]
        self.bias = None if getattr(head, "bias", None) is None else head.bias[self.ids]
        self.short = True
        probe = torch.arange(8, device=target.device) % target.vocab_size
        with torch.inference_mode():
            full = model(input_ids=probe[None], use_cache=False).logits[0][:, self.ids].float()
            own = self._logits(model.get_decoder()(input_ids=probe[None], use_cache=False).last_hidden_state[0]).float()
            self.short = bool((full - own).abs().max() <= 0.02 * full.abs().max())

    def __call__(self, ids: Tensor, rows: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """Token ids (T,) and the positions (n,) wanted -> states {layer: (T, H)}, and (n, D) probabilities after these positions."""
        ids = self.target._checked(ids)
        states: dict[int, Tensor] = {}

        def tap(j: int) -> Callable:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                states[j] = (output[0] if isinstance(output, tuple) else output)[0]

            return hook

        handles = [self.target.blocks[j].register_forward_hook(tap(j)) for j in self.layers]
        try:
            with torch.inference_mode():
                if self.short:
                    hidden = self.target.model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
                    logits = self._logits(hidden[rows])
                else:
                    logits = self.target.model(input_ids=ids[None], use_cache=False).logits[0][rows][:, self.ids]
                return states, logits.softmax(-1, dtype=torch.float32).to(logits.dtype)
        finally:
            for handle in handles:
                handle.remove()

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        return logits if not self.cap else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True, eq=False)
class Batch:
    """What all drafts share. R rows of all texts, A of them with loss at step 0; lists have one entry per step.

    Attributes: ``states`` {layer: (R, H)}; ``tokens`` and ``positions``, (R,) at step 0 and (A,) later; ``active`` (A,) rows;
    ``index`` (A,) rows of ``targets``; ``weight`` (A,) float32, of each row's loss; ``counts`` rows with loss; ``targets`` (n, D);
    ``texts`` for the attention.
    """

    states: dict[int, Tensor]
    tokens: list[Tensor]
    positions: list[Tensor]
    active: Tensor
    index: list[Tensor]
    weight: list[Tensor]
    counts: list[int]
    targets: Tensor
    texts: list[Span]


def loss_positions(mask: Tensor, steps: int) -> list[int]:
    """Rows of a text with loss at each step: row t of step k predicts token t + 2 + k; it and token t + 2 have to be ones to learn."""
    learn = mask[2:]
    return [int((learn[: len(learn) - k] & learn[k:]).sum()) if k < len(learn) else 0 for k in range(steps)]


def gather(source: TargetPass, texts: Sequence[Text], totals: Sequence[int], recipe: Recipe, dtype: torch.dtype) -> Batch:
    """Run the target over texts and lay out what the drafts need.

    Args:
        totals: rows with loss per step, in the whole batch (of all processes): the loss is a mean over them.
    """
    device, states, targets = source.target.device, [], []
    parts: list[list[list[Tensor]]] = [[[] for _ in range(recipe.steps)] for _ in range(4)]
    tokens, positions, index, weight = parts
    active, lengths, rows, known = [], [], 0, 0
    for ids, mask in texts:
        T, learn = len(ids), mask.clone()
        learn[:2] = False
        at = learn.nonzero()[:, 0]  # tokens to learn; the target's distribution for token j stands at position j - 1
        found, p = source(ids, at - 1)
        states.append({j: state[: T - 1] for j, state in found.items()})
        targets.append(p)
        place = torch.zeros(T, dtype=torch.long).index_put((at,), torch.arange(len(at)) + known)
        for k in range(recipe.steps):
            last = at + k
            fine = (last < T) & learn[last.clamp(max=T - 1)]
            last = last.clamp(max=T - 1)
            embedded = torch.arange(1, T) if k == 0 else last - 1
            tokens[k].append(ids[embedded].long())
            positions[k].append(torch.arange(T - 1) if k == 0 else at - 2 + k)
            index[k].append(place[last])
            weight[k].append(fine.float() * (recipe.decay**k / max(1, totals[k])))
        active.append(at - 2)
        lengths.append(T - 1)
        rows, known = rows + T - 1, known + len(at)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    together = [[torch.cat(step).to(device) for step in part] for part in parts]
    return Batch(
        states={j: torch.cat([found[j] for found in states]).to(dtype) for j in source.layers},
        tokens=together[0],
        positions=together[1],
        active=torch.cat([rows + start for rows, start in zip(active, starts, strict=True)]).to(device),
        index=together[2],
        weight=together[3],
        counts=[int((w > 0).sum()) for w in together[3]],
        targets=torch.cat(targets).to(dtype),
        texts=spans(lengths, active, dtype, device),
    )


def training_time_test(draft: Draft, batch: Batch, stats: bool = False) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Loss of one draft on one batch.

    Returns:
        ``(total, losses, hits)``: what to differentiate, and per step the weighted loss and the rows whose likeliest token is the
        target's. Without ``stats`` the numbers are 0, see :func:`~elsi_lib.speculative.loss.soft_cross_entropy`.
    """
    state = draft.fuse([batch.states[j] for j in draft.config.layers])[None]
    q, k, v = draft.project(draft.embed(batch.tokens[0])[None], state, batch.positions[0][None])
    q, state = q[:, :, batch.active], state[:, batch.active]
    own: list[tuple[Tensor, Tensor]] = []
    losses, hits = [], []
    for step in range(len(batch.tokens)):
        if step:
            q, *pair = draft.project(draft.embed(batch.tokens[step])[None], state, batch.positions[step][None])
            own.append(tuple(pair))
        state = draft.finish(state, attend(q, k, v, own, batch.texts))
        loss, hit = soft_cross_entropy(
            draft.norm(state)[0], draft.lm_head.weight, batch.targets, batch.index[step], batch.weight[step], stats
        )
        losses.append(loss)
        hits.append(hit)
    return torch.stack(losses).sum(), losses, hits


# The run


class _Learner:
    """A draft in training: float32 weights and optimiser, and a copy in the dtype of the matrix products."""

    def __init__(self, draft: Draft, recipe: Recipe, dtype: torch.dtype) -> None:
        self.draft, self.working = draft, draft
        if dtype != torch.float32:
            self.working = copy.deepcopy(draft, {id(draft.embedding): draft.embedding}).to(dtype)
        self.weights = dict(draft.named_parameters())
        self.optimiser = torch.optim.AdamW(
            self.weights.values(), recipe.learning_rate, (recipe.beta1, recipe.beta2), weight_decay=recipe.weight_decay, fused=True
        )

    def gradients(self, batch: Batch | None, stats: bool) -> tuple[list[float], list[int]]:
        for weight in self.working.parameters():
            weight.grad = None
        if batch is None:
            return [], []
        total, losses, hits = training_time_test(self.working, batch, stats)
        total.backward()
        return [float(x.detach()) for x in losses], [int(x) for x in hits]

    def advance(self, batch: Batch | None, stats: bool, rate: float, clip: float) -> tuple[list[float], list[int], float]:
        """One batch learned: losses and hits per step of the test, and the norm of the gradient."""
        return *self.gradients(batch, stats), self.update(rate, clip)

    def update(self, rate: float, clip: float) -> float:
        """One step of the optimiser; the norm of the gradient before it is clipped."""
        for (_, weight), working in zip(self.weights.items(), self.working.parameters(), strict=True):
            gradient = torch.zeros_like(weight) if working.grad is None else working.grad.float()
            weight.grad = reduce(gradient, "sum") if PartialState().num_processes > 1 else gradient
        norm = float(torch.nn.utils.clip_grad_norm_(self.weights.values(), clip))
        if math.isfinite(norm):
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            self.optimiser.step()
            self.sync()
        for weight in self.weights.values():
            weight.grad = None
        return norm

    def sync(self) -> None:
        if self.working is not self.draft:
            with torch.no_grad():
                for weight, working in zip(self.weights.values(), self.working.parameters(), strict=True):
                    working.copy_(weight)

    def tensors(self) -> dict[str, Tensor]:
        found = {}
        for name, weight in self.weights.items():
            found[name] = weight.detach()
            for key, value in self.optimiser.state.get(weight, {}).items():
                found[f"{key}:{name}"] = torch.as_tensor(value)
        return found

    def restore(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(tensors[name])
                keys = ("step", "exp_avg", "exp_avg_sq")
                self.optimiser.state[weight] = {key: tensors[f"{key}:{name}"].clone() for key in keys if f"{key}:{name}" in tensors}
        self.sync()


class _Workers:
    """On a CPU several drafts learn at once, a thread each: much of a step is too small to be worth sharing among the cores."""

    def __init__(self, wanted: int) -> None:
        self.threads = torch.get_num_threads()
        self.pool = None
        if min(wanted, self.threads) > 1:
            self.pool = ThreadPoolExecutor(min(wanted, self.threads), initializer=torch.set_num_threads, initargs=(1,))

    def map(self, function: Callable, items: Iterable) -> Iterable:
        if self.pool is None:
            return map(function, items)
        found = list(self.pool.map(function, items))
        torch.set_num_threads(self.threads)  # the setting of a worker is also that of threads started later
        return found


def train(
    target: Target,
    drafts: Mapping[str, Draft],
    texts: Sequence[Text],
    recipe: Recipe,
    folder: str | Path,
    *,
    passport: dict[str, Any] | None = None,
    report_every: int = 10,
    save_every: int = 50,
    watch: Callable[[int, int], None] | None = None,
) -> Path:
    """Train drafts of one target together; goes on where an earlier call with the same arguments was stopped.

    Args:
        drafts: name -> new draft. All share one draft vocabulary. They are changed in place.
        texts: token ids and loss mask of each; texts without a position to learn are an error.
        folder: gets ``training.csv`` (learning curves, written as they come), the state of the run, and at the end one folder per
            draft.
        passport: what the finished drafts say of where they come from, beside the recipe and the hash of the texts.
        report_every: optimiser steps between two lines of the learning curve; their losses and hits are of the batch about to be
            learned from, so in the first epoch of texts never seen.
        save_every: optimiser steps between two saved states.
        watch: called with (step, steps in all) after each step.

    Returns:
        The folder. Its drafts are read by :func:`~elsi_lib.speculative.checkpoint.load_draft`.

    Raises:
        ElsiError: no drafts or texts; drafts of several vocabularies; a folder that holds another run; NaN or an infinite gradient
            (names step and draft).
        AssetError: the folder cannot be written.
    """
    folder = Path(folder)
    process = PartialState(cpu=target.device.type == "cpu")
    vocabulary = _checked(drafts, texts)
    dtype = _dtype(recipe, target)
    plan = batches([len(ids) for ids, _ in texts], recipe)
    source = TargetPass(target, sorted({j for draft in drafts.values() for j in draft.config.layers}), vocabulary)
    about = {
        "recipe": asdict(recipe),
        "texts": len(texts),
        "tokens": sum(len(ids) for ids, _ in texts),
        "loss_positions": sum(int(mask.sum()) for _, mask in texts),
        "texts_sha256": texts_hash(texts),
        "coverage": vocabulary.coverage,
    }
    learners = {name: _Learner(draft, recipe, dtype) for name, draft in drafts.items()}
    identity = _identity(target, drafts, about)
    if done := _finished(folder, drafts, identity):
        return done
    first = _resume(folder, learners, identity)
    curve = _Curve(folder / CURVE, first, recipe.steps) if process.is_main_process else None
    seen = sum(len(texts[i][0]) for batch in plan[:first] for i in batch)
    workers = _Workers(len(learners) if target.device.type == "cpu" and process.num_processes == 1 else 1)
    for step in range(first, len(plan)):
        chosen = [texts[i] for i in plan[step]]
        totals = [sum(column) for column in zip(*(loss_positions(mask, recipe.steps) for _, mask in chosen), strict=True)]
        mine = chosen[process.process_index :: process.num_processes]
        batch = gather(source, mine, totals, recipe, dtype) if mine else None
        report = step % report_every == 0 or step == len(plan) - 1
        seen += sum(len(ids) for ids, _ in chosen)
        rate = recipe.rate(step, len(plan))
        advanced = workers.map(lambda learner, b=batch, n=report, r=rate: learner.advance(b, n, r, recipe.clip), learners.values())
        for name, (losses, hits, norm) in zip(learners, advanced, strict=True):
            if not math.isfinite(norm):
                raise ElsiError(
                    f"gradient of draft {name} is {norm} at step {step} of {len(plan)}: lower learning_rate (now "
                    f"{recipe.learning_rate}), or train in float32; the last saved state is of before"
                )
            if report:
                losses, hits = _added(losses, hits, recipe.steps, target.device)
                if curve:
                    curve.add(step, seen, name, losses, hits, totals, recipe.decay, norm)
        if (step + 1) % save_every == 0 and step + 1 < len(plan) and process.is_main_process:
            _save(folder, learners, identity, step + 1)
        if watch and process.is_main_process:
            watch(step + 1, len(plan))
    if process.is_main_process:
        final = curve.last() if curve else {}
        for name, draft in drafts.items():
            save_draft(draft, folder / name, (passport or {}) | {"training": about | {"final": final.get(name, {})}})
        with replaced(folder / "done.json") as part:
            part.write_text(json.dumps({"identity": identity, "drafts": sorted(drafts)}), encoding="utf-8")
        shutil.rmtree(folder / "state", ignore_errors=True)
    process.wait_for_everyone()
    return folder


def texts_hash(texts: Sequence[Text]) -> str:
    """sha256 of token ids and masks, in their order."""
    digest = hashlib.sha256()
    for ids, mask in texts:
        digest.update(len(ids).to_bytes(8, "little") + ids.int().numpy().tobytes() + mask.bool().numpy().tobytes())
    return digest.hexdigest()


def _dtype(recipe: Recipe, target: Target) -> torch.dtype:
    if recipe.dtype != "auto":
        return DTYPES[recipe.dtype]
    return torch.bfloat16 if target.dtype == torch.bfloat16 else torch.float32


def _checked(drafts: Mapping[str, Draft], texts: Sequence[Text]) -> DraftVocabulary:
    if not drafts:
        raise ElsiError("no drafts to train: name at least one")
    if not texts:
        raise ElsiError("no texts to train on")
    for number, (ids, mask) in enumerate(texts):
        if ids.shape != mask.shape or ids.ndim != 1:
            raise ElsiError(f"text {number}: token ids {tuple(ids.shape)} and loss mask {tuple(mask.shape)}: one entry per token")
        if len(ids) < 3 or not bool(mask[2:].any()):
            raise ElsiError(f"text {number} of {len(ids)} tokens has no token to learn after its second: leave it out")
    name, first = next(iter(drafts.items()))
    for other, draft in drafts.items():
        if not torch.equal(draft.vocabulary.ids, first.vocabulary.ids):
            raise ElsiError(f"drafts {name} and {other} have different draft vocabularies: one pass of the target serves one of them")
    return first.vocabulary


def _identity(target: Target, drafts: Mapping[str, Draft], about: dict[str, Any]) -> str:
    """Hash of all that the result of a run depends on, so that a state is resumed by its own run alone."""
    of = {name: asdict(draft.config) | {"passport": draft.passport, "weights": _sum(draft)} for name, draft in drafts.items()}
    identity = {key: value for key, value in target_identity(target).items() if key != "transformers"}
    content = json.dumps([identity, of, about], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _sum(draft: Draft) -> str:
    digest = hashlib.sha256()
    for weight in draft.parameters():
        digest.update(weight.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def _finished(folder: Path, drafts: Mapping[str, Draft], identity: str) -> Path | None:
    path = folder / "done.json"
    if not path.is_file():
        return None
    if json.loads(path.read_text(encoding="utf-8"))["identity"] != identity:
        raise ElsiError(f"{folder} holds the drafts of another training run: name another folder")
    from elsi_lib.speculative.checkpoint import read_draft

    for name, draft in drafts.items():
        draft.load_state_dict(read_draft(folder / name)[2])
    return folder


def _resume(folder: Path, learners: Mapping[str, _Learner], identity: str) -> int:
    """Steps already done, with the learners set to that state."""
    found = sorted((folder / "state").glob("step-*"))
    if not found:
        return 0
    for name, learner in learners.items():
        tensors, header = read_tensors(found[-1] / f"{name}.safetensors", STATE, "the state of a training run")
        if header.get("run") != identity:
            raise ElsiError(f"{folder} holds another training run (other drafts, texts, recipe or target): name another folder")
        learner.restore(tensors)
    return int(found[-1].name.removeprefix("step-"))


def _save(folder: Path, learners: Mapping[str, _Learner], identity: str, step: int) -> None:
    """The state appears at once and whole; the one before goes when it is there."""
    place, part = folder / "state" / f"step-{step:08d}", folder / "state" / f".part-{step:08d}"
    try:
        for name, learner in learners.items():
            write_tensors(part / f"{name}.safetensors", learner.tensors(), {"format": STATE, "run": identity})
        os.replace(part, place)
    except OSError as error:
        raise AssetError(f"the state of the training run cannot be written to {place.parent} ({error})") from error
    for old in place.parent.iterdir():
        if old != place:
            shutil.rmtree(old, ignore_errors=True)


def _added(losses: list[float], hits: list[int], steps: int, device: torch.device) -> tuple[list[float], list[float]]:
    """Sums over the processes; each weighs its rows by the whole batch's counts already."""
    numbers = torch.tensor([*(losses or [0.0] * steps), *(hits or [0] * steps)], dtype=torch.float64, device=device)
    if PartialState().num_processes > 1:
        numbers = reduce(numbers, "sum")
    return numbers[:steps].tolist(), numbers[steps:].tolist()


class _Curve:
    """The learning curve on disk: one line per reported step and draft."""

    def __init__(self, path: Path, first: int, steps: int) -> None:
        self.columns = ["step", "tokens", "draft", "loss", *(f"accept_{k}" for k in range(steps)), "norm"]
        self.path, self.rows = path, []
        if first and path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                self.rows = [row for row in csv.DictReader(file) if row["norm"] and int(row["step"]) < first]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def add(self, step: int, seen: int, name: str, losses: list, hits: list, totals: list[int], decay: float, norm: float) -> None:
        """``loss`` is the mean cross-entropy of step 0, nats; ``accept_k`` the share of hits at step k."""
        shares = [round(hit / max(1, total), 4) for hit, total in zip(hits, totals, strict=True)]
        row = dict(zip(self.columns, [step, seen, name, round(losses[0], 4), *shares, round(norm, 4)], strict=True))
        self.rows.append(row)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns).writerow(row)

    def last(self) -> dict[str, dict[str, float]]:
        """Means over the last tenth of the lines of each draft."""
        found: dict[str, dict[str, float]] = {}
        for name in {row["draft"] for row in self.rows}:
            own = [row for row in self.rows if row["draft"] == name]
            tail = own[-max(1, len(own) // 10) :]
            numbers = [c for c in self.columns if c not in ("step", "draft", "tokens")]
            found[name] = {c: sum(float(row[c]) for row in tail) / len(tail) for c in numbers}
        return found



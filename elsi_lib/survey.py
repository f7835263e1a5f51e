"""A survey: one pass of the target over more prompts, summed up in many ways at once, for the questions that the paper leaves open.

A calibration takes one share of positions, one size of block, one kind of text. A survey keeps the representatives of many such
choices from the same forward passes, so that they differ in the choice alone: shares, blocks, the other reading of block averages,
positions of outlying norm left out, groups of prompts of every size, and other kinds of text. It also measures what rival criteria
need: block influence (ShortGPT) and a ridge probe. Results are small and lie in ``survey`` beside the fingerprint.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from elsi_lib.assets import cache_dir, sha256_file
from elsi_lib.blocks import BlockAverage, block_sum
from elsi_lib.calibration import kept_positions_needed
from elsi_lib.corpora import CORPORA, load_corpus
from elsi_lib.errors import ElsiError
from elsi_lib.files import replaced
from elsi_lib.filtering import kept_count, token_entropy, top_entropy_positions
from elsi_lib.fingerprint import Fingerprint, pack_grams, read_tensors, write_tensors
from elsi_lib.pipeline import measured_or_cached, prepare
from elsi_lib.probe import ProbeStates, all_sets, probe_sets
from elsi_lib.progress import track
from elsi_lib.prompts import Prompt
from elsi_lib.provenance import code_version, environment, survey_version
from elsi_lib.selection import elsi, layer_rule, standing
from elsi_lib.settings import Settings, results_root, results_roots
from elsi_lib.targets import Target, load_target

FORMAT = "elsi-survey-1"
DEFAULT = "default"
RHOS = (0.1, 0.2, 0.5, 1.0)
BLOCKS = (8, 16, 64)
NORMS = (3.0, 10.0)  # times the median norm of a layer's states in the prompt
GROUP = 10  # prompts of the smallest sample
SIZES = (10, 20, 50, 100, 200, 500, 1000)  # prompts of a sample
FILES = ("variants.safetensors", "corpora.safetensors", "samples.csv", "influence.csv", "probe.csv", "passport.json")
_SAVE_EVERY = 25  # prompts


@dataclass(frozen=True)
class Choice:
    """One way to sum up the same states.

    Attributes:
        rho, block, reading: as of a calibration.
        norm_limit: positions are left out before the filter whose norm, at any layer, is above this multiple of the layer's median in
            the prompt; 0 for no limit.
        skip: leading positions left out before the filter.
    """

    rho: float = 0.3
    block: int = 32
    reading: str = "position"
    norm_limit: float = 0.0
    skip: int = 0


def choices(settings: Settings, prefix: int = 0) -> dict[str, Choice]:
    """Name -> choice: the settings' own, then each with one thing changed.

    Args:
        prefix: leading tokens that all prompts share (BOS, the template's system prompt); the choice ``no prefix`` leaves them out.
    """
    own = Choice(settings.rho, settings.block)
    found = {DEFAULT: own, "segment": Choice(own.rho, own.block, "segment")}
    found |= {f"rho {rho:g}": Choice(rho, own.block) for rho in RHOS if rho != own.rho}
    found |= {f"block {block}": Choice(own.rho, block) for block in BLOCKS if block != own.block}
    found |= {f"norm {limit:g}": Choice(own.rho, own.block, norm_limit=limit) for limit in NORMS}
    found["no prefix"] = Choice(own.rho, own.block, skip=prefix)
    return found


@dataclass(frozen=True)
class Survey:
    """Results of a survey.

    Attributes:
        folder: where they lie.
        status: "measured", "cached" or "stale", as for a fingerprint.
        variants: name (see :func:`choices`) -> fingerprint of the filtered variants: grams only, no bootstrap.
        corpora: name (see :data:`~elsi_lib.corpora.CORPORA`) -> the same for another kind of text.
        samples: choices made from groups of prompts: columns size, group, first_position, m, layers, entropy, rank and regret (of the
            set among all, judged on all prompts together), eagle3 (entropy of EAGLE-3's set on the group).
        influence: columns layer, influence (1 - mean cosine of a block's input and output, ShortGPT), error (standard error over
            prompts), prompts.
        probe: columns layers, r2_same, r2_next, see :func:`~elsi_lib.probe.probe_sets`.
        passport: target, prompts of each part, code, environment, seconds.
    """

    folder: Path
    status: str
    variants: dict[str, Fingerprint]
    corpora: dict[str, Fingerprint]
    samples: pd.DataFrame
    influence: pd.DataFrame
    probe: pd.DataFrame
    passport: dict[str, Any]

    @property
    def target(self) -> str:
        """Name of the target."""
        return self.passport["target"]["name"]


def survey_folder(settings: Settings) -> Path:
    """Where a survey's results go."""
    return settings.output / "survey"


def survey_hashes(folder: str | Path) -> dict[str, str]:
    """File name -> sha256 of a survey's files that are there."""
    paths = [path for name in FILES if (path := Path(folder) / name).is_file()]
    return {path.name: sha256_file(path) for path in paths}


def find_survey(settings: Settings) -> Survey | None:
    """The survey of these settings, from this run's results, else from those committed with the project; None if there is none."""
    name = survey_folder(settings).relative_to(results_root())
    for folder in (root / name for root in results_roots()):
        if all((folder / file).is_file() for file in FILES):
            return load_survey(folder)
    return None


def obtain_survey(settings: Settings) -> Survey:
    """The survey of these settings, made now if there is none (minutes to an hour)."""
    return find_survey(settings) or load_survey(run_survey(settings))


def beside_survey(settings: Settings) -> Survey | None:
    """Survey of the second target, or None; a model is never run for it."""
    return find_survey(settings.for_target(settings.beside)) if settings.beside else None


def survey_line(*surveys: Survey | None) -> str:
    """A line on each survey: target, prompts, status."""
    lines = []
    for survey in filter(None, surveys):
        seen = survey.passport["parts"]["variants"]["seen"]
        lines.append(f"{survey.target}: survey of {seen} prompts, {len(survey.corpora)} corpora, {survey.status}")
    return "\n".join(lines)


def load_survey(folder: str | Path) -> Survey:
    """Read a survey's results.

    Raises:
        ElsiError: a file is missing, damaged, or of another kind.
    """
    folder = Path(folder)
    if missing := [file for file in FILES if not (folder / file).is_file()]:
        raise ElsiError(f"no survey in {folder}: {', '.join(missing)} missing; run the notebook of the question")
    passport = json.loads((folder / "passport.json").read_text(encoding="utf-8"))
    code = code_version() | survey_version()
    stale = any(passport["code"].get(part) != code[part] for part in ("calibration", "survey"))
    return Survey(
        folder,
        "stale" if stale else measured_or_cached(folder, passport),
        _read_grams(folder / "variants.safetensors"),
        _read_grams(folder / "corpora.safetensors"),
        pd.read_csv(folder / "samples.csv", dtype={"layers": str}),
        pd.read_csv(folder / "influence.csv"),
        pd.read_csv(folder / "probe.csv", dtype={"layers": str}),
        passport,
    )


def run_survey(
    settings: Settings,
    target: Target | None = None,
    *,
    samples: int | None = None,
    corpus_samples: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Make a survey. A run that was cut goes on from the last of its sums.

    Args:
        settings: which target, prompts and preset.
        target: already loaded, to save the time.
        samples: prompts surveyed in every way, where that is not the preset's ``survey_samples``; the passport counts them.
        corpus_samples: prompts of each kind of text, where that is not the preset's.
        say: told what begins.

    Returns:
        The folder of the results.

    Raises:
        ElsiError: prompts too short for any block.
        AssetError: the target or the prompts cannot be fetched. A corpus that cannot be had is left out, and the passport says why.
    """
    target = target or load_target(settings.target)
    work = cache_dir() / "surveys" / settings.run_name
    _, prompts, about = prepare(replace(settings, samples=samples or settings.size("survey_samples")), target)
    prefix = len(os.path.commonprefix([prompt.ids for prompt in prompts]))
    named = choices(settings, prefix)
    say(f"surveying {len(prompts)} prompts in {len(named)} ways")
    tally = Tally(target, named, groups=True, probe=-(-settings.size("probe_tokens") // len(prompts)), seed=settings.seed)
    seconds = {"variants": _pass(tally, prompts, work / "variants.safetensors", target)}
    parts: dict[str, Any] = {"variants": tally.about() | {"prompts": about}}
    grams, corpora = tally.fingerprints(), {}
    longest = min(settings.size("corpus_tokens"), target.max_tokens or settings.size("corpus_tokens"))
    needed = kept_positions_needed(settings.rho, settings.block)
    for name in CORPORA:
        try:
            texts = load_corpus(
                name, target, corpus_samples or settings.size("corpus_samples"), seed=settings.seed, max_tokens=longest,
                min_tokens=needed, prompts=settings.prompts,
            )  # fmt: skip
        except ElsiError as error:  # not fetched, or no text of that length
            parts[name] = {"not run": re.split(": (?:set|lower) ", str(error))[0]}
            continue
        say(f"surveying {len(texts)} prompts of {name}")
        one = Tally(target, {name: named[DEFAULT]})
        seconds[name] = _pass(one, texts, work / f"{name.replace(' ', '-')}.safetensors", target)
        parts[name] = one.about()
        corpora |= one.fingerprints()
    say("probing layer sets")
    started = time.perf_counter()
    probed = probe_sets(tally.probe, all_sets(target.num_layers))
    seconds["probe"] = round(time.perf_counter() - started, 1)

    folder = survey_folder(settings)
    folder.mkdir(parents=True, exist_ok=True)
    _write_grams(folder / "variants.safetensors", grams)
    _write_grams(folder / "corpora.safetensors", corpora)
    for name, frame in (("samples", tally.samples()), ("influence", tally.influence()), ("probe", probed)):
        with replaced(folder / f"{name}.csv") as part:
            frame.to_csv(part, index=False, float_format="%.9g")
    passport = {
        "target": target.describe(),
        "parameters": {"rho": settings.rho, "block": settings.block, "seed": settings.seed, "corpus_tokens": longest},
        "parts": parts,
        "ridge": probed.attrs["ridge"],
        "probe": {"positions": sum(part.shape[1] for part in tally.probe.states), "prompts": len(tally.probe.states)},
        "seconds": seconds,
        "code": code_version() | survey_version(),
        "environment": environment(),
    }
    with replaced(folder / "passport.json") as part:
        part.write_text(json.dumps(passport, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return folder


class Tally:
    """Running sums of several choices over the same prompts, for the filtered variants with the first position kept and dropped.

    Args:
        target: whose states are summed.
        named: the choices.
        groups: also keep the default choice's sums of each :data:`GROUP` prompts, for :meth:`samples`.
        probe: positions of each prompt kept for the ridge probe; 0 for none.
        seed: of those positions.
    """

    def __init__(self, target: Target, named: dict[str, Choice], *, groups: bool = False, probe: int = 0, seed: int = 0) -> None:
        self.target, self.named, self.seed = target, named, seed
        n, d = target.num_layers, target.hidden_size
        self.averages = {(name, sink): BlockAverage(n, choice.block, d) for name, choice in named.items() for sink in (True, False)}
        self.used = dict.fromkeys(named, 0)
        self.tokens = self.seen = 0
        self.seconds = 0.0  # of all sessions
        self.groups: list[tuple[Tensor, Tensor]] | None = [] if groups else None  # sums (2, N, B, d) float32, blocks (2,)
        self.probe = ProbeStates(target, probe, seed) if probe else None
        self.influences: list[Tensor] = []  # (N,) of each prompt

    @torch.inference_mode()
    def add(self, prompt: Prompt) -> None:
        """Run the target over one prompt and add it to every choice that it is long enough for."""
        states, logits = self.target.run(prompt.ids)
        entropy = token_entropy(logits)
        norms = torch.stack([state.float().norm(dim=-1) for state in states])  # (N, T)
        outlying = (norms / norms.median(-1, keepdim=True).values).amax(0)
        for name, choice in self.named.items():
            kept = torch.ones(len(entropy), dtype=torch.bool, device=entropy.device)
            if choice.norm_limit:
                kept &= outlying <= choice.norm_limit
            kept[: choice.skip] = False
            self._add(name, choice, states, entropy, kept.nonzero()[:, 0])
        if self.probe is not None:
            self.probe.add(prompt.ids, states, logits)
            self.influences.append(self._influence(prompt.ids, states))
        self.tokens += len(prompt.ids)
        self.seen += 1

    def _add(self, name: str, choice: Choice, states: Sequence[Tensor], entropy: Tensor, allowed: Tensor) -> None:
        group = self._group() if name == DEFAULT and self.groups is not None else None
        if kept_count(max(len(allowed) - 1, 0), choice.rho) < choice.block:
            return
        for sink in (True, False):
            positions = allowed if sink else allowed[allowed > 0]
            positions = positions[top_entropy_positions(entropy[positions], choice.rho)]
            sums = [block_sum(state[positions], choice.block, choice.reading) for state in states]
            total, blocks = torch.stack([one for one, _ in sums]).cpu(), sums[0][1]
            self.averages[name, sink].add(total, blocks)
            if group is not None:
                group[0][int(not sink)] += total
                group[1][int(not sink)] += blocks
        self.used[name] += 1

    def _group(self) -> tuple[Tensor, Tensor]:
        if self.seen % GROUP == 0:
            n, d, block = self.target.num_layers, self.target.hidden_size, self.named[DEFAULT].block
            self.groups.append((torch.zeros(2, n, block, d), torch.zeros(2)))
        return self.groups[-1]

    def _influence(self, ids: Sequence[int], states: Sequence[Tensor]) -> Tensor:
        """1 - mean cosine of each block's input and output over the prompt's positions (Men et al. 2024, ShortGPT); what enters
        block 0 is taken to be the embeddings."""
        before = self.target.model.get_input_embeddings()(torch.as_tensor(ids, device=self.target.device))
        found = []
        for state in states:
            found.append(1 - torch.cosine_similarity(before.float(), state.float(), dim=-1).mean())
            before = state
        return torch.stack(found).cpu()

    def about(self) -> dict[str, Any]:
        """What a passport says of the prompts that were summed."""
        blocks = {name: self.averages[name, True].blocks for name in self.named}
        return {"seen": self.seen, "tokens": self.tokens, "used": self.used, "blocks": blocks}

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Name -> Gram matrices of the filtered variants, first position kept and dropped; choices without a block are left out."""
        found = {}
        for name, choice in self.named.items():
            both = [self.averages[name, sink] for sink in (True, False)]
            if all(one.blocks for one in both):
                parameters = {"rho": choice.rho, "block": choice.block, "reading": choice.reading, "seed": self.seed}
                passport = {
                    "target": self.target.describe(),
                    "parameters": parameters | {"norm_limit": choice.norm_limit, "skip": choice.skip},
                    "prompts": {"used": self.used[name], "blocks": both[0].blocks, "tokens": self.tokens},
                    "code": code_version(),
                }
                found[name] = Fingerprint({"grams": pack_grams(torch.stack([one.grams() for one in both]))}, passport)
        return found

    def influence(self) -> pd.DataFrame:
        """Block influence of every layer, see :class:`Survey`."""
        values = torch.stack(self.influences).double()
        error = values.std(0) / len(values) ** 0.5
        return pd.DataFrame({"layer": range(values.shape[1]), "influence": values.mean(0), "error": error, "prompts": len(values)})

    def samples(self, sizes: Sequence[int] = SIZES) -> pd.DataFrame:
        """ELSI's choices from disjoint groups of prompts of each size, and of all of them, see :class:`Survey`."""
        rows = []
        n = self.target.num_layers
        eagle3 = layer_rule("eagle3-code", n) if n > 6 else None
        whole = {sink: self.averages[DEFAULT, sink].grams() for sink in (True, False)}
        for size in [*(s for s in sizes if s <= self.seen), *([self.seen] if self.seen not in sizes else [])]:
            per = -(-size // GROUP)
            for group in range(max(1, len(self.groups) // per)):
                members = self.groups[group * per : (group + 1) * per]
                for sink in (True, False):
                    blocks = sum(float(b[int(not sink)]) for _, b in members)
                    if not blocks:
                        continue
                    mean = sum(total[int(not sink)].double() for total, _ in members) / blocks
                    grams = mean @ mean.mT
                    for m in (1, 2, 3):
                        chosen = elsi(grams, m)
                        place = standing(whole[sink], chosen.layers)
                        rows.append({
                            "size": size, "group": group, "first_position": "kept" if sink else "dropped", "m": m,
                            "layers": " ".join(map(str, chosen.layers)), "entropy": chosen.entropy, "rank": place.rank,
                            "regret": place.regret, "eagle3": standing(grams, eagle3).entropy if eagle3 and m == 3 else None,
                        })  # fmt: skip
        return pd.DataFrame(rows)

    def save(self, path: Path) -> None:
        """Keep the sums so far, atomically."""
        tensors = {f"total.{name}.{int(sink)}": average.total for (name, sink), average in self.averages.items()}
        if self.groups:
            tensors |= {"groups": torch.stack([g for g, _ in self.groups]), "group_blocks": torch.stack([b for _, b in self.groups])}
        if self.influences:
            tensors["influences"] = torch.stack(self.influences)
        if self.probe is not None and self.probe.states:
            taken = self.probe
            tensors |= {"states": torch.cat(taken.states, 1), "following": torch.cat(taken.following)}
            tensors |= {"same": torch.cat(taken.same), "next": torch.cat(taken.next), "generator": taken.generator.get_state()}
        state = {
            "choices": repr(self.named), "seen": self.seen, "tokens": self.tokens, "used": self.used, "seconds": self.seconds,
            "blocks": {f"{name}.{int(sink)}": average.blocks for (name, sink), average in self.averages.items()},
            "taken": [part.shape[1] for part in self.probe.states] if self.probe is not None else [],
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors, {"format": FORMAT, "state": json.dumps(state)})

    def restore(self, path: Path) -> None:
        """Go on from what :meth:`save` kept.

        Raises:
            ElsiError: sums of other choices.
        """
        tensors, header = read_tensors(path, FORMAT, "the sums of a survey")
        state = json.loads(header["state"])
        if state["choices"] != repr(self.named):
            raise ElsiError(f"{path} holds the sums of another survey: delete it to start anew")
        for (name, sink), average in self.averages.items():
            average.total, average.blocks = tensors[f"total.{name}.{int(sink)}"], state["blocks"][f"{name}.{int(sink)}"]
        self.seen, self.tokens, self.used, self.seconds = (state[name] for name in ("seen", "tokens", "used", "seconds"))
        if self.groups is not None and "groups" in tensors:
            self.groups = list(zip(tensors["groups"], tensors["group_blocks"], strict=True))
        if "influences" in tensors:
            self.influences = list(tensors["influences"])
        if self.probe is not None and "states" in tensors:
            sizes = state["taken"]
            self.probe.states = list(tensors["states"].split(sizes, 1))
            for name in ("following", "same", "next"):
                setattr(self.probe, name, list(tensors[name].split(sizes)))
            self.probe.generator.set_state(tensors["generator"])


def _pass(tally: Tally, prompts: Sequence[Prompt], path: Path, target: Target) -> float:
    """Add the prompts that a kept state lacks; returns the seconds that all of them took."""
    if path.is_file():
        tally.restore(path)
    started = time.perf_counter() - tally.seconds
    left = prompts[tally.seen :]
    for index, prompt in enumerate(track(f"surveying {target.name}", len(left))(left), start=1):
        tally.add(prompt)
        tally.seconds = time.perf_counter() - started
        if index % _SAVE_EVERY == 0 or index == len(left):
            tally.save(path)
    return round(tally.seconds, 1)


def _write_grams(path: Path, found: dict[str, Fingerprint]) -> None:
    """Gram matrices of several fingerprints in one file, in float32: their entropies move by less than 1e-6 nats."""
    about = {name: fp.passport for name, fp in found.items()}  # in the order of the choices
    tensors = {name: fp.tensors["grams"].float() for name, fp in found.items()}
    write_tensors(path, tensors, {"format": FORMAT, "passports": json.dumps(about)})


def _read_grams(path: Path) -> dict[str, Fingerprint]:
    tensors, header = read_tensors(path, FORMAT, "a survey's Gram matrices")
    about = json.loads(header["passports"])
    return {name: Fingerprint({"grams": tensors[name].double()}, about[name]) for name in about}

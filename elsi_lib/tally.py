"""Sums of a survey: one pass of the target over prompts, summed up in many ways at once, by prompts and by groups of them.

What a survey (:mod:`elsi_lib.survey`) makes its results of. Sums are kept as they come, and a run that was cut goes on from them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from elsi_lib.blocks import BlockAverage, block_sum
from elsi_lib.entropy import set_entropy
from elsi_lib.errors import ElsiError
from elsi_lib.filtering import kept_count, token_entropy, top_entropy_positions
from elsi_lib.fingerprint import Fingerprint, pack_grams, read_tensors, write_tensors
from elsi_lib.probe import ProbeStates
from elsi_lib.progress import track
from elsi_lib.prompts import Prompt
from elsi_lib.provenance import code_version
from elsi_lib.selection import TIE, all_set_entropies, elsi, layer_rule
from elsi_lib.settings import Settings
from elsi_lib.targets import Target

FORMAT = "elsi-survey-1"
DEFAULT = "default"
RHOS = (0.1, 0.2, 0.5, 1.0)
BLOCKS = (8, 16, 64)
NORMS = (3.0, 10.0)  # times the median norm of a layer's states in the prompt
GROUP = 10  # prompts of the smallest sample
SIZES = (10, 20, 50, 100, 200, 500, 1000)  # prompts of a sample
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


@dataclass
class Group:
    """Sums of the first choice over so many prompts, or over what is left of them at the end.

    Attributes:
        total: (2, N, B, d) float32, first position kept and dropped.
        blocks: (2,) averaged.
        prompts: of the group.
    """

    total: Tensor
    blocks: Tensor
    prompts: int


class Tally:
    """Running sums of several choices over the same prompts, for the filtered variants with the first position kept and dropped.

    Args:
        target: whose states are summed.
        named: the choices.
        group: also keep the first choice's sums of each so many prompts; 0 for none.
        probe: positions of each prompt kept for the ridge probe; 0 for none.
        seed: of those positions.
    """

    def __init__(self, target: Target, named: dict[str, Choice], *, group: int = 0, probe: int = 0, seed: int = 0) -> None:
        self.target, self.named, self.seed, self.group = target, named, seed, group
        n, d = target.num_layers, target.hidden_size
        self.averages = {(name, sink): BlockAverage(n, choice.block, d) for name, choice in named.items() for sink in (True, False)}
        self.used = dict.fromkeys(named, 0)
        self.tokens = 0
        self.keys: list[str] = []  # of the prompts summed, see Prompt
        self.seconds = 0.0  # of all sessions
        self.groups: list[Group] = []
        self.probe = ProbeStates(target, probe, seed) if probe else None
        self.influences: list[Tensor] = []  # (N,) of each prompt

    @property
    def seen(self) -> int:
        """Prompts summed."""
        return len(self.keys)

    @torch.inference_mode()
    def add(self, prompt: Prompt) -> None:
        """Run the target over one prompt and add it to every choice that it is long enough for."""
        states, logits = self.target.run(prompt.ids)
        if self.group:
            self._count()
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
        self.keys.append(prompt.key)

    def _add(self, name: str, choice: Choice, states: Sequence[Tensor], entropy: Tensor, allowed: Tensor) -> None:
        group = self.groups[-1] if self.group and name == next(iter(self.named)) else None
        if kept_count(max(len(allowed) - 1, 0), choice.rho) < choice.block:
            return
        for sink in (True, False):
            positions = allowed if sink else allowed[allowed > 0]
            positions = positions[top_entropy_positions(entropy[positions], choice.rho)]
            sums = [block_sum(state[positions], choice.block, choice.reading) for state in states]
            total, blocks = torch.stack([one for one, _ in sums]).cpu(), sums[0][1]
            self.averages[name, sink].add(total, blocks)
            if group is not None:
                group.total[int(not sink)] += total
                group.blocks[int(not sink)] += blocks
        self.used[name] += 1

    def _count(self) -> None:
        if self.seen % self.group == 0:
            n, d, block = self.target.num_layers, self.target.hidden_size, next(iter(self.named.values())).block
            self.groups.append(Group(torch.zeros(2, n, block, d), torch.zeros(2), 0))
        self.groups[-1].prompts += 1

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

    def save(self, path: Path) -> None:
        """Keep the sums so far, atomically."""
        tensors = {f"total.{name}.{int(sink)}": average.total for (name, sink), average in self.averages.items()}
        if self.groups:
            tensors["groups"] = torch.stack([group.total for group in self.groups])
            tensors["group_blocks"] = torch.stack([group.blocks for group in self.groups])
        if self.influences:
            tensors["influences"] = torch.stack(self.influences)
        if self.probe is not None and self.probe.states:
            taken = self.probe
            tensors |= {"states": torch.cat(taken.states, 1), "following": torch.cat(taken.following)}
            tensors |= {"same": torch.cat(taken.same), "next": torch.cat(taken.next), "generator": taken.generator.get_state()}
        state = {
            "choices": repr(self.named), "keys": self.keys, "tokens": self.tokens, "used": self.used, "seconds": self.seconds,
            "blocks": {f"{name}.{int(sink)}": average.blocks for (name, sink), average in self.averages.items()},
            "taken": [part.shape[1] for part in self.probe.states] if self.probe is not None else [],
            "per_prompt": self.probe and self.probe.per_prompt, "group": self.group,
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors, {"format": FORMAT, "state": json.dumps(state)})

    def restore(self, path: Path) -> None:
        """Go on from what :meth:`save` kept.

        Raises:
            ElsiError: sums of other choices, or with other positions for the probe; a damaged file.
        """
        tensors, header = read_tensors(path, FORMAT, "the sums of a survey")
        try:
            state = json.loads(header["state"])
            held = state["choices"], state["per_prompt"], state["group"]
        except (KeyError, ValueError) as error:
            raise ElsiError(f"{path} has no readable state: it is damaged; delete it to start anew") from error
        if held != (repr(self.named), self.probe and self.probe.per_prompt, self.group):
            raise ElsiError(f"{path} holds the sums of another survey: delete it to start anew")
        for (name, sink), average in self.averages.items():
            average.total, average.blocks = tensors[f"total.{name}.{int(sink)}"], state["blocks"][f"{name}.{int(sink)}"]
        self.keys, self.tokens, self.used, self.seconds = (state[name] for name in ("keys", "tokens", "used", "seconds"))
        if "groups" in tensors:
            sums = zip(tensors["groups"], tensors["group_blocks"], strict=True)
            self.groups = [Group(*one, min(self.group, self.seen - i * self.group)) for i, one in enumerate(sums)]
        if "influences" in tensors:
            self.influences = list(tensors["influences"])
        if self.probe is not None and "states" in tensors:
            sizes = state["taken"]
            self.probe.states = list(tensors["states"].split(sizes, 1))
            for name in ("following", "same", "next"):
                setattr(self.probe, name, list(tensors[name].split(sizes)))
            self.probe.generator.set_state(tensors["generator"])


def samples(groups: Sequence[Group], sizes: Sequence[int] = SIZES) -> pd.DataFrame:
    """ELSI's choices from disjoint groups of prompts of each size, and of all of them.

    Returns:
        Columns as :class:`~elsi_lib.survey.Survey` says of its ``samples``.
    """
    rows = []
    layers = groups[0].total.shape[1]
    eagle3 = layer_rule("eagle3-code", layers) if layers > 6 else None
    prompts = sum(group.prompts for group in groups)
    full = [group for group in groups if group.prompts == GROUP]
    sample = {size: _disjoint(full, size // GROUP) for size in sizes if size <= GROUP * len(full) and size < prompts}
    for side, first in enumerate(("kept", "dropped")):
        whole = _grams(groups, side)
        if whole is None:
            continue
        every = {m: all_set_entropies(whole, m) for m in (1, 2, 3)}
        for size, members in (*sample.items(), (prompts, [groups])):
            for number, member in enumerate(members):
                if (grams := _grams(member, side)) is None:
                    continue
                for m, (sets, entropies) in every.items():
                    chosen = elsi(grams, m)
                    own = entropies[(sets == torch.tensor(chosen.layers)).all(-1)][0]
                    rows.append({
                        "size": size, "group": number, "first_position": first, "m": m,
                        "layers": " ".join(map(str, chosen.layers)), "entropy": chosen.entropy,
                        "rank": int((entropies > own + TIE).sum()) + 1, "regret": float(entropies.max() - own),
                        "eagle3": set_entropy(grams, eagle3) if eagle3 and m == 3 else None,
                    })  # fmt: skip
    return pd.DataFrame(rows).sort_values(["size", "group"], kind="stable", ignore_index=True)


def _disjoint(groups: Sequence[Group], per: int) -> list[Sequence[Group]]:
    return [groups[i : i + per] for i in range(0, len(groups) - per + 1, per)]


def _grams(groups: Sequence[Group], side: int) -> Tensor | None:
    """(N, B, B) float64 of these groups' representatives; None without a block."""
    blocks = sum(float(group.blocks[side]) for group in groups)
    if not blocks:
        return None
    mean = sum(group.total[side].double() for group in groups) / blocks
    return mean @ mean.mT


def sum_up(tally: Tally, prompts: Sequence[Prompt], path: Path) -> float:
    """Add the prompts that a kept state lacks; returns the seconds that all of them took.

    Raises:
        ElsiError: the state is of other choices, of other prompts, or of more of them.
    """
    if path.is_file():
        tally.restore(path)
    if tally.seen > len(prompts):
        raise ElsiError(f"{path} holds the sums of {tally.seen} prompts, and {len(prompts)} are asked for: delete it to start anew")
    if tally.keys != [prompt.key for prompt in prompts[: tally.seen]]:
        raise ElsiError(f"{path} holds the sums of other prompts: delete it to start anew")
    started = time.perf_counter() - tally.seconds
    left = prompts[tally.seen :]
    for index, prompt in enumerate(track(f"surveying {tally.target.name}", len(left))(left), start=1):
        tally.add(prompt)
        tally.seconds = time.perf_counter() - started
        if index % _SAVE_EVERY == 0 or index == len(left):
            tally.save(path)
    return round(tally.seconds, 1)

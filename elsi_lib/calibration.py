"""One forward pass over the prompts, and what remains of it: from a target to its fingerprint (paper, sections 4.1 and 4.2).

States are consumed prompt by prompt into running sums, so memory does not grow with the number of prompts. The sums of several
processes add up: calibrate with ``part=(i, n)``, :meth:`Calibration.merge`, then :meth:`Calibration.fingerprint`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from elsi_lib.blocks import READINGS, BlockAverage, block_sum
from elsi_lib.entropy import gram_entropy
from elsi_lib.errors import ElsiError
from elsi_lib.filtering import kept_count, token_entropy, top_entropy_positions
from elsi_lib.fingerprint import VARIANTS, Fingerprint, pack_bootstrap, pack_grams, read_tensors, write_tensors
from elsi_lib.provenance import code_version, environment

if TYPE_CHECKING:
    from elsi_lib.prompts import Prompt
    from elsi_lib.targets import Target

_PARTIAL_FORMAT = "elsi-calibration-part-1"
_QUEUE = 16  # prompts whose sums wait for the bootstrap: one matrix product for all of them


def calibrate(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    rho: float = 0.30,
    block: int = 32,
    reading: str = "position",
    seed: int = 0,
    bootstrap: int = 40,
    spectra: int = 64,
    window: int = 128,
    about_prompts: dict[str, Any] | None = None,
    track: Callable[[Iterable], Iterable] = iter,
) -> Fingerprint:
    """Run the target once over every prompt and keep its fingerprint.

    Args:
        target: from :func:`~elsi_lib.targets.load_target`.
        prompts: token ids, from :func:`~elsi_lib.prompts.load_prompts`; the paper uses 200 ShareGPT conversations.
        rho: share of positions kept by the token-entropy filter, per prompt.
        block: B, rows of a representative.
        reading: of block averaging, see :func:`~elsi_lib.blocks.block_sum`.
        seed: of the bootstrap weights and of the random control of the spectra.
        bootstrap: R, Poisson bootstrap replicates over prompts; 0 for none.
        spectra: P', leading prompts whose raw token spectra are kept.
        window: positions of such a prompt that enter its spectrum.
        about_prompts: what the passport shall say of the prompts' origin (source, hash, counts).
        track: wraps the prompts, e.g. with a progress bar.

    Raises:
        ElsiError: a parameter out of range, no prompt that keeps ``block`` positions, NaN or infinity in a layer's states.
    """
    started = time.perf_counter()
    run = Calibration(target, rho, block, reading, seed, bootstrap, spectra, window, about_prompts=about_prompts)
    for index, prompt in enumerate(track(prompts)):
        run.add(index, prompt)
    return run.fingerprint(seconds=time.perf_counter() - started)


class Calibration:
    """Running sums of a calibration; arguments as for :func:`calibrate`."""

    def __init__(
        self,
        target: Target | None,
        rho: float = 0.30,
        block: int = 32,
        reading: str = "position",
        seed: int = 0,
        bootstrap: int = 40,
        spectra: int = 64,
        window: int = 128,
        *,
        about_prompts: dict[str, Any] | None = None,
        shape: tuple[int, int] | None = None,
        about_target: dict[str, Any] | None = None,
    ):
        kept_positions_needed(rho, block)
        if reading not in READINGS:
            raise ElsiError(f"reading {reading!r} unknown: one of {', '.join(READINGS)}")
        for name, value in (("bootstrap", bootstrap), ("spectra", spectra)):
            if value < 0:
                raise ElsiError(f"{name} = {value}: a count, 0 for none")
        if kept_count(window, rho) < 2:
            raise ElsiError(f"window = {window} leaves fewer than two positions at rho = {rho}: raise it")
        self.target = target
        self.about_target = about_target or target.describe()
        self.about_prompts = about_prompts or {}
        self.code = code_version()["calibration"]
        layers, hidden = shape or (target.num_layers, target.hidden_size)
        self.parameters = {
            "rho": rho,
            "block": block,
            "reading": reading,
            "seed": seed,
            "bootstrap": bootstrap,
            "spectra": spectra,
            "window": window,
        }
        self.averages = [BlockAverage(layers, block, hidden) for _ in VARIANTS]
        self.prompts: dict[int, dict[str, Any]] = {}  # index -> key, tokens, blocks; what cannot be used is in dropped
        self.dropped = 0
        self.rows: dict[int, dict[str, Tensor]] = {}  # index -> per-prompt results
        self.replicates = torch.zeros(bootstrap, layers * block * hidden) if bootstrap else None
        self.replicate_blocks = torch.zeros(bootstrap, dtype=torch.float64)
        self._queue: list[tuple[Tensor, Tensor, int]] = []

    def add(self, index: int, prompt: Prompt) -> None:
        """Run the target over one prompt and add it; ``index`` is its place among all prompts of the calibration."""
        states, logits = self.target.run(prompt.ids)
        try:
            entropy = token_entropy(logits)
        except ElsiError:
            check_finite(states, self._of(index))  # a bad layer spoils the logits too: name the layer
            raise
        self.add_states(index, prompt.key, states, entropy)

    @torch.inference_mode()
    def add_states(self, index: int, key: str, states: Sequence[Tensor] | Tensor, entropy: Tensor) -> None:
        """Add one prompt from its states, N of (T, d), and predictive entropies (T,) in nats."""
        rho, block, reading = (self.parameters[name] for name in ("rho", "block", "reading"))
        if index in self.prompts:
            raise ElsiError(f"prompt {index} was added twice: parts of a calibration must not overlap")
        length = len(entropy)
        if kept_count(length - 1, rho) < block:
            self.dropped += 1
            return
        chosen = []
        for filtered, sink in VARIANTS:
            first = 0 if sink else 1
            chosen.append(first + top_entropy_positions(entropy[first:], rho) if filtered else slice(first, None))
        # Layer by layer: the float32 copy of one layer stays in the cache while all variants read it.
        by_layer = [[block_sum(state[positions], block, reading) for positions in chosen] for state in map(Tensor.float, states)]
        sums = [torch.stack([layer[v][0] for layer in by_layer]).cpu() for v in range(len(VARIANTS))]
        for one in sums:
            check_finite(one, self._of(index))
        grams = []
        for average, one, (_, blocks) in zip(self.averages, sums, by_layer[0], strict=True):
            average.add(one, blocks)
            mean = one.to(torch.float64) / blocks
            grams.append(mean @ mean.mT)
        blocks = by_layer[0][0][1]  # of the default variant, which alone is bootstrapped
        self._bootstrap(key, sums[0], blocks)
        self.prompts[index] = {"key": key, "tokens": length, "blocks": blocks}
        self.rows[index] = {"prompt_entropy": gram_entropy(torch.stack(grams))}
        if index < self.parameters["spectra"]:
            self.rows[index] |= self._spectra(key, states, entropy)

    def _of(self, index: int) -> str:
        """Whose states those of a prompt are, for an error."""
        return f"{self.about_target['name']} (prompt {index}, dtype {self.about_target.get('dtype')})"

    def _spectra(self, key: str, states: Sequence[Tensor] | Tensor, entropy: Tensor) -> dict[str, Tensor]:
        """Raw token spectra and norms of one prompt's window."""
        rho, window = self.parameters["rho"], self.parameters["window"]
        states = torch.stack([state[:window] for state in states]).cpu().to(torch.float64)
        entropy = entropy[:window].cpu()
        generator = torch.Generator().manual_seed(self._stream(key, "random positions") % 2**63)
        grams = states @ states.mT
        spectra = torch.empty(2, 3, len(states), dtype=torch.float64)
        for i, first in enumerate((0, 1)):
            kept = top_entropy_positions(entropy[first:], rho) + first
            count = len(entropy) - first
            random = torch.randperm(count, generator=generator)[: len(kept)].sort().values + first
            for k, chosen in enumerate((torch.arange(first, len(entropy)), kept, random)):
                spectra[i, k] = gram_entropy(grams[:, chosen][:, :, chosen])
        norms = grams.diagonal(dim1=-2, dim2=-1).sqrt()
        return {"token_spectra": spectra, "norms": torch.stack([norms[:, 0], norms[:, 1:].median(-1).values])}

    def _stream(self, key: str, use: str) -> int:
        """A random number that depends on the seed and the prompt alone, so that parts, order and machines do not matter."""
        return int.from_bytes(hashlib.sha256(f"{self.parameters['seed']}:{use}:{key}".encode()).digest()[:16], "big")

    def _bootstrap(self, key: str, sums: Tensor, blocks: int) -> None:
        if self.replicates is None:
            return
        weights = np.random.Generator(np.random.Philox(key=self._stream(key, "bootstrap"))).poisson(1.0, len(self.replicates))
        self._queue.append((torch.from_numpy(weights), sums.flatten(), blocks))
        if len(self._queue) == _QUEUE:
            self._flush()

    def _flush(self) -> None:
        if self._queue:
            weights = torch.stack([w for w, _, _ in self._queue], dim=1).float()
            self.replicates.addmm_(weights, torch.stack([s for _, s, _ in self._queue]))
            self.replicate_blocks += (weights * torch.tensor([b for _, _, b in self._queue])).sum(1).to(torch.float64)
            self._queue.clear()

    def merge(self, other: Calibration) -> None:
        """Add the prompts another process has seen.

        Raises:
            ElsiError: another target, other parameters, other code, or prompts in common.
        """
        if self.code != other.code:
            raise ElsiError("parts made by different versions of the method's code: make them all again with one")
        for what, mine, theirs in (
            ("parameters", self.parameters, other.parameters),
            ("target", self.about_target, other.about_target),
            ("prompts", self.about_prompts, other.about_prompts),
        ):
            if mine != theirs:
                differing = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
                raise ElsiError(f"parts of different calibrations: their {what} differ in {', '.join(differing)}")
        if common := self.prompts.keys() & other.prompts.keys():
            raise ElsiError(f"both parts hold prompt {min(common)}: parts of a calibration must not overlap")
        for mine, theirs in zip(self.averages, other.averages, strict=True):
            mine.merge(theirs)
        self.prompts |= other.prompts
        self.rows |= other.rows
        self.dropped += other.dropped
        if self.replicates is not None:
            self._flush()
            other._flush()
            self.replicates += other.replicates
            self.replicate_blocks += other.replicate_blocks

    def fingerprint(self, seconds: float | None = None) -> Fingerprint:
        """Close the sums into a fingerprint.

        Raises:
            ElsiError: no prompt could be used.
        """
        rho, block = self.parameters["rho"], self.parameters["block"]
        if not self.prompts:
            raise ElsiError(
                f"no usable prompt: block = {block} needs {kept_positions_needed(rho, block)} tokens a prompt at rho = {rho}, "
                f"and all {self.dropped} prompts are shorter; lower block, raise rho, or give longer prompts"
            )
        order = sorted(self.rows)
        grams = torch.stack([average.grams() for average in self.averages])
        tensors = {
            "grams": pack_grams(grams),
            "prompt_entropy": torch.stack([self.rows[i]["prompt_entropy"] for i in order], dim=1).float(),
        }
        with_spectra = [i for i in order if "token_spectra" in self.rows[i]]
        if with_spectra:
            tensors["token_spectra"] = torch.stack([self.rows[i]["token_spectra"] for i in with_spectra], dim=2).float()
            tensors["norms"] = torch.stack([self.rows[i]["norms"] for i in with_spectra]).mean(0).float()
        empty = 0
        if self.replicates is not None:
            self._flush()
            shape = self.averages[0].total.shape
            replicates = [
                (mean := total.to(torch.float64).view(shape) / blocks) @ mean.mT
                for total, blocks in zip(self.replicates, self.replicate_blocks, strict=True)
                if blocks > 0
            ]
            empty = len(self.replicates) - len(replicates)  # with very few prompts a replicate can draw none of them
            if replicates:
                tensors |= pack_bootstrap(grams[0], torch.stack(replicates))
        used = [self.prompts[i] for i in order]
        passport = {
            "target": self.about_target,
            "parameters": self.parameters,
            "prompts": {
                **self.about_prompts,
                "used": len(used),
                "dropped_too_short": self.dropped,
                "tokens": sum(p["tokens"] for p in used),
                "blocks": {f"{f}-{s}": average.blocks for (f, s), average in zip(_VARIANT_NAMES, self.averages, strict=True)},
                "sha256": hashlib.sha256("".join(p["key"] for p in used).encode()).hexdigest(),
                "empty_replicates": empty,
            },
            "code": code_version() | {"calibration": self.code},
            "environment": environment(),
            "seconds": None if seconds is None else round(seconds, 1),
        }
        return Fingerprint(tensors, passport)

    def save(self, path: str | Path) -> Path:
        """Keep the sums of one part, to be merged later; safetensors, written atomically."""
        self._flush()
        tensors = {f"total.{i}": average.total for i, average in enumerate(self.averages)}
        tensors |= {f"{name}.{i}": value for i, row in self.rows.items() for name, value in row.items()}
        if self.replicates is not None:
            tensors |= {"replicates": self.replicates, "replicate_blocks": self.replicate_blocks}
        state = {
            "parameters": self.parameters,
            "target": self.about_target,
            "origin": self.about_prompts,
            "code": self.code,
            "blocks": [average.blocks for average in self.averages],
            "prompts": self.prompts,
            "dropped": self.dropped,
        }
        return write_tensors(path, tensors, {"format": _PARTIAL_FORMAT, "state": json.dumps(state)})

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a part that :meth:`save` wrote; it can be merged and closed, but not added to.

        Raises:
            ElsiError: no such file, not a part of a calibration, truncated, or edited.
        """
        tensors, header = read_tensors(path, _PARTIAL_FORMAT, "a part of a calibration")
        try:
            return cls._restored(tensors, json.loads(header["state"]))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ElsiError(f"{path} has no readable state of a calibration: it is damaged; make it again") from error

    @classmethod
    def _restored(cls, tensors: dict[str, Tensor], state: dict[str, Any]) -> Calibration:
        layers, _, hidden = tensors["total.0"].shape
        about = {"about_target": state["target"], "about_prompts": state["origin"]}
        run = cls(None, **state["parameters"], shape=(layers, hidden), **about)
        for i, average in enumerate(run.averages):
            average.add(tensors[f"total.{i}"], state["blocks"][i])
        run.prompts = {int(i): about for i, about in state["prompts"].items()}
        run.dropped, run.code = state["dropped"], state.get("code", "")
        for name, value in tensors.items():
            kind, _, index = name.partition(".")
            if kind in ("prompt_entropy", "token_spectra", "norms"):
                run.rows.setdefault(int(index), {})[kind] = value
        if run.replicates is not None:
            run.replicates, run.replicate_blocks = tensors["replicates"], tensors["replicate_blocks"]
        return run


_VARIANT_NAMES = [("filtered" if f else "unfiltered", "first kept" if s else "first dropped") for f, s in VARIANTS]


def check_finite(states: Tensor | Sequence[Tensor], of: str = "the target") -> None:
    """Refuse NaN and infinity: one float32 sum per layer, one transfer from the device; a closer look only where a sum is not finite.

    Args:
        states: (..., d) of each layer, from layer 0 on.

    Raises:
        ElsiError: NaN or infinite states; names the first such layer.
    """
    sums = torch.stack([state.sum(dtype=torch.float32) for state in states]).isfinite().tolist()
    for layer, (state, fine) in enumerate(zip(states, sums, strict=True)):
        if not fine and not bool(state.isfinite().all()):  # a sum of large finite states may overflow
            kind = "NaN" if bool(state.isnan().any()) else "infinity"
            raise ElsiError(f"{kind} in the states of layer {layer} of {of}: load the target with dtype=float32")


def kept_positions_needed(rho: float, block: int) -> int:
    """Fewest tokens of a usable prompt: its filter keeps a block even when the first position is dropped.

    Raises:
        ElsiError: rho outside (0, 1] or block below 1.
    """
    if not 0 < rho <= 1:
        raise ElsiError(f"rho = {rho} outside (0, 1]: the share of positions to keep; the paper uses 0.30")
    if block < 1:
        raise ElsiError(f"block = {block}: a block has at least one token; the paper uses 32")
    length = int((block - 1) / rho)  # ceil(rho (length - 1)) >= block first holds at most two tokens further
    while kept_count(length - 1, rho) < block:
        length += 1
    return length

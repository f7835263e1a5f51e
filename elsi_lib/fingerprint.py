"""What a calibration leaves of a target: the Gram matrices of its layers' representatives, and where they came from.

Figures 2, 3, 5, 6, 7 and table 1 of the paper are functions of N matrices of B x B, so a file of a megabyte or two stands for the
target: no model is needed to select layers, and a fingerprint can be shared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from elsi_lib.cka import cka_matrix
from elsi_lib.entropy import gram_entropy, prepare_grams, set_entropy
from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.files import replaced
from elsi_lib.selection import check_layers

FORMAT = "elsi-fingerprint-1"
# The variants that need their own pass over the states: (filtered, first position kept).
VARIANTS = ((True, True), (True, False), (False, True), (False, False))
SPECTRA = ("all", "kept", "random")


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Gram matrices of a target's layers under one calibration.

    Attributes:
        tensors: what the file holds, see :meth:`save`.
        passport: target, prompts, parameters, code, packages, hardware, seconds.
        filtered: whether the views below are those of the token-entropy filter (paper, 4.1).
        sink: whether they keep the first position of each prompt, where attention sinks sit.
    """

    tensors: dict[str, Tensor]
    passport: dict[str, Any]
    filtered: bool = True
    sink: bool = True

    @property
    def grams(self) -> Tensor:
        """(N, B, B) float64: K_j = Z_j Z_j^T of each layer's representative, for the variant in force.

        Raises:
            ElsiError: a survey's fingerprint holds the filtered variants alone.
        """
        held = self.tensors["grams"]
        if self._variant >= len(held):
            raise ElsiError(f"this fingerprint of {self.target} holds the filtered variants alone, as those of a survey do")
        return _unpack(held[self._variant], self.block)

    @property
    def num_layers(self) -> int:
        """N, decoder blocks of the target."""
        return self.tensors["grams"].shape[1]

    @property
    def block(self) -> int:
        """B, rows of a representative."""
        return self.passport["parameters"]["block"]

    @property
    def target(self) -> str:
        """Name of the target."""
        return self.passport["target"]["name"]

    @property
    def sha256(self) -> str:
        """Hash of the content: tensors and passport."""
        return _content_hash(self.tensors, self.passport)

    def variant(self, filtered: bool = True, sink: bool = True) -> Fingerprint:
        """The same calibration with the token filter or the first position switched; nothing is copied."""
        return Fingerprint(self.tensors, self.passport, filtered, sink)

    def entropy(
        self, layers: Sequence[int] | None = None, alpha: float = 1.0, center: bool = False, normalize: str = "none"
    ) -> float | Tensor:
        """S_alpha in nats: of a layer set, or (N,) of each single layer where ``layers`` is None. See :mod:`elsi_lib.entropy`."""
        grams = prepare_grams(self.grams, center, normalize)
        if layers is None:
            return gram_entropy(grams, alpha)
        return set_entropy(grams, check_layers(layers, self.num_layers, self.target), alpha)

    def cka(self, debiased: bool = False) -> Tensor:
        """(N, N) linear CKA between layers. See :func:`elsi_lib.cka.cka_matrix`."""
        return cka_matrix(self.grams, debiased)

    @property
    def bootstrap(self) -> Tensor | None:
        """(R, N, B, B) float64 Gram matrices of R Poisson bootstrap replicates over prompts, or None where there are none.

        Only the default variant (filtered, first position kept) carries them. They are stored as 16-bit differences to ``grams``
        in units of sqrt(K_ii K_jj); entropies move by less than 1e-3 nats.
        """
        if "bootstrap" not in self.tensors or self._variant != 0:
            return None
        grams = self.grams
        unit = _unit(grams)
        step = self.tensors["bootstrap_step"].to(torch.float64)[..., None, None]
        return grams + _unpack(self.tensors["bootstrap"].to(torch.float64), self.block) * step * unit

    def prompt_entropy(self) -> Tensor:
        """(P, N) nats: S_1 of each prompt's own block average, for the variant in force.

        Raises:
            ElsiError: a survey's fingerprint holds none.
        """
        return self._held("prompt_entropy", "those of a survey hold Gram matrices alone")[self._variant].to(torch.float64)

    def token_entropy_spectra(self, positions: str = "all") -> Tensor:
        """(P', N) nats: S_1 of the raw token states of single prompts, without any averaging (paper, figures 1 and 4).

        Args:
            positions: ``"all"`` positions of the window at the prompt's start, those ``"kept"`` by the filter within it, or
                equally many at ``"random"``: the control that tells what the filter does beyond leaving fewer rows.
                Keeps or drops the first position with the variant in force; the filter is named here.

        Raises:
            ElsiError: the calibration kept none (``spectra`` = 0), or no such positions.
        """
        if positions not in SPECTRA:
            raise ElsiError(f"positions {positions!r}: one of {', '.join(SPECTRA)}")
        spectra = self._held("token_spectra", "calibrate with spectra above 0")
        return spectra[0 if self.sink else 1, SPECTRA.index(positions)].to(torch.float64)

    @property
    def norms(self) -> Tensor:
        """(2, N): norm of the first position's state, and the median norm of the others, averaged over the prompts of the spectra.

        Raises:
            ElsiError: the calibration kept none (``spectra`` = 0).
        """
        return self._held("norms", "calibrate with spectra above 0").to(torch.float64)

    def _held(self, name: str, why: str) -> Tensor:
        if name not in self.tensors:
            raise ElsiError(f"this fingerprint of {self.target} holds no {name}: {why}")
        return self.tensors[name]

    @property
    def _variant(self) -> int:
        return VARIANTS.index((self.filtered, self.sink))

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, atomically.

        Tensors: ``grams`` (4, N, B (B+1) / 2) float64 upper triangles of the four variants; ``prompt_entropy`` (4, P, N) float32;
        ``token_spectra`` (2, 3, P', N) float32; ``norms`` (2, N) float32; ``bootstrap`` (R, N, B (B+1) / 2) int16 and
        ``bootstrap_step`` (R, N) float32. The passport and a hash of everything stand in the header.
        """
        header = {"format": FORMAT, "passport": json.dumps(self.passport, sort_keys=True), "sha256": self.sha256}
        return write_tensors(path, self.tensors, header)

    @classmethod
    def load(cls, path: str | Path) -> Fingerprint:
        """Read a fingerprint and check it.

        Raises:
            ElsiError: no such file, not a fingerprint, truncated, or edited since it was written.
        """
        path = Path(path)
        if not path.is_file():
            raise ElsiError(f"no fingerprint at {path}: make one with `elsi calibrate TARGET -o {path.name}`")
        tensors, header = read_tensors(path, FORMAT, "a fingerprint")
        try:
            passport = json.loads(header["passport"])
        except (KeyError, json.JSONDecodeError) as error:
            raise ElsiError(f"{path} has no readable passport: it is damaged; make it again") from error
        if _content_hash(tensors, passport) != header.get("sha256"):
            raise ElsiError(f"{path} was edited after it was written: its content does not match its hash; make it again")
        return cls(tensors, passport)


def write_tensors(path: str | Path, tensors: dict[str, Tensor], header: dict[str, str]) -> Path:
    """Write a safetensors file atomically: an old file stays as it was until the new one is whole.

    Raises:
        AssetError: the file cannot be written (no permission, disk full).
    """
    try:
        with replaced(path) as part:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata=header)
    except (OSError, SafetensorError) as error:
        raise AssetError(f"{path} cannot be written ({error}): check the folder's permissions and the space on the disk") from error
    return Path(path)


def read_tensors(path: str | Path, form: str, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a file that :func:`write_tensors` wrote with ``header["format"] == form``.

    Raises:
        ElsiError: the file cannot be read, is truncated, or holds something else than ``what``.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if header.get("format") != form:
                raise ElsiError(f"{path} is not {what} (format {header.get('format')!r}, expected {form!r})")
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise ElsiError(f"{path} cannot be read as {what} ({error}): it is missing, truncated or damaged; make it again") from error


def pack_grams(grams: Tensor) -> Tensor:
    """(..., B, B) symmetric -> (..., B (B+1) / 2) upper triangle, row by row."""
    row, column = torch.triu_indices(grams.shape[-1], grams.shape[-1])
    return grams[..., row, column]


def pack_bootstrap(grams: Tensor, replicates: Tensor) -> dict[str, Tensor]:
    """Replicates (R, N, B, B) as 16-bit differences to ``grams`` (N, B, B); see :attr:`Fingerprint.bootstrap`."""
    difference = pack_grams((replicates - grams) / _unit(grams))
    step = (difference.abs().amax(-1) / 32767).clamp_min(1e-30).to(torch.float32)
    quantised = (difference / step[..., None].to(torch.float64)).round().clamp(-32767, 32767).to(torch.int16)
    return {"bootstrap": quantised, "bootstrap_step": step}


def _unit(grams: Tensor) -> Tensor:
    scale = grams.diagonal(dim1=-2, dim2=-1).sqrt().clamp_min(1e-300)
    return scale[..., :, None] * scale[..., None, :]


def _unpack(packed: Tensor, block: int) -> Tensor:
    row, column = torch.triu_indices(block, block)
    full = packed.new_empty(*packed.shape[:-1], block, block)
    full[..., row, column] = packed
    full[..., column, row] = packed
    return full


def _content_hash(tensors: dict[str, Tensor], passport: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(passport, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()

"""From settings to a fingerprint: find it, or load the target and the prompts and calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elsi_lib.assets import sha256_file
from elsi_lib.calibration import Calibration, calibrate, kept_positions_needed
from elsi_lib.errors import ElsiError
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.progress import track
from elsi_lib.prompts import Prompt, find_source, load_prompts
from elsi_lib.provenance import environment
from elsi_lib.settings import Settings, find_fingerprint, is_current, results_root
from elsi_lib.targets import Target, load_target


def obtain_fingerprint(settings: Settings) -> tuple[Fingerprint, str]:
    """This run's fingerprint and how it was come by.

    Returns:
        The fingerprint and ``"measured"`` (in this run's results folder, made on a machine like this one by the code as it stands),
        ``"cached"`` (made elsewhere, and still current) or ``"stale"`` (the method's code has changed since).
    """
    found = find_fingerprint(settings)
    if found is None:
        fingerprint = run_calibration(settings)
        fingerprint.save(settings.output / "fingerprint.safetensors")
        return fingerprint, "measured"
    path, fingerprint = found
    return fingerprint, fingerprint_status(path, fingerprint)


def fingerprint_status(path: Path, fingerprint: Fingerprint) -> str:
    """``"measured"``, ``"cached"`` or ``"stale"``, see :func:`obtain_fingerprint`."""
    if not is_current(fingerprint):
        return "stale"
    return measured_or_cached(path, fingerprint.passport)


def measured_or_cached(path: Path, passport: dict[str, Any]) -> str:
    """``"measured"`` for a result in this run's folder that was made on a machine like this one, else ``"cached"``."""
    here = path.resolve().is_relative_to(results_root().resolve()) and passport["environment"] == environment()
    return "measured" if here else "cached"


def run_calibration(settings: Settings, target: Target | None = None, **options: Any) -> Fingerprint:
    """Load the target and its prompts as the settings say, and calibrate.

    Args:
        settings: which target, which prompts, how many.
        target: already loaded, to save the time.
        options: further arguments of :func:`~elsi_lib.calibration.calibrate` (``reading``, ``window``).
    """
    target, prompts, about = prepare(settings, target)
    return calibrate(
        target,
        prompts,
        **_sizes(settings),
        **options,
        about_prompts=about,
        track=track(f"calibrating {target.name}", len(prompts)),
    )


def run_part(settings: Settings, part: tuple[int, int], target: Target | None = None, **options: Any) -> Calibration:
    """Part i of n of a calibration, for one of several processes; see :meth:`~elsi_lib.calibration.Calibration.merge`."""
    i, n = part
    if not 0 <= i < n:
        raise ElsiError(f"part {i}/{n}: parts are numbered 0/{n} to {n - 1}/{n}")
    target, prompts, about = prepare(settings, target)
    run = Calibration(target, **_sizes(settings), **options, about_prompts=about)
    mine = list(enumerate(prompts))[i::n]
    for index, prompt in track(f"calibrating {target.name}, part {i}/{n}", len(mine))(mine):
        run.add(index, prompt)
    return run


def prepare(settings: Settings, target: Target | None = None) -> tuple[Target, list[Prompt], dict[str, Any]]:
    """The target, its prompts as token ids, and what the passport says of the prompts.

    Prompts are cut at the preset's length, or at the target's context where that is shorter.
    """
    needed = kept_positions_needed(settings.rho, settings.block)
    asked = settings.size("max_tokens")
    if needed > asked:
        raise ElsiError(
            f"block = {settings.block} at rho = {settings.rho} needs prompts of {needed} tokens, and preset {settings.preset} "
            f"cuts them at {asked}: lower block, raise rho, or take another preset"
        )
    target = target or load_target(settings.target)
    longest = min(asked, target.max_tokens or asked)
    if needed > longest:
        raise ElsiError(
            f"block = {settings.block} at rho = {settings.rho} needs prompts of {needed} tokens, and {target.name} takes at most "
            f"{longest}: lower block or raise rho"
        )
    prompts, counts = load_prompts(
        settings.prompts, settings.size("samples"), settings.seed, target.tokenizer, max_tokens=longest, min_tokens=needed
    )
    wanted = settings.calibration()
    about = {
        "source": wanted["source"],
        "source_sha256": sha256_file(find_source(settings.prompts)),
        "asked": wanted["asked"],
        "max_tokens": asked,
        "counts": counts.as_dict(),
    }
    return target, prompts, about


def _sizes(settings: Settings) -> dict[str, Any]:
    """The arguments of a calibration that the settings fix."""
    wanted = settings.calibration()
    return {name: wanted[name] for name in ("rho", "block", "seed", "bootstrap", "spectra")}

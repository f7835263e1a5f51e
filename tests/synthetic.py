"""Fingerprints of random states, for tests that need no model."""

import torch

from elsi_lib.assets import ASSETS
from elsi_lib.calibration import Calibration
from elsi_lib.fingerprint import Fingerprint


def fingerprint(
    layers=8,
    hidden=24,
    prompts=6,
    length=48,
    block=8,
    bootstrap=6,
    spectra=5,
    name="synthetic",
    seed=0,
    source="sharegpt",
    **prompts_about,
) -> Fingerprint:
    """States that drift along depth, with a first position of large norm in the later half (an attention sink)."""
    generator = torch.Generator().manual_seed(seed)
    origin = {"source": source, "source_sha256": ASSETS[source].sha256 if source in ASSETS else None}
    about = {**origin, "asked": prompts, "max_tokens": 256, **prompts_about}
    run = Calibration(
        None, 0.30, block, "position", seed, bootstrap, spectra, window=32, about_prompts=about,
        shape=(layers, hidden), about_target={"name": name, "source": name, "revision": "0" * 40, "dtype": "float32"},
    )  # fmt: skip
    for index in range(prompts):
        steps = torch.randn(layers, length, hidden, generator=generator)
        states = steps.cumsum(0) / torch.arange(1, layers + 1)[:, None, None].sqrt() + index / prompts
        states[layers // 2 :, 0] *= 50
        run.add_states(index, f"prompt {index}", states, torch.rand(length, generator=generator))
    return run.fingerprint(seconds=1.0)

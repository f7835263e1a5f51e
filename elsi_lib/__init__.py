"""Which layers of a target model should feed its draft: the companion library to "Surfing the Activation Wave".

Layer j is, everywhere in this package, the raw residual output of 0-based decoder block j.

    >>> from elsi_lib import Fingerprint, elsi, exhaustive
    >>> fp = Fingerprint.load("data/results/smollm2-135m-instruct/fingerprint.safetensors")
    >>> elsi(fp, 3).layers
"""

from importlib import import_module
from typing import Any

# Loaded at first use: torch and transformers take seconds, and `elsi --help` needs neither.
_HOME = {
    "AssetError": "errors",
    "ElsiError": "errors",
    "Fingerprint": "fingerprint",
    "Selection": "selection",
    "calibrate": "calibration",
    "elsi": "selection",
    "elsi_c": "selection",
    "engine_ids": "layers",
    "exhaustive": "selection",
    "layer_ids": "layers",
    "layer_rule": "selection",
    "linear_cka": "cka",
    "load_prompts": "prompts",
    "load_target": "targets",
    "matrix_entropy": "entropy",
    "select": "selection",
    "stability": "selection",
    "standing": "selection",
    "token_entropy": "filtering",
    "top_entropy_positions": "filtering",
    "transition_scores": "cka",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

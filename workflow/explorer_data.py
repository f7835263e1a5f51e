"""Data of the layer explorer (book/explorer.md) as script files, because a page opened from a disk may load scripts and nothing else.

``site.js`` lists the fingerprints and how every system names layers; ``NAME.js`` holds one fingerprint, byte for byte, and is loaded
when a reader asks for it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elsi_lib.choice import KEY
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.layers import CONVENTIONS
from elsi_lib.settings import Settings

FILE = "fingerprint.safetensors"
# The keys of config.json, outermost first, under which a system looks for a draft's layer ids. EAGLE's code has them fixed and
# transformers has no drafts, so these two have none.
CONFIG_KEYS = {
    "sglang": ("eagle_config", KEY),
    "specforge": ("eagle_config", KEY),
    "vllm": (KEY,),
    "speculators": (KEY,),
    "dflash": ("dflash_config", "target_layer_ids"),
}


def explorer_data(roots: Iterable[Path]) -> dict[str, bytes]:
    """File name -> content.

    Args:
        roots: folders of results; a fingerprint in a later one takes the place of an earlier one of the same name.

    Raises:
        ElsiError: a fingerprint that is damaged.
    """
    default = Settings().run_name
    paths = {path.parent.name: path for root in roots for path in root.glob(f"*/{FILE}")}
    names = sorted(paths, key=lambda name: (name != default, name))
    site = {
        "fingerprints": [_entry(name, Fingerprint.load(paths[name])) for name in names],
        "conventions": {name: _convention(name) for name in CONVENTIONS},
    }
    files = {f"{name}.js": _call("receive", name, base64.b64encode(paths[name].read_bytes()).decode()) for name in names}
    return {"site.js": _call("site", site)} | files


def _entry(name: str, fp: Fingerprint) -> dict[str, Any]:
    return {"name": name, "target": fp.target, "layers": fp.num_layers}


def _convention(name: str) -> dict[str, Any]:
    return asdict(CONVENTIONS[name]) | {"config": CONFIG_KEYS.get(name)}


def _call(function: str, *arguments: Any) -> bytes:
    return f"Elsi.data.{function}({', '.join(map(json.dumps, arguments))});\n".encode()

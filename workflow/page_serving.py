"""From a layer set to a served draft: the ids in one config.json, what each engine can take, and the model card's launch lines."""

from __future__ import annotations

import json
import re

from page_costs import fingerprints
from page_parts import NOT_HERE, Origin

from elsi_lib.choice import KEY
from elsi_lib.fingerprint import Fingerprint
from elsi_lib.layers import servable_layers
from elsi_lib.report.words import braces, markdown_table
from elsi_lib.selection import elsi, layer_rule
from elsi_lib.speculative.card import model_card
from elsi_lib.speculative.draft import DraftConfig
from elsi_lib.speculative.export import LOADERS, export_config, loader_ids

SHOWN = ("num_aux_hidden_states", KEY, "eagle_config")


def configs(origin: Origin) -> str:
    """The keys of config.json that name the layers, for ELSI's set of three of every target that is calibrated here."""
    parts = []
    for fp in _fingerprints(origin):
        layers = elsi(fp, 3).layers
        content = export_config(_config(fp, layers))
        shown = {name: content[name] for name in SHOWN if name in content}
        parts.append(f"**{fp.target}**, layers {braces(layers)} of 0-{fp.num_layers - 1}:\n\n```json\n{_json(shown)}\n```")
    return "\n\n".join(parts) or NOT_HERE


def servable(origin: Origin) -> str:
    """Which engine can take which set, why not, and what is left to choose from where one cannot."""
    rows, reasons, limited = [], {}, []
    for fp in _fingerprints(origin):
        sets = {"ELSI m=3": elsi(fp, 3).layers, "ELSI m=1": elsi(fp, 1).layers}
        sets |= {
            "EAGLE-3 as printed": layer_rule("eagle3", fp.num_layers),
            "EAGLE-3 as its code runs": layer_rule("eagle3-code", fp.num_layers),
        }
        for label, layers in sets.items():
            found = loader_ids(_config(fp, layers))
            cells = [braces(given) if not isinstance(given, str) else "no" for given in found.values()]
            rows.append((fp.target, label, braces(layers), *cells))
            for name, given in found.items():
                if isinstance(given, str):
                    reasons.setdefault((name, _reason(given)), []).append(f"{braces(layers)} of {fp.target}")
        if isinstance(loader_ids(_config(fp, sets["ELSI m=3"]))["sglang"], str):
            among = elsi(fp, 3, among=servable_layers("sglang", fp.num_layers))
            lost = fp.entropy(sets["ELSI m=3"]) - among.entropy
            limited.append(
                f"Among the layers that SGLang can capture of {fp.target}, `elsi select --engine sglang` chooses "
                f"{braces(among.layers)}: {among.entropy:.3f} nats, {lost:.3f} below the choice from all layers."
            )
    if not rows:
        return NOT_HERE
    heads = ("target", "set", "layers", *(loader.title for loader in LOADERS.values()))
    said = [f"- **{LOADERS[name].title}**, {'; '.join(of)}: {reason}." for (name, reason), of in reasons.items()]
    return "\n\n".join([markdown_table(heads, rows), "Why not:", "\n".join(said), *limited])


def launch() -> str:
    """How each engine is started, as the model card of an export has it; EAGLE's own layers, so that every engine has a line."""
    N = 30
    config = _draft((1, N // 2 - 1, N - 4), N, hidden=576, vocabulary=49_152)
    return serving_section(config)


def serving_section(config: DraftConfig) -> str:
    """The part ``Serving`` of a model card, without its heading and without ids that are another draft's."""
    found = loader_ids(config)
    ids = {name: given for name, given in found.items() if not isinstance(given, str)}
    reasons = {name: given for name, given in found.items() if isinstance(given, str)}
    titles = {name: loader.title for name, loader in LOADERS.items()}
    card = model_card(config, {}, ids, reasons, titles, "bfloat16")
    section = card.partition("## Serving\n\n")[2].partition("\n\n## ")[0]
    for given in dict.fromkeys(ids.values()):
        section = section.replace(json.dumps(list(given)), "[IDS]")
    return section


def _fingerprints(origin: Origin) -> list[Fingerprint]:
    return [Fingerprint.load(path) for path in fingerprints(origin)]


def _config(fp: Fingerprint, layers: tuple[int, ...]) -> DraftConfig:
    target = fp.passport["target"]
    return _draft(layers, fp.num_layers, target.get("hidden_size", 64), target.get("vocab_size", 64))


def _draft(layers: tuple[int, ...], num_layers: int, hidden: int, vocabulary: int) -> DraftConfig:
    """A draft of these layers; the other sizes, which no id depends on, are only of a kind that every engine takes."""
    return DraftConfig(
        layers, num_layers, hidden, vocabulary, draft_vocab_size=vocabulary, intermediate_size=hidden,
        num_attention_heads=1, num_key_value_heads=1, head_dim=hidden,
    )  # fmt: skip


def _reason(given: str) -> str:
    """A reason without the set it was given for."""
    text = re.sub(r"^\w+ cannot take this draft: ", "", given)
    text = re.sub(r"^\w+ cannot name layer \d+ of \d+: (?:it captures through SGLang: )?", "it cannot name the last block: ", text)
    return re.sub(r"^\w+ takes (exactly \d+ layers).*", r"it takes \1", text)


def _json(content: dict) -> str:
    """Indented, with lists of numbers on one line."""
    return re.sub(r"\[\s+([\d,\s]+?)\s+\]", lambda found: f"[{' '.join(found.group(1).split())}]", json.dumps(content, indent=2))

"""The model card of an exported draft: what it belongs to, its layers in every numbering, how to serve it, what was not tested."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from elsi_lib.catalogue import ASSETS, HubRepo
from elsi_lib.choice import KEY
from elsi_lib.provenance import code_version
from elsi_lib.speculative.draft import DraftConfig

_FIELDS = {
    "sglang": f"`eagle_config.{KEY}`",
    "vllm": f"`{KEY}`",
    "specforge": f"`eagle_config.{KEY}`, or `model.aux_hidden_state_layer_ids` of a run",
    "speculators": "an argument, see below",
    "eagle": "fixed in its code",
}
_LONGEST = 8


def model_card(
    config: DraftConfig,
    passport: Mapping[str, Any],
    ids: Mapping[str, tuple[int, ...]],
    reasons: Mapping[str, str],
    titles: Mapping[str, str],
    dtype: str,
) -> str:
    """Markdown for README.md of an export.

    Args:
        passport: of the draft: ``target``, and whatever its training left there; ``tau`` gets a section of its own.
        ids: of every engine that can take the draft; ``reasons`` of those that cannot, ``titles`` of all.
    """
    target = dict(passport.get("target") or {})
    name = _text(target.get("name") or "an unnamed target")
    version = code_version()["elsi_lib"]
    parts = [
        _front_matter(target),
        f"# EAGLE-3 draft of {name}, layers {_set(config.layers)}\n\n{_summary(config, dtype, version)}",
        f"## Target\n\n{_table(('', ''), _target_rows(target))}\n\nWith any other target, also a fine-tuned or differently quantised "
        "one, the text stays the target's own, but fewer drafted tokens are accepted.",
        f"## Layers\n\n{_layers(config, ids, reasons, titles)}",
        _serving(config, target, ids),
        _training(passport),
        _tau(passport.get("tau")),
        _licence(target),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(target: Mapping[str, Any]) -> str:
    base = f"base_model: {_hub_id(target)}\n" if _hub_id(target) else ""
    return f"---\n{base}tags:\n- eagle3\n- speculative-decoding\n---"


def _summary(config: DraftConfig, dtype: str, version: str) -> str:
    fused = "state of one layer" if len(config.layers) == 1 else f"states of {len(config.layers)} layers"
    norms = {
        "none": "as they are",
        "each": "after an RMSNorm per layer (`fc_norm`)",
        "concat": "after one RMSNorm over their concatenation (`norm_before_fc`)",
    }
    return (
        f"One decoder layer that drafts for the target below (speculative decoding). It reads the {fused} of the target, "
        f"{norms[config.norm_before_fc]}, and proposes {config.draft_vocab_size:,} of the target's {config.vocab_size:,} token ids. "
        f"Weights are {dtype}; the embedding is the target's own and not in the file. `d2t` holds offsets (target id - draft id), "
        f"`t2d` marks the ids the draft can propose. Rotary base {config.rope_theta:g}, whatever the target's. Written by elsi-lib "
        f"{version}, the companion to arXiv 2610.12939."
    )


def _target_rows(target: Mapping[str, Any]) -> list[tuple[str, str]]:
    wanted = ("name", "source", "revision", "architecture", "num_layers", "hidden_size", "vocab_size", "dtype")
    return [(key.replace("_", " "), _text(target[key])) for key in wanted if target.get(key) is not None]


def _layers(config: DraftConfig, ids: Mapping[str, tuple], reasons: Mapping[str, str], titles: Mapping[str, str]) -> str:
    rows = [("this project", ", ".join(map(str, config.layers)), "0-based decoder blocks, their raw output")]
    for name, title in titles.items():
        given = ids.get(name)
        rows.append((title, ", ".join(map(str, given)) if given else "none", _FIELDS[name] if given else _text(reasons[name])))
    text = (
        f"The target has {config.num_target_layers} decoder blocks. These are the same layers in every numbering; ids shifted by one "
        f"load all the same, and draft worse.\n\n{_table(('system', 'ids', 'where it reads them, or why it has none'), rows)}"
    )
    if "sglang" in reasons:
        text += (
            "\n\nDo not load this draft in SGLang: its key is left out of config.json, and without it SGLang falls back to default "
            "layers without a word."
        )
    return text


def _serving(config: DraftConfig, target: Mapping[str, Any], ids: Mapping[str, tuple[int, ...]]) -> str:
    path = _hub_id(target) or "TARGET"
    where = "" if path != "TARGET" else " and TARGET for the target's folder or hub id"
    parts = [f"## Serving\n\n`DRAFT` stands for this folder{where}."]
    if "sglang" in ids:
        parts.append(
            "SGLang, with EAGLE's tree of 60 nodes, the root counted (10 per level, six levels):\n\n```bash\npython -m "
            f"sglang.launch_server --model-path {path} --speculative-algorithm EAGLE3 \\\n  --speculative-draft-model-path DRAFT "
            "--speculative-num-steps 6 \\\n  --speculative-eagle-topk 10 --speculative-num-draft-tokens 60\n```"
        )
    if "vllm" in ids:
        drafted = json.dumps({"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 5})
        parts.append(f"vLLM, a chain of five:\n\n```bash\nvllm serve {path} --speculative-config '{drafted}'\n```")
        if len(config.layers) != 3 or config.norm_before_fc != "none":
            parts.append(
                "vLLM must be of a version that sizes `fc` by `num_aux_hidden_states` and knows `fc_norm` and `norm_before_fc`; older "
                "ones expect three layers and no norm."
            )
    if "specforge" in ids:
        parts.append("SpecForge reads the layers from this config.json, and goes on training from this folder as its draft model.")
    if "speculators" in ids:
        parts.append(_speculators(config, path, ids["speculators"]))
    if "eagle" in ids:
        parts.append(
            f'EAGLE\'s own code: `EaModel.from_pretrained(base_model_path="{path}", ea_model_path="DRAFT", use_eagle3=True)`.'
        )
    parts.append(
        "Not tested here: no server was run for this export, nor was it checked that one can capture states of this target's "
        "architecture. Names, shapes, types and ids follow the sources of sglang 0.5.23, vLLM, SpecForge a6b6b02, speculators 0.9.0 "
        "and EAGLE cb7e084. That exports give the logits of the trained draft is tested with speculators 0.9.0 (`make test-engines`)."
    )
    return "\n\n".join(parts)


def _speculators(config: DraftConfig, path: str, ids: tuple[int, ...]) -> str:
    given = json.dumps({KEY: list(ids)})
    if len(config.layers) == 3 and config.norm_before_fc == "none":
        converted = (
            "speculators 0.9.0 converts it; its converter does not read the layers from config.json, so they are given:\n\n```bash\n"
            f"speculators convert DRAFT --algorithm eagle3 --verifier {path} --output-path CONVERTED \\\n"
            f"  --algorithm-kwargs '{given}'\n```\n\n"
        )
    else:
        converted = "Do not convert it with speculators 0.9.0: the converter expects three layers, and drops norms before `fc`. "
    return (
        f"{converted}The model of speculators reads the draft as it is. Where a file holds no embedding, version 0.9.0 may leave it "
        "uninitialised instead of taking the target's, also after a conversion; the last two lines fill it:\n\n"
        f"```python\n{speculators_snippet(config, path, ids)}```"
    )


def speculators_snippet(config: DraftConfig, path: str, ids: Iterable[int]) -> str:
    """Python that loads an export with ``Eagle3DraftModel`` of speculators 0.9.0, for any number of layers and either norm."""
    norms = {"none": "", "each": "    fc_norm=True,\n", "concat": "    norm_before_fc=True,\n"}
    return (
        "import torch\n"
        "from speculators.config import SpeculatorsConfig, VerifierConfig\n"
        "from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig\n"
        "from speculators.proposals.greedy import GreedyTokenProposalConfig\n"
        "from transformers import AutoConfig\n\n"
        'layer = AutoConfig.from_pretrained("DRAFT")\n'
        "config = Eagle3SpeculatorConfig(\n"
        "    transformer_layer_config=layer,\n"
        "    draft_vocab_size=layer.draft_vocab_size,\n"
        f"    eagle_aux_hidden_state_layer_ids={list(ids)},\n"
        f"{norms[config.norm_before_fc]}"
        "    speculators_config=SpeculatorsConfig(\n"
        '        algorithm="eagle3",\n'
        "        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=5)],\n"
        '        default_proposal_method="greedy",\n'
        f'        verifier=VerifierConfig.from_pretrained("{path}"),\n'
        "    ),\n"
        ")\n"
        'names = {r"^midlayer\\.": "layers.0."}\n'
        'draft = Eagle3DraftModel.from_pretrained("DRAFT", config=config, key_mapping=names)\n'
        "torch.nn.init.constant_(draft.embed_tokens.weight, torch.nan)\n"
        "draft.load_verifier_weights()\n"
    )


def _training(passport: Mapping[str, Any]) -> str:
    facts = {name: value for name, value in passport.items() if name not in ("target", "tau")}
    rows = [(name, value) for name, value in _flat(facts) if value]
    return f"## Training\n\n{_table(('', ''), rows)}" if rows else "## Training\n\nThe draft's passport says nothing of its training."


def _tau(tau: Any) -> str:
    """Measured acceptance length, +1 included: a number, a mapping, or a list of rows."""
    if tau is None:
        return "## Measured tau\n\nNone is recorded in this draft's passport."
    if isinstance(tau, list) and tau and all(isinstance(row, Mapping) for row in tau):
        columns = tuple(dict.fromkeys(key for row in tau for key in row))
        body = _table(tuple(map(_text, columns)), [tuple(_value(row.get(key)) for key in columns) for row in tau])
    else:
        body = _table(("", ""), _flat(tau if isinstance(tau, Mapping) else {"tau": tau}))
    return f"## Measured tau\n\nTokens per step of the target, its own token included.\n\n{body}"


def _licence(target: Mapping[str, Any]) -> str:
    asset = ASSETS.get(str(target.get("name")))
    terms = f"{asset.licence}, as far as known here" if asset and asset.kind == "target" else "not known here: see its own card"
    return (
        "## Licence\n\nThese weights were distilled from the target. What may be done with them follows from the target's licence "
        f"({terms}) and from that of the training text. The Apache-2.0 licence of the library covers its code, not these weights."
    )


def _flat(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        label = f"{prefix}{_text(name)}"
        rows += _flat(value, f"{label}, ") if isinstance(value, Mapping) else [(label, _value(value))]
    return rows


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        shown = ", ".join(map(_value, value[:_LONGEST]))
        return shown if len(value) <= _LONGEST else f"{shown}, ... ({len(value):,} in all, the last {_value(value[-1])})"
    return _text(value)


def _text(value: Any) -> str:
    """One line of plain text for a Markdown cell: no markup of others, and of a path on some machine only its last part."""
    text = " ".join(str(value).split())
    text = re.sub(r"(?<![\w.:/])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\]+[/\\])+([^\s/\\]*)", r"\1", text)
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _set(layers: Iterable[int]) -> str:
    return "{" + ", ".join(map(str, layers)) + "}"


def _hub_id(target: Mapping[str, Any]) -> str:
    """The target's hub id; empty for one from elsewhere."""
    source = str(target.get("source") or "")
    asset = ASSETS.get(source)
    if asset is not None:
        return asset.source.repo if isinstance(asset.source, HubRepo) else ""
    return source if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) else ""

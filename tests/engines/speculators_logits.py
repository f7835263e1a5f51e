"""Run in the environment of ``make test-engines``: the logits of exports, computed by speculators.

    python speculators_logits.py CASES.json

CASES is a list of folders. Each holds ``export``, ``target`` (configuration, embedding, head and final norm), ``inputs.safetensors``
(states (1, T, |L| H), ids (1, T)) and ``case.json`` (layer ids, steps, ways). There are two ways into speculators: ``card`` runs the
Python of the export's model card, ``convert`` speculators' own converter. ``out.safetensors`` gets, for each way, the logits
(1, T, D) of every step, the layer ids and the draft vocabulary.
"""

import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.convert import convert_model
from speculators.models.eagle3 import Eagle3DraftModel


def card(folder: Path, given: dict) -> Eagle3DraftModel:
    text = (folder / "export" / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    code = code.replace('"DRAFT"', repr(str(folder / "export"))).replace('"TARGET"', repr(str(folder / "target")))
    names: dict = {}
    exec(code, names)
    return names["draft"]


def convert(folder: Path, given: dict) -> Eagle3DraftModel:
    converted, target = str(folder / "converted"), str(folder / "target")
    ids = given["layer_ids"]
    convert_model(str(folder / "export"), target, "eagle3", converted, eagle_aux_hidden_state_layer_ids=ids)
    draft = Eagle3DraftModel.from_pretrained(converted)
    torch.nn.init.constant_(draft.embed_tokens.weight, torch.nan)  # speculators 0.9.0 may leave it uninitialised
    draft.load_verifier_weights()
    return draft


def run(draft: Eagle3DraftModel, folder: Path, given: dict) -> dict[str, torch.Tensor]:
    steps: list[torch.Tensor] = []
    draft.lm_head.register_forward_hook(lambda module, args, output: steps.append(output.detach().clone()))
    inputs = load_file(folder / "inputs.safetensors")
    T = inputs["ids"].shape[1]
    with torch.no_grad():
        draft.eval()(
            hidden_states=inputs["states"],
            input_ids=inputs["ids"],
            document_ids=torch.zeros(1, T, dtype=torch.long),
            position_ids=torch.arange(T)[None],
            ttt_steps=given["steps"],
        )
    out = {f"logits{step}": logits for step, logits in enumerate(steps)}
    out["layer_ids"] = torch.tensor(draft.config.eagle_aux_hidden_state_layer_ids)
    return out | ({} if draft.d2t is None else {"d2t": draft.d2t, "t2d": draft.t2d})


def main() -> None:
    for folder in map(Path, json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))):
        given = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        found = {}
        for name in given["ways"]:
            draft = {"card": card, "convert": convert}[name](folder, given)
            found |= {f"{name}.{key}": tensor.contiguous() for key, tensor in run(draft, folder, given).items()}
        save_file(found, folder / "out.safetensors")


if __name__ == "__main__":
    main()

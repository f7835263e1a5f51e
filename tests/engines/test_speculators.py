"""Exports read by a released training and serving library give the logits of the draft: ``make test-engines``.

Not part of ``make test``: it needs an environment of its own, with the pinned speculators. ``ELSI_ENGINES`` may name another Python
than that of the make target. ``ELSI_DRAFT`` may name a trained draft of a target of `elsi targets`, which is then tried as well.
"""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCABULARY, tiny_target

from elsi_lib.speculative.checkpoint import load_draft, save_draft
from elsi_lib.speculative.draft import Draft
from elsi_lib.speculative.export import export_draft
from elsi_lib.speculative.vocabulary import DraftVocabulary
from elsi_lib.targets import Target, load_target

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("ELSI_ENGINES", str(ROOT / "_build" / "engines" / "bin" / "python"))
SCRIPT = Path(__file__).with_name("speculators_logits.py")
ROWS, STEPS = 128, 3  # the block masks of flex attention, which speculators prefers, come in blocks of 128
CASES = {  # layers, changes to the draft, size of the draft vocabulary
    "three layers": ((1, 3, 5), {}, 20),
    "another rotary base and one key-value head": ((0, 1, 2), {"rope_theta": 500.0, "num_key_value_heads": 1}, 20),
    "wide heads and MLP": ((1, 3, 5), {"head_dim": 16, "intermediate_size": 48}, 20),
    "the whole vocabulary": ((1, 3, 7), {}, VOCABULARY),
    "one layer": ((2,), {}, 20),
    "two layers, a norm over both": ((0, 7), {"norm_before_fc": "concat"}, 20),
    "three layers, a norm for each": ((1, 3, 5), {"norm_before_fc": "each"}, 20),
    "four layers, a norm for each": ((0, 2, 4, 7), {"norm_before_fc": "each"}, 20),
}
TRAINED = "a trained draft"


@dataclasses.dataclass
class Case:
    draft: Draft
    folder: Path
    ways: list[str]

    def inputs(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "inputs.safetensors")

    def found(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "out.safetensors")


def tiny_draft(target: Target, layers, changes, size) -> Draft:
    """A draft with no weight left at its initial value."""
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))[:size].sort().values
    draft = Draft.for_target(target, layers, DraftVocabulary(ids, VOCABULARY), **changes)
    generator = torch.Generator().manual_seed(len(layers))
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.2 if weight.ndim == 2 else 0.3) + (weight.ndim == 1))
    return draft.eval()


def prepare(draft: Draft, saved: Path, target: Target, folder: Path) -> Case:
    """A case's folder: the export, the little that a loader reads of the target, random states and ids."""
    made = export_draft(saved, folder / "export", dtype="float32")
    model, config = target.model, draft.config
    (folder / "target").mkdir()
    model.config.save_pretrained(folder / "target")
    parts = {"model.embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    weights = {f"{name}.weight": part.weight.detach().float().clone() for name, part in parts.items()}
    weights["model.norm.weight"] = model.model.norm.weight.detach().float().clone()
    save_file(weights, folder / "target" / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, ROWS, draft.fc.in_features, generator=generator)
    ids = torch.randint(0, config.vocab_size, (1, ROWS), generator=generator)
    save_file({"states": states, "ids": ids}, folder / "inputs.safetensors")
    converts = len(config.layers) == 3 and config.norm_before_fc == "none"
    given = {"layer_ids": made.ids["speculators"], "steps": STEPS, "ways": ["card", "convert"] if converts else ["card"]}
    (folder / "case.json").write_text(json.dumps(given))
    return Case(draft, folder, given["ways"])


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Case]:
    """Every case prepared, and computed by speculators in one process."""
    place = tmp_path_factory.mktemp("cases")
    target = tiny_target("llama", layers=8)
    prepared = {}
    for number, (name, (layers, changes, size)) in enumerate(CASES.items()):
        draft = tiny_draft(target, layers, changes, size)
        saved = save_draft(draft, place / str(number) / "draft")
        prepared[name] = prepare(draft, saved, target, place / str(number))
    if "ELSI_DRAFT" in os.environ:
        saved = Path(os.environ["ELSI_DRAFT"])
        target = load_target(json.loads((saved / "config.json").read_text())["passport"]["target"]["source"], dtype="float32")
        (place / "trained").mkdir()
        prepared[TRAINED] = prepare(load_draft(saved, target).float().eval(), saved, target, place / "trained")
    listed = place / "cases.json"
    listed.write_text(json.dumps([str(case.folder) for case in prepared.values()]))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    run = subprocess.run([PYTHON, SCRIPT, listed], capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return prepared


def own_logits(case: Case) -> list[torch.Tensor]:
    """Of every step of training-time test: row t of step k sees rows 0..t of step 0 and its own of later steps, at position t + k."""
    draft, inputs = case.draft, case.inputs()
    hidden, ids = draft.fuse(inputs["states"]), inputs["ids"]
    cache, found = [], []
    causal, own = torch.ones(ROWS, ROWS, dtype=torch.bool).tril(), torch.eye(ROWS, dtype=torch.bool)
    for step in range(STEPS):
        shifted = torch.cat([ids[:, step:], ids.new_zeros(1, step)], 1)
        mask = torch.cat([causal, *[own] * step], 1)[None, None]
        hidden, logits = draft(draft.embed(shifted), hidden, mask, torch.arange(ROWS)[None] + step, cache)
        found.append(logits)
    return found


@pytest.mark.parametrize(
    "name", [*CASES, pytest.param(TRAINED, marks=pytest.mark.skipif("ELSI_DRAFT" not in os.environ, reason="ELSI_DRAFT is not set"))]
)
def test_speculators_reads_the_same_draft(cases, name):
    case = cases[name]
    config, vocabulary, found = case.draft.config, case.draft.vocabulary, case.found()
    with torch.no_grad():
        expected = own_logits(case)
    assert all(float(logits.std()) > 0.1 for logits in expected)
    for way in case.ways:
        assert found[f"{way}.layer_ids"].tolist() == [j + 1 for j in config.layers]
        if config.draft_vocab_size < config.vocab_size:  # speculators drops the tables of a whole vocabulary
            assert torch.equal(found[f"{way}.d2t"], vocabulary.d2t) and torch.equal(found[f"{way}.t2d"], vocabulary.t2d)
        for step, logits in enumerate(expected):
            torch.testing.assert_close(found[f"{way}.logits{step}"], logits, rtol=1e-4, atol=1e-4)

"""A survey against calibrations of the same choices, ridge regression written out, and a run that was cut."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from synthetic import fingerprint
from tiny import tiny_target

from elsi_lib import corpora, survey
from elsi_lib.calibration import Calibration, calibrate
from elsi_lib.corpora import CORPORA, load_corpus
from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.filtering import token_entropy
from elsi_lib.fingerprint import read_tensors, write_tensors
from elsi_lib.jackknife import write_left_out
from elsi_lib.probe import ProbeStates, all_sets, probe_sets
from elsi_lib.prompts import Prompt
from elsi_lib.selection import elsi, exhaustive, standing
from elsi_lib.settings import Settings
from elsi_lib.survey import find_survey, load_survey, run_survey
from elsi_lib.tally import FORMAT, GROUP, Choice, Tally, samples, sum_up

OWN = Choice(rho=0.5, block=4)
PRESET = {"survey_samples": 12, "stability_samples": 25, "corpus_samples": 3, "corpus_tokens": 90}
PRESET |= {"probe_tokens": 36, "max_tokens": 100}
TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps. "


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=8)


def prompts_of(count, length=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [Prompt(str(i), f"key {i}", tuple(torch.randint(5, 30, (length,), generator=generator).tolist())) for i in range(count)]


def tallied(target, named, prompts, **options):
    tally = Tally(target, named, **options)
    for prompt in prompts:
        tally.add(prompt)
    return tally


@pytest.mark.parametrize("choice", [OWN, Choice(0.5, 4, "segment"), Choice(1.0, 8), Choice(0.2, 4)])
def test_a_choice_is_the_calibration_of_its_parameters(target, choice):
    prompts = prompts_of(5)
    found = tallied(target, {"one": choice}, prompts).fingerprints()["one"]
    expected = calibrate(target, prompts, rho=choice.rho, block=choice.block, reading=choice.reading, bootstrap=0, spectra=0)
    for sink in (True, False):
        torch.testing.assert_close(found.variant(sink=sink).grams, expected.variant(sink=sink).grams, rtol=1e-6, atol=1e-9)
    assert found.passport["prompts"]["blocks"] == expected.passport["prompts"]["blocks"]["filtered, first kept"] if (
        "filtered, first kept" in expected.passport["prompts"]["blocks"]
    ) else found.passport["prompts"]["used"] == 5


def test_positions_left_out_do_not_enter(target):
    """Against a calibration that is given the other positions only."""
    prompts = prompts_of(4)
    named = {"skip": replace(OWN, skip=7), "norm": replace(OWN, norm_limit=1.3)}
    found = tallied(target, named, prompts).fingerprints()
    expected = {name: Calibration(target, OWN.rho, OWN.block, bootstrap=0, spectra=0, window=8) for name in named}
    for index, prompt in enumerate(prompts):
        states, logits = target.run(prompt.ids)
        norms = torch.stack([state.norm(dim=-1) for state in states])
        quiet = ~(norms > 1.3 * norms.median(-1, keepdim=True).values).any(0)
        assert 0 < quiet.sum() < len(quiet)
        late = torch.arange(len(quiet)) >= 7
        for name, kept in (("skip", late), ("norm", quiet)):
            expected[name].add_states(index, prompt.key, [s[kept] for s in states], token_entropy(logits)[kept])
    for name, run in expected.items():
        torch.testing.assert_close(found[name].grams, run.fingerprint().grams, rtol=1e-6, atol=1e-9)


def test_prompts_too_short_for_a_choice_are_left_out_of_it_alone(target):
    tally = tallied(target, {"default": OWN, "long": Choice(0.5, 24)}, [*prompts_of(2, 60), *prompts_of(3, 30)])
    assert tally.used == {"default": 5, "long": 2} and tally.about()["seen"] == 5
    assert "none" not in tally.fingerprints()
    assert set(tallied(target, {"default": OWN, "none": Choice(0.1, 64)}, prompts_of(1)).fingerprints()) == {"default"}


def test_samples_are_choices_from_the_groups_own_prompts(target):
    prompts = prompts_of(2 * GROUP)
    table = samples(tallied(target, {"default": OWN}, prompts, group=GROUP).groups, sizes=(GROUP, 2 * GROUP))
    assert table.groupby("size")["group"].nunique().to_dict() == {GROUP: 2, 2 * GROUP: 1}
    second = calibrate(target, prompts[GROUP:], rho=OWN.rho, block=OWN.block, bootstrap=0, spectra=0)
    for sink, word in ((True, "kept"), (False, "dropped")):
        row = table[(table["size"] == GROUP) & (table["group"] == 1) & (table["m"] == 3) & (table["first_position"] == word)].iloc[0]
        chosen = elsi(second.variant(sink=sink), 3)
        assert row["layers"] == " ".join(map(str, chosen.layers)) and row["entropy"] == pytest.approx(chosen.entropy, abs=1e-6)
        assert row["eagle3"] == pytest.approx(second.variant(sink=sink).entropy((1, 3, 4)), abs=1e-6)
    every = calibrate(target, prompts, rho=OWN.rho, block=OWN.block, bootstrap=0, spectra=0)
    for row in table[table["m"] == 2].itertuples():
        place = standing(every.variant(sink=row.first_position == "kept"), tuple(map(int, row.layers.split())))
        assert row.rank == place.rank and row.regret == pytest.approx(place.regret, abs=1e-6)


def test_groups_of_two_passes_are_those_of_one(target):
    """A rest of fewer prompts than a group has, at the end of either pass, counts in the whole alone."""
    prompts = prompts_of(2 * GROUP + 3)
    one = tallied(target, {"default": OWN}, prompts, group=GROUP).groups
    parts = [tallied(target, {"default": OWN}, some, group=GROUP).groups for some in (prompts[:GROUP], prompts[GROUP:])]
    assert [group.prompts for group in one] == [GROUP, GROUP, 3]
    pd.testing.assert_frame_equal(samples(sum(parts, [])), samples(one))
    sizes = samples(one)["size"]
    assert sorted(set(sizes)) == [GROUP, 2 * GROUP, 2 * GROUP + 3]
    assert (samples(one).groupby("size")["group"].nunique() == [2, 1, 1]).all()
    uneven = [tallied(target, {"default": OWN}, some, group=GROUP).groups for some in (prompts[: GROUP + 3], prompts[GROUP + 3 :])]
    assert [group.prompts for group in sum(uneven, [])] == [GROUP, 3, GROUP]
    whole = [table[table["size"] == 2 * GROUP + 3]["entropy"].to_numpy() for table in map(samples, (one, sum(uneven, [])))]
    np.testing.assert_allclose(*whole, rtol=1e-6)


def test_block_influence_is_one_minus_the_mean_cosine(target):
    prompt = prompts_of(1)[0]
    table = tallied(target, {"default": OWN}, [prompt, *prompts_of(1, seed=1)], probe=2).influence()
    states = [target.model.get_input_embeddings()(torch.tensor(prompt.ids)), *target.run(prompt.ids)[0]]
    arrays = [state.detach().numpy().astype(np.float64) for state in states]
    first = [
        1 - np.mean((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1))
        for a, b in zip(arrays, arrays[1:], strict=False)
    ]
    one = tallied(target, {"default": OWN}, [prompt, prompt], probe=2).influence()
    np.testing.assert_allclose(one["influence"], first, rtol=1e-5)
    np.testing.assert_allclose(one["error"], 0, atol=1e-7)
    assert list(table["layer"]) == list(range(8)) and (table["prompts"] == 2).all()


def test_the_probe_is_ridge_regression_on_the_joined_states(target):
    prompts = prompts_of(12)
    taken = tallied(target, {"default": OWN}, prompts, probe=6).probe
    sets = [(0,), (2, 5), (1, 3, 7), (0, 1, 2)]
    table = probe_sets(taken, sets)
    train = 9 * 6
    X, E = torch.cat(taken.states, 1).double().numpy(), torch.cat(taken.following).double().numpy()
    assert X.shape[1] == 72

    def scaled(A):
        A = A - A[:train].mean(0)
        return A / np.sqrt((A[:train] ** 2).sum() / train)

    for column, Y, own in (("r2_same", taken.same, False), ("r2_next", taken.next, True)):
        Y = torch.cat(Y).double().numpy()
        for layers, found in zip(sets, table[column], strict=True):
            parts = [scaled(X[j]) / np.sqrt(len(layers)) for j in layers] + ([scaled(E)] if own else [])
            Z = np.concatenate(parts, 1)
            penalty = table.attrs["ridge"][column] * (Z[:train] ** 2).sum() / train
            mean = Y[:train].mean(0)
            W = np.linalg.solve(Z[:train].T @ Z[:train] + penalty * np.eye(Z.shape[1]), Z[:train].T @ (Y[:train] - mean))
            rest = Y[train:] - mean - Z[train:] @ W
            assert found == pytest.approx(1 - (rest**2).sum() / ((Y[train:] - mean) ** 2).sum(), abs=2e-4)


def test_the_probe_reads_positions_with_a_successor_and_never_the_first(target):
    ids = tuple(range(5, 30)) * 2
    taken = ProbeStates(target, per_prompt=100)
    states, logits = target.run(ids)
    taken.add(ids, states, logits)
    assert taken.states[0].shape == (8, 48, 32)
    torch.testing.assert_close(taken.states[0][3], states[3][1:49])
    torch.testing.assert_close(taken.following[0], target.model.get_input_embeddings()(torch.tensor(ids[2:50])))
    centred = logits - logits.mean(-1, keepdim=True)
    torch.testing.assert_close(taken.next[0], centred[2:50] @ taken.projection)
    with pytest.raises(ElsiError, match="at least 8"):
        probe_sets(taken, [(0,)])
    assert len(all_sets(8)) == 8 + 28 + 56


def test_a_cut_pass_goes_on_from_its_sums(target, tmp_path):
    named = {"default": OWN, "norm": replace(OWN, norm_limit=1.3)}
    prompts = prompts_of(13)
    whole = tallied(target, named, prompts, group=GROUP, probe=3)
    first = tallied(target, named, prompts[:7], group=GROUP, probe=3)
    first.save(tmp_path / "sums.safetensors")
    again = Tally(target, named, group=GROUP, probe=3)
    sum_up(again, prompts, tmp_path / "sums.safetensors")
    assert again.about() == whole.about()
    for name, fp in whole.fingerprints().items():
        torch.testing.assert_close(again.fingerprints()[name].grams, fp.grams, rtol=1e-6, atol=1e-9)
    assert [group.prompts for group in again.groups] == [10, 3]
    assert samples(again.groups).equals(samples(whole.groups))
    torch.testing.assert_close(torch.cat(again.probe.states, 1), torch.cat(whole.probe.states, 1))
    with pytest.raises(ElsiError, match="sums of 13 prompts, and 9 are asked for: delete"):
        sum_up(Tally(target, named, group=GROUP, probe=3), prompts[:9], tmp_path / "sums.safetensors")
    for other in (Tally(target, {"default": Choice()}), Tally(target, named, group=5, probe=3)):
        with pytest.raises(ElsiError, match="sums of another survey"):
            other.restore(tmp_path / "sums.safetensors")


def test_sums_of_other_prompts_are_refused(target, tmp_path):
    named, prompts, path = {"default": OWN}, prompts_of(6), tmp_path / "sums"
    sum_up(Tally(target, named, probe=2), prompts[:4], path)
    other = [prompts[0], replace(prompts[1], key="another"), *prompts[2:]]
    for wrong in (other, prompts[::-1]):
        with pytest.raises(ElsiError, match="holds the sums of other prompts: delete it"):
            sum_up(Tally(target, named, probe=2), wrong, path)
    with pytest.raises(ElsiError, match="holds the sums of 4 prompts, and 3 are asked for"):
        sum_up(Tally(target, named, probe=2), prompts[:3], path)
    for probe in (0, 3):  # other positions of each prompt
        with pytest.raises(ElsiError, match="holds the sums of another survey: delete it"):
            sum_up(Tally(target, named, probe=probe), prompts, path)
    tensors, header = read_tensors(path, FORMAT, "sums")
    write_tensors(path, tensors, header | {"state": "{}"})
    with pytest.raises(ElsiError, match="no readable state: it is damaged; delete it"):
        sum_up(Tally(target, named, probe=2), prompts, path)


@pytest.fixture
def texts(monkeypatch, tmp_path):
    """Files in the place of ShareGPT and Spec-Bench."""
    rows = [{"id": str(i), "conversations": [{"from": "human", "value": TEXT * 2 + "abcdefghij"[i % 10] * i}]} for i in range(1, 60)]
    rows += [{"id": f"r{i}", "conversations": [{"from": "human", "value": "привет мир " * 20 + "a" * i}]} for i in range(9)]
    (tmp_path / "chats.json").write_text(json.dumps(rows))
    questions = [
        {"question_id": i, "category": category, "turns": [TEXT[: 20 + i], "again"]}
        for i, category in enumerate(["math", "math_reasoning", "translation", "summarization", "rag", "qa"] * 6)
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    places = {"sharegpt": tmp_path / "chats.json", "spec-bench": tmp_path / "questions.jsonl"}
    monkeypatch.setattr(corpora, "find_source", lambda name: places[name])
    monkeypatch.setattr("elsi_lib.prompts.find_source", lambda name: places[name])
    monkeypatch.setattr("elsi_lib.pipeline.find_source", lambda name: places[name])
    return places


@pytest.mark.parametrize("name", CORPORA)
def test_every_corpus_fills_its_prompts(target, texts, name):
    found = load_corpus(name, target, 4, seed=0, max_tokens=90, min_tokens=40)
    assert 1 <= len(found) <= 4 and all(40 <= len(prompt.ids) <= 90 for prompt in found)
    assert len({prompt.key for prompt in found}) == len(found)
    assert [p.ids for p in load_corpus(name, target, 4, seed=0, max_tokens=90, min_tokens=40)] == [p.ids for p in found]
    assert len(found) == 4 or name == "translation"


def test_the_second_sample_of_conversations_is_disjoint(target, texts):
    one, other = (load_corpus(n, target, 10, seed=0, max_tokens=90, min_tokens=40) for n in ("conversations", "other conversations"))
    assert not {p.key for p in one} & {p.key for p in other}


def test_an_unknown_corpus_is_refused(target):
    with pytest.raises(ElsiError, match="corpus 'poems' unknown: one of conversations"):
        load_corpus("poems", target, 1, seed=0, max_tokens=9, min_tokens=1)


def test_a_survey_leaves_what_the_questions_need(target, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("ELSI_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("ELSI_CACHE", str(tmp_path / "cache"))
    settings = Settings(target="tiny-llama", preset="quick", rho=0.5, block=8)
    monkeypatch.setattr(Settings, "size", lambda self, name: PRESET.get(name) or self.samples)
    found = load_survey(run_survey(settings, target))
    assert found.status == "measured" and set(found.corpora) == set(CORPORA)
    assert set(found.left_out) <= set(CORPORA) and {"conversations", "code"} <= set(found.left_out)
    for side, sink in enumerate((True, False)):
        sets = [find(fp.variant(sink=sink), 3).layers for find in (elsi, exhaustive) for fp in found.corpora.values()]
        assert [tuple(one) for one in found.left_out["code"].sets[side].tolist()] == sets
        assert found.left_out["code"].entropy.shape == (2, 3, len(sets))
    assert {"default", "segment", "rho 0.2", "block 16", "norm 3", "no prefix"} <= set(found.variants)
    assert found.passport["parts"]["variants"]["seen"] == 12 and len(found.probe) == 92
    assert found.passport["parts"]["samples"]["seen"] == 13 and set(found.samples["size"]) == {10, 20, 25}
    assert set(found.samples.loc[found.samples["size"] == 10, "group"]) == {0, 1}
    fp = found.variants["default"]
    assert fp.target == "tiny-llama" and elsi(fp, 3).layers and fp.variant(sink=False).entropy().shape == (8,)
    assert str(tmp_path) not in json.dumps(found.passport)
    assert find_survey(settings).folder == found.folder and find_survey(replace(settings, rho=0.4)) is None
    passport = found.folder / "passport.json"
    whole = json.loads(passport.read_text())
    passport.write_text(json.dumps(whole | {"target": whole["target"] | {"source": "another"}}))
    assert find_survey(settings) is None  # of another target
    passport.write_text(json.dumps(whole | {"parameters": whole["parameters"] | {"seed": 1}}))
    assert find_survey(settings) is None
    for damaged in (passport.read_text()[:-9], "{}", "[]", json.dumps(whole | {"parts": {}})):
        passport.write_text(damaged)
        with pytest.raises(ElsiError, match="the survey in .* is damaged .*: delete it and run the notebook"):
            load_survey(found.folder)
    passport.write_text(json.dumps(whole))
    (found.folder / "probe.csv").unlink()
    with pytest.raises(ElsiError, match=r"probe\.csv missing"):
        load_survey(found.folder)


def test_sums_of_other_weights_or_texts_are_not_gone_on_with(target):
    settings, about = Settings(target="tiny-llama", preset="quick"), {"source_sha256": "a", "max_tokens": 90}
    same = survey._identity(settings, target, dict(about))
    assert same == survey._identity(settings, tiny_target(layers=8), about | {"asked": 7})
    others = [
        survey._identity(settings, tiny_target(layers=7), about),
        survey._identity(replace(settings, rho=0.4), target, about),
        survey._identity(settings, target, about | {"source_sha256": "b"}),
    ]
    assert len({same, *others}) == 4


def test_without_spec_bench_the_rest_is_surveyed(target, texts, tmp_path, monkeypatch):
    def missing(name):
        if name == "spec-bench":
            raise AssetError("spec-bench: the address cannot be read: set ELSI_ASSETS to a folder")
        return texts[name]

    monkeypatch.setattr(corpora, "find_source", missing)
    monkeypatch.setenv("ELSI_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("ELSI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Settings, "size", lambda self, name: PRESET.get(name) or self.samples)
    found = load_survey(run_survey(Settings(target="tiny-llama", preset="quick", rho=0.5, block=8), target))
    assert set(found.corpora) == {"conversations", "other conversations", "code", "other languages"}
    assert found.passport["parts"]["mathematics"] == {"not run": "spec-bench: the address cannot be read"}


def test_a_survey_of_other_code_is_stale(tmp_path, target, texts, monkeypatch):
    monkeypatch.setenv("ELSI_RESULTS", str(tmp_path / "results"))
    folder = tmp_path / "survey"
    folder.mkdir()
    one = {"default": fingerprint(bootstrap=0, spectra=0)}
    for name in ("variants", "corpora"):
        survey._write_grams(folder / f"{name}.safetensors", one)
    write_left_out(folder / "left_out.safetensors", {})
    for name in ("samples", "influence", "probe"):
        (folder / f"{name}.csv").write_text("layers\n")
    about = {"target": {"name": "x"}, "parameters": {}, "parts": {"variants": {"prompts": {}}}, "environment": {}}
    (folder / "passport.json").write_text(json.dumps(about | {"code": {"calibration": "x", "survey": "y"}}))
    found = load_survey(folder)
    assert found.status == "stale"
    torch.testing.assert_close(found.variants["default"].grams, one["default"].grams, rtol=1e-6, atol=1e-6)

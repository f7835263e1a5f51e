import math

import numpy as np
import pytest
import torch
from synthetic import fingerprint

from elsi_lib.fingerprint import Fingerprint, pack_bootstrap, pack_grams
from elsi_lib.report.questions import sink
from elsi_lib.selection import exhaustive, standing

FP = fingerprint(layers=9, prompts=7)


def made(grams, name="made", replicates=None):
    """A fingerprint whose four variants have these Gram matrices (one, or kept and dropped)."""
    kept, dropped = grams if isinstance(grams, tuple) else (grams, grams)
    tensors = {"grams": pack_grams(torch.stack([kept, dropped, kept, dropped]))}
    if replicates is not None:
        tensors |= pack_bootstrap(kept, replicates)
    return Fingerprint(tensors, {"target": {"name": name}, "parameters": {"block": kept.shape[-1]}})


def with_sink(lengths, rows=6):
    """Row 0 of length ``lengths[j]`` in a direction of its own, the other rows equal and of length 1."""
    grams = torch.zeros(len(lengths), rows, rows, dtype=torch.float64)
    grams[:, 1:, 1:] = 1.0
    grams[:, 0, 0] = torch.tensor(lengths, dtype=torch.float64) ** 2
    return grams


def test_two_directions_by_hand():
    lengths = [1.0, 5.0, math.sqrt(5), 1.0]
    grams = with_sink(lengths)
    dropped = torch.eye(6, dtype=torch.float64).expand(4, 6, 6)
    data = sink.profiles([made((grams, dropped))])
    of = data[data["variant"] == sink.ALL]
    share = np.array([length**2 / (length**2 + 5) for length in lengths])
    expected = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    np.testing.assert_allclose(of["entropy"], expected, atol=1e-12)
    np.testing.assert_allclose(of["top_share"], np.maximum(share, 1 - share))
    np.testing.assert_allclose(of["top_share"] + of["second_share"], 1)
    assert of["first_row"].iloc[1] == pytest.approx(1) and of["loudest_row"].iloc[1] == 0
    assert of["first_row"].iloc[0] == pytest.approx(0, abs=1e-12) and of["loudest_weight"].iloc[0] == pytest.approx(0.2)
    assert of["entropy"].iloc[2] == pytest.approx(math.log(2))  # the sink as heavy as the rest
    quiet = data[data["variant"] == sink.QUIET]
    assert (quiet["rows"] == 5).all() and quiet["first_row"].isna().all()
    np.testing.assert_allclose(quiet["entropy"], 0, atol=1e-12)
    np.testing.assert_allclose(data[data["variant"] == sink.DROPPED]["entropy"], math.log(6))


def test_a_wave_that_a_sink_makes_is_called_so():
    grams = with_sink([1.0, 20.0, 15.0, 10.0, 6.0, 3.0])
    flat = torch.ones(6, 6, 6, dtype=torch.float64) + 0.01 * torch.eye(6)
    fps = [made((grams, flat), replicates=torch.stack([grams * scale for scale in (0.9, 1.0, 1.1)]))]
    data, left, alike = sink.profiles(fps), sink.rises(fps), sink.similarity([FP])
    share = left.set_index("variant")["share"]
    assert share[sink.ALL] == 1
    assert share[sink.QUIET] == pytest.approx(0, abs=1e-9) and share[sink.DROPPED] == pytest.approx(0, abs=1e-9)
    chosen = sink.choices([FP])
    found = sink.finding(data.assign(target=FP.target), left.assign(target=FP.target), chosen, alike)
    assert "the wave is a sink's" in found.text and "0 % of its late rise is left" in found.text
    assert found.alt and found.values["open_sink_share_first_position"] == 0


def test_a_wave_without_a_sink_is_not():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(6, 6, 8, generator=generator, dtype=torch.float64) * 0.2
    states[:, :, 0] += torch.tensor([3.0, 9.0, 7.0, 5.0, 3.0, 1.0])[:, None]  # a mean that all rows share, shrinking
    fps = [made(states @ states.mT)]
    left = sink.rises(fps).set_index("variant")
    assert left.loc[sink.DROPPED, "share"] == pytest.approx(1)
    chosen, alike = sink.choices(fps), sink.similarity(fps)
    found = sink.finding(sink.profiles(fps), left.loc[[sink.ALL, sink.DROPPED]].reset_index(), chosen, alike)
    assert "not a sink's alone" in found.text


def test_choices_stand_where_the_selection_says():
    chosen = sink.choices([FP, None])
    row = chosen[(chosen["variant"] == sink.DROPPED) & (chosen["method"] == "exhaustive m=3")].iloc[0]
    best, dropped = exhaustive(FP, 3), FP.variant(sink=False)
    assert row["layers"] == " ".join(map(str, exhaustive(dropped, 3).layers))
    assert row["rank_before"] == standing(dropped, best.layers).rank and row["sets"] == 84
    first = chosen[chosen["variant"] == sink.ALL]
    assert (first["rank_before"][first["method"].str.startswith("exhaustive")] == 1).all() and (first["overlap"] == 1).all()


def test_further_calibrations_are_drawn_beside_their_own_target():
    other = fingerprint(layers=9, prompts=7, seed=4)
    stranger = fingerprint(layers=9, prompts=7, name="stranger")
    more = {"norm below 10": other, "norm below 100": [stranger, None]}
    data = sink.profiles([FP], more)
    np.testing.assert_allclose(data[data["variant"] == "norm below 10"]["entropy"], other.entropy())
    assert "norm below 100" not in set(data["variant"])
    chosen = sink.choices([FP], more)
    fig = sink.figure(data, chosen)
    assert "norm below 10" in [text.get_text() for text in fig.legends[0].get_texts()]
    assert sink.table(chosen, sink.similarity([FP], more)).count("norm below 10") == 1


def test_figures_are_drawn_and_say_what_they_show():
    data = sink.profiles([FP])
    assert len(sink.spectrum_figure(data).axes) == 3
    found = sink.spectrum_finding(data)
    assert "binary entropy" in found.text and found.alt.startswith("Largest eigenvalue")

"""The file, its refusals, and views of a fingerprint against the formulas they stand for."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from elsi_lib import fingerprint as module
from elsi_lib.cka import cka_matrix
from elsi_lib.entropy import gram_entropy, prepare_grams
from elsi_lib.errors import AssetError, ElsiError
from elsi_lib.fingerprint import VARIANTS, Fingerprint, pack_bootstrap, pack_grams

N, B = 5, 6


def make(seed=0, bootstrap=3):
    rng = torch.Generator().manual_seed(seed)
    Z = torch.randn(4, N, B, 20, generator=rng, dtype=torch.float64)
    grams = Z @ Z.mT
    tensors = {
        "grams": pack_grams(grams),
        "prompt_entropy": torch.rand(4, 7, N, generator=rng),
        "token_spectra": torch.rand(2, 3, 2, N, generator=rng),
        "norms": torch.rand(2, N, generator=rng),
    }
    if bootstrap:
        replicates = Z[0] + 0.2 * torch.randn(bootstrap, N, B, 20, generator=rng, dtype=torch.float64)
        tensors |= pack_bootstrap(grams[0], replicates @ replicates.mT)
    passport = {"target": {"name": "tiny"}, "parameters": {"block": B, "rho": 0.3}, "prompts": {"used": 7}, "note": "é"}
    return Fingerprint(tensors, passport), grams


def test_round_trip(tmp_path):
    fp, grams = make()
    path = fp.save(tmp_path / "new" / "folder" / "fp.safetensors")
    back = Fingerprint.load(path)
    assert back.passport == fp.passport and back.sha256 == fp.sha256 and back.target == "tiny"
    assert back.tensors.keys() == fp.tensors.keys()
    for name, tensor in fp.tensors.items():
        assert torch.equal(back.tensors[name], tensor) and back.tensors[name].dtype == tensor.dtype
    assert (back.num_layers, back.block) == (N, B)
    assert torch.equal(back.grams, (grams[0].triu() + grams[0].triu(1).mT))
    assert list(path.parent.iterdir()) == [path]  # nothing else is left behind


def test_the_hash_is_of_the_content():
    fp = make()[0]
    assert make()[0].sha256 == fp.sha256 != make(seed=1)[0].sha256
    assert Fingerprint(fp.tensors, {**fp.passport, "note": "e"}).sha256 != fp.sha256
    assert Fingerprint(dict(reversed(fp.tensors.items())), dict(reversed(fp.passport.items()))).sha256 == fp.sha256


def test_each_variant_has_its_own_matrices(tmp_path):
    fp, grams = make()
    for v, (filtered, sink) in enumerate(VARIANTS):
        view = fp.variant(filtered, sink)
        torch.testing.assert_close(view.grams, grams[v], rtol=1e-14, atol=1e-14)
        assert torch.equal(view.prompt_entropy(), fp.tensors["prompt_entropy"][v].double())
        assert (view.bootstrap is None) == ((filtered, sink) != (True, True))
        for k, positions in enumerate(("all", "kept", "random")):
            assert torch.equal(view.token_entropy_spectra(positions), fp.tensors["token_spectra"][0 if sink else 1, k].double())
    assert VARIANTS[0] == (True, True)
    assert make(bootstrap=0)[0].bootstrap is None


def test_what_a_fingerprint_does_not_hold_is_named():
    fp = make()[0]
    bare = Fingerprint({name: fp.tensors[name] for name in ("grams", "prompt_entropy")}, fp.passport)
    for read in (bare.token_entropy_spectra, lambda: bare.norms):
        with pytest.raises(ElsiError, match="of tiny holds no (token_spectra|norms): calibrate with spectra above 0"):
            read()
    of_survey = Fingerprint({"grams": fp.tensors["grams"][:2]}, fp.passport)
    assert torch.equal(of_survey.variant(sink=False).grams, fp.variant(sink=False).grams)
    with pytest.raises(ElsiError, match="of tiny holds the filtered variants alone"):
        of_survey.variant(filtered=False).entropy()
    with pytest.raises(ElsiError, match="holds no prompt_entropy"):
        of_survey.prompt_entropy()


def test_views_are_entropy_and_cka_of_the_matrices():
    fp, grams = make()
    assert fp.entropy(alpha=2.0).tolist() == pytest.approx([-math.log((k @ k).trace() / k.trace() ** 2) for k in grams[0]])
    p = np.linalg.eigvalsh((grams[0][1] + grams[0][3]).numpy())
    p /= p.sum()
    assert fp.entropy((3, 1)) == pytest.approx(-(p * np.log(p)).sum(), abs=1e-12)
    normalised = prepare_grams(grams[0], center=True, normalize="trace")
    expected = gram_entropy(normalised[[0, 4]].sum(0), 0.5)
    assert fp.entropy((0, 4), 0.5, center=True, normalize="trace") == pytest.approx(float(expected), abs=1e-12)
    torch.testing.assert_close(fp.cka(debiased=True), cka_matrix(grams[0], debiased=True))
    with pytest.raises(ElsiError, match=r"layer set \(2, 40\) outside 0..4 of tiny"):
        fp.entropy((2, 40))
    with pytest.raises(ElsiError, match="positions 'some': one of all, kept, random"):
        fp.token_entropy_spectra("some")


# Files that are no fingerprint, or no longer.


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ElsiError, match="no fingerprint at .*elsi calibrate"):
        Fingerprint.load(tmp_path / "none.safetensors")
    with pytest.raises(ElsiError, match="no fingerprint at"):
        Fingerprint.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"not a fingerprint at all", b"\x00" * 64])
def test_other_files(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ElsiError, match="cannot be read as a fingerprint"):
        Fingerprint.load(path)


def test_other_safetensors_files(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ElsiError, match="is not a fingerprint"):
        Fingerprint.load(path)
    save_file({"weight": torch.ones(2)}, path, metadata={"format": module.FORMAT})
    with pytest.raises(ElsiError, match="passport"):
        Fingerprint.load(path)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = make()[0].save(tmp_path_factory.mktemp("fp") / "fp")
    return path, path.read_bytes()


@given(data=st.data())
def test_truncated_anywhere(content, data):
    path, whole = content
    damaged = path.with_name("cut")
    damaged.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ElsiError, match="cannot be read as a fingerprint|is not a fingerprint"):
        Fingerprint.load(damaged)


@given(data=st.data())
def test_any_flipped_bit(content, data):
    path, whole = content
    header = 8 + int.from_bytes(whole[:8], "little")
    place = data.draw(st.one_of(st.integers(0, header - 1), st.integers(header, len(whole) - 1)))
    flipped = bytearray(whole)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    damaged = path.with_name("flipped")
    damaged.write_bytes(flipped)
    with pytest.raises(ElsiError):
        Fingerprint.load(damaged)


def test_an_edited_passport_or_matrix_is_noticed(tmp_path, content):
    path, _ = content
    with safe_open(path, "pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    passport = json.loads(header["passport"])
    save_file(tensors, tmp_path / "same", metadata=header)
    assert Fingerprint.load(tmp_path / "same").target == "tiny"
    edited = {**passport, "target": {"name": "better"}}
    save_file(tensors, tmp_path / "a", metadata={**header, "passport": json.dumps(edited)})
    save_file({**tensors, "grams": tensors["grams"] * 2}, tmp_path / "b", metadata=header)
    save_file({**tensors, "extra": torch.ones(1)}, tmp_path / "c", metadata=header)
    save_file(tensors, tmp_path / "d", metadata={**header, "sha256": "0" * 64})
    for name in "abcd":
        with pytest.raises(ElsiError, match="was edited after it was written"):
            Fingerprint.load(tmp_path / name)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = make()[0].save(tmp_path / "fp")
    before = path.read_bytes()

    def disk_full(tensors, filename, metadata):
        filename.write_bytes(b"half a fi")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", disk_full)
    with pytest.raises(AssetError, match="cannot be written .*No space left.*space on the disk"):
        make(seed=1)[0].save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AssetError, match="cannot be written"):
        make()[0].save(tmp_path / "file" / "fp")


# The 16-bit bootstrap.


def realistic(seed, sink, prompts=60, layers=8, rows=32, d=128):
    """Block means of prompts with a common mean and decaying directions; ``sink`` multiplies row 0 from layer 4 on."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal((layers, 1, d)) * 3
    noise = rng.standard_normal((prompts, layers, rows, d)) * np.exp(-np.arange(d) / 20)
    sums = common + noise + 0.3 * rng.standard_normal((layers, rows, d))
    sums[:, 4:, 0] += sink * rng.standard_normal((layers - 4, d))
    sums = torch.from_numpy(sums * np.exp(np.linspace(0, 4, layers))[:, None, None])

    def grams(weights):
        Z = torch.einsum("p,pnbd->nbd", torch.from_numpy(weights) / weights.sum(), sums)
        return Z @ Z.mT

    return grams(np.ones(prompts)), torch.stack([grams(rng.poisson(1.0, prompts).astype(float)) for _ in range(6)])


@pytest.mark.parametrize("sink", [0, 10, 1000])
@pytest.mark.parametrize("prompts", [3, 60])
def test_packed_replicates_move_entropies_by_less_than_a_thousandth(sink, prompts):
    grams, replicates = realistic(sink, sink, prompts)
    fp = Fingerprint({"grams": pack_grams(grams[None]), **pack_bootstrap(grams, replicates)}, {"parameters": {"block": 32}})
    assert fp.tensors["bootstrap"].dtype == torch.int16
    packed = fp.bootstrap
    assert packed.shape == replicates.shape and packed.dtype == torch.float64
    for layers in ([0], [3], [4], [7], [0, 7], [2, 4, 6]):
        for center in (False, True):
            before, after = (
                gram_entropy(torch.stack([prepare_grams(k, center)[layers].sum(0) for k in which])) for which in (replicates, packed)
            )
            assert (before - after).abs().max() < 1e-3
    # Each entry within half a step of sqrt(K_ii K_jj), and float64's rounding where a replicate is the whole.
    scale = grams.diagonal(dim1=1, dim2=2).sqrt()
    error = (packed - replicates).abs() / (scale[:, :, None] * scale[:, None, :])
    widest = ((replicates - grams).abs() / (scale[:, :, None] * scale[:, None, :])).amax((-2, -1), keepdim=True)
    assert (error <= widest / 32767 * 0.51 + 1e-14).all()


def test_replicates_equal_to_the_whole_stay_so():
    grams, _ = realistic(0, 0)
    fp = Fingerprint({"grams": pack_grams(grams[None]), **pack_bootstrap(grams, grams[None])}, {"parameters": {"block": 32}})
    assert torch.equal(fp.bootstrap[0], fp.grams)


def test_packing_keeps_the_upper_triangle_row_by_row():
    assert pack_grams(torch.tensor([[1, 2, 3], [2, 4, 5], [3, 5, 6]])).tolist() == [1, 2, 3, 4, 5, 6]

"""Packed weights change no bit, and leave nothing behind."""

import pytest
import torch
from tiny import tiny_ids, tiny_model, tiny_target

from elsi_lib.speculative.packing import packed, packs_bfloat16
from elsi_lib.targets import Target, load_target


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("length", [1, 7, 64])
def test_the_logits_are_the_same_to_the_last_bit(architecture, length):
    target = Target(tiny_model(architecture).to(torch.bfloat16))
    ids = tiny_ids(length)
    expected = target.run(ids)[1]
    with packed(target):
        assert torch.equal(target.run(ids)[1], expected)
        with packed(target):
            assert torch.equal(target.run(ids)[1], expected)
        assert torch.equal(target.run(ids)[1], expected)
    assert torch.equal(target.run(ids)[1], expected)


def test_the_target_is_as_before_also_after_a_failure():
    target = Target(tiny_model().to(torch.bfloat16))
    names = [name for name, _ in target.model.named_parameters()]
    with pytest.raises(ZeroDivisionError), packed(target):
        raise ZeroDivisionError
    assert not any("forward" in vars(module) for module in target.model.modules())
    assert [name for name, _ in target.model.named_parameters()] == names


def test_other_dtypes_are_left_alone():
    target = tiny_target()
    with packed(target):
        assert not any("forward" in vars(module) for module in target.model.modules())


def test_a_processor_that_cannot_pack_multiplies_as_ever(monkeypatch):
    def refuse(*_):
        raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx512bw")

    target = Target(tiny_model().to(torch.bfloat16))
    expected = target.run(tiny_ids(7))[1]
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    packs_bfloat16.cache_clear()
    try:
        with packed(target):
            assert not any("forward" in vars(module) for module in target.model.modules())
            assert torch.equal(target.run(tiny_ids(7))[1], expected)
    finally:
        packs_bfloat16.cache_clear()


@pytest.mark.real
def test_the_real_target():
    target = load_target("smollm2-135m-instruct", dtype="bfloat16")
    ids = torch.randint(0, 40_000, (30,), generator=torch.Generator().manual_seed(0))
    expected = target.run(ids)[1]
    with packed(target):
        assert torch.equal(target.run(ids)[1], expected)

"""The names of a layer: this project's, and those of every engine and training code (the off-by-one trap).

Layer j is the raw residual output of 0-based decoder block j, before any final norm, everywhere in this library. Other systems
count otherwise; only this module translates. What each system does was read in its sources, at the commit its note names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elsi_lib.errors import ElsiError
from elsi_lib.selection import check_layers, is_whole


@dataclass(frozen=True)
class Convention:
    """How a system names the output of block j: id = j + ``offset``.

    ``last`` says why it cannot name block N-1's raw output, and is empty where it can. ``count`` is the only size of
    layer set it accepts. ``note`` says what its code does and where that was read.
    """

    offset: int
    last: str = ""
    count: int | None = None
    note: str = ""


_SGLANG_LAST = (
    "its Llama and Qwen loops capture the inputs of blocks 0..N-1 only, so the last block's output is dropped without "
    "a word and the draft's fc meets too few states"
)

CONVENTIONS: dict[str, Convention] = {
    "elsi": Convention(0, note="block j, 0-based; raw residual output"),
    "transformers": Convention(
        1,
        last="entry N of hidden_states is taken after the final norm: hook the last block instead",
        note="hidden_states[j + 1]; entry 0 is the embeddings",
    ),
    "eagle": Convention(
        1,
        last="its code captures the input of block idx, and the last block's output is the input of none",
        note="the input of block j + 1; ids 2, N // 2, N - 3 are fixed in the code (SafeAILab/EAGLE cb7e084, "
        "eagle/model/modeling_llama_kv.py and modeling_qwen3_kv.py)",
    ),
    "vllm": Convention(
        1,
        note="eagle_aux_hidden_state_layer_ids at the top level; id N is the last block before the norm (documentation "
        "of hidden state extraction, v0.22; EagleModelMixin in vllm/model_executor/models/interfaces.py), in the "
        "DeepSeek family since vllm#46973; models that still capture block inputs stop at N - 1",
    ),
    "speculators": Convention(
        1,
        note="vLLM's ids; scripts/launch_vllm.py appends N by itself for the verifier's last state "
        "(vllm-project/speculators c05b95b); a draft that also takes N as input: not checked",
    ),
    "sglang": Convention(
        0,
        last=_SGLANG_LAST,
        note="nested eagle_config.eagle_aux_hidden_state_layer_ids; captures the input of block id + 1 "
        "(sgl-project/sglang 0023954, python/sglang/srt/models/llama.py; qwen2.py alike). Exceptions: gpt-oss reads "
        "ids as j + 1 and reaches the last block (sglang#32334); the DeepSeek family reads ids as j + 1 unless the "
        "first is 1 (sglang#25454). Newest version not checked",
    ),
    "specforge": Convention(
        0,
        last=f"it captures through SGLang: {_SGLANG_LAST}",
        count=3,
        note="exactly three distinct non-negative ids (sgl-project/SpecForge a6b6b02, specforge/algorithms/"
        "model_providers.py and specforge/training/capture_contract.py)",
    ),
    "dflash": Convention(
        0,
        last="it reads entry id + 1 of transformers' hidden_states, and entry N is taken after the final norm",
        note="dflash_config.target_layer_ids (as vllm-project/speculators c05b95b converts them, "
        "src/speculators/convert/dflash/converter.py)",
    ),
}


def _convention(name: str) -> Convention:
    if name not in CONVENTIONS:
        raise ElsiError(f"no layer convention {name!r}: use one of {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]


def layer_ids(layers: Iterable[int], num_layers: int, convention: str) -> tuple[int, ...]:
    """The ids that ``convention`` gives to a layer set of a model of ``num_layers`` blocks, sorted.

    Sorted because engines capture in layer order, whatever the order of the ids (FIELD: names for a layer).

    Raises:
        ElsiError: unknown convention, a set outside the model, or one the convention cannot name; says why.
    """
    rule = _convention(convention)
    layers = check_layers(layers, num_layers, f"a model of {num_layers} layers")
    if rule.last and num_layers - 1 in layers:
        raise ElsiError(f"{convention} cannot name layer {num_layers - 1} of {num_layers}: {rule.last}")
    if rule.count not in (None, len(layers)):
        raise ElsiError(f"{convention} takes exactly {rule.count} layers, not the {len(layers)} of {layers}")
    return tuple(j + rule.offset for j in layers)


def from_layer_ids(ids: Iterable[int], num_layers: int, convention: str) -> tuple[int, ...]:
    """The layer set that ``ids`` mean in ``convention``, sorted: the inverse of :func:`layer_ids`.

    Raises:
        ElsiError: unknown convention; ids that repeat, name no block's output, or have a size it does not accept.
    """
    rule, ids = _convention(convention), tuple(ids)
    first, end = rule.offset, rule.offset + num_layers - bool(rule.last)
    if any(not is_whole(i) or not first <= i < end for i in ids):
        why = f" ({rule.last})" if rule.last and end in ids else ""
        raise ElsiError(f"{convention} ids {ids} outside {first}..{end - 1} of a model of {num_layers} layers{why}")
    layers = check_layers((i - rule.offset for i in ids), num_layers, f"a model of {num_layers} layers")
    layer_ids(layers, num_layers, convention)  # refuses a size the convention does not accept
    return layers


def engine_ids(layers: Iterable[int], num_layers: int) -> dict[str, tuple[int, ...] | str]:
    """For every convention its ids of a layer set, or the reason (one line) why it has none.

    Raises:
        ElsiError: a set outside the model.
    """
    layers = check_layers(layers, num_layers, f"a model of {num_layers} layers")
    named: dict[str, tuple[int, ...] | str] = {}
    for convention in CONVENTIONS:
        try:
            named[convention] = layer_ids(layers, num_layers, convention)
        except ElsiError as err:
            named[convention] = str(err)
    return named


def servable_layers(convention: str, num_layers: int) -> tuple[int, ...]:
    """The layers that ``convention`` can name: all, or all but the last block.

    Raises:
        ElsiError: unknown convention.
    """
    return tuple(range(num_layers - bool(_convention(convention).last)))

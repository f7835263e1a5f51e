"""The EAGLE-3 draft on any layer set: one decoder layer that guesses the tokens after those the target has read.

Row t takes the target's states of token t, fused by ``fc`` into h_t, and the embedding of token t + 1, and predicts token t + 2.
Further steps take the draft's own recurrent state, the layer's output BEFORE the last norm, in the place of h_t. Rotary position of
row t at step k: t + k. Names and order of the tensors are those of EAGLE's release.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from elsi_lib.errors import ElsiError
from elsi_lib.selection import check_layers
from elsi_lib.speculative.vocabulary import DraftVocabulary
from elsi_lib.targets import Target

NORM_BEFORE_FC = ("none", "each", "concat")
_ROWS = 16


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """Sizes of a draft. H is the target's hidden size.

    Raises:
        ElsiError: a layer set outside the target, sizes that are not positive or do not fit together, an unknown option.
    """

    layers: tuple[int, ...]  # sorted 0-based blocks whose states are fused, in this project's numbering
    num_target_layers: int
    hidden_size: int
    vocab_size: int  # V, of the target
    draft_vocab_size: int  # D
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0  # EAGLE trains with this whatever the target's; written out, so inference uses the same
    max_position_embeddings: int = 2048
    norm_before_fc: str = "none"  # "each": an RMSNorm per layer (EAGLE-3.1's fc_norm); "concat": one over all (gpt-oss drafts)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", check_layers(self.layers, self.num_target_layers))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ElsiError(f"{field.name} = {value!r} of a draft: a positive whole number is expected; name it when making one")
            if field.type == "float" and not (isinstance(value, float | int) and value > 0):
                raise ElsiError(f"{field.name} = {value!r} of a draft: a number above 0 is expected")
        if self.draft_vocab_size > self.vocab_size:
            raise ElsiError(f"draft vocabulary of {self.draft_vocab_size} ids, but the target has {self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ElsiError(
                f"{self.num_attention_heads} attention heads of {self.head_dim} over {self.num_key_value_heads} key-value heads: "
                "heads are a multiple of key-value heads, and rotary embeddings need an even head_dim"
            )
        if self.norm_before_fc not in NORM_BEFORE_FC:
            raise ElsiError(f"norm_before_fc = {self.norm_before_fc!r}: one of {', '.join(NORM_BEFORE_FC)}")

    @classmethod
    def for_target(cls, target: Target, layers: Sequence[int], draft_vocab_size: int, **changes: Any) -> DraftConfig:
        """Sizes as EAGLE takes them from the target's configuration; targets of any architecture get the Llama-style draft.

        What a target's configuration lacks follows the usual rules: as many key-value heads as heads, head_dim H / heads, MLP
        4 H, epsilon 1e-6. ``changes`` name fields to set otherwise.
        """
        config = target.model.config.get_text_config()

        def first(*names: str) -> Any:
            return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

        heads = changes.get("num_attention_heads") or first("num_attention_heads")
        sizes = {
            "intermediate_size": first("intermediate_size", "n_inner", "ffn_hidden_size") or 4 * target.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": first("num_key_value_heads") or heads,
            "head_dim": first("head_dim") or target.hidden_size // heads,
            "rms_norm_eps": first("rms_norm_eps") or 1e-6,
            "max_position_embeddings": target.max_tokens or 2048,
        }
        layers = check_layers(layers, target.num_layers, target.name)
        own = {"num_target_layers": target.num_layers, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        return cls(layers, draft_vocab_size=draft_vocab_size, **(own | sizes | changes))

    def llama(self) -> dict[str, Any]:
        """The fields of config.json that every engine reads (their layer ids are the export's business)."""
        own = ("layers", "num_target_layers", "norm_before_fc")
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **{name: value for name, value in dataclasses.asdict(self).items() if name not in own},
        }


class _Attention(nn.Module):
    """Projections of the attention; q, k and v read 2 H features: embedding and hidden state."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        heads, pairs = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(2 * config.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, pairs, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, pairs, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = _Attention(config)
        sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
        self.mlp = LlamaMLP(LlamaConfig(**sizes, hidden_act="silu", mlp_bias=False))


class Draft(nn.Module):
    """An EAGLE-3 draft.

    Attributes: ``config``, ``vocabulary``, ``passport`` (where it came from), ``embedding`` ((V, H), the target's own tensor:
    frozen, not copied, not in the checkpoint, and left where it is by ``to``).

    Args:
        seed: of the weights. Each tensor's depend on the seed, its name and its shape only, so drafts of two layer sets
            differ at the start in ``fc`` alone.

    Raises:
        ElsiError: a draft vocabulary or an embedding that does not fit the configuration.
    """

    def __init__(
        self, config: DraftConfig, vocabulary: DraftVocabulary, embedding: Tensor, *, seed: int = 0, passport: dict | None = None
    ) -> None:
        super().__init__()
        if (vocabulary.size, vocabulary.target_size) != (config.draft_vocab_size, config.vocab_size):
            raise ElsiError(
                f"draft vocabulary of {vocabulary.size} of {vocabulary.target_size} ids does not fit a draft of "
                f"{config.draft_vocab_size} of {config.vocab_size} ids: build it for this target and size"
            )
        if tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
            raise ElsiError(
                f"embedding of shape {tuple(embedding.shape)}, but the draft reads {(config.vocab_size, config.hidden_size)}: a "
                "target whose embedding is narrower than its states is not supported"
            )
        self.config, self.vocabulary, self.passport = config, vocabulary, dict(passport or {})
        self.embedding = embedding.detach()
        H, count = config.hidden_size, len(config.layers)
        if config.norm_before_fc == "each":
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(H, config.rms_norm_eps) for _ in range(count))
        elif config.norm_before_fc == "concat":
            self.input_norm = LlamaRMSNorm(count * H, config.rms_norm_eps)
        self.fc = nn.Linear(count * H, H, bias=False)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(H, config.rms_norm_eps)
        self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", vocabulary.d2t.cpu())
        self.register_buffer("t2d", vocabulary.t2d.cpu())
        # Not a buffer: a cast of the draft to bfloat16 would round the angles.
        self._frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "little")
                nn.init.normal_(weight, std=0.02, generator=torch.Generator().manual_seed(key))

    @classmethod
    def for_target(
        cls, target: Target, layers: Sequence[int], vocabulary: DraftVocabulary, *, seed: int = 0, **changes: Any
    ) -> Draft:
        """A new float32 draft on the target's device; ``changes`` as in :meth:`DraftConfig.for_target`."""
        config = DraftConfig.for_target(target, layers, vocabulary.size, **changes)
        passport = {"target": target_identity(target), "seed": seed}
        draft = cls(config, vocabulary, target.model.get_input_embeddings().weight, seed=seed, passport=passport)
        return draft.to(target.device)

    def copy_head(self, weight: Tensor) -> None:
        """Start ``lm_head`` from the rows of the target's head (V, H) that the draft vocabulary keeps, instead of at random."""
        with torch.no_grad():
            self.lm_head.weight.copy_(weight[self.vocabulary.ids.to(weight.device)])

    def embed(self, ids: Tensor) -> Tensor:
        """(...) target ids -> (..., H) in the draft's dtype: plain rows of the target's embedding, as EAGLE and the engines take."""
        return F.embedding(ids, self.embedding).to(self.fc.weight.dtype)

    def fuse(self, states: Tensor | Sequence[Tensor]) -> Tensor:
        """The target's states of the layer set -> the hidden state of step 0.

        Args:
            states: one (..., H) per layer, in the order of ``config.layers`` (sorted), or their concatenation (..., |L| H).

        Returns:
            (..., H).

        Raises:
            ElsiError: states of another number of layers or another width.
        """
        states = states if isinstance(states, Tensor) else torch.cat(list(states), -1)
        if states.shape[-1] != self.fc.in_features:
            raise ElsiError(
                f"{states.shape[-1]} features for a draft of layers {self.config.layers}, which reads {self.fc.in_features}: "
                f"concatenate the states of these {len(self.config.layers)} layers"
            )
        states = states.to(self.fc.weight.dtype)
        if self.config.norm_before_fc == "each":
            parts = states.split(self.config.hidden_size, -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        elif self.config.norm_before_fc == "concat":
            states = self.input_norm(states)
        return self.fc(states)

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One step over T rows.

        Args:
            embeddings: (batch, T, H), of the tokens after the rows'.
            hidden: (batch, T, H), of :meth:`fuse` at the first step, then the state that this method returned.
            mask: (batch or 1, 1, T, S) bool, true where a row sees a key, or float to be added; S counts the cache's keys, then the
                T new ones. Every row sees at least one key. None is causal: the last T of S.
            positions: (batch or 1, T) rotary positions; None goes on from the cache's length.
            cache: an empty list, or [keys, values], each (batch, key-value heads, S - T, head_dim), keys rotated. The new rows are
                appended in place; the caller may cut and reorder it.

        Returns:
            ``(state, logits)``: (batch, T, H) before ``norm``, and (batch, T, D).
        """
        if positions is None:
            start = cache[0].shape[2] if cache else 0
            positions = torch.arange(start, start + hidden.shape[1], device=hidden.device)[None]
        q, k, v = self.project(embeddings, hidden, positions)
        if cache is not None:
            cache[:] = [torch.cat(pair, 2) for pair in zip(cache, (k, v), strict=True)] if cache else [k, v]
            k, v = cache
        T, S = q.shape[2], k.shape[2]
        if mask is None and T > 1 and S > T:
            mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        plain = mask is None and T > 1
        attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=plain, enable_gqa=q.shape[1] != k.shape[1])
        state = self.finish(hidden, attended)
        return state, self.logits(state)

    def project(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (batch, heads, T, head_dim), rotated keys and values (batch, key-value heads, T, head_dim)."""
        layer, attention = self.midlayer, self.midlayer.self_attn
        x = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], -1)
        split = (*x.shape[:2], -1, self.config.head_dim)
        q, k, v = (part(x).view(split).transpose(1, 2) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
        self._frequencies = self._frequencies.to(x.device)
        angles = positions.to(x.device)[..., None] * self._frequencies
        angles = torch.cat([angles, angles], -1)
        q, k = apply_rotary_pos_emb(q, k, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        return q, k, v

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """What follows the attention: (batch, T, H) and (batch, heads, T, head_dim) -> state (batch, T, H)."""
        layer = self.midlayer
        middle = hidden + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))  # the residual is the un-normed state
        return middle + layer.mlp(layer.post_attention_layernorm(middle))

    def logits(self, state: Tensor) -> Tensor:
        """State (..., H) -> logits over the draft vocabulary (..., D)."""
        return self.lm_head(self.norm(state))


def target_identity(target: Target) -> dict[str, Any]:
    """What tells a target from another: its description, and the norms of some rows of its embedding, which any dtype keeps."""
    weight = target.model.get_input_embeddings().weight
    rows = torch.linspace(0, len(weight) - 1, min(_ROWS, len(weight))).long().to(weight.device)
    return target.describe() | {"embedding_norms": weight[rows].float().norm(dim=-1).tolist()}

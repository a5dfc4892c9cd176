"""The builder of most families: a pre-norm decoder described by a table row of facts (profiles.families.table)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from profiles.errors import InputError
from profiles.families import experts, windows
from profiles.families.fields import Fields
from profiles.model import Attention, FeedForward, LatentAttention, Layer, Mixer, ModelSpec

Flag = bool | str
"""A fact, or the name of the config's flag that decides it."""


@dataclass(frozen=True, repr=False, eq=False)
class Decoder:
    """What a family's config.json does not say, or says under a flag."""

    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_weight: bool = True
    norm_bias: Flag = False
    norms: int = 2
    post_norm: bool = False
    parallel: Flag = False
    qkv_bias: Flag = "attention_bias"
    output_bias: Flag = "attention_bias"
    mlp_bias: Flag = "mlp_bias"
    head_bias: Flag = False
    qk_norm: Literal["none", "head", "full", "per_head"] = "none"
    qk_norm_if: str = ""
    """Flag that turns ``qk_norm`` on; empty = always on."""
    sinks: bool = False
    tied: bool = False
    activation: str = "silu"
    reach: windows.Rule = windows.whole
    rotates: Callable[[Fields, int], list[bool]] = windows.always
    ffn: Callable[[Fields, int, int, experts.FfnFacts], FeedForward] = experts.dense
    latent: bool = False
    indexed: bool = False
    """MLA with an indexer (DeepSeek-V3.2, GLM-5)."""
    whole_heads: bool = False
    """hidden_size must be a multiple of the heads where no head_dim is given; elsewhere transformers rounds down."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Class defaults of fields that released files leave out."""
    note: str = ""

    def read(self, fields: Fields, name: str, family: str) -> ModelSpec:
        """The ModelSpec of one config of this family."""
        fields = Fields(fields.raw, fields.where, self.defaults)
        layers = fields.layers()
        mixers = self._mixers(fields, layers)
        facts = experts.FfnFacts(self.gated, self._is(fields, self.mlp_bias), fields.text("hidden_act", self.activation))
        parallel = self._is(fields, self.parallel)
        built = [
            Layer(mixer=mixers[i], ffn=self.ffn(fields, i, layers, facts), norms=1 if parallel else self.norms, parallel=parallel,
                  post_norm=self.post_norm)
            for i in range(layers)
        ]  # fmt: skip
        theta, share = fields.rope()
        longest = fields.count("max_position_embeddings", 0, least=0)
        return assemble(
            built, name=name, family=family, hidden=fields.count("hidden_size"), vocab=fields.count("vocab_size"),
            tied=fields.tied(self.tied), norm=self.norm, norm_bias=self._is(fields, self.norm_bias), norm_weight=self.norm_weight,
            norm_eps=fields.number("norm_eps", 1e-5), head_bias=self._is(fields, self.head_bias),
            mtp=fields.count("num_nextn_predict_layers", 0, least=0), rope_theta=theta, rope_fraction=share,
            rope_scaling=fields.rope_scaling(longest), max_seq_len=longest, notes=(self.note,) if self.note else (),
        )  # fmt: skip

    def _is(self, fields: Fields, fact: Flag) -> bool:
        return fact if isinstance(fact, bool) else fields.flag(fact, False)

    def _mixers(self, fields: Fields, layers: int) -> list[Mixer]:
        if self.latent:
            plain = latent_attention(fields)
            if not self.indexed:
                return [plain] * layers
            own = plain.model_copy(
                update={"index_heads": fields.count("index_n_heads", 64), "index_dim": fields.count("index_head_dim", 128)}
            )
            shared = [kind == "shared" for kind in fields.per_layer("indexer_types", layers) or []] or [False] * layers
            return [plain if shares else own for shares in shared]
        heads = fields.heads()
        if self.whole_heads and not fields.has("head_dim"):
            fields.divides("num_attention_heads", heads, "hidden_size", fields.count("hidden_size"))
        qk = self.qk_norm if not self.qk_norm_if or fields.flag(self.qk_norm_if, False) else "none"
        common: dict[str, Any] = {
            "heads": heads, "kv_heads": fields.kv_heads(heads), "head_dim": fields.head_dim(heads),
            "qkv_bias": self._is(fields, self.qkv_bias), "output_bias": self._is(fields, self.output_bias),
            "qk_norm": qk, "sinks": self.sinks,
        }  # fmt: skip
        reach, rotates = self.reach(fields, layers), self.rotates(fields, layers)
        made: dict[tuple[int | None, int | None, bool], Attention] = {}
        for (window, chunk), turns in zip(reach, rotates, strict=True):
            made.setdefault((window, chunk, turns), Attention(**common, window=window, chunk=chunk, rotary=turns))
        return [made[(*reach[i], rotates[i])] for i in range(layers)]


def latent_attention(fields: Fields) -> LatentAttention:
    """MLA from the DeepSeek fields (head_dim and num_key_value_heads mean nothing there)."""
    return LatentAttention(
        heads=fields.heads(), q_rank=fields.optional("q_lora_rank"), kv_rank=fields.count("kv_lora_rank"),
        nope_dim=fields.count("qk_nope_head_dim"), rope_dim=fields.count("qk_rope_head_dim"), value_dim=fields.count("v_head_dim"),
        bias=fields.flag("attention_bias", False),
    )  # fmt: skip


def assemble(layers: Sequence[Layer], **fields: Any) -> ModelSpec:
    """A ModelSpec of these layers in order, equal ones written once."""
    kinds: dict[Layer, int] = {}
    pattern = tuple(kinds.setdefault(layer, len(kinds)) for layer in layers)
    if not pattern:
        raise InputError("num_hidden_layers", 0, "a model needs at least one layer", 1)
    return ModelSpec(kinds=tuple(kinds), pattern=pattern, **fields)

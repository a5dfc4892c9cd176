"""Execution: what a framework keeps, fuses, overlaps and can express.

The same model under the same layout costs differently in Megatron, TorchTitan or DeepSpeed: which tensors are kept for backward,
in which dtype states are held, what is overlapped. Each such fact is a field here. A preset is a YAML file under
``data/executions``: ``extends`` names the preset it starts from, ``facts`` gives ``field: {value: ..., source: ...}``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cost_models.timing import TimeFacts
from profiles.errors import AxisplanError, InputError
from profiles.files import read_shipped

Elementwise = Literal["fused", "eager", "compiled"]
Dispatch = Literal["per_expert", "per_rank", "per_node"]
PRESETS = Path(__file__).parent / "data" / "executions"


@dataclass(frozen=True, repr=False)
class Execution(TimeFacts):
    """Facts about a framework. Bytes are per element or per parameter; sources of a preset's values: ``source_of``."""

    name: str = "axisplan"

    # -- attention ----------------------------------------------------------------------------------------------------
    attention: Literal["unfused", "triton", "fa2", "fa3", "cudnn"] = "cudnn"
    """The attention kernel; ``unfused`` keeps the scores (s x s a head)."""
    score_bytes: float = 4.0
    """Unfused attention: bytes a score of what exists for a moment beyond the kept probabilities (fp32 softmax; or the gradients of
    scores and probabilities)."""
    causal_skip: bool = True
    """Masked blocks are not computed."""
    attention_dropout: bool = False
    """Dropout on the attention probabilities: a mask of one byte a score where unfused."""
    hidden_dropout: bool = False
    """Dropout after attention and feed-forward: a mask of one byte an element."""
    fused_qkv: bool = True
    """Q, K and V come from one matrix product."""
    fused_gate_up: bool = True
    """Gate and up projections are one matrix product."""
    kv_repeated: bool = False
    """K and V are expanded to all query heads before attention, and kept so."""
    kv_replication: bool = False
    """TP may exceed the KV heads: each rank then holds one whole KV head."""
    splits_kv_heads: bool = False
    """Where TP exceeds the KV heads, each rank holds its even part of K's and V's weights, less than a head, and gathers their outputs."""
    splits_mtp_projection: bool = False
    """TP splits the projection at the entry of a multi-token-prediction module."""
    ulysses_keeps_output: bool = True
    """The all-to-all form of context parallelism keeps attention's output before and after its all-to-all (Transformer Engine
    from 2.8)."""
    gathered_kv_kept: bool = False
    """The gathered form of context parallelism keeps the gathered K and V for backward instead of gathering them again."""

    # -- element-wise work and the tensors it keeps -------------------------------------------------------------------
    elementwise: Elementwise = "fused"
    """``fused``: norm keeps input and output, the gate keeps gate, up and product. ``eager``: fp32 copies and each intermediate as
    well. ``compiled``: outputs that follow from kept inputs by pointwise work are computed again in backward."""
    statistics: bool = True
    """Norm statistics and attention's log-sum-exp are counted (4 bytes a row)."""
    fp8_input_bytes: float = 1.0
    """Bytes an element of a linear layer's kept input under an 8-bit or 4-bit precision (2: the 16-bit input is kept)."""
    quantise_bytes: float = 5.0
    """Bytes read and written per element to quantise a linear layer's input (forward) and output gradient (backward)."""
    accumulate_bytes: float = 3.0
    """Bytes per weight that adding a weight gradient to its accumulator costs beyond the matrix product, every microbatch: of the 8
    that are read and written, what the product's epilogue does not hide (an estimate that no fit moved: modelling-notes.md section 3)."""
    parallel_is_one_region: bool = True
    """A parallel block (attention beside feed-forward) enters and leaves the TP region once: one gathered input, one reduction of
    both partial sums."""
    keeps_gathered_input: bool = False
    """Under sequence parallelism a linear layer keeps its gathered input (DTensor) instead of gathering it again (Megatron)."""
    dummy_weight_gradients: bool = False
    """One 16-bit gradient of each distinct weight shape stays allocated (Transformer Engine with fused accumulation)."""

    # -- embedding, head, loss ----------------------------------------------------------------------------------------
    vocab_multiple: int = 1
    """The vocabulary is padded to this multiple of TP."""
    vocab_parallel: bool = True
    """TP splits embedding, head and loss over the vocabulary."""
    logit_saved_bytes: float = 2.0
    """Bytes a logit kept from the loss's forward to its backward."""
    logit_peak_bytes: float = 4.0
    """Bytes a logit at the loss's peak, kept ones included."""
    logit_forward_traffic: float = 12.0
    logit_backward_traffic: float = 8.0
    """Bytes a logit read and written by the loss, forward and backward, matrix products apart."""
    loss_reductions: int = 3
    """Reductions of the vocabulary-parallel loss over TP: maximum, target logit and sum of exponentials apart (3), or the last two
    together (2)."""
    loss_chunk_tokens: int = 0
    """Tokens whose logits exist at once in a chunked loss; 0 = all of a microbatch."""
    chunks_loss: bool = False
    """The loss can be computed in chunks: the planner chooses so where whole logits would take a tenth of the memory."""

    # -- states -------------------------------------------------------------------------------------------------------
    parameter_bytes: float = 2.0
    """Stored working parameter in 16-bit training (4: fp32 storage, cast where it is gathered or used)."""
    sharded_masters: bool = False
    """Under ZeRO-3 the sharded parameters are stored in fp32 and are the master copy."""
    fp8_parameters: bool = False
    """Under an 8-bit precision the working parameters of linear layers are gathered in one byte, and stored so unless in fp32."""
    fp8_parameter_copies: float = 2.0
    """8-bit copies of a linear layer's parameter where it is stored so: its two layouts (row- and column-wise)."""
    fp8_weight_cache: float = 2.0
    """8- or 4-bit copies kept beside each 16-bit parameter of a linear layer, where parameters are not stored so."""
    master_bytes: float = 4.0
    """Master copy beside the working parameter, per parameter (2: 16-bit remainder, 0: none)."""
    moment_bytes: float = 4.0
    """Bytes of each of the optimizer's two moments."""
    gradient_bytes: float = 4.0
    """The gradient that accumulates over microbatches."""
    weight_gradient_bytes: float = 2.0
    """A matrix product's own weight gradient, before it is added to the accumulator (0: accumulated inside the product)."""
    optimizer_gradient_bytes: float = 0.0
    """A further copy of the gradient that the optimizer keeps, sharded as its state (DeepSpeed's fp32 partition)."""
    offload_takes_gradients: bool = False
    """An offloaded optimizer keeps the sharded gradients (ZeRO-2 and 3) in host memory as well."""
    reduce_bytes: float = 4.0
    """Bytes a gradient element on the wire."""
    gather_bytes: float = 2.0
    """Bytes a parameter on the wire and in a gathered buffer."""

    # -- ZeRO ---------------------------------------------------------------------------------------------------------
    gathered_units: float = 2.0
    """Layers whose parameters are gathered at once under ZeRO-3 (the current one and the prefetched one)."""
    unsharded_gradient_units: float = 1.0
    """Layers whose full gradient exists at once under ZeRO-2 and 3."""
    gradient_bucket_bytes: float = 0.0
    """ZeRO-2: bytes of the bucket in which whole gradients gather before they are reduced (0: a layer's)."""
    reshard_with_pipeline: bool = True
    """ZeRO-3 releases gathered parameters after forward also under pipeline parallelism."""
    reduces_by_unit: bool = False
    """ZeRO-3 gathers and reduces whole units in FSDP2's order (``cost_models.fully_sharded``), which then stands for
    ``gathered_units`` and ``unsharded_gradient_units``; schedules that split the backward hold all units gathered for the step."""
    gathered_root: bool = True
    """Embedding, final norm and head form one unit that stays gathered through the step under ZeRO-3."""
    optimizer_temporary_bytes: float = 0.0
    """Bytes a parameter shard of temporaries in the optimizer step (foreach and unfused optimizers)."""
    initial_copies_bytes: float = 0.0
    """Bytes a parameter of the *unsharded* model part that exist on the device while it is built (4: fp32 before casting)."""
    builds_in_place: bool = True
    """The framework itself builds no more than a rank's part of the model; False: the launch script must see to it."""
    initial_whole_model: bool = False
    """Each rank builds the whole model on its device before TP and PP split it."""
    initial_host_copies: float = 0.0
    """Copies of the whole model, 4 bytes a parameter, that each rank's process builds in host memory (0: built in place)."""

    # -- context parallelism, pipeline --------------------------------------------------------------------------------
    cp_balanced: bool = True
    """Causal sequences are cut front-and-back so that each context-parallel rank has equal pairs."""
    ring_gradient_bytes: float = 2.0
    """Bytes an element of the key and value gradients that go round a ring (4: they are summed in fp32)."""
    ring_buffers: float = 2.0
    """KV blocks alive in a ring beside the own one (received and sent)."""
    p2p_buffers: float = 2.0
    """Boundary activations held by pipeline sends and receives."""
    pipeline_output_kept: bool = False
    """A stage keeps its output until its backward, beside the tensors its layers keep (PyTorch's stages; Megatron frees it)."""
    split_backward_keeps_graph: bool = False
    """The input-gradient pass of a split backward frees nothing before the weight-gradient pass (PyTorch's graph partition: each
    weight's node refers to all nodes below it)."""
    recompute_unit: int = 1
    """Layers of one checkpoint under full recompute."""
    discards_outputs: bool = True
    """Selective recompute of a norm, an activation or an up-projection frees its output until backward (Megatron's
    output-discarding checkpoint); False: a plain checkpoint, whose output the next operation keeps."""
    recompute_stops_early: bool = False
    """Recomputation ends with the last tensor backward needs (PyTorch's non-reentrant checkpoint)."""

    # -- mixture of experts -------------------------------------------------------------------------------------------
    dispatch: Dispatch = "per_expert"
    """What travels when a token chose several experts of one rank or node."""
    dispatch_bytes: float = 2.0
    """Bytes an element of a dispatched token forward (1: sent in 8 bits); combine and gradients travel in 16 bits."""
    grouped_gemm: bool = True
    permute_fusion: bool = True
    expert_weight_on_input: bool = False
    """The routing weight scales the expert's intermediate (kept once) instead of its output (kept for the weight's gradient)."""
    router_fp32: bool = False
    """The router's product runs in fp32, on an fp32 copy of its input and weight that is kept."""
    route_bytes: float = 8.0
    """Bytes of an index kept for each routed row: source and order where it leaves, place where it arrives."""
    router_collectives: bool = False
    """Token counts are exchanged over EP and ETP, and the balance loss's counts are summed over TP and CP, in every forward."""
    moe_buffers: float = 1.0
    """Copies of the dispatched tokens that exist beside the kept ones while a layer runs."""

    # -- outside the tensors ------------------------------------------------------------------------------------------
    reserved_ratio: float = 1.03
    """Reserved / allocated of the caching allocator."""
    eager_reserved_ratio: float = 1.07
    """The same where element-wise work is eager: many short-lived tensors of odd sizes."""
    workspace_bytes: float = 64.0 * 2**20
    """Matrix-product and reduction workspaces inside the allocator."""
    communicator_bytes: float = 0.5 * 2**30
    """Device memory of one communicator (NCCL), outside the allocator."""
    all_to_all_bytes: float = 1.0 * 2**30
    """The same, further, for a communicator that runs all-to-all (a channel to each peer)."""
    graph_pool_ratio: float = 0.0
    """CUDA graphs: share of the captured modules' kept activations that their private pools hold once more."""

    # -- what it can express (limits read by planner.legality) --------------------------------------------------------
    cp_kinds: tuple[str, ...] = ("ring", "ulysses", "hybrid", "allgather")
    schedules: tuple[str, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v")
    zero_stages: tuple[str, ...] = ("0", "1", "2", "3")
    precisions: tuple[str, ...] = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
    optimizers: tuple[str, ...] = ("adamw", "adamw8bit", "muon", "sgd")
    dispatchers: tuple[str, ...] = ("alltoall", "allgather", "deepep", "hybridep")
    axes: tuple[str, ...] = ("tp", "cp", "pp", "ep", "etp", "dp_replicate", "dp_shard")
    """Axes whose degree may exceed 1."""
    uneven_stages: bool = True
    window_ring: bool = True
    """Sliding-window attention may be split by a ring."""
    tied_pipeline: bool = True
    """Tied embeddings may be split by a pipeline (a copy at each end)."""

    sources: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def source_of(self, fact: str) -> str:
        """Where a fact's value comes from; the field's default otherwise."""
        return dict(self.sources).get(fact, "default")

    @property
    def unfused(self) -> bool:
        return self.attention == "unfused"

    @property
    def slack(self) -> float:
        """Reserved over allocated bytes of this framework's element-wise work."""
        return self.eager_reserved_ratio if self.elementwise == "eager" else self.reserved_ratio

    def with_(self, **facts: Any) -> Execution:
        return replace(self, **facts)


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Execution)


@cache
def execution_names() -> tuple[str, ...]:
    """The presets that are built in."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.yaml")))


@cache
def _preset(name: str) -> Execution:
    if name not in execution_names():
        close = difflib.get_close_matches(name, execution_names(), 1)
        raise InputError("execution", name, f"is one of {', '.join(execution_names())}", close[0] if close else "axisplan")
    data = read_shipped(PRESETS / f"{name}.yaml") or {}
    base = _preset(data["extends"]) if "extends" in data else Execution()
    sources = dict(base.sources)
    values: dict[str, Any] = {}
    for fact, entry in (data.get("facts") or {}).items():
        if fact not in _hints() or fact in ("name", "sources"):
            raise AxisplanError(f"execution preset {name}: {fact} is not a fact")
        if not isinstance(entry, Mapping) or set(entry) != {"value", "source"}:
            raise AxisplanError(f"execution preset {name}: {fact} needs a value and a source")
        values[fact] = _typed(fact, entry["value"])
        sources[fact] = str(entry["source"])
    return replace(base, name=name, sources=tuple(sorted(sources.items())), **values)


def load_execution(name: str, overrides: Mapping[str, str] | None = None) -> Execution:
    """The preset ``name`` with facts replaced by ``overrides`` (``--set execution.KEY=VALUE``; values as text or typed).

    Raises InputError for an unknown preset or fact, or a value of the wrong type.
    """
    execution = _preset(name)
    if not overrides:
        return execution
    settable = {f.name for f in fields(Execution)} - {"name", "sources"}
    values: dict[str, Any] = {}
    for key, raw in overrides.items():
        fact = key.removeprefix("execution.")
        if fact not in settable:
            close = difflib.get_close_matches(fact, sorted(settable), 1, 0.0)
            raise InputError(f"execution.{fact}", raw, "is not a fact of an execution", f"execution.{close[0]}")
        values[fact] = _typed(fact, raw)
    sources = dict(execution.sources) | dict.fromkeys(values, "set by the user")
    return replace(execution, sources=tuple(sorted(sources.items())), **values)


def _typed(fact: str, raw: Any) -> Any:
    """``raw`` as the type of field ``fact``; raises InputError."""
    kind = _hints()[fact]
    where = f"execution.{fact}"
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if raw not in choices:
            close = difflib.get_close_matches(str(raw), choices, 1)
            raise InputError(where, raw, f"is one of {', '.join(choices)}", close[0] if close else choices[0])
        return raw
    if get_origin(kind) is tuple:
        items = [p for p in raw.split("+") if p] if isinstance(raw, str) else list(raw or ())
        return tuple(str(i) for i in items)
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        if str(raw).lower() in ("true", "1", "on", "yes"):
            return True
        if str(raw).lower() in ("false", "0", "off", "no"):
            return False
        raise InputError(where, raw, "must be true or false", "true")
    if kind is str:
        return str(raw)
    try:
        number = int(raw) if kind is int and not isinstance(raw, bool) else float(raw)
    except (TypeError, ValueError):
        raise InputError(where, raw, "must be a whole number" if kind is int else "must be a number", 0) from None
    if not 0 <= number < float("inf"):
        raise InputError(where, raw, "must be a finite number, zero or more", 0)
    return number

"""TimeFacts: what a framework's way of launching, overlapping and fusing does to time. A part of ``Execution``.

Each field is a fact or a constant of a *framework*; none belongs to a row, a model or a source. Constants of a GPU or a link live
in their profiles. Values of the presets, with where each was seen: ``data/executions``; plausible ranges: ``data/time.yaml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TpOverlap = Literal["none", "backward", "userbuffers", "async"]
Graphs = Literal["none", "partial", "full"]


@dataclass(frozen=True, repr=False, eq=False)
class TimeFacts:
    """Facts about time. Seconds, bytes, or shares between 0 and 1. Only ever a part of an ``Execution``, which compares them."""

    # -- compute --------------------------------------------------------------------------------------------------------
    pointwise_factor: float = 1.3
    """Time of pointwise kernels over their counted bytes at the achieved memory rate (of fused kernels: an estimate that no fit moved,
    modelling-notes.md section 3)."""
    libraries: str = "current"
    """Generation of cuBLAS and Transformer Engine, where their 8- and 4-bit products differ from the GPU's curve
    (``data/product_speed.yaml``)."""
    optimizer_traffic: float = 34.0
    """Bytes read and written a parameter of the shard in the optimizer step, gradient norm included."""
    unfused_activations: tuple[str, ...] = ()
    """Activations that run as a chain of pointwise kernels (names as in ``compute.UNFUSED_ACTIVATIONS``)."""

    # -- host -----------------------------------------------------------------------------------------------------------
    host_layer_seconds: float = 1.05e-3
    """Host time to launch one pass of one layer; the pass takes the longer of this and its GPU work (fitted: 3.05 ms for the three
    passes of a layer in vTrain's runs)."""
    graphs: Graphs = "none"
    """CUDA graphs: ``full`` removes the host's part, ``partial`` leaves half of it (experts stay eager)."""
    host_kernel_seconds: float = 8.0e-6
    """Host time of one operation where the device is the host itself (CPU): added to every operation."""
    blocking_launch_seconds: float = 0.0
    """Added to each pass of each layer where every launch blocks (CUDA_LAUNCH_BLOCKING=1)."""
    moe_sync_seconds: float = 8.5e-4
    """Added to the forward of each MoE layer: the router's many small kernels, capacity masks, and token counts that the host waits
    for (fitted: ``data/fitted.yaml``). Zero with full graphs, and on a CPU."""
    step_overhead_seconds: float = 0.012
    """Once a step: data, logging, gradient clipping's synchronisation, learning-rate update (an estimate that no fit moved: section 3)."""

    # -- overlap --------------------------------------------------------------------------------------------------------
    tp_overlap: TpOverlap = "backward"
    """``backward``: collectives run beside weight and input gradient products in backward only; ``userbuffers``, ``async``:
    they are cut into pieces beside the products, forward too; ``none``: all exposed."""
    tp_exposed: float = 0.3
    """Share of the collectives left exposed by ``userbuffers`` or ``async``."""
    dp_overlap: bool = True
    """Gradient reduction runs beside the last microbatch's backward, parameter gathering beside the first forward."""
    gather_overlap: bool = True
    """The same for parameter gathering alone, where only one of the two is overlapped."""
    dp_bucket_bytes: float = 256.0 * 2**20
    """The last bucket is never hidden."""
    fsdp_prefetch: bool = True
    """The next layer's parameters are gathered beside this layer's work."""
    gathers_per_microbatch: float = 2.0
    """ZeRO-3 gathers for forward and again for backward (1: parameters stay until backward, SHARD_GRAD_OP)."""
    gather_copies: float = 0.0
    """Times a gathered byte is read and written in the GPU's memory beyond the collective (FSDP2 and DeepSpeed copy parameters out of
    the gathered buffer: 2; FSDP1's flat parameter is the buffer: 0)."""
    reduce_copy_bytes: float = 0.0
    """Bytes read and written a gradient element to lay it out for its reduction (FSDP2: 16 bits in, fp32 out: 6)."""
    reduce_every_microbatch: bool = True
    """ZeRO-2 and 3 reduce gradients after every microbatch, under a pipeline too; otherwise a pipeline reduces with the last
    one."""
    accumulates_unsharded: bool = False
    """ZeRO-2 and 3 sum whole gradients over the microbatches and reduce them once (no_sync), at the memory of the whole
    gradient."""
    p2p_scatter: bool = False
    """Without SP, pipeline messages are cut over TP and gathered again within the node (Megatron's scatter-gather)."""
    p2p_overlap: bool = True
    """Interleaved schedules send and receive beside work; plain 1F1B blocks."""
    p2p_blocking: bool = True
    """Plain 1F1B: both ranks wait for the transfer."""
    post_validation: bool = False
    """A rank starts the next step without waiting for the others' gradient norms (the zero-bubble paper's optimizer)."""
    exchange_seconds: float = 60.0e-6
    """Added to each all-to-all of tokens: split sizes, uneven parts."""
    exchange_efficiency: float = 0.75
    """Rate of an all-to-all of uneven parts over the equal-parts rate, inside a domain."""
    deduplicated_token_seconds: float = 20.0e-9
    """Added to each exchange for each of the rank's tokens by DeepEP and HybridEP: layout of ranks and nodes, notification,
    conversion of the routing map (fitted; preparing alone takes 6 ns on one GB200 rack:
    hardware/data/gb200_nvl72_moe_alltoall.csv)."""
    deduplicated_efficiency: float = 0.75
    """Rate inside a domain of DeepEP and HybridEP over the equal-parts all-to-all: all copies pass there, remote ones forwarded
    (1.0 within one NVL72 rack: hardware/data/gb200_nvl72_moe_alltoall.csv)."""
    deduplicated_network_efficiency: float = 0.9
    """The same between nodes: 0.93 of the NICs at 4 nodes, 0.84 at 8 (hardware/data/deepep_alltoall.csv)."""
    ep_overlap: bool = False
    """All-to-all of one microbatch runs beside another's work, whatever the schedule."""
    ring_merge_bytes: float = 14.0
    """Bytes an output element and block of putting a ring's partial attention together: read the block 2, read and write the fp32
    sum 8, statistics and casts 4 (Transformer Engine's correction kernels)."""
    cp_overlap: bool = True
    """Ring passes run beside the attention of the block at hand."""

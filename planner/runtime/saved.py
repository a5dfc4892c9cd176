"""What the runtime's operations keep for backward, beside what fused CUDA kernels of the same operation keep.

The dry run counts on this contract: a trace on a CPU keeps what ``ours`` says, and so does a GPU, because the operations themselves
(``kernels``) choose what is saved. Where a fused kernel keeps something else, it stands here with its reason; a test compares both
sides with the graph and with the kernels' own schemas.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fused:
    """A fused kernel: the operation that runs its backward, as torch names it ("" where it is not torch's); tensors it keeps, by that
    schema's names; what that means beside ours."""

    name: str
    backward: str
    keeps: tuple[str, ...]
    beside_ours: str


@dataclass(frozen=True)
class Contract:
    """An operation of ``torch.ops.axisplan``: the tensors its autograd function keeps, in the order in which it saves them."""

    ours: tuple[str, ...]
    fused: tuple[Fused, ...]


FLASH = ("query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "philox_seed", "philox_offset")
CONTRACTS: dict[str, Contract] = {
    "attend": Contract(("q", "k", "v", "out", "logsumexp"), (
        Fused("FlashAttention-2", "_scaled_dot_product_flash_attention_backward", FLASH,
              "the same; the runtime calls this kernel, with no dropout the seeds are two numbers"),
        Fused("cuDNN", "_scaled_dot_product_cudnn_attention_backward", (*FLASH[:5], "philox_seed", "philox_offset", "attn_bias",
              "cum_seq_q", "cum_seq_k"), "the same, and an additive mask where one is given; the runtime gives none"),
        Fused("memory-efficient", "_scaled_dot_product_efficient_attention_backward", (*FLASH[:3], "attn_bias", "out", "logsumexp",
              "philox_seed", "philox_offset"), "the same; logsumexp is padded to 32 queries, keys and values have as many heads as queries"),
    )),
    "rms_norm": Contract(("x", "weight", "rstd"), (
        Fused("torch's fused RMSNorm", "_fused_rms_norm_backward", ("input", "rstd", "weight"), "the same; the runtime calls this kernel"),
        Fused("Apex with memory_efficient", "", ("output", "weight", "rstd"),
              "less: the output, which the next linear layer keeps anyway, stands for the input"),
    )),
    "cross_entropy": Contract(("logits", "targets", "logsumexp"), (
        Fused("torch's log-softmax and nll_loss", "_log_softmax_backward_data", ("output",),
              "more: log-probabilities as large as the logits, in fp32 where the logits were widened"),
        Fused("linear and loss in one (Liger Kernel, arXiv:2410.10989; Cut Cross-Entropy, arXiv:2411.09009)", "",
              ("input gradient", "weight gradient"), "less: no logits at all; both gradients are made in the forward, or the logits again"),
    )),
    "swiglu": Contract(("gate", "up"), (
        Fused("Transformer Engine and Liger SwiGLU", "", ("gate", "up"), "the same; the product itself is the next linear layer's input"),
    )),
    "activate": Contract(("x",), (Fused("torch's SiLU", "silu_backward", ("self",), "the same"),)),
}  # fmt: skip
"""By operation. Sources of what is not torch's: the kernels' documentation and papers named."""

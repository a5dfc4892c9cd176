"""Megatron-LM's own parser, fed with command lines: runs in a venv of its own (docs/emit.md), never in axisplan's.

Reads JSON lines {"world", "rank", "argv", "arch", "environment", "build"} and answers one JSON line each: {"ok": true, "dp", "vpp",
"groups", "parameters"} or {"ok": false, "stage", "error"}. ``AXISPLAN_MEGATRON`` names the checkout. Nothing of the GPU is used:
torch.cuda's two questions about the device are answered here, Triton is a stand-in, process groups are torch's fake ones.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
import types
import typing
import warnings
from unittest.mock import MagicMock

from stand_ins import without_triton

warnings.filterwarnings("ignore")
CHECKOUT = os.environ["AXISPLAN_MEGATRON"]


def prepare() -> None:
    """No Triton, and the checkout's packages."""
    without_triton()
    sys.path.insert(0, CHECKOUT)


prepare()
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

ARCH = {"major": 9}
torch.cuda.get_device_capability = lambda *_: (ARCH["major"], 0)
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(
    major=ARCH["major"], minor=0, name="GPU", total_memory=80 << 30, multi_processor_count=132
)

import megatron.core.extensions.transformer_engine as te  # noqa: E402
import megatron.core.models.common.embeddings.rope_utils as rope_utils  # noqa: E402
import megatron.core.parallel_state as ps  # noqa: E402
import megatron.core.transformer.moe.moe_utils as moe_utils  # noqa: E402
import megatron.core.transformer.multi_token_prediction as mtp_module  # noqa: E402
import megatron.core.utils as core_utils  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args  # noqa: E402

mtp_module.is_inference_column_parallel_linear = lambda _: False
core_utils._te_version = core_utils.PkgVersion("2.13.0")
FUSED = (
    "fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs", "fused_unpermute",
    "fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd",
)  # fmt: skip
for module in (te, moe_utils, rope_utils):
    for name in FUSED:
        setattr(module, name, MagicMock(name=name))


def groups() -> dict[str, list[int]]:
    made = {
        "tp": ps.get_tensor_model_parallel_group(), "cp": ps.get_context_parallel_group(), "dp": ps.get_data_parallel_group(),
        "pp": ps.get_pipeline_model_parallel_group(), "ep": ps.get_expert_model_parallel_group(),
        "etp": ps.get_expert_tensor_parallel_group(), "edp": ps.get_expert_data_parallel_group(),
    }  # fmt: skip
    return {name: sorted(dist.get_process_group_ranks(group)) for name, group in made.items()}


def answer(case: dict[str, typing.Any]) -> dict[str, typing.Any]:
    os.environ.update({"WORLD_SIZE": str(case["world"]), "RANK": str(case.get("rank", 0)), "LOCAL_RANK": "0"})
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER"):
        os.environ.pop(name, None)
    os.environ.update(case.get("environment", {}))
    ARCH["major"] = case.get("arch", 9)
    stage, said = "parse_args", io.StringIO()
    sys.argv = ["pretrain_gpt.py", *case["argv"]]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            args = parse_args()
            stage = "validate_args"
            validate_args(args, {})
            stage = "TransformerConfig"
            config = core_transformer_config_from_args(args)
            stage = "initialize_model_parallel"
            initialise(args, case["world"], case.get("rank", 0))
            out = {
                "ok": True, "dp": args.data_parallel_size, "vpp": args.virtual_pipeline_model_parallel_size, "groups": groups(),
                "sp": bool(args.sequence_parallel), "etp": args.expert_tensor_parallel_size,
            }  # fmt: skip
            if case.get("build"):
                stage = "build"
                out["parameters"] = build(args, config)
        return out
    except SystemExit:
        lines = said.getvalue().strip().splitlines() or [""]
        return {"ok": False, "stage": stage, "error": lines[-1][:400]}
    except BaseException as error:
        if os.environ.get("AXISPLAN_ORACLE_TRACE"):
            traceback.print_exc()
        return {"ok": False, "stage": stage, "error": f"{type(error).__name__}: {error}"[:400]}


def initialise(args: typing.Any, world: int, rank: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )


class OnMeta(torch.overrides.TorchFunctionMode):
    """Tensors that are asked for on the GPU are made on the meta device."""

    def __torch_function__(
        self, function: typing.Any, kinds: object, args: tuple[typing.Any, ...] = (), kwargs: typing.Any = None
    ) -> typing.Any:
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "pin_memory"}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "meta"
        if getattr(function, "__name__", "") == "cuda":
            return args[0].to("meta")
        return function(*args, **kwargs)


class NoTracker:
    """A random-number tracker that keeps nothing."""

    def fork(self, *_: object, **__: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True

    def __getattr__(self, name: str) -> typing.Any:
        return lambda *_, **__: None


def build(args: typing.Any, config: typing.Any) -> dict[str, list[int]]:
    """Parameters of this rank by chunk: all, and those of routed experts. The model is built on the meta device, local layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel import random as tracker
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    tracker._CUDA_RNG_STATE_TRACKER, tracker._CUDA_RNG_STATE_TRACKER_INITIALIZED = NoTracker(), True
    torch.cuda.current_device = lambda: "meta"
    torch.cuda.Stream = torch.cuda.Event = lambda *_, **__: None
    config.use_cpu_initialization, config.perform_initialization, config.sequence_parallel = True, False, False
    config.context_parallel_size = 1
    vocabulary = calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, False
    )
    plain = DotProductAttention.__init__

    def without_channels(
        self: typing.Any, *given: typing.Any, k_channels: object = None, v_channels: object = None, **named: typing.Any
    ) -> None:
        plain(self, *given, **named)

    DotProductAttention.__init__ = without_channels
    every: list[int] = []
    experts: list[int] = []
    virtual = args.virtual_pipeline_model_parallel_size
    for chunk in range(virtual or 1):
        stage = chunk if virtual else None
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization, qk_l2_norm=False, vp_stage=stage
        )
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage) if args.mtp_num_layers else None
        with torch.device("meta"), OnMeta():
            model = GPTModel(
                config=config, transformer_layer_spec=spec, vocab_size=vocabulary, max_sequence_length=args.max_position_embeddings,
                pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights, parallel_output=True,
                position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base, mtp_block_spec=mtp, vp_stage=stage,
            )  # fmt: skip
        every.append(sum(p.numel() for p in model.parameters()))
        experts.append(sum(p.numel() for name, p in model.named_parameters() if ".experts." in name))
    return {"all": every, "experts": experts}


def main() -> None:
    """One answer a line, in order. ``ready`` comes first."""
    reply = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=reply)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=reply)


main()

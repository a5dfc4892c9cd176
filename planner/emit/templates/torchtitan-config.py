"""$title

The configuration of torchtitan $version for this plan; started with --module axisplan_config --config train.
"""

import os

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
${imports}from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: F401
${loader_imports}from torchtitan.models.$module import model_registry
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer


def train() -> Trainer.Config:
    model_spec = model_registry($registry)
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path=os.environ.get("HF_ASSETS_PATH", "./assets/hf"),
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        optimizer=default_adamw(lr=$learning_rate),
        dataloader=$dataloader,
        metrics=MetricsProcessor.Config(log_freq=1),
        training=TrainingConfig(
$training
        ),
        parallelism=ParallelismConfig(
$parallelism
        ),
        activation_checkpoint=$activation_checkpoint,
        compile=CompileConfig(
$compiled
        ),
    )

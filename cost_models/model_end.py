"""The end of the model on the chunk that holds it: the head with its loss, and before it in a backward the prediction modules.

Head and embedding are used once more by each module, and autograd adds up all uses of a weight before it gives the sum away: what one
use leaves waits for the next, and the two and their sum exist at once. Seen in the dry run (docs/dry-run.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cost_models import split_backward
from cost_models.arrays import maximum
from cost_models.gradient_buckets import Buckets
from cost_models.head_ops import vocab_rows
from cost_models.job import Job
from cost_models.layer_cost import Local
from cost_models.unit_memory import PLAIN, Run, unit_memory
from profiles.operations import Number


class End(NamedTuple):
    """Bytes per microbatch on one rank of the model's end: ``kept`` from forward to backward, held for the ``weight_pass``, of these
    ``above`` the last weight. The most beyond what the chunk keeps: at the first ``loss``, and from there to the model's own layers
    in a ``backward`` that is whole."""

    kept: Number
    weight_pass: Number
    above: Number
    loss: Number
    backward: Number


def model_end(job: Job, degrees: Any, layers: tuple[Run, ...], *, first: bool) -> End:
    """The end behind the ``layers`` of a chunk, which is the model's ``first`` chunk too where it has one."""
    head, modules = unit_memory(job, degrees, "head"), job.model.mtp
    kept, weight_pass, above = head.kept, head.weight_pass, head.above
    complete = head_gradients(job, degrees)
    if not modules:
        return End(kept, weight_pass, above, head.transient, complete + _of_head(job, degrees, first=first))
    module, buckets = unit_memory(job, degrees, "mtp"), Buckets(job, degrees)
    each, inside = prediction_module(
        job, degrees, layers[-1] if layers else Run(job.model.pattern[-1], PLAIN, 1), buckets.of("mtp")
    )
    looks_up = unit_memory(job, degrees, "embedding").transient
    share, lookup = shared_gradient(job, degrees, "head"), shared_gradient(job, degrees, "embedding")
    stays = first or job.model.tied
    """Whether lookups wait for a use of the embedding that comes after the modules'."""
    backward: Number = head.transient
    freed: Number = 0
    waits: Number = 0
    for number in range(modules):
        if number:
            backward = maximum(backward, maximum(head.transient, complete + share) + waits - freed)
        lookups = waits - share if number else 0
        backward = maximum(backward, inside + share + lookups - freed)
        freed = freed + each
        summed = share if job.model.tied else lookups
        backward = maximum(backward, share + lookups + looks_up + summed - freed)
        waits = share if job.model.tied else share + lookup
    if not stays:
        backward = maximum(backward, share + lookup + buckets.of("tokens") - freed)
        waits = share
    backward = maximum(backward, maximum(head.transient, complete + share) + waits - freed)
    backward = maximum(backward, complete + _of_head(job, degrees, first=first) + (waits - share) - freed)
    return End(
        kept + modules * each, weight_pass + modules * module.weight_pass, above + modules * module.above, head.transient, backward
    )


def _of_head(job: Job, degrees: Any, *, first: bool) -> Number:
    """The bucket of the head's whole gradient; a head tied to the embedding before it waits for the lookup."""
    return 0 if first and job.model.tied else Buckets(job, degrees).of("head")


def head_gradients(job: Job, degrees: Any) -> Number:
    """Beyond what is kept, when the head's weight gradient is made: it and its input's gradient; the logits are gone."""
    head = unit_memory(job, degrees, "head")
    return split_backward.own_gradients(job, degrees, "head") + head.stream - head.above


def prediction_module(job: Job, degrees: Any, last: Run, bucket: Number = 0) -> tuple[Number, Number]:
    """(bytes that a multi-token-prediction module keeps, the most beyond them in its layer's backward, when its head is done). Its layer
    follows the rule of the model's ``last``; ``bucket``: of its whole gradients."""
    module, head = unit_memory(job, degrees, "mtp"), unit_memory(job, degrees, "head")
    plain, layer = unit_memory(job, degrees, last.kind), unit_memory(job, degrees, last.kind, last.rule)
    dropped = plain.kept - layer.kept
    return module.kept - dropped, dropped + maximum(layer.transient, layer.begun + bucket) - head.kept


def waiting_for_embedding(job: Job, degrees: Any) -> Number:
    """The gradient of the token embedding that waits for the lookup's, which comes last, where one backward goes through both ends:
    a tied head's, or that of a prediction module's lookup."""
    return shared_gradient(job, degrees, "embedding") if job.model.tied or job.model.mtp else 0


def shared_gradient(job: Job, degrees: Any, weight: str) -> Number:
    """What one use of ``head`` or ``embedding`` leaves until the last use's gradient is there."""
    execution, local = job.execution, Local(job, degrees)
    if execution.dummy_weight_gradients or not job.trains("embedding" if job.model.tied else weight):
        return 0
    width = job.model.embedding_width or job.model.hidden
    return execution.weight_gradient_bytes * local.bytes / 2 * vocab_rows(local) * width

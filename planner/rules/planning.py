"""Rules of a job that planning asks and costing does not: what a target's own runtime does not run may be estimated, not planned.

The data are ``trains``, ``optimizers`` and ``lacks`` in ``planner/data/limits.yaml``; ``FEATURES`` says what a name stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from planner.rules.core import Break, Case, Check, Rule, listed
from profiles.model import LatentAttention, Layer, LinearAttention, ModelSpec, StateSpace

PLANNING: dict[str, Rule] = {}


def planning_rule(sentence: str) -> Callable[[Check], Check]:
    """Register the decorated function as the planning rule of its name."""

    def register(check: Check) -> Check:
        PLANNING[check.__name__] = Rule(check.__name__, "planning", sentence, frozenset(), check)
        return check

    return register


def _any(holds: Callable[[Layer], bool]) -> Callable[[ModelSpec], bool]:
    return lambda model: any(holds(kind) for kind in model.kinds)


FEATURES: dict[str, tuple[str, Callable[[ModelSpec], bool]]] = {
    "state_space": ("state-space layers", _any(lambda k: any(isinstance(m, StateSpace) for m in k.mixers))),
    "linear_attention": ("linear-attention layers", _any(lambda k: any(isinstance(m, LinearAttention) for m in k.mixers))),
    "two_mixers": ("layers with two mixers", _any(lambda k: k.beside is not None)),
    "more_norms": ("layers with more than two norms", _any(lambda k: k.norms > 2)),
    "narrow_embedding": ("an embedding of another width than the model", lambda m: m.embedding_width not in (None, m.hidden)),
    "indexer": (
        "an indexer that picks the tokens to see",
        _any(lambda k: isinstance(k.mixer, LatentAttention) and k.mixer.index_heads > 0),
    ),
    "latent_attention": ("latent attention", _any(lambda k: isinstance(k.mixer, LatentAttention))),
    "other_rope_scaling": (
        "rotary frequencies scaled otherwise than llama3's",
        lambda m: m.rope_scaling is not None and m.rope_scaling.kind != "llama3",
    ),
    "squared_relu": ("squared ReLU", _any(lambda k: k.ffn is not None and k.ffn.activation == "relu2")),
    "clamped_activation": ("gpt-oss's clamped activation", lambda m: m.family == "gpt_oss"),
}
"""Features of a model that a runtime may lack: in words, and whether a model has it."""


def lacking(model: ModelSpec, names: Iterable[str]) -> list[str]:
    """Those of the features called ``names`` that the model has, in words."""
    return [FEATURES[name][0] for name in names if FEATURES[name][1](model)]


@planning_rule("the target's runtime runs every layer of the model")
def runtime_runs_the_model(case: Case) -> Iterator[Break]:
    found = lacking(case.job.model, case.limits.lacks)
    if found:
        message = f"{case.limits.target}'s runtime does not run {listed(found)}; plan it for another --execution"
        yield Break("model", case.job.model.name, message, ())


@planning_rule("the target's runtime trains in the precision")
def runtime_trains_in_the_precision(case: Case) -> Iterator[Break]:
    known = case.limits.trains
    if known and case.job.precision not in known:
        yield Break(
            "precision", case.job.precision, f"{case.limits.target}'s runtime trains in {listed(known)}", tuple(reversed(known))
        )


@planning_rule("the target's runtime captures as much in CUDA graphs as the execution says")
def runtime_captures_graphs(case: Case) -> Iterator[Break]:
    graphs, known = case.job.execution.graphs, case.limits.graphs
    if graphs not in known:
        yield Break("execution.graphs", graphs, f"{case.limits.target} has {listed(known)}", tuple(known))


@planning_rule("the target's runtime keeps the optimizer's moments as the execution says")
def runtime_keeps_the_moments(case: Case) -> Iterator[Break]:
    if case.job.execution.moment_bytes == 2 and not case.limits.narrow_moments:
        yield Break("execution.moment_bytes", 2, f"{case.limits.target} has no 16-bit moments", (4,))


@planning_rule("the target's runtime learns the model's positions")
def runtime_learns_the_positions(case: Case) -> Iterator[Break]:
    rows, length = case.job.model.learned_positions, case.job.seq_len
    if case.limits.positions == "sequence" and rows not in (0, length):
        message = f"{case.limits.target} learns as many positions as the sequence has tokens, {case.job.model.name} {rows}"
        yield Break("seq_len", length, message, (rows,))


@planning_rule("the target's runtime has the optimizer")
def runtime_has_the_optimizer(case: Case) -> Iterator[Break]:
    known = case.limits.optimizers
    if known and case.job.optimizer not in known:
        yield Break("optimizer", case.job.optimizer, f"{case.limits.target}'s runtime has {listed(known)}", tuple(known))

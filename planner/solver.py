"""PuLP programs through HiGHS, or CBC where HiGHS is missing: one thread, fixed seed, relative gap 0, node limits; a time limit only where
one is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def run(program: Any, *, nodes: int = 1_000_000, backend: str = "", seconds: float | None = None) -> str | None:
    """Solve a PuLP program. Returns "optimal", "feasible" (a limit of nodes or ``seconds`` ended it with an answer), "unknown" (ended
    without one), or None (infeasible).

    ``backend``: "highs" or "cbc"; empty picks HiGHS where it is installed. Under CBC a bound exists only when it says optimal.
    """
    import pulp

    chosen = backend or ("highs" if _has_highs() else "cbc")
    if chosen == "highs":
        solver = pulp.HiGHS(
            msg=False, threads=1, gapRel=0.0, random_seed=1, mip_max_nodes=nodes, mip_abs_gap=0.0, timeLimit=seconds
        )
    else:
        solver = pulp.PULP_CBC_CMD(
            msg=False, threads=1, gapRel=0.0, timeLimit=seconds, options=["randomSeed 1", f"maxNodes {nodes}"]
        )
    with silent():
        try:
            status = program.solve(solver)
        except KeyError:
            return _stopped(program)
    if pulp.LpStatus[status] != "Optimal":
        return None if pulp.LpStatus[status] == "Infeasible" else "unknown"
    if chosen == "highs":
        model = getattr(program, "solverModel", None)
        if model is not None and "Optimal" not in str(model.modelStatusToString(model.getModelStatus())):
            return _stopped(program)
    return "optimal" if program.sol_status == pulp.LpSolutionOptimal else "feasible"


def _stopped(program: Any) -> str:
    """A limit ended HiGHS, which PuLP has no word for, or calls optimal: its answer, if it has one, is read here."""
    import highspy

    model = program.solverModel
    if model.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return "unknown"
    values = list(model.getSolution().col_value)
    for variable in program.variables():
        variable.varValue = values[variable.index]
    return "feasible"


def bound_of(program: Any) -> float:
    """The proven lower bound of a minimisation that ``run`` has solved: HiGHS's dual bound; under CBC the optimum, or -inf."""
    import pulp

    model = getattr(program, "solverModel", None)
    if model is not None and hasattr(model, "getInfo"):
        info = model.getInfo()
        value = float(pulp.value(program.objective))
        dual = float(info.mip_dual_bound)
        return min(dual, value) if dual == dual and abs(dual) < 1e300 else value
    return float(pulp.value(program.objective)) if program.sol_status == pulp.LpSolutionOptimal else float("-inf")


def _has_highs() -> bool:
    from importlib.util import find_spec

    return find_spec("highspy") is not None


@contextmanager
def silent() -> Iterator[None]:
    """Nothing reaches standard output meanwhile: HiGHS prints its banner past its own switch, and ``--json`` promises one document."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    with open(os.devnull, "wb") as sink:
        os.dup2(sink.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)

"""How far loss and gradients under every layout of the tests lie from one process, in fp64: a table, and the worst of all.

    OMP_NUM_THREADS=1 python benchmarks/layout_errors.py --out layout_errors.csv

About 140 layouts on 1 to 8 processes; a line each as it is done. Exit code 1 when one exceeds 1e-9.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = ROOT / "tests" / "planner" / "runtime"
sys.path.insert(0, str(RUNTIME))  # the tests import their neighbours by name
LIMIT, FLOOR = 1e-9, 1e-14
"""Below the floor a whole gradient is rounding (a key's bias without rotary positions has none)."""


def load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases() -> list[tuple[int, str, str, dict[str, Any]]]:
    """(processes, layout, model, further arguments) of every layout that the tests compare."""
    layouts, later, adapters = (load(n, RUNTIME / f"{n}.py") for n in ("test_layouts", "test_prediction", "test_adapters"))
    out = [(*p.values, {}) for p in (*layouts.MATRIX, *later.MATRIX)]
    return out + [(w, t, m, {"settings": s, "after": 2}) for w, t, m, s in (p.values for p in adapters.MATRIX)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("layout_errors.csv"))
    parser.add_argument("--skip", type=int, default=0, help="cases done before")
    arguments = parser.parse_args()
    pools = load("distributed", ROOT / "tests" / "distributed.py")
    folder = tempfile.TemporaryDirectory()

    def gradients(world: int, layout: str, model: str, **facts: Any) -> tuple[float, dict[str, np.ndarray]]:
        path = f"{folder.name}/gradients.npz"
        loss = pools.pool(world).call(RUNTIME / "programs.py", "gradients", 600.0, path=path, layout=layout, model=model, **facts)[
            0
        ]
        with np.load(path) as file:
            return loss, {n: file[n] for n in file.files}

    worst, alone = 0.0, dict[str, Any]()
    with arguments.out.open("a" if arguments.skip else "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not arguments.skip:
            writer.writerow(["processes", "layout", "model", "trained", "loss_error", "gradient_error", "tensor"])
        for world, layout, model, facts in cases()[arguments.skip :]:
            began, key = time.monotonic(), f"{model} {facts}"
            if key not in alone:
                alone[key] = gradients(1, "micro_batch=8", model, **facts)
            expected, got = alone[key], gradients(world, layout, model, **facts)
            assert set(got[1]) == set(expected[1]), (layout, model)
            scale = {n: np.abs(v).max() for n, v in expected[1].items()}
            errors = {n: np.abs(got[1][n] - v).max() / scale[n] for n, v in expected[1].items() if scale[n] > FLOOR}
            name = max(errors, key=lambda n: errors[n])
            loss = abs(got[0] - expected[0]) / abs(expected[0])
            worst = max(worst, errors[name], loss)
            trained = ",".join(f"{k}={v}" for k, v in facts.get("settings", {}).items())
            writer.writerow([world, layout, model, trained, f"{loss:.2e}", f"{errors[name]:.2e}", name])
            file.flush()
            print(f"{world} {layout} {model} {trained}: {errors[name]:.1e} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"worst: {worst:.2e}")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()

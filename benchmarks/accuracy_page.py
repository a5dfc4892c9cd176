"""Write what the accuracy of the cost models is today: ``docs/accuracy.md``, its picture, and the baseline that CI compares with.

``python benchmarks/accuracy_page.py``; half a minute. Run ``benchmarks/leave_one_out.py --json benchmarks/results/leave_one_out.json``
first where a constant has changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cost_models.accuracy import regress
from cost_models.accuracy_report import page, picture, summary
from cost_models.runs import load_runs, read_rows

ROOT = Path(__file__).parents[1]
DATA, DOCS = ROOT / "tests" / "data", ROOT / "docs"


def rounded(tree: Any) -> Any:
    """The same with floats of six digits, so that the file changes only where something did."""
    if isinstance(tree, dict):
        return {key: rounded(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [rounded(value) for value in tree]
    return float(f"{tree:.6g}") if isinstance(tree, float) else tree


def main() -> None:
    published = regress(*load_runs(read_rows(DATA / "runs.csv")))
    single = regress(*load_runs(read_rows(DATA / "vtrain_single.csv")))
    document = published.to_json()
    left_out = ROOT / "benchmarks" / "results" / "leave_one_out.json"
    known = json.loads(left_out.read_text(encoding="utf-8")) if left_out.exists() else None
    text = page(document, {"vTrain's single-node runs": single.to_json()}, known)
    (DOCS / "accuracy.md").write_text(
        text.replace("\n## Memory", "\n![predicted against measured](accuracy.png)\n\n## Memory", 1), encoding="utf-8"
    )
    picture(published, DOCS / "accuracy.png")
    (DATA / "accuracy_baseline.json").write_text(json.dumps(rounded(document), indent=1) + "\n", encoding="utf-8")
    print("\n".join(summary(document)))


if __name__ == "__main__":
    main()

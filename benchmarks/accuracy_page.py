"""Write what the accuracy of the cost models is today: ``docs/accuracy.md``, its picture, README's table, and the baseline that CI
compares with.

``python benchmarks/accuracy_page.py``; half a minute. Run ``benchmarks/leave_one_out.py --json benchmarks/results/leave_one_out.json``
first where a constant has changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cost_models.accuracy import regress
from cost_models.accuracy_report import page, picture, summary, table
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


BEGIN, END = "<!-- accuracy: written by benchmarks/accuracy_page.py -->\n", "<!-- accuracy: end -->\n"
"""What README's table stands between."""


def with_table(readme: str, table: str) -> str:
    """README with its table of accuracy replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table}\n{END}{after}"


def whole_page(published: dict[str, Any], single: dict[str, Any]) -> str:
    """``docs/accuracy.md`` from the results of both files of runs, with what ``leave_one_out.py`` wrote."""
    left_out = ROOT / "benchmarks" / "results" / "leave_one_out.json"
    known = json.loads(left_out.read_text(encoding="utf-8")) if left_out.exists() else None
    text = page(published, {"vTrain's single-node runs": single}, known)
    return text.replace("\n## Memory", "\n![predicted against measured](accuracy.png)\n\n## Memory", 1)


def main() -> None:
    published = regress(*load_runs(read_rows(DATA / "runs.csv")))
    single = regress(*load_runs(read_rows(DATA / "vtrain_single.csv")))
    document = published.to_json()
    (DOCS / "accuracy.md").write_text(whole_page(document, single.to_json()), encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), table(document)), encoding="utf-8")
    picture(published, DOCS / "accuracy.png")
    (DATA / "accuracy_baseline.json").write_text(json.dumps(rounded(document), indent=1) + "\n", encoding="utf-8")
    print("\n".join(summary(document)))


if __name__ == "__main__":
    main()

"""The plans that the README names: each command, what it answers, and what it took.

``python benchmarks/named_plans.py [NAME ...]`` runs the commands (cold, one after the other) and keeps what they say in
``benchmarks/results/named_plans.json``; ``--page`` writes ``docs/named-plans.md`` from it, ``--readme`` prints the table for the README.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from cost_models.job import GIB
from planner.layout_words import bare
from profiles.files import write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "named_plans.json"
PAGE = ROOT / "docs" / "named-plans.md"
DEEPSEEK = "deepseek-v3 --cluster h800-sxm:256x8 --seq-len 4k --global-batch 15360 --precision fp8"
PLANS = {
    "DeepSeek-V3 on 2,048 H800": f"{DEEPSEEK} --execution megatron",
    "Llama-3.1-405B on 16,384 H100, 8k": "llama-3.1-405b --cluster h100-sxm:2048x8 --seq-len 8k --global-batch 2048",
    "Llama-3.1-405B on 16,384 H100, 128k": "llama-3.1-405b --cluster h100-sxm:2048x8 --seq-len 128k --global-batch 128",
    "GPT-3 175B on 1,024 A100": "gpt3-175b --cluster a100-sxm:128x8 --seq-len 2k --global-batch 1536",
    "Mixtral 8x7B on 64 H100": "mixtral-8x7b --cluster h100-sxm:8x8 --seq-len 4k --global-batch 1024",
    "Qwen3-235B-A22B on 256 H100": "qwen3-235b-a22b --cluster h100-sxm:32x8 --seq-len 4k --global-batch 2048",
    "Kimi-K2 on 4,096 H800": "kimi-k2 --cluster h800-sxm:512x8 --seq-len 4k --global-batch 16384",
    "Llama-3-8B on 8 H100": "llama-3-8b --cluster h100-sxm:1x8 --seq-len 8k --global-batch 128",
}
DOCUMENT = "pp=16,ep=64,dp_replicate=1,dp_shard=128,zero=1,micro_batch=1,"
"""DeepSeek-V3's own degrees (its report, section 3.2): no TP, PP 16, EP 64, ZeRO-1."""
CHOICES = (
    "schedule=1f1b,recompute=full",
    "schedule=dualpipe,recompute=full",
    "schedule=dualpipe,recompute=selective(layernorm,moe_act,mla_up_proj)",
)
"""Schedule and recompute: the last are the report's own (norms, up-projections and SwiGLU)."""


def run(arguments: list[str]) -> tuple[int, dict[str, Any], str, float]:
    """(exit code, JSON document, stderr, CPU seconds) of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", "import cli; cli.main()", *arguments, "--json"], capture_output=True, text=True, cwd=ROOT
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    document = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return done.returncode, document, done.stderr.strip(), took


def planned(name: str) -> dict[str, Any]:
    code, document, error, took = run(["plan", *PLANS[name].split(), "--top", "0"])
    row: dict[str, Any] = {"command": f"axisplan plan {PLANS[name]}", "exit": code, "cpu_s": round(took, 1)}
    if code:
        return row | {"error": error}
    estimate, certificate = document["estimate"], document["certificate"]
    fullest = max(s["device"] for s in estimate["memory"])
    return row | {
        "layout": document["layout_text"], "step_s": estimate["step_seconds"], "low_s": estimate["step_seconds_low"],
        "high_s": estimate["step_seconds_high"], "tokens_per_second_per_gpu": estimate["tokens_per_second_per_gpu"], "mfu": estimate["mfu"],
        "device_gib": fullest / GIB, "limit_gib": estimate["limit_bytes"] / GIB, "columns": certificate["columns_legal"],
        "gap": certificate["gap"], "proved": certificate["proved"],
    }  # fmt: skip


def documented(choice: str) -> dict[str, Any]:
    """DeepSeek-V3's own layout under the same job: whether it is legal, and fits, and its predicted step."""
    arguments = [*DEEPSEEK.split(), "--layout", DOCUMENT + choice]
    code, document, error, took = run(["check", *arguments])
    row = {
        "command": f"axisplan check {DEEPSEEK} --layout '{DOCUMENT}{choice}'",
        "exit": code,
        "cpu_s": round(took, 1),
        "error": error,
    }
    row |= {"legal": document.get("legal"), "fits": document.get("fits"), "binding": document.get("binding")}
    found = run(["estimate", *arguments])[1]
    return row | {key: found.get(key) for key in ("step_seconds", "mfu")}


PIPE = r"\|"
"""A bar inside a table."""


def table(rows: dict[str, Any]) -> list[str]:
    lines = ["| job | plan | step | tokens/s/GPU | MFU | fullest GPU | gap | CPU |", "|---|---|---:|---:|---:|---:|---:|---:|"]
    for name in PLANS:
        r = rows.get(name)
        if r is None or r["exit"]:
            lines.append(f"| {name} | {'not run' if r is None else r['error']} | | | | | | |")
            continue
        gap = "proved" if r["proved"] else f"{100 * r['gap']:.1f} %"
        lines.append(
            f"| {name} | `{bare(r['layout']).replace('|', PIPE)}` | {r['step_s']:.3g} s | {r['tokens_per_second_per_gpu']:,.0f}"
            f" | {100 * r['mfu']:.1f} %"
            f" | {r['device_gib']:.1f} of {r['limit_gib']:.1f} GiB | {gap} | {r['cpu_s']:.1f} s |"
        )
    return lines


def page(rows: dict[str, Any]) -> str:
    out = [
        "# Named plans",
        "",
        "Each command as it was run, cold, with the search's bounded effort (no `--prove`), and what it answered. CPU seconds are of the whole",
        "command. Written by `python benchmarks/named_plans.py --page`.",
        "",
        *table(rows),
        "",
    ]
    if rows.get("document"):
        out += [
            "## DeepSeek-V3's own layout",
            "",
            "The degrees of its report under the same job, with three choices of schedule and recompute.",
            "",
        ]
        for own in rows["document"]:
            room = own["binding"]["headroom_bytes"] / GIB
            fits = (
                f"fits with {room:.1f} GiB to spare" if own["fits"] else f"lacks {-room:.1f} GiB on stage {own['binding']['stage']}"
            )
            time = (
                f"{own['step_seconds']:.3g} s a step, MFU {100 * own['mfu']:.1f} %"
                if own["step_seconds"]
                else "no time: it does not fit"
            )
            refused = f"    # exit {own['exit']}" if own["exit"] else ""
            out += [
                "```bash",
                own["command"] + refused,
                "```",
                "",
                f"Legal: {'yes' if own['legal'] else 'no'}; {fits}; {time}.",
                "",
            ]
        out += [
            "The degrees fit under 1F1B. The report trained with the last choice: that it does not fit here is a defect of this model of",
            "memory for that framework, which keeps activations in 8 bits and, of a split backward, only what its weight gradients need;",
            "the `axisplan` execution keeps 16 bits and PyTorch's graph. Its GPU hours (180 thousand for 10^12 tokens) are 20 s a step;",
            "recompute of every layer and an exchange of tokens that nothing hides make the difference.",
            "",
        ]
    out += ["## Commands and whole layouts", ""]
    for name in PLANS:
        r = rows.get(name)
        if r:
            out += [f"### {name}", "", "```bash", r["command"], "```", "", "```text", r.get("layout") or r["error"], "```", ""]
            if "columns" in r:
                gap = "proved" if r["proved"] else f"gap {100 * r['gap']:.2f} %"
                out += [f"{r['columns']:,} legal columns; {r['low_s']:.3g} to {r['high_s']:.3g} s with 80 % chance; {gap}.", ""]
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="The plans that the README names.")
    parser.add_argument("names", nargs="*", help="part of a name (default: all)")
    parser.add_argument("--page", action="store_true", help="write the docs page from the results")
    parser.add_argument("--readme", action="store_true", help="print the table for the README")
    arguments = parser.parse_args()
    rows: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if not (arguments.page or arguments.readme):
        for name in PLANS:
            if not arguments.names or any(n.lower() in name.lower() for n in arguments.names):
                rows[name] = planned(name)
                print(name, json.dumps(rows[name]), flush=True)
                write_text(RESULTS, json.dumps(rows, indent=1) + "\n")
        if not arguments.names or any(n.lower() in "document" for n in arguments.names):
            rows["document"] = [documented(c) for c in CHOICES]
            print("document", json.dumps(rows["document"]), flush=True)
            write_text(RESULTS, json.dumps(rows, indent=1) + "\n")
    if arguments.page:
        write_text(PAGE, page(rows))
    if arguments.readme:
        print("\n".join(table(rows)))


if __name__ == "__main__":
    main()

"""Reports: what is drawn is what the plan says."""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from planner import plan as plans
from planner.cells import AtCommas
from planner.plan import Plan
from planner.report import figures
from planner.report.page import assumptions
from planner.report.spans import Spans, spans_of
from planner.screen import show_memory, show_timeline, sparkline, table


@pytest.fixture(scope="session")
def dense(make_plan) -> Plan:
    return make_plan("llama-3-8b", "h100-sxm:2x8", "tp=2,pp=4,recompute=full", "tp=4,pp=2,recompute=full", "tp=8")


@pytest.fixture(scope="session")
def experts(make_plan) -> Plan:
    return make_plan("qwen3-30b-a3b", "h100-sxm:2x8", "tp=1,pp=2,ep=8,recompute=full")


@pytest.fixture(scope="session")
def spans(dense: Plan) -> Spans:
    return spans_of(dense)


def test_a_stage_runs_every_microbatch_forward_and_backward_once(dense, spans):
    microbatches = dense.layout_object.microbatches(64)
    for stage in range(4):
        for kind in ("forward", "backward"):
            seen = sorted(s.microbatch for s in spans.spans if s.stage == stage and s.kind == kind)
            assert seen == list(range(microbatches))


def test_spans_of_a_stage_never_overlap_and_end_within_the_step(dense, spans):
    for stage in range(4):
        mine = [s for s in spans.spans if s.stage == stage]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(mine))
    assert max(s.end for s in spans.spans) <= spans.seconds
    assert spans.seconds == pytest.approx(dense.step_seconds)


def test_busy_seconds_of_a_stage_are_those_of_the_estimate(dense, spans):
    passes = ("forward", "backward", "backward_input", "backward_weight")
    for stage, busy in enumerate(dense.estimate["stage_seconds"]):
        assert sum(s.end - s.start for s in spans.spans if s.stage == stage and s.kind in passes) == pytest.approx(busy)


def test_exposed_communication_of_the_busiest_stage_is_what_the_step_accounts_for(dense, spans):
    busiest = dense.estimate["busiest_stage"]
    drawn = sum(s.communication for s in spans.spans if s.stage == busiest)
    accounted = sum(s for cause, s in dense.estimate["seconds"].items() if cause.startswith("communication"))
    assert drawn == pytest.approx(accounted, rel=0.02)


def test_a_long_step_is_drawn_with_fewer_microbatches_and_says_so(make_plan):
    long = make_plan("llama-3-8b", "h100-sxm:2x8", "tp=2,pp=4,recompute=full", batch=256)
    short = spans_of(long, most=300)
    assert (short.microbatches, short.drawn) == (128, 32)
    assert {s.microbatch for s in short.spans if s.stage == 3} - {-1} == set(range(short.drawn))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v", "dualpipe-v"])
def test_every_schedule_can_be_drawn(make_plan, schedule):
    plan = make_plan(
        "llama-tiny", "cpu:1x4", f"pp=4,schedule={schedule},micro_batch=1", seq_len=128, batch=16, execution="axisplan"
    )
    found = spans_of(plan)
    assert {s.stage for s in found.spans} == {0, 1, 2, 3}
    assert all(s.end >= s.start >= 0 and 0 <= s.communication <= s.end - s.start + 1e-12 for s in found.spans)


def test_memory_parts_sum_to_the_device(dense):
    for stage in dense.estimate["memory"]:
        assert sum(figures.memory_parts(stage).values()) == pytest.approx(stage["device"])


def test_the_seconds_picture_sums_to_the_step(dense):
    figure = figures.seconds_figure(dense.estimate)
    assert sum(x for trace in figure["data"] for x in trace["x"]) == pytest.approx(dense.step_seconds, rel=0.01)


def test_the_front_holds_only_candidates_that_no_other_beats():
    rows = [{"seconds": s, "bytes": b} for s, b in ((1.0, 9), (2.0, 5), (2.5, 6), (3.0, 1), (3.0, 2))]
    assert [(r["seconds"], r["bytes"]) for r in figures.pareto(rows)] == [(1.0, 9), (2.0, 5), (3.0, 1)]


def test_the_candidates_are_the_chosen_plan_and_its_runners_up(dense):
    rows = figures.candidates(dense)
    assert [r["role"] for r in rows] == ["chosen", "runner-up", "runner-up"]
    assert rows[0]["seconds"] == dense.step_seconds


@pytest.mark.parametrize("columns", [140, 100, 80])
def test_a_narrow_window_cuts_no_figure_and_wraps_no_line(dense, spans, columns):
    from rich.console import Console

    out = Console(file=io.StringIO(), width=columns)
    show_memory(out, dense.estimate)
    show_timeline(out, spans)
    memory, timeline = out.file.getvalue().split("timeline of")
    rows = [line.split() for line in memory.splitlines() if line.rstrip().endswith("|")]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    for row, stage in zip(rows, dense.estimate["memory"], strict=True):
        for key in ("parameters", "gradients", "optimizer", "activations", "peak_allocated", "device"):
            assert f"{stage[key] / 2**30:.2f}" in row
    lines = [line for line in timeline.splitlines()[1:] if line]
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3"]
    assert all(line.endswith("|") and len(line) <= columns for line in lines)


def test_a_sparkline_is_full_where_a_stage_works_all_the_time_and_blank_where_it_waits(spans):
    from planner.report.spans import Span

    half = Spans((Span(0, "forward", 0, 0, 0.0, 1.0),), 2.0, 0.0, 1, 1)
    assert sparkline(half, 0, 8) == "████    "
    assert len(sparkline(spans, 3, 40)) == 40


def embedded(text: str) -> dict:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def test_the_html_file_holds_all_it_needs_and_loads_nothing(dense, tmp_path, invoke):
    pytest.importorskip("plotly")
    dense.save(tmp_path / "plan.json")
    code, out, err = invoke("report", str(tmp_path / "plan.json"), "--out", str(tmp_path / "report.html"))
    assert (code, err) == (0, "")
    assert "html written to" in out
    text = (tmp_path / "report.html").read_text()
    assert "Plotly" in text
    outside = text.replace(text[text.index("<script>") : text.index('<script id="data"')], "")
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", outside)
    assert "proved fastest" in text
    assert "every divisor &amp; &lt;more&gt;" in text
    data = embedded(text)
    assert len(data["timeline"]["start"]) == len(spans_of(dense).spans)
    assert data["cluster"]["world"] == 16
    assert set(data["figures"]) == {"memory", "seconds", "candidates"}


def test_every_constant_of_the_hardware_is_in_the_page_with_its_origin(dense):
    pytest.importorskip("plotly")
    from planner.report.page import assumptions
    from profiles.hardware import describe

    text = assumptions(dense, dense.job())
    rows = describe(dense.job().cluster)
    assert f"{len(rows)} constants" in text
    assert all(f"<td>{row[0]}</td>" in text for row in rows)


def test_a_hostile_model_name_stays_text(dense):
    pytest.importorskip("plotly")
    from planner.report.page import page

    job = dense.job()
    model = job.model.model_copy(update={"name": "</script><script>alert(1)</script>"})
    hostile = dense.model_copy(update={"model": plans.model_dump(model)})
    assert "<script>alert(1)" not in page(hostile)


@pytest.mark.parametrize("form", ["png", "svg"])
def test_pictures_for_papers_are_written_whole(dense, tmp_path, invoke, form):
    pytest.importorskip("matplotlib")
    dense.save(tmp_path / "plan.json")
    out = tmp_path / f"picture.{form}"
    assert invoke("report", str(tmp_path / "plan.json"), "--out", str(out))[0] == 0
    head = out.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if form == "png" else b"<?xml" in head
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_limit_of_a_paper_picture_crosses_no_legend_and_its_label_no_axis(dense, make_plan):
    pytest.importorskip("matplotlib")
    from planner.report import paper

    for plan in (dense, make_plan("llama-3-8b", "h100-sxm:1x8", "zero=3,recompute=full")):
        figure, axes = paper._pyplot().subplots(figsize=(4, 2))
        paper._memory(axes, plan)
        figure.canvas.draw()
        frame, (label,) = axes.get_window_extent(), axes.texts
        limit = axes.transData.transform((0, plan.estimate["limit_bytes"] / 2**30))[1]
        assert axes.get_legend().get_window_extent().y0 > limit
        assert frame.x0 < label.get_window_extent().x0 < label.get_window_extent().x1 < frame.x1
        paper._pyplot().close(figure)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--out", "report.pdf"], "tells no format"),
        (["--out", "plan.json"], "is the plan itself"),
        (["--run", "plan.json"], "is laid over a trace"),
        (["--format", "trace", "--run", "plan.json"], "is a plan"),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(dense, tmp_path, invoke, arguments, line, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dense.save("plan.json")
    code, _, err = invoke("report", "plan.json", *arguments)
    assert code == 2
    assert line in err
    assert err.count("\n") == 1


def test_without_the_plotting_packages_the_extra_is_named(dense, tmp_path, invoke, monkeypatch):
    dense.save(tmp_path / "plan.json")
    for name in ("plotly", "plotly.offline", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    for form in ("html", "png"):
        code, _, err = invoke("report", str(tmp_path / "plan.json"), "--format", form)
        assert code == 1
        assert "axisplan[plot]" in err
        assert err.count("\n") == 1


def test_a_trace_holds_every_span_in_microseconds_by_stage(dense, spans, tmp_path, invoke):
    dense.save(tmp_path / "plan.json")
    run = tmp_path / "run.jsonl"
    run.write_text("".join(json.dumps({"step": i, "seconds": 0.5 + i, "loss": 1.0}) + "\n" for i in range(3)))
    out = tmp_path / "trace.json"
    code, _, err = invoke("report", str(tmp_path / "plan.json"), "--format", "trace", "--run", str(run), "--out", str(out))
    assert (code, err) == (0, "")
    events = json.loads(out.read_text())["traceEvents"]
    work = [e for e in events if e["ph"] == "X" and e["pid"] < 4 and e.get("cat") in {s.kind for s in spans.spans}]
    assert len(work) == len(spans.spans)
    first = next(e for e in work if e["cat"] == "forward" and e["pid"] == 0 and e["args"]["microbatch"] == 0)
    span = next(s for s in spans.spans if s.kind == "forward" and s.stage == 0 and s.microbatch == 0)
    assert first["ts"] == pytest.approx(1e6 * span.start, abs=0.01)
    assert first["dur"] == pytest.approx(1e6 * (span.end - span.start), abs=0.01)
    measured = [e for e in events if e["ph"] == "X" and e["pid"] == 4 and e["tid"] == 1]
    assert [e["dur"] for e in measured] == [5e5, 1.5e6, 2.5e6]
    starts, ends = ({e["id"] for e in events if e["ph"] == ph} for ph in "sf")
    assert starts == ends
    assert len(starts) == 2 * 3 * dense.layout_object.microbatches(64)


BROWSER = "a browser: apt-get install chromium chromium-driver, and selenium"


@pytest.fixture
def browser():
    """Headless chromium; skips where there is none."""
    import shutil

    selenium = pytest.importorskip("selenium", reason=BROWSER)
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and driver):
        pytest.skip(f"no browser here; needs {BROWSER}")
    from selenium import webdriver

    assert selenium
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    window.set_script_timeout(60)
    yield window
    window.quit()


def opened(browser, path: Path, width: int, scheme: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    browser.execute_cdp_cmd(
        "Network.emulateNetworkConditions", {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    )
    browser.get(path.as_uri())
    WebDriverWait(browser, 60).until(lambda b: b.execute_script("return document.documentElement.dataset.ready") == "yes")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (420, "light"), (1400, "dark")])
def test_in_a_browser_offline_each_picture_has_its_data_and_the_console_is_clean(experts, dense, tmp_path, browser, width, scheme):
    pytest.importorskip("plotly")
    from planner.report.page import page

    for name, plan in (("dense", dense), ("experts", experts)):
        path = tmp_path / f"{name}.html"
        path.write_text(page(plan))
        opened(browser, path, width, scheme)
        assert browser.get_log("browser") == []
        ask = browser.execute_script
        for figure in ("timeline", "memory", "seconds", "cluster", "candidates"):
            drawn = ask(f"return document.getElementById('{figure}').data.length")
            assert drawn > 0, figure
            assert ask(f"return document.querySelectorAll('#{figure} .main-svg').length") > 0
        t = ask("const t = document.getElementById('timeline').data.filter(t => t.name === 'forward')[0];"
                "return {way: t.orientation, x: Array.from(t.x), y: Array.from(t.y), width: t.width || 0}")  # fmt: skip
        forwards = [s.end - s.start - s.communication for s in spans_of(plan).spans if s.kind == "forward"]
        assert t["way"] == "h" or width < 1000, "on a wide window each pass is a bar of its own"
        assert t["way"] == "v" or len(t["x"]) == len(forwards)
        drawn = sum(t["x"]) if t["way"] == "h" else sum(-y / 0.84 * t["width"] for y in t["y"])
        assert drawn == pytest.approx(sum(forwards), rel=1e-3)
        assert ask("return document.documentElement.scrollWidth") <= width
        layout = plan.layout_object
        axes = [a for a, _ in layout.axes] + (["etp", "ep", "edp"] if plan is experts else [])
        for axis in axes:
            for rank in (0, 5, 15):
                assert tuple(ask(f"return window.axisplanGroup({rank}, '{axis}')")) == layout.group(rank, axis), (axis, rank)
        ask("Plotly.relayout('timeline', {'xaxis.range[0]': 0, 'xaxis.range[1]': 0.1})")
        background = ask("return getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") is (scheme == "light")
        assert browser.get_log("browser") == []


@pytest.mark.slow
def test_sixteen_thousand_ranks_are_drawn_by_node(make_plan, tmp_path, browser):
    pytest.importorskip("plotly")
    from planner.report.page import page

    plan = make_plan("llama-3.1-405b", "h100-sxm:2048x8", "tp=8,pp=16,recompute=full", seq_len=8192, batch=4096)
    path = tmp_path / "large.html"
    path.write_text(page(plan))
    opened(browser, path, 1400, "light")
    cells = "return document.getElementById('cluster').data[0].z.flat().filter(v => v !== null).length"
    assert browser.execute_script(cells) == 2048
    assert browser.get_log("browser") == []
    assert path.stat().st_size < 12 << 20


@pytest.fixture(scope="module")
def solved() -> Plan:
    from cost_models.execution import load_execution
    from cost_models.job import Job
    from planner.solve import PlanRequest, solve
    from profiles.hardware import load_cluster
    from profiles.huggingface import load_model

    job = Job(load_model("llama-3.2-1b"), load_cluster("h100-sxm:1x4"), load_execution("axisplan"), 2048, 8, "bf16")
    return solve(PlanRequest(job, prove=True, tie=0.0))


def test_the_candidates_considered_fit_and_none_is_faster_than_a_proved_plan(solved):
    from cost_models.step import estimate
    from planner.legality import read_layout
    from planner.report.considered import considered

    found = considered(solved)
    assert 10 < len(found.rows) <= found.fitting <= found.legal
    assert len({r["layout"] for r in found.rows}) == len(found.rows)
    assert min(r["seconds"] for r in found.rows) >= solved.step_seconds * (1 - 1e-4)
    assert max(r["bytes"] for r in found.rows) <= solved.estimate["limit_bytes"]
    for row in found.rows[::10]:
        figures_of = estimate(solved.job(), read_layout(solved.job(), row["layout"]))
        assert row["seconds"] == pytest.approx(figures_of.step_seconds)
        assert row["bytes"] == pytest.approx(max(s.device for s in figures_of.memory))


def test_fewer_candidates_are_drawn_evenly_and_the_note_says_so(solved):
    from planner.report.considered import considered

    some, every = considered(solved, 12), considered(solved, 10**6)
    assert len(some.rows) <= 12 < len(every.rows)
    assert {r["layout"] for r in some.rows} <= {r["layout"] for r in every.rows}
    assert "of them drawn" in some.note
    assert f"{some.fitting:,} may fit" in every.note


def test_a_plan_of_several_gpu_types_has_no_candidates_to_draw_again(solved):
    from planner.report.considered import Considered, considered

    other = solved.model_copy(update={"certificate": solved.certificate.model_copy(update={"objective": "fewest-gpus"})})
    assert considered(other) == Considered((), 0, 0)
    assert considered(other).note == ""


@pytest.mark.parametrize("width", [140, 100])
def test_a_layout_in_a_narrow_cell_breaks_at_its_commas(width: int) -> None:
    text = "tp=4,pp=4,vpp=3,dp_shard=4,zero=1,micro_batch=1,schedule=interleaved,recompute=selective(layernorm,mlp_act),stages=6|6|6|7|7|7"
    out = io.StringIO()
    Console(file=out, width=width).print(table("", ("layout", "loses"), [(AtCommas(text), "communication.tp " * 4)]))
    lines = [line.split("  ")[0].strip() for line in out.getvalue().splitlines() if "=" in line]
    assert len(lines) > 1
    assert "".join(lines) == text
    assert all(line.endswith(",") for line in lines[:-1])
    assert any("selective(layernorm,mlp_act)" in line for line in lines)


def test_settings_in_the_report_are_words_and_figures_as_people_write_them(dense: Plan) -> None:
    shown = assumptions(dense, dense.job())
    settings = dict(re.findall(r"<td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td></tr>", shown.split("</details>")[0]))
    assert settings["frozen"] == settings["memory limit bytes"] == "none"
    assert settings["seq len"] == "4096"
    assert settings["margin"] == "0.08"
    assert {"yes", "no"} & set(settings.values())
    assert not [v for v in settings.values() if v in ("True", "False", "None", "[]")]

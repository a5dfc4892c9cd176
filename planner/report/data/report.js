(function () {
  "use strict";
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const ROOT = document.documentElement;
  const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false };
  const COLOURS = {
    forward: "#0072B2", backward: "#E69F00", backward_input: "#E69F00", backward_weight: "#009E73",
    communication: "#CC79A7", gather: "#CC79A7", reduce: "#CC79A7", optimizer: "#56B4E9",
  };
  const NAMES = { forward: "forward", backward: "backward", backward_input: "input gradient", backward_weight: "weight gradient",
    communication: "communication", gather: "communication", reduce: "communication", optimizer: "optimizer" };
  const byId = (id) => document.getElementById(id);
  const width = () => byId("timeline").clientWidth;

  function colour(name) { return getComputedStyle(ROOT).getPropertyValue(name).trim(); }

  function themed(layout) {
    const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true };
    const out = Object.assign({
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 60, r: 12, t: 8, b: 46 },
      font: { color: colour("--ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, hoverlabel: { align: "left" },
    }, layout);
    if (ROOT.classList.contains("printing")) {
      out.width = 700;
      if (layout.showlegend !== false) {
        out.margin = Object.assign({}, out.margin, { r: 175 });
        out.legend = { orientation: "v", x: 1.02, y: 1, yanchor: "top" };
      }
    }
    else out.autosize = true;
    for (const name of ["xaxis", "yaxis"]) out[name] = Object.assign({}, axis, layout[name] || {});
    return out;
  }

  function seconds(value) {
    const scales = [[1, "s"], [1e-3, "ms"], [1e-6, "us"]];
    for (const [scale, unit] of scales) if (Math.abs(value) >= scale) return (value / scale).toPrecision(3) + " " + unit;
    return value.toPrecision(3) + " s";
  }

  // -- the timeline: every action where few are in view, shares of a time slice where many are ------------------------------
  const T = DATA.timeline;
  const MOST = 2400, PASS_PIXELS = 6;  // narrower passes would hide each other: the last one drawn wins a pixel

  function visible(from, to) {
    const out = [];
    for (let i = 0; i < T.start.length; i++) if (T.end[i] > from && T.start[i] < to) out.push(i);
    return out;
  }

  function pieces(from, to) {
    const rows = visible(from, to);
    const out = {};
    function add(name, stage, start, length, text) {
      if (length <= 0) return;
      const t = out[name] || (out[name] = { base: [], x: [], y: [], text: [] });
      t.base.push(start); t.x.push(length); t.y.push(stage); t.text.push(text);
    }
    const pixels = Math.max(200, document.getElementById("timeline").clientWidth - 120);
    if (rows.length <= MOST && PASS_PIXELS * rows.length / T.stages <= pixels) {
      for (const i of rows) {
        const kind = T.kinds[T.kind[i]], name = NAMES[kind], wait = T.communication[i], length = T.end[i] - T.start[i];
        let text = "stage " + T.stage[i] + ": " + (kind === "gather" ? "parameters gathered" : kind === "reduce" ? "gradients reduced" : name);
        if (T.microbatch[i] >= 0) text += ", microbatch " + T.microbatch[i] + ", chunk " + T.chunk[i];
        text += "<br>" + seconds(T.start[i]) + " to " + seconds(T.end[i]) + " (" + seconds(length) + ")";
        if (wait > 0) text += "<br>of it communication " + seconds(wait);
        if (name !== "communication") add(name, T.stage[i], T.start[i], length - wait, text);
        add("communication", T.stage[i], T.end[i] - wait, wait, text);
      }
      return { traces: out, exact: true, count: rows.length };
    }
    const slices = Math.max(24, Math.min(Math.floor(pixels / 3), Math.floor(MOST / (2 * T.stages)))), wide = (to - from) / slices;
    const sums = {};
    function put(name, stage, a, b) {
      for (let s = Math.max(0, Math.floor((a - from) / wide)); s < slices && from + s * wide < b; s++) {
        const part = Math.min(b, from + (s + 1) * wide) - Math.max(a, from + s * wide);
        if (part > 0) { const key = stage * slices + s; (sums[key] || (sums[key] = {}))[name] = (sums[key][name] || 0) + part; }
      }
    }
    for (const i of rows) {
      const name = NAMES[T.kinds[T.kind[i]]], wait = T.communication[i];
      if (name !== "communication") put(name, T.stage[i], T.start[i], T.end[i] - wait);
      put("communication", T.stage[i], T.end[i] - wait, T.end[i]);
    }
    const order = ["forward", "backward", "input gradient", "weight gradient", "communication", "optimizer"];
    for (const key of Object.keys(sums)) {
      const stage = Math.floor(key / slices), s = key % slices, at = from + s * wide;
      const parts = order.filter((n) => sums[key][n]).map((n) => [n, sums[key][n] / wide]);
      const text = "stage " + stage + ", " + seconds(at) + " to " + seconds(at + wide) + "<br>" +
        parts.map(([n, v]) => n + " " + (100 * v).toFixed(0) + " %").join("<br>") + "<br>zoom in for single passes";
      let base = stage + 0.42;
      for (const [n, v] of parts) {
        const t = out[n] || (out[n] = { base: [], x: [], y: [], text: [], width: wide });
        t.base.push(base); t.x.push(at + wide / 2); t.y.push(-0.84 * v); t.text.push(text);
        base -= 0.84 * v;
      }
    }
    return { traces: out, exact: false, count: rows.length };
  }

  function timelineLayout(range) {
    const step = Math.max(1, Math.ceil(T.stages / 32)), ticks = [];
    for (let s = 0; s < T.stages; s += step) ticks.push(s);
    return themed({
      barmode: "overlay", bargap: T.stages > 40 ? 0.05 : 0.15, height: Math.min(900, 130 + Math.max(1, T.stages) * (T.stages > 24 ? 14 : 24)),
      xaxis: { title: { text: "seconds from the start of the step" }, range: range },
      yaxis: { title: { text: "stage" }, tickmode: "array", tickvals: ticks, range: [T.stages - 0.5, -0.5], fixedrange: true, showgrid: false },
      dragmode: "zoom",
      shapes: [{ type: "line", x0: T.seconds, x1: T.seconds, yref: "paper", y0: 0, y1: 1, line: { color: colour("--faint"), dash: "dot", width: 1 } }],
      uniformtext: { mode: "hide", minsize: 9 },
    });
  }

  let shown = [0, T.seconds * 1.005];
  function timelineTraces() {
    const found = pieces(shown[0], shown[1]);
    const label = found.exact && found.count <= 260;
    const order = ["forward", "backward", "input gradient", "weight gradient", "communication", "optimizer"];
    const fill = { forward: "forward", backward: "backward", "input gradient": "backward_input", "weight gradient": "backward_weight",
      communication: "communication", optimizer: "optimizer" };
    return order.filter((n) => found.traces[n]).map((n) => {
      const t = found.traces[n];
      const trace = { type: "bar", orientation: found.exact ? "h" : "v", width: t.width, name: n, base: t.base, x: t.x, y: t.y, hovertext: t.text, hoverinfo: "text",
        marker: { color: COLOURS[fill[n]], line: { width: label ? 0.5 : 0, color: colour("--page") } } };
      if (label && n !== "communication" && n !== "optimizer") {
        trace.text = t.text.map((x) => (x.match(/microbatch (\d+)/) || ["", ""])[1]);
        trace.textposition = "inside"; trace.insidetextanchor = "middle"; trace.textangle = 0;
        trace.insidetextfont = { color: n === "backward" || n === "input gradient" ? "#222" : "#fff" };
      }
      return trace;
    });
  }
  function drawTimeline() { return Plotly.react("timeline", timelineTraces(), timelineLayout(shown), CONFIG); }

  // -- the cluster ----------------------------------------------------------------------------------------------------------
  const C = DATA.cluster;
  const DENSE = C.axes, EXPERT = ["etp", "ep", "edp"];
  const SIZES = Object.fromEntries(DENSE.concat(EXPERT.filter((a) => a in C.expert).map((a) => [a, C.expert[a]])));

  function coordinates(rank) {
    const out = {};
    let rest = rank, place = 0, stride = 1;
    for (const [axis, size] of DENSE) { out[axis] = rest % size; rest = Math.floor(rest / size); }
    for (const [axis, size] of DENSE) if (axis !== "pp") { place += out[axis] * stride; stride *= size; }
    if ("ep" in C.expert) {
      const e = C.expert;
      out.etp = place % e.etp; out.ep = Math.floor(place / e.etp) % e.ep; out.edp = Math.floor(place / (e.etp * e.ep));
    }
    return out;
  }
  function rankAt(at) {
    let rank = 0, stride = 1;
    for (const [axis, size] of DENSE) { rank += (at[axis] || 0) * stride; stride *= size; }
    return rank;
  }
  function rankOfPlace(place, pp) {
    const at = { pp: pp };
    for (const [axis, size] of DENSE) if (axis !== "pp") { at[axis] = place % size; place = Math.floor(place / size); }
    return rankAt(at);
  }
  function group(rank, axis) {
    const here = coordinates(rank), out = [];
    if (EXPERT.includes(axis)) {
      const e = C.expert, strides = { etp: 1, ep: e.etp, edp: e.etp * e.ep };
      let base = 0;
      for (const a of EXPERT) if (a !== axis) base += here[a] * strides[a];
      for (let i = 0; i < e[axis]; i++) out.push(rankOfPlace(base + i * strides[axis], here.pp));
    } else {
      for (let i = 0; i < SIZES[axis]; i++) out.push(rankAt(Object.assign({}, here, { [axis]: i })));
    }
    return out.sort((a, b) => a - b);
  }
  window.axisplanGroup = group;

  function ranksText(ranks) {
    if (ranks.length <= 8) return ranks.join(", ");
    const step = ranks[1] - ranks[0];
    if (ranks.every((r, i) => i === 0 || r - ranks[i - 1] === step))
      return step === 1 ? ranks[0] + " to " + ranks[ranks.length - 1] : ranks[0] + ", " + ranks[1] + ", ..., " + ranks[ranks.length - 1] + " (every " + step + ")";
    return ranks.slice(0, 6).join(", ") + ", ..., " + ranks[ranks.length - 1];
  }

  const ONE_BY_ONE = 1024;
  const domain = Math.min(C.levels[0].size > 1 ? C.levels[0].size : C.gpus_per_node, C.world);
  const whole = C.world > ONE_BY_ONE;
  const per = whole ? domain : 1;

  const block = (function () {
    const inside = whole ? 1 : domain;
    const w = inside <= 2 ? inside : Math.ceil(Math.sqrt(inside * 2)), h = Math.ceil(inside / w);
    const blocks = Math.ceil(C.world / (per * inside));
    return { inside, w, h, blocks };
  })();
  let grid = null;
  function arrange() {
    const gap = block.inside > 1 ? 1 : 0, cell = whole ? 15 : C.world <= 128 ? 30 : 20;
    const room = Math.max(1, Math.floor(Math.max(260, width() - 130) / (cell * (block.w + gap))));
    const across = Math.min(block.blocks, room > 3 ? 2 ** Math.floor(Math.log2(room)) : room);
    const down = Math.ceil(block.blocks / across);
    const cols = across * (block.w + gap) - gap, rows = down * (block.h + gap) - gap;
    const cells = [];
    for (let i = 0; i < Math.ceil(C.world / per); i++) {
      const b = Math.floor(i / block.inside), k = i % block.inside;
      cells.push([(b % across) * (block.w + gap) + (k % block.w), Math.floor(b / across) * (block.h + gap) + Math.floor(k / block.w)]);
    }
    grid = { cols, rows, cells, cell };
  }
  const colourable = Object.keys(SIZES).filter((axis) => {
    if (SIZES[axis] < 2) return false;
    if (!whole) return true;
    const first = coordinates(0)[axis];
    for (let r = 1; r < per; r++) if (coordinates(r)[axis] !== first) return false;
    return true;
  });
  let axis = colourable.includes("pp") ? "pp" : colourable[0];
  let chosen = 0;

  function cellText(i) {
    const first = i * per, at = coordinates(first);
    const places = Object.keys(SIZES).filter((a) => SIZES[a] > 1);
    if (!whole) return "rank " + first + ", node " + Math.floor(first / C.gpus_per_node) + "<br>" +
      places.map((a) => a + " " + at[a] + " of " + SIZES[a] + ": " + ranksText(group(first, a))).join("<br>");
    const last = Math.min(C.world, first + per) - 1, end = coordinates(last);
    return C.levels[0].name + " domain " + i + ": ranks " + first + " to " + last + "<br>" +
      places.map((a) => a + " " + (at[a] === end[a] ? at[a] : at[a] + " to " + end[a]) + " of " + SIZES[a]).join("<br>");
  }

  function drawCluster() {
    arrange();
    const z = [], text = [], known = {};
    for (let y = 0; y < grid.rows; y++) { z.push(new Array(grid.cols).fill(null)); text.push(new Array(grid.cols).fill("")); }
    grid.cells.forEach(([x, y], i) => { z[y][x] = axis ? coordinates(i * per)[axis] : 0; text[y][x] = cellText(i); known[x + "," + y] = i * per; });
    grid.known = known;
    const top = axis ? SIZES[axis] - 1 : 1;
    const bar = axis ? { title: { text: axis }, thickness: 12, tickmode: top <= 8 ? "linear" : "auto", dtick: 1, len: 1, tickformat: "d" } : undefined;
    const heat = { type: "heatmap", z, text, hoverinfo: "text", hoverongaps: false, xgap: 1, ygap: 1, colorscale: "Viridis", zmin: 0, zmax: top,
      showscale: Boolean(axis), colorbar: bar };
    const layout = themed({
      height: Math.max(150, grid.rows * grid.cell + 30), margin: { l: 10, r: 10, t: 10, b: 10 }, showlegend: false,
      xaxis: { visible: false, range: [-0.7, Math.max(grid.cols, Math.floor((width() - 130) / grid.cell)) - 0.3], fixedrange: true },
      yaxis: { visible: false, range: [grid.rows - 0.3, -0.7], fixedrange: true },
    });
    return Plotly.react("cluster", [heat, outline()], layout, CONFIG);
  }
  function outline() {
    const cells = axis ? [...new Set(group(chosen, axis).map((r) => Math.floor(r / per)))] : [];
    return { type: "scatter", mode: "markers", x: cells.map((c) => grid.cells[c][0]), y: cells.map((c) => grid.cells[c][1]), hoverinfo: "skip",
      marker: { symbol: "square-open", size: grid.cell - 6, color: "#D55E00", line: { width: 2, color: "#D55E00" } } };
  }
  function choose(rank) {
    chosen = Math.max(0, Math.min(C.world - 1, Math.floor(rank) || 0));
    const at = coordinates(chosen);
    const rows = Object.keys(SIZES).map((a) => "<tr><td>" + a + "</td><td class=n>" + at[a] + "</td><td class=n>" + SIZES[a] + "</td><td>" + ranksText(group(chosen, a)) + "</td></tr>");
    byId("groups").innerHTML = "<table><thead><tr><th>rank " + chosen + ", node " + Math.floor(chosen / C.gpus_per_node) +
      "</th><th class=n>index</th><th class=n>size</th><th>ranks of its group</th></tr></thead><tbody>" + rows.join("") + "</tbody></table>";
    const marks = outline();
    Plotly.restyle("cluster", { x: [marks.x], y: [marks.y] }, [1]);
  }

  // -- all of them ----------------------------------------------------------------------------------------------------------
  function drawAll() {
    const wait = [drawTimeline(), drawCluster()];
    for (const name of Object.keys(DATA.figures)) {
      const f = DATA.figures[name];
      wait.push(Plotly.react(name, f.data, themed(JSON.parse(JSON.stringify(f.layout))), CONFIG));
    }
    return Promise.all(wait);
  }

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let picked = null;
  function theme(now) { ROOT.dataset.theme = now; return drawAll(); }
  function current() { return picked || (dark.matches ? "dark" : "light"); }
  byId("theme").addEventListener("click", () => { picked = current() === "dark" ? "light" : "dark"; theme(picked); });
  dark.addEventListener("change", () => theme(current()));
  window.addEventListener("beforeprint", () => { ROOT.classList.add("printing"); theme("light"); });
  window.addEventListener("afterprint", () => { ROOT.classList.remove("printing"); theme(current()); });

  for (const name of colourable) byId("axis").add(new Option(name, name));
  if (axis) byId("axis").value = axis;
  byId("axis").disabled = colourable.length === 0;
  byId("axis").addEventListener("change", (event) => { axis = event.target.value; drawCluster().then(() => choose(chosen)); });
  byId("rank").max = C.world - 1;
  byId("rank").addEventListener("input", (event) => choose(Number(event.target.value)));

  theme(current()).then(() => {
    choose(0);
    let waiting = null;
    byId("timeline").on("plotly_relayout", (event) => {
      let range = null;
      if ("xaxis.range[0]" in event) range = [event["xaxis.range[0]"], event["xaxis.range[1]"]];
      else if ("xaxis.range" in event) range = event["xaxis.range"].slice();
      else if (event["xaxis.autorange"]) range = [0, T.seconds * 1.005];
      if (!range || (range[0] === shown[0] && range[1] === shown[1])) return;
      shown = range;
      clearTimeout(waiting);
      waiting = setTimeout(drawTimeline, 60);
    });
    byId("cluster").on("plotly_hover", (event) => {
      const p = event.points[0], rank = grid.known[p.x + "," + p.y];
      if (rank !== undefined && rank !== chosen) { byId("rank").value = rank; choose(rank); }
    });
    let resizing = null;
    window.addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => drawCluster().then(() => choose(chosen)), 150); });
    ROOT.dataset.ready = "yes";
  });
})();

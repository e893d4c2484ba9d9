/* Curves of runs. Each <div class="chart" data-chart="..."> names one of CHARTS.

A run's curve is {x: steps, s: seconds of training, y: values}; a curve of means has `every`, too, the steps of
each mean. A point's place on another axis follows from its step. */
"use strict";

const runs = data.runs || [];
const shown = runs.map(() => true);
const plots = [];
let axis = "steps";
let singles = true; // whether single steps are drawn behind their means
let active = null; // the chart that is being read

const AXES = {
  steps: { label: "steps", place: (run, step) => step, end: (run) => run.steps },
  tokens: { label: "tokens", place: (run, step) => step * run.tokens, end: (run) => run.steps * run.tokens },
  seconds: { label: "seconds of training", place: (run, step, second) => second, end: (run) => run.seconds },
  flops: { label: "operations", place: (run, step) => step * run.flops, end: (run) => run.steps * run.flops },
};

/* A curve whose name stands in `behind` is drawn pale where the next one is there, and not read then. */
const CHARTS = {
  loss: { title: "train loss", unit: "nats a token", curves: ["loss", "mean"], behind: "loss", word: "mean" },
  bpb: { title: "validation", unit: "bits per byte", curves: ["val", "whole"], points: true },
  time: {
    title: "step time",
    unit: "ms, logarithmic",
    curves: ["time", "median", "stalls"],
    behind: "time",
    word: "median",
    log: true,
  },
  rate: { title: "learning rate", unit: "multiplier", curves: ["rate"] },
};

/* Words for a place on the axis. */
const placeWords = (x) => (axis === "steps" ? Math.round(x).toLocaleString("en") : short(x));

/* Colours of a side lie near each other; the sides differ in hue, and in dashes for whoever sees no hue. */
function colour(run) {
  const at = run.of > 1 ? run.place / (run.of - 1) : 0.4;
  if (run.side) return `hsl(${350 + 42 * at} 88% ${isDark() ? 76 - 18 * at : 32 + 4 * at}%)`;
  return `hsl(${250 - 55 * at} 75% ${isDark() ? 80 - 18 * at : 30 + 12 * at}%)`;
}

/* --- a chart ---------------------------------------------------------------------------------------------- */

/* The curves of a chart: {run, at, curve, xs: places on the axis, pale, rings, read, label}. */
function curvesOf(kind) {
  const spec = CHARTS[kind];
  const found = [];
  runs.forEach((run, at) => {
    for (const name of spec.curves) {
      const curve = run[name];
      if (!curve.x.length) continue;
      const pale = name === spec.behind && run[spec.word].x.length > 0;
      found.push({
        run,
        at,
        curve,
        xs: curve.x.map((step, i) => AXES[axis].place(run, step, curve.s[i])),
        pale,
        rings: name === "stalls" || name === "whole",
        read: !pale && name !== "stalls",
        label: name === "whole" ? `${run.name}, whole text` : run.name,
      });
    }
  });
  return found;
}

const visible = (one) => shown[one.at] && (singles || !one.pale);

/* How a curve is drawn. */
function drawn(one, spec) {
  const own = colour(one.run);
  const style = { show: visible(one), stroke: own, spanGaps: true, width: 2, points: { show: false } };
  if (one.pale) Object.assign(style, { alpha: 0.3, width: 1 });
  else if (one.run.side) style.dash = [7, 3];
  if (spec.points) style.points = { show: true, size: 6, fill: own };
  if (one.rings) {
    style.paths = () => null;
    style.points = { show: true, size: 11, width: 2, fill: css("--paper") };
  }
  return style;
}

/* A little more than what there is, so that nothing lies on the frame. */
function fit(min, max, part) {
  if (min === null) return [0, 1];
  const more = part * (max - min || 1);
  return [min - more, max + more];
}

/* Marks of a logarithmic axis: 1, 2 and 5 of each decade where there are few, else every decade. */
function decades(min, max) {
  const found = [];
  for (let ten = 10 ** Math.floor(Math.log10(min)); ten <= max; ten *= 10) {
    for (const one of max / min < 200 ? [1, 2, 5] : [1]) found.push(ten * one);
  }
  return found.filter((one) => min <= one && one <= max);
}

const sizeOf = (box) => ({
  width: box.clientWidth,
  height: Math.max(220, Math.min(340, box.clientWidth * 0.6)),
});

function options(chart) {
  const { box, spec } = chart;
  const values = (u, ticks) => ticks.map(short);
  const x = { ...axisStyle(), values, label: AXES[axis].label, space: () => (box.clientWidth < 500 ? 50 : 80) };
  const y = { ...axisStyle(), values, label: spec.unit };
  const scale = { range: (u, min, max) => fit(min, max, 0.05) };
  if (spec.log) {
    Object.assign(y, { filter: (u, ticks) => ticks, splits: (u, at, min, max) => decades(min, max) });
    Object.assign(scale, { distr: 3, range: (u, min, max) => [0.8 * (min || 1), 1.25 * (max || 1)] });
  }
  return {
    ...sizeOf(box),
    padding: [8, 26, 0, 0],
    legend: { show: false },
    scales: { x: { time: false, range: (u, min, max) => (min < max ? [min, max] : fit(min, max, 1)) }, y: scale },
    cursor: {
      drag: { x: true, y: false },
      points: { show: false },
      sync: { key: "all" },
      bind: { dblclick: () => whole },
    },
    axes: [x, y],
    series: [{}, ...chart.list.map((one) => drawn(one, spec))],
    hooks: { setCursor: [() => chart === active && readout(chart)] },
  };
}

function build(chart) {
  if (chart.plot) chart.plot.destroy();
  chart.list = curvesOf(chart.kind);
  const table = uPlot.join(chart.list.map((one) => [one.xs, one.curve.y]));
  chart.plot = new uPlot(options(chart), table, chart.box);
  hideCanvases(chart.box);
}

/* --- zoom: all charts show the same part ------------------------------------------------------------------ */

function everywhere(min, max) {
  const all = plots.flatMap((chart) => chart.list);
  const first = Math.min(...all.map((one) => one.xs[0]));
  const last = Math.max(...all.map((one) => one.xs.at(-1)));
  let [from, to] = [Math.max(first, min), Math.min(last, max)];
  if (first === last) [from, to] = fit(first, last, 1); // a single place
  if (from < to) for (const { plot } of plots) plot.setScale("x", { min: from, max: to });
}

const whole = () => everywhere(-Infinity, Infinity);

function zoom(plot, factor) {
  const { min, max } = plot.scales.x;
  const at = plot.cursor.idx;
  const x = at === null || at === undefined ? (min + max) / 2 : plot.data[0][at];
  const middle = Math.min(max, Math.max(min, x));
  everywhere(middle - (middle - min) * factor, middle + (max - middle) * factor);
}

/* Draws all charts again; what is shown of the axis and what is read stay. */
function rebuild() {
  for (const chart of plots) {
    const { scales, cursor, data: table } = chart.plot;
    const { min, max } = scales.x;
    const x = table[0][cursor.idx];
    build(chart);
    chart.plot.setScale("x", { min, max });
    if (x !== undefined) queueMicrotask(() => move(chart.plot, x)); // uPlot sets scales in one, too
  }
}

/* --- reading values --------------------------------------------------------------------------------------- */

/* What a curve says of a place: text; empty where it says nothing. Of points, the last one up to there. */
function reading(one, x, points) {
  const { xs, curve, run } = one;
  let at = xs.findLastIndex((place) => place <= x);
  const words = (i) => (curve.y[i] === null ? "not finite" : short(curve.y[i]));
  if (points) {
    if (at < 0) return "";
    return words(at) + (xs[at] < x ? ` at ${placeWords(xs[at])}` : "");
  }
  if (x > AXES[axis].end(run)) return "ended";
  if (at < 0 || (at + 1 < xs.length && xs[at + 1] - x < x - xs[at])) at += 1;
  return words(at);
}

/* What a value stands for, where it is not a single step's. */
function meaning(chart) {
  const counts = chart.list.filter((one) => one.read && shown[one.at]).map((one) => one.curve.every ?? 1);
  const [least, most] = [Math.min(...counts), Math.max(...counts)];
  return most > 1 ? `, ${chart.spec.word}s of ${least < most ? `${least} to ` : ""}${most} steps` : "";
}

function readout(chart) {
  const { plot, list, spec } = chart;
  const at = plot.cursor.idx;
  if (at === null || at === undefined) return;
  const x = plot.data[0][at];
  const parts = [`<b>${AXES[axis].label} ${placeWords(x)}</b>${meaning(chart)}`];
  for (const one of list) {
    const value = one.read && shown[one.at] ? reading(one, x, spec.points) : "";
    const swatch = `<i class="${one.run.side ? "dashed" : ""}" style="border-color:${colour(one.run)}"></i>`;
    if (value) parts.push(`${swatch}<bdi>${escape(one.label)}</bdi> <b>${value}</b>`);
  }
  chart.out.innerHTML = parts.map((part) => `<span>${part}</span>`).join(" ");
}

/* A table of a chart's values: of all points, or at forty places. */
function numbers(chart) {
  const { plot, spec } = chart;
  const list = chart.list.filter((one) => one.read && shown[one.at]);
  const xs = spec.points ? [...new Set(list.flatMap((one) => one.xs))].sort((a, b) => a - b) : plot.data[0];
  const rows = Math.min(xs.length, 40);
  const places = [...Array(rows).keys()].map((i) => xs[Math.round((i * (xs.length - 1)) / Math.max(1, rows - 1))]);
  const cell = (one, x) => (spec.points && !one.xs.includes(x) ? "" : reading(one, x, spec.points));
  const heads = [AXES[axis].label + meaning(chart), ...list.map((one) => one.label)];
  const head = heads.map((name) => `<th scope="col" class="n"><bdi>${escape(name)}</bdi></th>`);
  const body = places.map((x) => {
    const cells = list.map((one) => `<td class="n">${cell(one, x)}</td>`);
    return `<tr><th scope="row" class="n">${placeWords(x)}</th>${cells.join("")}</tr>`;
  });
  return `<table><thead><tr>${head.join("")}</tr></thead><tbody>${body.join("")}</tbody></table>`;
}

function refresh(chart) {
  if (chart.more.open) chart.more.lastChild.innerHTML = numbers(chart);
}

/* Puts the cursor on the point that lies nearest to a place; on the one after `but` if that is `but`. */
function move(plot, to, but = null) {
  const xs = plot.data[0];
  const { min, max } = plot.scales.x;
  let at = plot.valToIdx(Math.min(max, Math.max(min, to)));
  if (at === but) at += Math.sign(to - xs[but]);
  if (xs[at] >= min && xs[at] <= max) {
    plot.setCursor({ left: plot.valToPos(xs[at], "x"), top: plot.over.clientHeight / 2 });
  }
}

/* Moves the cursor by a part of what is shown, or by a point if the points lie further apart. */
function walk(plot, part) {
  const { min, max } = plot.scales.x;
  const now = plot.cursor.idx;
  if (now === null || now === undefined) move(plot, min);
  else move(plot, plot.data[0][now] + part * (max - min), now);
}

function keys(chart, event) {
  const { plot } = chart;
  const part = event.shiftKey ? 0.1 : 0.01;
  const acts = {
    ArrowLeft: () => walk(plot, -part),
    ArrowRight: () => walk(plot, part),
    Home: () => move(plot, plot.scales.x.min),
    End: () => move(plot, plot.scales.x.max),
    "+": () => zoom(plot, 0.5),
    "=": () => zoom(plot, 0.5),
    "-": () => zoom(plot, 2),
    0: whole,
  };
  if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  acts[event.key]();
  readout(chart);
  chart.say.textContent = chart.out.textContent;
}

/* --- the page --------------------------------------------------------------------------------------------- */

const HINT = "Hover, tap or use the arrow keys to read values; drag or press + to zoom, double-click or press 0 to see all.";

function place(box) {
  const kind = box.dataset.chart;
  const chart = { box, kind, spec: CHARTS[kind] };
  const { title } = chart.spec;
  if (!curvesOf(kind).length) {
    box.textContent = "No run tells of it.";
    return;
  }
  const name = `${title}: a chart. Arrow keys read values, plus and minus zoom, 0 shows all. The numbers stand in the table below it.`;
  for (const [key, value] of Object.entries({ tabindex: "0", role: "group", "aria-label": name })) {
    box.setAttribute(key, value);
  }
  const tools = element("div", { class: "tools" }, box.parentNode.querySelector("header"));
  for (const [sign, words, act] of [
    ["+", "zoom in", () => zoom(chart.plot, 0.5)],
    ["−", "zoom out", () => zoom(chart.plot, 2)],
    ["all", "show all", whole],
  ]) {
    const button = element("button", { type: "button", "aria-label": `${words}: ${title}` }, tools, sign);
    button.addEventListener("click", act);
  }
  chart.out = element("div", { class: "readout" }, box.parentNode, HINT);
  chart.say = element("div", { role: "status", class: "unseen" }, box.parentNode);
  chart.more = element("details", {}, box.parentNode);
  element("summary", {}, chart.more, `Table: ${title}`);
  element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `table: ${title}` }, chart.more);
  chart.more.addEventListener("toggle", () => refresh(chart));
  for (const event of ["pointerenter", "focus"]) box.addEventListener(event, () => (active = chart));
  box.addEventListener("keydown", (event) => keys(chart, event));
  build(chart);
  plots.push(chart);
}

/* Shows and hides curves as they are switched. */
function redraw() {
  for (const chart of plots) {
    chart.plot.batch(() => {
      chart.list.forEach((one, i) => {
        if (chart.plot.series[i + 1].show !== visible(one)) chart.plot.setSeries(i + 1, { show: visible(one) });
      });
    });
    refresh(chart);
  }
  if (active) readout(active);
}

function setAxis(name) {
  axis = name;
  for (const chart of plots) {
    build(chart);
    chart.out.textContent = HINT;
  }
  whole();
  plots.forEach(refresh);
}

/* A box or a round button with its label; its parent's. */
function choice(parent, type, name, text, checked, act) {
  const label = element("label", {}, parent);
  const input = element("input", { type, name }, label);
  input.checked = checked;
  input.addEventListener("change", () => act(input.checked));
  element("bdi", {}, label, text);
  return label;
}

function choices(parent, title, className = "") {
  const group = element("fieldset", { class: className }, parent);
  element("legend", {}, group, title);
  return element("div", { class: "choices" }, group);
}

function controls(box) {
  (data.sides || []).forEach((title, side) => {
    const group = choices(box, title);
    runs.forEach((run, at) => {
      if (run.side !== side) return;
      const label = choice(group, "checkbox", "run", run.name, true, (on) => {
        shown[at] = on;
        redraw();
      });
      const swatch = document.createElement("i");
      swatch.className = side ? "dashed" : "";
      swatch.dataset.run = at;
      label.firstChild.after(swatch);
    });
  });
  const group = choices(box, "Horizontal axis", "unprinted");
  for (const name in AXES) {
    if (!runs.every((run) => AXES[name].end(run))) continue;
    choice(group, "radio", "axis", AXES[name].label, name === axis, () => setAxis(name));
  }
  if (runs.some((run) => run.mean.x.length)) {
    const more = element("div", { class: "choices unprinted" }, box);
    choice(more, "checkbox", "singles", "single steps behind means and medians", true, (on) => {
      singles = on;
      redraw();
    });
  }
}

function paintSwatches() {
  for (const swatch of document.querySelectorAll("[data-run]")) {
    swatch.style.borderColor = colour(runs[swatch.dataset.run]);
  }
}

document.querySelectorAll("[data-controls]").forEach(controls);
document.querySelectorAll("[data-chart]").forEach(place);
paintSwatches();
whole();
onResize(() => {
  for (const { box, plot } of plots) if (box.clientWidth !== plot.width) plot.setSize(sizeOf(box));
});
onColours(() => {
  paintSwatches();
  rebuild();
});

/* Charts of a page. Each <div class="chart"> names its chart in data-chart; the numbers stand in #data.

A run's curve is {x: steps, s: seconds, y: values}. A point's place on another axis follows from its step. */
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const probe = document.body.appendChild(document.createElement("span"));
  function css(name) {
    probe.style.color = `var(${name})`; // a canvas takes no light-dark(): the browser works it out
    return getComputedStyle(probe).color;
  }
  const charts = [];
  const runs = data.runs || [];
  const shown = runs.map(() => true);
  let axis = "steps";
  let raw = true;

  /* --- numbers ---------------------------------------------------------------------------------------- */

  const AXES = {
    steps: { label: "steps", place: (run, curve, i) => curve.x[i] },
    tokens: { label: "tokens", place: (run, curve, i) => curve.x[i] * run.tokens },
    seconds: { label: "seconds of training", place: (run, curve, i) => curve.s[i] },
    flops: { label: "operations", place: (run, curve, i) => curve.x[i] * run.flops },
  };

  const UNITS = [[1e15, "e15"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  function short(value) {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    for (const [unit, name] of UNITS) if (size >= unit * (unit === 1e3 ? 10 : 1)) return +(value / unit).toPrecision(4) + name;
    return String(+value.toPrecision(size >= 1 ? 5 : 3));
  }

  /* Colours of a side lie near each other; the sides differ in hue, and in dashes for whoever sees no hue. */
  function colour(run) {
    const hue = run.side ? 28 : 215;
    const from = dark.matches ? 78 : 30;
    const to = dark.matches ? 55 : 58;
    const at = run.of > 1 ? run.place / (run.of - 1) : 0.4;
    return `hsl(${hue + at * (run.side ? 20 : -25)} ${run.side ? 88 : 75}% ${from + (to - from) * at}%)`;
  }

  /* --- a chart of curves ------------------------------------------------------------------------------ */

  const KINDS = {
    loss: { title: "train loss", unit: "nats a token", curves: ["loss", "mean"] },
    bpb: { title: "validation", unit: "bits per byte", curves: ["val", "whole"], points: true },
    time: { title: "step time", unit: "ms, logarithmic", curves: ["time", "stalls"], log: true },
    rate: { title: "learning rate", unit: "multiplier", curves: ["rate"] },
  };

  function series(kind) {
    const found = [];
    runs.forEach((run, at) => {
      for (const name of KINDS[kind].curves) {
        const curve = run[name];
        if (!curve || !curve.x.length) continue;
        const faint = name === "loss" && run.mean.x.length > 1;
        found.push({ run, at, name, curve, faint, label: name === "whole" ? `${run.name}, whole text` : run.name, rings: name === "stalls" || name === "whole", silent: faint || name === "stalls" });
      }
    });
    return found;
  }

  function table(list) {
    const tables = list.map(({ run, curve }) => {
      const xs = curve.x.map((_, i) => AXES[axis].place(run, curve, i));
      return [xs, curve.y];
    });
    return tables.length ? uPlot.join(tables) : [[]];
  }

  function options(box, kind, list) {
    const spec = KINDS[kind];
    const line = css("--line");
    const ink = css("--quiet");
    const axes = [
      { label: AXES[axis].label, values: (u, ticks) => ticks.map(short), space: box.clientWidth < 500 ? 50 : 80 },
      { label: spec.unit, values: (u, ticks) => ticks.map(short), size: 58, ...(spec.log ? { filter: (u, ticks) => ticks } : {}) },
    ];
    for (const one of axes) Object.assign(one, { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line }, labelSize: 18, labelFont: "12px sans-serif", font: "12px sans-serif" });
    if (spec.log) axes[1].splits = (u, at, min, max) => decades(min, max);
    return {
      width: box.clientWidth,
      height: Math.max(220, Math.min(340, box.clientWidth * 0.6)),
      padding: [8, 26, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: (u, min, max) => (spec.points && min === u.data[0][0] ? fit(min, max, 0.02) : [min, max]) },
        y: spec.log ? { distr: 3, range: (u, min, max) => [0.8 * (min || 1), 1.25 * (max || 1)] } : { range: (u, min, max) => fit(min, max, 0.05) },
      },
      cursor: { drag: { x: true, y: false }, points: { show: false }, sync: { key: axis } },
      axes,
      series: [{}, ...list.map((one) => drawn(one, spec))],
      hooks: { setCursor: [(u) => box.dispatchEvent(new CustomEvent("moved"))] },
    };
  }

  /* A little more than what is shown. */
  const fit = (min, max, part) => (min === null ? [0, 1] : [min - part * (max - min || 1), max + part * (max - min || 1)]);

  /* Marks of a logarithmic axis: 1, 2 and 5 of each decade where there are few, else every decade. */
  function decades(min, max) {
    const found = [];
    for (let ten = 10 ** Math.floor(Math.log10(min)); ten <= max; ten *= 10) {
      for (const one of max / min < 200 ? [1, 2, 5] : [1]) if (ten * one >= min && ten * one <= max) found.push(ten * one);
    }
    return found;
  }

  function drawn(one, spec) {
    const own = colour(one.run);
    const style = { show: visible(one), stroke: own, spanGaps: true, width: one.faint ? 1 : 2, points: { show: false } };
    if (one.faint) Object.assign(style, { alpha: 0.3 });
    else if (one.run.side && spec !== KINDS.time) style.dash = [7, 3];
    if (spec === KINDS.time) style.width = 1;
    if (spec.points) style.points = { show: true, size: 6, fill: own };
    if (one.rings) Object.assign(style, { paths: () => null, points: { show: true, size: 11, width: 2, fill: css("--paper") } });
    return style;
  }

  const visible = (one) => shown[one.at] && (raw || !one.faint);

  /* The value of a curve that lies nearest to a place; none beyond the curve's end. */
  function nearest(values, at) {
    let end = values.length - 1;
    while (end >= 0 && (values[end] === undefined || values[end] === null)) end--;
    if (at > end) return null;
    for (let step = 0; step < values.length; step++) {
      if (values[at - step] !== undefined && values[at - step] !== null) return values[at - step];
      if (values[at + step] !== undefined && values[at + step] !== null) return values[at + step];
    }
    return null;
  }

  function readout(chart, out) {
    const u = chart.plot;
    const at = u.cursor.idx;
    if (at === null || at === undefined) return;
    const parts = [`<b>${AXES[axis].label} ${short(u.data[0][at])}</b>`];
    chart.list.forEach((one, i) => {
      if (one.silent || !shown[one.at]) return;
      const value = nearest(u.data[i + 1], at);
      parts.push(`<i style="border-color:${colour(one.run)}"></i>${escape(one.label)} <b>${value === null ? "ended" : short(value)}</b>`);
    });
    out.innerHTML = parts.map((part) => `<span>${part}</span>`).join(" ");
  }

  const escape = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

  function build(chart) {
    const { box } = chart;
    if (chart.plot) chart.plot.destroy();
    chart.list = series(chart.kind);
    chart.plot = new uPlot(options(box, chart.kind, chart.list), table(chart.list), box);
    box.querySelectorAll("canvas").forEach((canvas) => canvas.setAttribute("aria-hidden", "true"));
  }

  /* --- keyboard --------------------------------------------------------------------------------------- */

  function zoom(u, factor) {
    const { min, max } = u.scales.x;
    const at = u.cursor.idx;
    const middle = at === null || at === undefined ? (min + max) / 2 : u.data[0][at];
    everywhere(middle - (middle - min) * factor, middle + (max - middle) * factor);
  }

  /* All charts show the same part, as they do after dragging. */
  function everywhere(min, max) {
    const ends = charts.map((chart) => chart.plot.data[0]);
    const first = Math.min(...ends.map((xs) => xs[0]));
    const last = Math.max(...ends.map((xs) => xs[xs.length - 1]));
    const [from, to] = [Math.max(first, min), Math.min(last, max)];
    if (from < to) for (const chart of charts) chart.plot.setScale("x", { min: from, max: to });
  }

  function whole() {
    everywhere(-Infinity, Infinity);
  }

  function keys(chart, event) {
    const u = chart.plot;
    const xs = u.data[0];
    const { min, max } = u.scales.x;
    const now = u.cursor.idx ?? 0;
    const jump = event.shiftKey ? 0.1 : 0.01;
    const move = (to) => {
      const x = Math.min(max, Math.max(min, to));
      u.setCursor({ left: u.valToPos(x, "x"), top: u.bbox.height / devicePixelRatio / 2 });
    };
    const steps = { ArrowLeft: () => move(xs[now] - jump * (max - min)), ArrowRight: () => move(xs[now] + jump * (max - min)), Home: () => move(min), End: () => move(max), "+": () => zoom(u, 0.5), "=": () => zoom(u, 0.5), "-": () => zoom(u, 2), 0: () => whole(u) };
    if (!steps[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    steps[event.key]();
    chart.say.textContent = chart.out.textContent;
  }

  /* --- the table behind a chart ----------------------------------------------------------------------- */

  function numbers(chart) {
    const list = chart.list.filter((one) => !one.silent && shown[one.at]);
    const columns = list.map((one) => chart.plot.data[chart.list.indexOf(one) + 1]);
    const xs = chart.plot.data[0];
    const rows = 40;
    const places = [...new Set([...Array(rows).keys()].map((i) => Math.round((i * (xs.length - 1)) / (rows - 1))))];
    const head = [AXES[axis].label, ...list.map((one) => one.label)].map((name) => `<th scope="col" class="n">${escape(name)}</th>`);
    const body = places.map((at) => `<tr><th scope="row" class="n">${short(xs[at])}</th>${columns.map((ys) => `<td class="n">${short(nearest(ys, at))}</td>`).join("")}</tr>`);
    return `<table><thead><tr>${head.join("")}</tr></thead><tbody>${body.join("")}</tbody></table>`;
  }

  function element(name, attributes, parent) {
    const made = document.createElement(name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    parent.append(made);
    return made;
  }

  function curves(box) {
    const kind = box.dataset.chart;
    const chart = { box, kind };
    if (!series(kind).length) {
      box.textContent = "No run tells of it.";
      return;
    }
    const name = `${KINDS[kind].title}: a chart. Arrow keys read values, plus and minus zoom, 0 shows all. The numbers stand in the table below it.`;
    for (const [key, value] of Object.entries({ tabindex: "0", role: "group", "aria-label": name })) box.setAttribute(key, value);
    const tools = document.createElement("div");
    tools.className = "tools";
    box.before(tools);
    for (const [label, act] of [["+", (u) => zoom(u, 0.5)], ["−", (u) => zoom(u, 2)], ["all", whole]]) {
      const button = element("button", { type: "button", "aria-label": `${{ "+": "zoom in", "−": "zoom out", all: "show all" }[label]}: ${KINDS[kind].title}` }, tools);
      button.textContent = label;
      button.addEventListener("click", () => act(chart.plot));
    }
    chart.out = document.createElement("div");
    chart.out.className = "readout";
    chart.out.textContent = "Hover or use the arrow keys to read values; drag or press + to zoom, double-click or press 0 to see all.";
    box.after(chart.out);
    chart.say = element("div", { role: "status", style: "position:absolute;left:-9999px" }, box.parentNode);
    const more = document.createElement("details");
    chart.out.after(more);
    more.innerHTML = `<summary>Table: ${KINDS[kind].title}</summary><div class="scroll" tabindex="0" role="region" aria-label="table: ${KINDS[kind].title}"></div>`;
    chart.more = more;
    more.addEventListener("toggle", () => refresh(chart));
    box.addEventListener("moved", () => readout(chart, chart.out));
    box.addEventListener("keydown", (event) => keys(chart, event));
    build(chart);
    charts.push(chart);
  }

  const refresh = (chart) => {
    if (chart.more.open) chart.more.lastChild.innerHTML = numbers(chart);
  };

  function redraw() {
    for (const chart of charts) {
      chart.plot.batch(() => chart.list.forEach((one, i) => {
        if (chart.plot.series[i + 1].show !== visible(one)) chart.plot.setSeries(i + 1, { show: visible(one) });
      }));
      refresh(chart);
    }
  }

  /* --- controls --------------------------------------------------------------------------------------- */

  function choice(parent, type, name, label, checked, act, swatch) {
    const box = element("label", {}, parent);
    const input = element("input", { type, name }, box);
    input.checked = checked;
    if (swatch) element("span", { class: swatch.side ? "swatch dashed" : "swatch", style: `border-color:${colour(swatch)}` }, box);
    box.append(label);
    input.addEventListener("change", () => act(input.checked));
    return input;
  }

  function controls(place) {
    const sides = data.sides || [];
    sides.forEach((title, side) => {
      const group = element("fieldset", {}, place);
      element("legend", {}, group).textContent = title;
      const box = element("div", { class: "choices" }, group);
      runs.forEach((run, at) => {
        if (run.side === side) choice(box, "checkbox", "run", run.name, true, (on) => { shown[at] = on; redraw(); }, run);
      });
    });
    const group = element("fieldset", {}, place);
    element("legend", {}, group).textContent = "Horizontal axis";
    const box = element("div", { class: "choices" }, group);
    for (const name in AXES) {
      const known = runs.every((run) => name === "steps" || name === "seconds" || run[name]);
      if (known) choice(box, "radio", "axis", AXES[name].label, name === axis, () => { axis = name; charts.forEach((chart) => { build(chart); refresh(chart); }); });
    }
    choice(box, "checkbox", "raw", "single steps behind the means", true, (on) => { raw = on; redraw(); });
  }

  /* --- the board: points that lead to records --------------------------------------------------------- */

  function board(box) {
    const spec = data[box.dataset.board];
    const ys = [...spec.points.map((p) => p.y), ...spec.rules.map((r) => r.y)];
    const xs = [...spec.points.map((p) => p.x), ...(spec.budget ? [spec.budget] : [])];
    const pad = (values, least) => {
      const [low, high] = [Math.min(...values), Math.max(...values)];
      const more = Math.max((high - low) * 0.12, least);
      return [low - more, high + more];
    };
    const [xr, yr] = [pad(xs, spec.time ? 86400 / 2 : 5000), pad(ys, 0.02)];
    if (spec.time) xr[1] += (xr[1] - xr[0]) * Math.min(1, 90 / box.clientWidth); // for the last one's name
    const ink = css("--quiet");
    const style = { stroke: ink, grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") }, font: "12px sans-serif", labelFont: "12px sans-serif", labelSize: 18 };
    const days = { values: (u, ticks) => ticks.map((t) => new Date(t * 1000).toISOString().slice(0, 10)), space: 90, incrs: [1, 2, 7, 14, 30, 91, 182, 365].map((d) => d * 86400) };
    return new uPlot({
      width: box.clientWidth, hooks: { ready: [(u) => overlay(u, spec)] }, height: Math.max(340, Math.min(420, box.clientWidth * 0.7)), legend: { show: false }, cursor: { show: false }, padding: [8, box.clientWidth > 640 ? 180 : 12, 0, 0],
      scales: { x: { time: false, range: () => xr }, y: { range: () => yr } },
      axes: [{ ...style, label: spec.xlabel, ...(spec.time ? days : { values: (u, t) => t.map(short), space: 70 }) }, { ...style, label: "bits per byte", size: 58 }],
      series: [{}, { stroke: css("--link"), width: 2, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } }],
    }, [spec.points.map((p) => p.x), spec.best || spec.points.map(() => null)], box);
  }

  /* Rules, intervals and links, laid over a chart that has its size. */
  function overlay(plot, spec) {
    const over = plot.over;
    const put = (name, className, css, attributes = {}) => element(name, { class: className, style: css, ...attributes }, over);
    const height = over.clientHeight;
    let last = -99;
    let label = null;
    for (const rule of [...spec.rules].sort((a, b) => b.y - a.y)) {
      const top = plot.valToPos(rule.y, "y");
      put("div", "rule", `top:${top}px`);
      if (top - last < 11) {
        label.textContent += `, ${rule.name}`; // one name would lie on the other
      } else {
        label = put("div", `rule-name${plot.width > 640 ? " outside" : ""}`, `top:${top - 5.5}px`);
        label.textContent = rule.name;
        last = top;
      }
    }
    if (spec.budget) put("div", "budget", `left:${plot.valToPos(spec.budget, "x")}px`, { title: "budget" });
    const names = []; // the places of those that stand already
    const up = spec.time; // names stand above their points, where the falling line of the ladder never is
    for (const point of [...spec.points].sort((a, b) => (up ? a.y - b.y : b.y - a.y))) {
      const [left, top] = [plot.valToPos(point.x, "x"), plot.valToPos(point.y, "y")];
      if (point.half) {
        const [from, to] = [plot.valToPos(point.y + point.half, "y"), plot.valToPos(point.y - point.half, "y")];
        const cut = `${from < 0 ? " cut-top" : ""}${to > height ? " cut-bottom" : ""}`;
        put("div", `whisker${cut}`, `left:${left}px;top:${Math.max(0, from)}px;height:${Math.min(height, to) - Math.max(0, from)}px`);
      }
      const link = put("a", `mark${point.open ? " open" : ""}`, `left:${left}px;top:${top}px`, { href: point.href, "aria-label": point.text, title: point.text });
      const name = element("span", {}, link);
      name.textContent = point.name;
      const [width, tall] = [name.offsetWidth, name.offsetHeight];
      const side = left + 16 + width > over.clientWidth ? "left" : "right";
      const box = { left: side === "left" ? left - 9 - width : left + 9, top: up ? top - 5 - tall : top - 8 };
      const over_it = (one) => Math.abs(one.top - box.top) < tall && one.left < box.left + width && box.left < one.left + one.width;
      for (let one; (one = names.find(over_it)); ) box.top = up ? one.top - tall : one.top + tall;
      names.push({ ...box, width });
      link.classList.add(side);
      name.style.top = `${box.top - top + 5}px`; // 5: of the mark above its middle
    }
    plot.root.querySelectorAll("canvas").forEach((canvas) => canvas.setAttribute("aria-hidden", "true"));
  }

  /* --- start ------------------------------------------------------------------------------------------ */

  const places = document.querySelectorAll("[data-controls]");
  const boards = [...document.querySelectorAll("[data-board]")].map((box) => ({ box, plot: board(box) }));
  places.forEach(controls);
  document.querySelectorAll("[data-chart]").forEach(curves);

  let wait = 0;
  addEventListener("resize", () => {
    clearTimeout(wait);
    wait = setTimeout(again, 100);
  });
  dark.addEventListener("change", () => {
    document.querySelectorAll("[data-controls]").forEach((place) => place.querySelectorAll(".swatch").forEach((swatch, at) => { swatch.style.borderColor = colour(runs[at]); }));
    again();
  });
  function again() {
    charts.forEach(build);
    boards.forEach((one) => { one.plot.destroy(); one.plot = board(one.box); });
  }
  document.documentElement.dataset.ready = "1";
})();

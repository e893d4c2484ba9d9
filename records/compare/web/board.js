/* Charts of the board: points that lead to records. Each <div data-board="..."> names its numbers in #data. */
"use strict";

const NARROW = 640; // pixels; below it, names stand within the chart
const MARK = 14; // pixels of a point

/* What is seen of an axis: all values, and some room. */
function spread(values, least) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const more = Math.max((high - low) * 0.12, least);
  return [low - more, high + more];
}

const DAYS = {
  values: (u, ticks) => ticks.map((t) => new Date(t * 1000).toISOString().slice(0, 10)),
  space: 90,
  incrs: [1, 2, 7, 14, 30, 91, 182, 365].map((days) => days * 86400),
};
const BYTES = { values: (u, ticks) => ticks.map(short), space: 70 };

function board(box) {
  const spec = data[box.dataset.board];
  const width = box.clientWidth;
  const xs = spec.points.map((point) => point.x);
  const x = spread([...xs, ...(spec.budget ? [spec.budget] : [])], spec.time ? 86400 / 2 : 5000);
  const y = spread([...spec.points, ...spec.rules].map((one) => one.y), 0.02);
  if (spec.time) x[1] += (x[1] - x[0]) * Math.min(1, 90 / width); // for the last one's name
  const ladder = { stroke: css("--link"), width: 2, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } };
  const plot = new uPlot(
    {
      width,
      height: Math.max(340, Math.min(420, width * 0.7)),
      padding: [8, width > NARROW ? 180 : 12, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: () => x }, y: { range: () => y } },
      axes: [
        { ...axisStyle(), label: spec.xlabel, ...(spec.time ? DAYS : BYTES) },
        { ...axisStyle(), label: "bits per byte, lower is better" },
      ],
      series: [{}, ladder],
      hooks: { ready: [(u) => overlay(u, spec)] },
    },
    [xs, spec.best || xs.map(() => null)],
    box,
  );
  hideCanvases(box);
  return plot;
}

/* Lays rules, intervals and links over a chart. */
function overlay(plot, spec) {
  const taken = [
    ...rules(plot, spec),
    ...spec.points.map((point) => {
      const [left, top] = [plot.valToPos(point.x, "x"), plot.valToPos(point.y, "y")];
      return { left: left - MARK / 2, top: top - MARK / 2, width: MARK, height: MARK };
    }),
  ];
  if (spec.budget) {
    element("div", { class: "budget", style: `left:${plot.valToPos(spec.budget, "x")}px`, title: "budget" }, plot.over);
  }
  // on the ladder, names stand above their points, where the falling line never is
  const up = spec.time;
  for (const point of [...spec.points].sort((a, b) => (up ? a.y - b.y : b.y - a.y))) {
    interval(plot, point);
    taken.push(mark(plot, point, up, taken));
  }
}

/* Lines of compressors; the places of their names within the chart. Names that would touch share a line. */
function rules(plot, spec) {
  const boxes = [];
  const within = spec.time ? "rule-name left" : "rule-name"; // where the fewest points are
  let label = null;
  for (const rule of [...spec.rules].sort((a, b) => b.y - a.y)) {
    const y = plot.valToPos(rule.y, "y");
    element("div", { class: "rule", style: `top:${y}px` }, plot.over);
    if (label && y - label.y < label.height) {
      label.made.textContent += `, ${rule.name}`;
    } else {
      const made = element("div", { class: plot.width > NARROW ? "rule-name outside" : within }, plot.over, rule.name);
      const height = made.offsetHeight;
      made.style.top = `${y - height / 2}px`;
      label = { made, y, height };
      boxes.push(label);
    }
  }
  return boxes.map(({ made, y, height }) => ({
    left: made.offsetLeft,
    top: y - height / 2,
    width: made.offsetWidth,
    height,
  }));
}

/* The 95 % interval of a point, as far as the chart goes. */
function interval(plot, point) {
  if (!point.half) return;
  const height = plot.over.clientHeight;
  const [from, to] = [point.y + point.half, point.y - point.half].map((y) => plot.valToPos(y, "y"));
  const cut = `${from < 0 ? " cut-top" : ""}${to > height ? " cut-bottom" : ""}`;
  const [top, bottom] = [Math.max(0, from), Math.min(height, to)];
  const style = `left:${plot.valToPos(point.x, "x")}px;top:${top}px;height:${bottom - top}px`;
  element("div", { class: `whisker${cut}`, style }, plot.over);
}

const touch = (a, b) =>
  a.left < b.left + b.width && b.left < a.left + a.width && a.top < b.top + b.height && b.top < a.top + a.height;

/* The nearest free place above or below; only above where `up`. */
function free(box, up, taken) {
  const tops = taken.flatMap((one) => [one.top - box.height, one.top + one.height]);
  return [box.top, ...tops]
    .filter((top) => !up || top <= box.top)
    .map((top) => ({ ...box, top }))
    .filter((one) => !taken.some((other) => touch(one, other)))
    .reduce((a, b) => (Math.abs(b.top - box.top) < Math.abs(a.top - box.top) ? b : a));
}

/* A point's link with its name, which stands beside it or above; the place of the name. */
function mark(plot, point, up, taken) {
  const [left, top] = [plot.valToPos(point.x, "x"), plot.valToPos(point.y, "y")];
  const about = { href: point.href, "aria-label": point.text, title: point.text, style: `left:${left}px;top:${top}px` };
  const link = element("a", { class: `mark${point.open ? " open" : ""}`, ...about }, plot.over);
  const name = element("span", {}, link, point.name);
  const [width, height] = [name.offsetWidth, name.offsetHeight];
  const side = left + 16 + width > plot.over.clientWidth ? "left" : "right";
  const beside = {
    left: side === "left" ? left - 9 - width : left + 9,
    top: up ? top - 5 - height : top - height / 2,
    width,
    height,
  };
  const box = free(beside, up, taken);
  link.classList.add(side);
  name.style.top = `${box.top - top + MARK / 2 - 2}px`; // 2: the mark's border
  return box;
}

const boards = [...document.querySelectorAll("[data-board]")].map((box) => ({ box, plot: board(box) }));

function drawBoard(one) {
  one.plot.destroy();
  one.plot = board(one.box);
}

onResize(() => boards.filter((one) => one.box.clientWidth !== one.plot.width).forEach(drawBoard));
onColours(() => boards.forEach(drawBoard));

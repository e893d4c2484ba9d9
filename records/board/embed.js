/* Draws every chart of a document, and tells those of curves what the document's switches say. */
"use strict";

const curves = []; // views that share their switches and what they show of the axis
let zoom = [0, 1]; // shares of the axis

function tell(name, value) {
  for (const view of curves) view.signal(name, value).runAsync();
}

function show(from, to) {
  const width = Math.min(1, to - from);
  if (!(width > 1e-4)) return;
  const start = Math.min(1 - width, Math.max(0, from));
  zoom = [start, start + width];
  tell("zoom", zoom);
}

const steps = {
  earlier: (from, to) => [from - (to - from) / 4, to - (to - from) / 4],
  later: (from, to) => [from + (to - from) / 4, to + (to - from) / 4],
  closer: (from, to) => [from + (to - from) / 4, to - (to - from) / 4],
  wider: (from, to) => [from - (to - from) / 2, to + (to - from) / 2],
  all: () => [0, 1],
};

/* A part that was dragged over becomes what is shown. */
async function dragged(view) {
  const [a, b] = [...(view.signal("brush_x") ?? [])].sort((one, other) => one - other);
  if (!(b - a > 4)) return;
  const share = (pixel) => zoom[0] + (pixel / view.signal("width")) * (zoom[1] - zoom[0]);
  const part = [share(a), share(b)];
  await view.signal("brush_x", [0, 0]).runAsync(); // or the mark would grow with the axis
  show(...part);
}

async function draw(box) {
  const words = box.getAttribute("aria-label");
  const spec = JSON.parse(document.getElementById(box.dataset.spec).textContent);
  // ast: expressions are interpreted, so that the page may forbid eval
  const { view } = await vegaEmbed(box, spec, {
    actions: false,
    renderer: "svg",
    ast: true,
    logLevel: 1, // errors alone
    tooltip: { disableDefaultStyle: true },
  });
  box.setAttribute("aria-label", words);
  box.setAttribute("role", "img"); // one picture, for whoever reads the table below it
  box.querySelector("svg").setAttribute("aria-hidden", "true");
  if (!spec.params?.some((one) => one.name === "zoom")) return;
  curves.push(view);
  box.addEventListener("pointerup", () => setTimeout(() => dragged(view)));
  box.addEventListener("dblclick", () => show(0, 1));
}

for (const input of document.querySelectorAll("[data-run]")) {
  input.addEventListener("change", () => {
    tell("shown", [...document.querySelectorAll("[data-run]")].map((one) => one.checked));
  });
}
for (const input of document.querySelectorAll("[data-signal]")) {
  input.addEventListener("change", () => {
    tell(input.dataset.signal, input.type === "checkbox" ? input.checked : input.value);
  });
}
for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => show(...steps[button.dataset.zoom](...zoom)));
}
Promise.all([...document.querySelectorAll(".chart")].map(draw)).then(() => {
  document.documentElement.dataset.ready = "1";
});

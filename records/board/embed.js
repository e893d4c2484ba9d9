/* Draws every chart of a document. */
"use strict";

const AXES = 90; // pixels beside a chart

async function draw(box) {
  const words = box.getAttribute("aria-label");
  const spec = JSON.parse(document.getElementById(box.dataset.spec).textContent);
  for (const panel of spec.vconcat ?? []) {
    panel.width = box.clientWidth - AXES; // Vega-Lite measures the page for single charts alone
  }
  // ast: expressions are interpreted, so that the page may forbid eval
  await vegaEmbed(box, spec, {
    actions: false,
    renderer: "svg",
    ast: true,
    bind: box.previousElementSibling,
    logLevel: 1, // errors alone
    tooltip: { disableDefaultStyle: true },
  });
  box.setAttribute("aria-label", words);
  box.setAttribute("role", "img"); // one picture for a screen reader
  box.querySelector("svg").setAttribute("aria-hidden", "true");
}

Promise.all([...document.querySelectorAll(".chart")].map(draw)).then(() => {
  document.documentElement.dataset.ready = "1";
});

/* What all charts of a page share: the numbers in #data, words for numbers, elements, and colours. */
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);

/* --- words and elements ----------------------------------------------------------------------------------- */

const UNITS = [[1e15, "e15"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]];

/* Five digits at most: 0.99137, 257.8, 10.23k. */
function short(value) {
  if (value === null || value === undefined) return "";
  const [unit, name] = UNITS.find(([least]) => Math.abs(value) >= least) ?? [1, ""];
  return +(value / (name === "k" ? 1e3 : unit)).toPrecision(5) + name;
}

const escape = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

function element(name, attributes, parent, text = "") {
  const made = document.createElement(name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  made.textContent = text;
  parent.append(made);
  return made;
}

/* A canvas tells a screen reader nothing. */
function hideCanvases(box) {
  box.querySelectorAll("canvas").forEach((canvas) => canvas.setAttribute("aria-hidden", "true"));
}

/* --- colours ---------------------------------------------------------------------------------------------- */

const darkness = matchMedia("(prefers-color-scheme: dark)");
let printing = false;
const isDark = () => darkness.matches && !printing;

const probe = document.body.appendChild(document.createElement("span"));

/* A colour of the style sheet. A canvas takes no light-dark(), so the browser works it out. */
function css(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

/* The look of an axis. Letters grow with those of the page. */
function axisStyle() {
  const letters = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const font = `${0.75 * letters}px sans-serif`;
  const line = css("--line");
  return {
    stroke: css("--quiet"),
    grid: { stroke: line, width: 1 },
    ticks: { stroke: line },
    font,
    labelFont: font,
    labelSize: 1.2 * letters,
    size: (u, values, at) => (at === 0 ? 2 : 3.6) * letters,
  };
}

/* `act` is called when the colours change; paper is light, whatever the screen is. */
function onColours(act) {
  const print = (now) => {
    printing = now;
    document.documentElement.style.colorScheme = now ? "light" : "";
    act();
  };
  darkness.addEventListener("change", act);
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
}

/* `act` is called once a change of the window's size has ended. */
function onResize(act) {
  let wait = 0;
  addEventListener("resize", () => {
    clearTimeout(wait);
    wait = setTimeout(act, 100);
  });
}

addEventListener("load", () => (document.documentElement.dataset.ready = "1"));

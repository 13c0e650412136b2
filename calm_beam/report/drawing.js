// Small helpers: elements, numbers, scales, the tooltip.

const SVG = "http://www.w3.org/2000/svg";

function byId(name) {
  return document.getElementById(name);
}

// Children that are texts become text nodes: nothing of the data is ever read as HTML.
function make(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function draw(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function short(number, digits = 3) {
  return String(Number(number.toPrecision(digits)));
}

function whole(number) {
  return number.toLocaleString("en-US");
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

// A minus sign, so that it is not broken off or misread.
function loss(number) {
  return number.toFixed(4).replace("-", "−");
}

// Returns round numbers that cover an interval, about so many.
function ticksOf(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) ticks.push(index * step);
  return ticks;
}

function linear(domain, range) {
  return (value) => range[0] + ((value - domain[0]) / (domain[1] - domain[0])) * (range[1] - range[0]);
}

const tip = byId("tip");

// Shows lines of text at a place of the window, and tells them to screen readers.
function showTip(lines, x, y, swatch) {
  tip.replaceChildren(
    ...lines.map((line, index) =>
      make("span", index ? {} : { class: "first" }, index || !swatch ? "" : make("i", { class: `swatch ${swatch}` }), line),
    ),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, x - width / 2), document.documentElement.clientWidth - width - 8);
  tip.style.left = `${left}px`;
  tip.style.top = `${y - height - 12 < 8 ? y + 20 : y - height - 12}px`;
}

function say(lines) {
  byId("said").textContent = lines.join(", ");
}

function hideTip() {
  tip.hidden = true;
}

// The colours of layers, with their numbers; where there are many, some of the numbers.
function scaleOf(numLayers, text) {
  const every = Math.ceil(numLayers / 12);
  const cells = [];
  for (let layer = 1; layer <= numLayers; layer += 1) {
    const isNamed = layer === 1 || layer === numLayers || ((layer - 1) % every === 0 && numLayers - layer >= every);
    cells.push(make("span", { class: `cell l${layer}` }, isNamed ? String(layer) : ""));
  }
  return [make("span", { class: "name" }, text), make("span", { class: "cells" }, ...cells)];
}

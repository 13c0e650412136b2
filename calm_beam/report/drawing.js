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

// A text of others: its direction neither reaches nor takes up the words around it.
function foreign(text) {
  return make("bdi", {}, text);
}

// The same where there are no elements: in attributes and options.
function isolated(text) {
  return /^[\x20-\x7e]*$/.test(text) ? text : `\u2068${text}\u2069`;
}

function short(number, digits = 3) {
  return String(Number(number.toPrecision(digits)));
}

function whole(number) {
  return number.toLocaleString("en-US");
}

function counted(number, one, many) {
  return `${whole(number)} ${number === 1 ? one : many}`;
}

// A number in so few digits as tell it from another one, at least so many.
function apart(number, other, write, digits) {
  for (let more = digits; more < 17; more += 1) if (number === other || Number(write(number, more)) !== other) return write(number, more);
  return String(number);
}

// Numbers do not part from their signs where a line ends.
function together(text) {
  return text.replace(/ (?=[%=≤>])|(?<=[δελp=≤>]) /g, "\u00a0");
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

// A minus sign, so that it is not broken off or misread.
function minus(text) {
  return text.replace("-", "−");
}

// A loss in so many digits that one sees on which side of delta it lies.
function lossBeside(number, delta) {
  return minus(apart(number, delta, (value, digits) => value.toFixed(digits), 4));
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

// Labels: measured, and put where nothing is in their way.

const pen = document.createElement("canvas").getContext("2d");
const ASCENT = 10;
const DESCENT = 3;
// How far from its place a label may be, and how finely places are tried.
const REACH = [130, 84];
const STRIDE = 5;

function widthOf(text, isBold) {
  pen.font = `${isBold ? 650 : 400} 12px ${getComputedStyle(document.body).fontFamily}`;
  // Digits of one width are a little wider.
  return pen.measureText(text).width * 1.04 + 2;
}

// The box of a text that stands on a baseline.
function boxOf(x, baseline, width, anchor = "middle") {
  const left = x - { start: 0, middle: width / 2, end: width }[anchor];
  return { left, right: left + width, top: baseline - ASCENT, bottom: baseline + DESCENT };
}

function boxAround(x, y, radius) {
  return { left: x - radius, right: x + radius, top: y - radius, bottom: y + radius };
}

function overlap(one, other) {
  const width = Math.min(one.right, other.right) - Math.max(one.left, other.left);
  const height = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
  return width > 0 && height > 0 ? width * height : 0;
}

// Boxes along a line through points.
function boxesAlong(points) {
  return points.slice(1).flatMap(([x, y], place) => {
    const [fromX, fromY] = points[place];
    const steps = Math.max(1, Math.ceil(Math.hypot(x - fromX, y - fromY) / 4));
    return Array.from({ length: steps + 1 }, (_, step) => boxAround(fromX + ((x - fromX) * step) / steps, fromY + ((y - fromY) * step) / steps, 1.5));
  });
}

// Returns a label for a point, as near to it as there is room, with a line to the point if it is not beside it; its box
// is added to those that are taken. `taken` is never covered, `crossed` only if there is no other way.
function labelFor(text, name, [x, y], { taken, crossed, area, wish }) {
  const width = widthOf(text, true);
  const height = ASCENT + DESCENT;
  const near = (box) => overlap(box, { left: x - REACH[0] - width, right: x + REACH[0] + width, top: y - REACH[1] - height, bottom: y + REACH[1] + height }) > 0;
  const [nearTaken, nearCrossed] = [taken.filter(near), crossed.filter(near)];
  let best = null;
  const consider = (centerX, centerY) => {
    const left = Math.min(Math.max(centerX - width / 2, area.left), area.right - width);
    const top = Math.min(Math.max(centerY - height / 2, area.top), area.bottom - height);
    const box = { left, right: left + width, top, bottom: top + height };
    const away = Math.hypot(Math.max(box.left - x, 0, x - box.right), Math.max(box.top - y, 0, y - box.bottom));
    const unwished = Math.hypot(left + width / 2 - x - wish[0] * (width / 2 + 9), top + height / 2 - y - wish[1] * (height / 2 + 9));
    let cost = away + 0.15 * unwished;
    if (best && cost >= best.cost) return;
    const wide = { left: box.left - 2, right: box.right + 2, top: box.top - 1, bottom: box.bottom + 1 };
    for (const other of nearCrossed) cost += 3 * overlap(wide, other);
    for (const other of nearTaken) cost += 1000 * overlap(wide, other);
    if (!best || cost < best.cost) best = { cost, box, away };
  };
  for (let up = -REACH[1]; up <= REACH[1]; up += STRIDE) {
    for (let aside = -REACH[0]; aside <= REACH[0]; aside += STRIDE) consider(x + aside, y + up);
  }
  const { box, away } = best;
  taken.push(box);
  const group = draw("g", { class: "label" });
  if (away > 14) {
    const [endX, endY] = [Math.min(Math.max(x, box.left), box.right), Math.min(Math.max(y, box.top), box.bottom)];
    const [startX, startY] = [x + ((endX - x) * 7) / away, y + ((endY - y) * 7) / away];
    group.append(draw("line", { class: "leader", x1: startX, y1: startY, x2: endX, y2: endY }));
  }
  group.append(draw("text", { class: name, x: box.left + width / 2, y: box.bottom - DESCENT, "text-anchor": "middle" }, text));
  return group;
}

// Returns texts below an axis, the most important first, without those that one before them leaves no room for.
function rowOf(texts, baseline) {
  const boxes = [];
  return texts.flatMap(({ x, text, name = "tick", isBold = false }) => {
    const box = boxOf(x, baseline, widthOf(text, isBold) + 6);
    if (boxes.some((other) => overlap(box, other))) return [];
    boxes.push(box);
    return [draw("text", { class: name, x, y: baseline, "text-anchor": "middle" }, text)];
  });
}

// Places so far from each other that not all of their texts are left out: the ends first, then every so many.
function orderOf(count, widest, room) {
  const every = Math.max(1, Math.ceil((count * widest) / room));
  return [0, count - 1, ...Array.from({ length: Math.ceil(count / every) }, (_, index) => index * every)];
}

const tip = byId("tip");

// Shows lines of text at a place of the window, and tells them to screen readers.
function showTip(lines, x, y, swatch) {
  tip.replaceChildren(
    ...lines.map((line, index) =>
      make("span", index ? {} : { class: "first" }, index || !swatch ? "" : make("i", { class: `swatch ${swatch}` }), foreign(line)),
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

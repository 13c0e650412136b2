// The drawings: risk over thresholds, what a tolerance buys, exit layers over positions.

const NOT_TESTED = 0;
const ACCEPTED = 1;
const NOT_ACCEPTED = 2;
// Shares of fewer are faded: with 30, one share in two is off by nine percentage points either way.
const FEW_TOKENS = 30;
const VERDICTS = ["not tested", "proved safe", "not proved safe"];

function laneName(lane) {
  return lane === 0 ? "never exit" : `λ ${short(data.thresholds[lane - 1], 6)}`;
}

function pValue(entry, lane) {
  return apart(entry.pValues[lane], entry.epsilon, short, 2);
}

function verdict(entry, lane) {
  if (lane === 0) return "the full model";
  return lane === entry.unconfirmed ? "proved, not confirmed" : VERDICTS[entry.tests[lane]];
}

// Where a pointer or a finger is over a chart, as one of its columns.
function columnAt(event, figure, plot, columns) {
  const x = event.clientX - figure.getBoundingClientRect().left - plot.left;
  return Math.min(columns - 1, Math.max(0, Math.floor((x / plot.width) * columns)));
}

function plotOf(figure, height, margins) {
  const width = Math.max(260, figure.clientWidth);
  const [top, right, bottom, left] = margins;
  const plot = { left, top, width: width - left - right, height: height - top - bottom };
  plot.right = left + plot.width;
  plot.bottom = top + plot.height;
  plot.svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  return plot;
}

function drawGrid(plot, ticks, y, format) {
  for (const tick of ticks) {
    plot.svg.append(
      draw("line", { class: "grid", x1: plot.left, x2: plot.right, y1: y(tick), y2: y(tick) }),
      draw("text", { class: "tick", x: plot.left - 8, y: y(tick) + 4, "text-anchor": "end" }, format(tick)),
    );
  }
}

// The largest risk that is drawn near delta, where the decision falls: risks at low thresholds are often many times as
// large. The safest threshold is always drawn, also where it lost more.
function mostNearDelta(entry, risks) {
  return Math.max(entry.delta * 3, risks.length > 1 ? risks[1] * 1.05 : 0);
}

function drawRisk(figure, entry, lane, isWhole) {
  const { risks } = data.objectives[entry.objective];
  const lanes = risks.length;
  const lowest = Math.min(0, ...risks);
  const highest = Math.max(...risks, entry.delta * 1.1);
  const top = isWhole ? highest * 1.05 : Math.min(highest * 1.05, mostNearDelta(entry, risks));
  const bottom = isWhole ? lowest * 1.05 : Math.max(lowest * 1.05, Math.min(-entry.delta, risks[entry.chosen] * 1.2));
  const ticks = ticksOf(bottom, top, 5);
  const tickName = (tick) => minus(short(tick));
  const left = Math.max(52, 14 + Math.max(...ticks.map((tick) => widthOf(tickName(tick), false))));
  const plot = plotOf(figure, figure.clientWidth < 520 ? 280 : 340, [22, 16, 46, left]);
  const y = linear([bottom, top], [plot.bottom, plot.top]);
  const step = plot.width / lanes;
  const x = (place) => plot.left + (place + 0.5) * step;
  const svg = plot.svg;

  const clip = draw("clipPath", { id: "plot-area" });
  clip.append(draw("rect", { x: plot.left, y: plot.top - 6, width: plot.width, height: plot.height + 12 }));
  svg.append(clip);
  svg.append(draw("rect", { class: "cursor", x: x(lane) - step / 2, y: plot.top, width: step, height: plot.height }));
  svg.append(
    draw("rect", { class: "within", x: plot.left, y: y(entry.delta), width: plot.width, height: plot.bottom - y(entry.delta) }),
  );
  drawGrid(plot, ticks, y, tickName);
  drawThresholds(plot, lanes, x, lane);

  const inside = draw("g", { "clip-path": "url(#plot-area)" });
  svg.append(inside);
  const line = (from, to, name) =>
    draw("polyline", {
      class: name,
      points: risks.slice(from, to + 1).map((risk, place) => `${x(from + place)},${y(risk)}`).join(" "),
    });
  const isTested = (place) => place === 0 || entry.tests[place] !== NOT_TESTED;
  const lastTested = risks.reduce((last, _, place) => (isTested(place) ? place : last), 0);
  inside.append(line(lastTested, lanes - 1, "path after"), line(0, lastTested, "path"));
  svg.append(draw("line", { class: "delta", x1: plot.left, x2: plot.right, y1: y(entry.delta), y2: y(entry.delta) }));
  const taken = [];
  risks.forEach((risk, place) => {
    if (y(risk) < plot.top - 6 || y(risk) > plot.bottom + 6) return;
    inside.append(drawMark(entry, place, x(place), y(risk)));
    taken.push(boxAround(x(place), y(risk), 7));
  });
  // Of what lies above or below the drawing, the label stands at the edge.
  const at = (place) => [x(place), Math.min(Math.max(y(risks[place]), plot.top), plot.bottom)];
  const path = boxesAlong(risks.map((risk, place) => [x(place), y(risk)]));
  const labels = {
    taken,
    crossed: [
      ...path,
      { left: plot.left, right: plot.right, top: y(entry.delta) - 2, bottom: y(entry.delta) + 2 },
    ],
    area: { left: plot.left + 3, right: Math.max(plot.right, plot.left + 90), top: plot.top - 16, bottom: plot.bottom - 3 },
  };
  svg.append(labelFor(entry.chosen ? "chosen" : "never exit", "flag", at(entry.chosen), { ...labels, wish: [1, 1] }));
  if (entry.procedure === "fixed_sequence" && entry.tests[lastTested] === NOT_ACCEPTED) {
    const arrow = y(risks[lastTested]) < plot.top - 6 ? " ↑" : "";
    svg.append(labelFor(`test stops${arrow}`, "flag stop", at(lastTested), { ...labels, wish: [-1, -1] }));
  }
  // Anywhere along its line, best at the right end.
  const name = `δ = ${short(entry.delta, 6)}`;
  svg.append(placeAlong(name, "delta-name", y(entry.delta), { ...labels, crossed: path }));
  svg.setAttribute("aria-label", `Measured risk at ${lanes - 1} thresholds, with the tolerance ${entry.delta}`);
  figure.replaceChildren(svg);

  figure.describe = (place) => [
    laneName(place),
    `measured risk ${lossBeside(risks[place], entry.delta)}`,
    ...(place ? [`p = ${pValue(entry, place)}, ε = ${short(entry.epsilon, 6)}`] : []),
    `${layersNow()[place].toFixed(2)} of ${data.numLayers} layers`,
    verdict(entry, place),
  ];
  figure.place = (place) => [x(place), Math.max(plot.top, y(risks[place]))];
  figure.columns = { plot, count: lanes };
}

// Capital won against the null, and the risk, after every round.
function drawProof(figure, entry) {
  const { looks } = entry;
  const goal = -Math.log10(entry.epsilon);
  const capitals = looks.map((look) => look.logCapital / Math.LN10);
  const plot = plotOf(figure, figure.clientWidth < 520 ? 360 : 400, [22, 24, 46, 64]);
  const middle = plot.top + plot.height * 0.58;
  const x = linear([0, looks[looks.length - 1].n], [plot.left, plot.right]);
  const low = Math.min(0, ...capitals);
  const high = Math.max(goal, ...capitals);
  const room = 0.08 * (high - low);
  const capital = linear([low - room, high + room], [middle - 8, plot.top]);
  const risks = looks.map((look) => look.risk);
  const [least, most] = [Math.min(0, ...risks), Math.max(entry.delta, ...risks) * 1.1];
  const risk = linear([least, most], [plot.bottom, middle + 22]);
  const svg = plot.svg;

  drawGrid(plot, powersOf(low - room, high + room), capital, (tick) => `×${short(10 ** tick, 1)}`);
  drawGrid(plot, ticksOf(least, most, 3), risk, (tick) => minus(short(tick)));
  const line = (values, y) => draw("polyline", { class: "path", points: looks.map((look, place) => `${x(look.n)},${y(values[place])}`).join(" ") });
  const level = (y) => draw("line", { class: "delta", x1: plot.left, x2: plot.right, y1: y, y2: y });
  svg.append(level(capital(goal)), level(risk(entry.delta)), line(capitals, capital), line(risks, risk));
  looks.forEach((look, place) => {
    const isProved = look.threshold !== null && entry.threshold !== null && look.threshold <= entry.threshold;
    const name = isProved ? "mark accepted" : "mark open";
    svg.append(
      draw("circle", { class: name, cx: x(look.n), cy: capital(capitals[place]), r: 4 }),
      draw("circle", { class: name, cx: x(look.n), cy: risk(risks[place]), r: 4 }),
    );
  });
  const area = (top, bottom) => ({ left: plot.left + 3, right: plot.right, top, bottom });
  const along = (values, y) => boxesAlong(looks.map((look, place) => [x(look.n), y(values[place])]));
  svg.append(
    placeAlong(`proved: capital × ${short(1 / entry.epsilon, 4)}`, "delta-name", capital(goal), { taken: [], crossed: along(capitals, capital), area: area(plot.top - 16, middle - 8) }),
    placeAlong(`δ = ${short(entry.delta, 6)}`, "delta-name", risk(entry.delta), { taken: [], crossed: along(risks, risk), area: area(middle + 8, plot.bottom) }),
    draw("text", { class: "axis-name", x: plot.left, y: plot.top - 9 }, "capital against “not safe”"),
    draw("text", { class: "axis-name", x: plot.left, y: middle + 14 }, "risk"),
    draw("line", { class: "axis", x1: plot.left, x2: plot.right, y1: plot.bottom, y2: plot.bottom }),
    ...rowOf(orderOf(looks.length, 52, plot.width).map((place) => ({ x: x(looks[place].n), text: whole(looks[place].n) })), plot.bottom + 18),
    draw("text", { class: "axis-name", x: plot.right, y: plot.bottom + 38, "text-anchor": "end" }, "counted by then →"),
  );
  svg.setAttribute("aria-label", `Capital and risk after each of ${counted(looks.length, "round", "rounds")}`);
  figure.replaceChildren(svg);

  figure.describe = (place) => {
    const look = looks[place];
    return [
      `round ${place + 1}: ${whole(look.n)}`,
      `capital × ${short(10 ** capitals[place])}`,
      `risk ${lossBeside(look.risk, entry.delta)}`,
      `${look.threshold === null ? "nothing proved" : `λ ${short(look.threshold, 6)} proved`}: ${look.layers.toFixed(2)} of ${data.numLayers} layers`,
    ];
  };
  figure.place = (place) => [x(looks[place].n), capital(capitals[place])];
  // Rounds are about equally long.
  figure.columns = { plot, count: looks.length };
}

// Returns powers of ten within an interval of logarithms, or, where there are few, three times them too.
function powersOf(low, high) {
  const step = high - low > 3 ? Math.ceil((high - low) / 6) : 0.5;
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(Number.isInteger(tick) ? tick : Math.floor(tick) + Math.log10(3));
  return ticks;
}

function drawThresholds(plot, lanes, x, lane) {
  // The slider's own first, then the ends, then as many as have room.
  const texts = [lane, ...orderOf(lanes, 40, plot.width)].map((place) => ({
    x: x(place),
    text: place === 0 ? "never" : short(data.thresholds[place - 1], 6).replace(/^0\./, "."),
    name: place === lane ? "tick now" : "tick",
    isBold: place === lane,
  }));
  plot.svg.append(...rowOf(texts, plot.bottom + 18));
  plot.svg.append(
    draw("line", { class: "axis", x1: plot.left, x2: plot.right, y1: plot.bottom, y2: plot.bottom }),
    draw("text", { class: "axis-name", x: plot.right, y: plot.bottom + 38, "text-anchor": "end" }, "exit threshold λ, from the safest on →"),
  );
}

function drawMark(entry, place, x, y) {
  if (place === 0) return draw("rect", { class: "mark full", x: x - 4, y: y - 4, width: 8, height: 8 });
  switch (entry.tests[place]) {
    case ACCEPTED:
      return draw("circle", { class: place === entry.chosen ? "mark accepted choice" : "mark accepted", cx: x, cy: y, r: place === entry.chosen ? 6 : 4 });
    case NOT_TESTED:
      return draw("circle", { class: "mark open", cx: x, cy: y, r: 3 });
  }
  return draw("path", { class: "mark failed", d: `M${x - 5},${y - 5}l10,10m0,-10l-10,10` });
}

// Returns the name of a horizontal line, on it or just below it, as far to the right as there is room.
function placeAlong(text, name, y, { taken, crossed, area }) {
  const width = widthOf(text, true);
  let best = null;
  for (let right = area.right; right - width >= area.left; right -= 8) {
    for (const baseline of [y - 7, y + 7 + ASCENT]) {
      if (baseline + DESCENT > area.bottom) continue;
      const box = boxOf(right, baseline, width, "end");
      const cost = (area.right - right) * 0.1 + (baseline > y ? 6 : 0) + [...taken, ...crossed].reduce((sum, other) => sum + 100 * overlap(box, other), 0);
      if (!best || cost < best.cost) best = { cost, box, right, baseline };
    }
  }
  taken.push(best.box);
  return draw("text", { class: name, x: best.right, y: best.baseline, "text-anchor": "end" }, text);
}

// One small drawing for each quantity, over the tolerances of one kind of promise.
function drawPanel(title, explanation, points, format) {
  const width = 250;
  const height = 140;
  const values = points.map((point) => point.value);
  const low = Math.min(...values, points[0].base);
  const high = Math.max(...values, points[0].base);
  const room = (high - low || 1) * 0.25;
  const y = linear([low - room, high + room], [height - 26, 22]);
  const x = (place) => 14 + (place + 0.5) * ((width - 28) / points.length);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} against delta` });
  const base = y(points[0].base);
  svg.append(
    draw("line", { class: "delta", x1: 8, x2: width - 8, y1: base, y2: base }),
    draw("polyline", { class: "path", points: values.map((value, place) => `${x(place)},${y(value)}`).join(" ") }),
  );
  const taken = points.map((point, place) => boxAround(x(place), y(point.value), point.isNow ? 7 : 5));
  const labels = {
    taken,
    crossed: [...boxesAlong(values.map((value, place) => [x(place), y(value)])), { left: 8, right: width - 8, top: base - 1, bottom: base + 1 }],
    area: { left: 2, right: width - 2, top: 2, bottom: height - 24 },
  };
  points.forEach((point, place) => {
    svg.append(draw("circle", { class: point.isNow ? "mark accepted choice" : "mark accepted", cx: x(place), cy: y(point.value), r: point.isNow ? 6 : 4 }));
  });
  // The chosen one first; of many the others stand in the table alone.
  const order = [points.findIndex((point) => point.isNow), 0, points.length - 1, ...points.keys()].filter((place) => place >= 0);
  const named = points.length > 6 ? order.slice(0, 3) : order;
  for (const place of new Set(named)) {
    const point = points[place];
    svg.append(labelFor(format(point.value), point.isNow ? "value now" : "value", [x(place), y(point.value)], { ...labels, wish: [0, -1] }));
  }
  const texts = order.map((place) => ({ x: x(place), text: (place ? "" : "δ ") + short(points[place].delta, 4) }));
  svg.append(...rowOf(texts, height - 6));
  return make("figure", { class: "panel" }, make("figcaption", {}, make("strong", {}, title), make("span", {}, explanation)), svg);
}

// What a token costs over what is lost, at every threshold, and where the only tolerance of such promises lies.
function drawExchange(entry, layers) {
  const { risks } = data.objectives[entry.objective];
  const [width, height] = [380, 230];
  const plot = { left: 34, right: width - 14, top: 22, bottom: height - 44 };
  const most = Math.max(entry.delta * 1.1, Math.min(Math.max(...risks) * 1.05, mostNearDelta(entry, risks)));
  const least = Math.max(Math.min(0, ...risks), -entry.delta);
  const x = linear([least, most], [plot.left, plot.right]);
  const y = linear([0, data.numLayers * 1.04], [plot.bottom, plot.top]);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Layers per token over measured risk, with the tolerance ${entry.delta}` });
  plot.svg = svg;
  drawGrid(plot, ticksOf(0, data.numLayers, 4), y, (tick) => short(tick));
  const inside = risks.map((_, place) => place).filter((place) => risks[place] >= least && risks[place] <= most);
  const at = (place) => [x(risks[place]), y(layers[place])];
  const texts = ticksOf(least, most, 4).map((tick) => ({ x: x(tick), text: minus(short(tick)) }));
  svg.append(
    draw("rect", { class: "within", x: plot.left, y: plot.top, width: x(entry.delta) - plot.left, height: plot.bottom - plot.top }),
    draw("line", { class: "axis", x1: plot.left, x2: plot.right, y1: plot.bottom, y2: plot.bottom }),
    draw("line", { class: "delta", x1: x(entry.delta), x2: x(entry.delta), y1: plot.top, y2: plot.bottom }),
    draw("polyline", { class: "path", points: inside.map((place) => at(place).join(",")).join(" ") }),
    ...inside.map((place) => drawMark(entry, place, ...at(place))),
    ...rowOf(texts, plot.bottom + 17),
    draw("text", { class: "axis-name", x: plot.right, y: plot.bottom + 36, "text-anchor": "end" }, "measured risk →"),
  );
  const labels = {
    taken: inside.map((place) => boxAround(...at(place), 7)),
    crossed: [...boxesAlong(inside.map(at)), { left: x(entry.delta) - 2, right: x(entry.delta) + 2, top: plot.top, bottom: plot.bottom }],
    area: { left: plot.left + 3, right: plot.right, top: plot.top - 18, bottom: plot.bottom - 3 },
  };
  svg.append(
    labelFor(`δ = ${short(entry.delta, 6)}`, "delta-name", [x(entry.delta), plot.top], { ...labels, wish: [1, -1] }),
    labelFor(entry.chosen ? `chosen: ${layers[entry.chosen].toFixed(2)}` : "never exit", "flag", at(entry.chosen), { ...labels, wish: [-1, 1] }),
  );
  return make("figure", { class: "panel curve" }, make("figcaption", {}, make("strong", {}, "Layers per token"), make("span", {}, `of ${data.numLayers}, at every threshold`)), svg);
}

function drawExits(figure, lane) {
  const { width: positions, tokens } = data.exits;
  const sum = (column) => column.reduce((total, exits) => total + exits, 0);
  // As far as outputs go here or with the full model; low thresholds make some that never end.
  const count = 1 + Math.max(0, ...[0, lane].map((each) => tokens[each].findLastIndex((column) => sum(column) > 0)));
  const columns = tokens[lane].slice(0, count);
  const totals = columns.map(sum);
  const most = Math.max(...totals, 1);
  const plot = plotOf(figure, figure.clientWidth < 520 ? 276 : 316, [10, 16, 60, 58]);
  const strip = 34;
  const base = plot.bottom - strip - 10;
  const y = linear([0, 1], [base, plot.top]);
  const step = plot.width / Math.max(count, 1);
  drawGrid(plot, [0, 0.5, 1], y, percent);
  columns.forEach((column, place) => {
    if (!totals[place]) return;
    const bar = draw("g", totals[place] < FEW_TOKENS ? { class: "bar few", opacity: 0.15 + (0.5 * totals[place]) / FEW_TOKENS } : { class: "bar" });
    let below = 0;
    const x = plot.left + place * step;
    const gap = step > 6 ? 1 : 0;
    column.forEach((exits, layer) => {
      if (!exits) return;
      const share = exits / totals[place];
      const height = y(below) - y(below + share);
      bar.append(draw("rect", { class: `part l${layer + 1}`, x, y: y(below + share), width: step - gap, height: Math.max(height, 0.5) }));
      below += share;
    });
    const height = Math.max((totals[place] / most) * strip, 1);
    plot.svg.append(bar, draw("rect", { class: "strip", x, y: plot.bottom - height, width: step - gap, height }));
  });
  const middle = (place) => plot.left + (place + 0.5) * step;
  const row = (widest, textOf) => orderOf(count, widest, plot.width).map((place) => ({ x: middle(place), text: textOf(place) }));
  plot.svg.append(
    ...rowOf(row(30, (place) => String(place * positions + 1)), plot.bottom + 16),
    ...rowOf(row(44, (place) => whole(totals[place])), plot.bottom + 33),
    draw("text", { class: "axis-name", x: plot.right, y: plot.bottom + 52, "text-anchor": "end" }, "position in the output →"),
    draw("text", { class: "tick", x: plot.left - 8, y: plot.bottom - 2, "text-anchor": "end" }, "tokens"),
    draw("text", { class: "tick", x: plot.left - 20, y: plot.bottom + 33, "text-anchor": "end" }, "n"),
  );
  plot.svg.setAttribute("aria-label", `Shares of exit layers at ${count} output positions, ${laneName(lane)}`);
  figure.replaceChildren(plot.svg);

  figure.describe = (place) => {
    const first = place * positions + 1;
    const used = columns[place].map((exits, layer) => [exits, layer + 1]).filter(([exits]) => exits);
    used.sort((one, other) => other[0] - one[0]);
    return [
      positions > 1 ? `positions ${first}–${first + positions - 1}` : `position ${first}`,
      `${counted(totals[place], "token", "tokens")}${totals[place] < FEW_TOKENS ? ": few" : ""}`,
      ...used.slice(0, 5).map(([exits, layer]) => `layer ${layer}: ${percent(exits / totals[place])}`),
      ...(used.length > 5 ? [`others: ${percent(sum(used.slice(5).map(([exits]) => exits)) / totals[place])}`] : []),
    ];
  };
  figure.place = (place) => [plot.left + (place + 0.5) * step, plot.top + 20];
  figure.columns = { plot, count };
}

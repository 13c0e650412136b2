// The drawings: risk over thresholds, what a tolerance buys, exit layers over positions.

const NOT_TESTED = 0;
const ACCEPTED = 1;
const NOT_ACCEPTED = 2;
const VERDICTS = ["not tested", "proved safe", "not proved safe"];

function laneName(lane) {
  return lane === 0 ? "never exit" : `λ ${short(data.thresholds[lane - 1], 6)}`;
}

function verdict(entry, lane) {
  return lane === 0 ? "the full model" : VERDICTS[entry.tests[lane]];
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

function drawRisk(figure, entry, lane, isWhole) {
  const { risks } = data.objectives[entry.objective];
  const lanes = risks.length;
  const plot = plotOf(figure, figure.clientWidth < 520 ? 280 : 340, [22, 16, 46, 52]);
  const lowest = Math.min(0, ...risks);
  const highest = Math.max(...risks, entry.delta * 1.1);
  // Near delta, where the decision falls; risks at low thresholds are often many times as large.
  const top = isWhole ? highest * 1.05 : Math.min(highest * 1.05, entry.delta * 3);
  const bottom = isWhole ? lowest * 1.05 : Math.max(lowest * 1.05, -entry.delta);
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
  drawGrid(plot, ticksOf(bottom, top, 5), y, (tick) => short(tick).replace("-", "−"));
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
  svg.append(
    draw("line", { class: "delta", x1: plot.left, x2: plot.right, y1: y(entry.delta), y2: y(entry.delta) }),
    draw("text", { class: "delta-name", x: plot.right, y: y(entry.delta) - 7, "text-anchor": "end" }, `δ = ${short(entry.delta, 6)}`),
  );
  risks.forEach((risk, place) => {
    if (y(risk) < plot.top - 6) return;
    inside.append(drawMark(entry, place, x(place), y(risk)));
  });
  // Risks mostly grow to the right, so there is room below a point to its right, and above it to its left.
  const isLeft = x(entry.chosen) < plot.right - 80;
  const below = y(risks[entry.chosen]) + 20;
  plot.svg.append(
    draw(
      "text",
      { class: "flag", x: x(entry.chosen) + (isLeft ? 9 : -9), y: below < plot.bottom - 3 ? below : below - 34, "text-anchor": isLeft ? "start" : "end" },
      entry.chosen ? "chosen" : "never exit",
    ),
  );
  const hasStopped = entry.procedure === "fixed_sequence" && entry.tests[lastTested] === NOT_ACCEPTED;
  if (hasStopped && y(risks[lastTested]) > plot.top - 6) {
    const isRoomy = x(lastTested) > plot.left + 76;
    plot.svg.append(
      draw("text", { class: "flag stop", x: x(lastTested) - 9, y: y(risks[lastTested]) - 9, "text-anchor": "end" }, isRoomy ? "test stops" : ""),
    );
  }
  svg.setAttribute("aria-label", `Measured risk at ${lanes - 1} thresholds, with the tolerance ${entry.delta}`);
  figure.replaceChildren(svg);

  figure.describe = (place) => [
    laneName(place),
    `measured risk ${loss(risks[place])}`,
    ...(place ? [`p = ${short(entry.pValues[place], 2)}, ε = ${short(entry.epsilon, 6)}`] : []),
    `${data.layers[place].toFixed(2)} of ${data.numLayers} layers`,
    verdict(entry, place),
  ];
  figure.place = (place) => [x(place), Math.max(plot.top, y(risks[place]))];
  figure.columns = { plot, count: lanes };
}

function drawThresholds(plot, lanes, x, lane) {
  // As many names as have room; those at the ends and at the slider always.
  const every = Math.max(1, Math.ceil((lanes * 40) / plot.width));
  for (let place = 0; place < lanes; place += 1) {
    const isEnd = place === 0 || place === lanes - 1 || place === lane;
    const isFree = place % every === 0 && Math.min(place, lanes - 1 - place, Math.abs(place - lane)) >= every;
    if (!isEnd && !isFree) continue;
    // The slider's own name takes the room of an end that is near.
    if (isEnd && place !== lane && Math.abs(place - lane) < every) continue;
    const name = place === 0 ? "never" : short(data.thresholds[place - 1], 4).replace(/^0\./, ".");
    plot.svg.append(
      draw("text", { class: place === lane ? "tick now" : "tick", x: x(place), y: plot.bottom + 18, "text-anchor": "middle" }, name),
    );
  }
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

// One small drawing for each quantity, over the tolerances of one kind of promise.
function drawPanel(title, explanation, points, format) {
  const width = 250;
  const height = 140;
  const values = points.map((point) => point.value);
  const low = Math.min(...values, points[0].base);
  const high = Math.max(...values, points[0].base);
  const room = (high - low || 1) * 0.25;
  const y = linear([low - room, high + room], [height - 26, 22]);
  const x = (place) => 10 + (place + 0.5) * ((width - 20) / points.length);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} against delta` });
  svg.append(
    draw("line", { class: "delta", x1: 8, x2: width - 8, y1: y(points[0].base), y2: y(points[0].base) }),
    draw("polyline", { class: "path", points: values.map((value, place) => `${x(place)},${y(value)}`).join(" ") }),
  );
  points.forEach((point, place) => {
    svg.append(
      draw("circle", { class: point.isNow ? "mark accepted choice" : "mark accepted", cx: x(place), cy: y(point.value), r: point.isNow ? 6 : 4 }),
      draw("text", { class: point.isNow ? "value now" : "value", x: x(place), y: y(point.value) - 11, "text-anchor": "middle" }, format(point.value)),
      draw("text", { class: "tick", x: x(place), y: height - 6, "text-anchor": "middle" }, (place ? "" : "δ ") + short(point.delta, 4)),
    );
  });
  return make("figure", { class: "panel" }, make("figcaption", {}, make("strong", {}, title), make("span", {}, explanation)), svg);
}

function drawExits(figure, lane) {
  const { width: positions, tokens } = data.exits;
  const sum = (column) => column.reduce((total, exits) => total + exits, 0);
  // As far as outputs go here or with the full model; low thresholds make some that never end.
  const count = 1 + Math.max(0, ...[0, lane].map((each) => tokens[each].findLastIndex((column) => sum(column) > 0)));
  const columns = tokens[lane].slice(0, count);
  const totals = columns.map(sum);
  const most = Math.max(...totals, 1);
  const plot = plotOf(figure, figure.clientWidth < 520 ? 260 : 300, [10, 16, 44, 52]);
  const strip = 34;
  const base = plot.bottom - strip - 10;
  const y = linear([0, 1], [base, plot.top]);
  const step = plot.width / Math.max(count, 1);
  drawGrid(plot, [0, 0.5, 1], y, percent);
  columns.forEach((column, place) => {
    if (!totals[place]) return;
    let below = 0;
    const x = plot.left + place * step;
    const gap = step > 6 ? 1 : 0;
    column.forEach((exits, layer) => {
      if (!exits) return;
      const share = exits / totals[place];
      const height = y(below) - y(below + share);
      plot.svg.append(draw("rect", { class: `part l${layer + 1}`, x, y: y(below + share), width: step - gap, height: Math.max(height, 0.5) }));
      below += share;
    });
    const height = Math.max((totals[place] / most) * strip, 1);
    plot.svg.append(draw("rect", { class: "strip", x, y: plot.bottom - height, width: step - gap, height }));
  });
  const every = Math.max(1, Math.ceil((count * 28) / plot.width));
  for (let place = 0; place < count; place += 1) {
    if (place % every && place !== count - 1) continue;
    if (place !== count - 1 && count - 1 - place < every) continue;
    plot.svg.append(
      draw("text", { class: "tick", x: plot.left + (place + 0.5) * step, y: plot.bottom + 16, "text-anchor": "middle" }, String(place * positions + 1)),
    );
  }
  plot.svg.append(
    draw("text", { class: "axis-name", x: plot.right, y: plot.bottom + 36, "text-anchor": "end" }, "position in the output →"),
    draw("text", { class: "tick", x: plot.left - 8, y: plot.bottom - 2, "text-anchor": "end" }, "tokens"),
  );
  plot.svg.setAttribute("aria-label", `Shares of exit layers at ${count} output positions, ${laneName(lane)}`);
  figure.replaceChildren(plot.svg);

  figure.describe = (place) => {
    const first = place * positions + 1;
    const used = columns[place].map((exits, layer) => [exits, layer + 1]).filter(([exits]) => exits);
    used.sort((one, other) => other[0] - one[0]);
    return [
      positions > 1 ? `positions ${first}–${first + positions - 1}` : `position ${first}`,
      `${whole(totals[place])} tokens`,
      ...used.slice(0, 5).map(([exits, layer]) => `layer ${layer}: ${percent(exits / totals[place])}`),
      ...(used.length > 5 ? [`others: ${percent(sum(used.slice(5).map(([exits]) => exits)) / totals[place])}`] : []),
    ];
  };
  figure.place = (place) => [plot.left + (place + 0.5) * step, plot.top + 20];
  figure.columns = { plot, count };
}

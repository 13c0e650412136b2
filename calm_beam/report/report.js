// The page: what is chosen, and everything that follows it.

const data = JSON.parse(byId("data").textContent);
const firstPromise = data.entries.findIndex((entry) => entry.chosen > 0);
const state = { entry: Math.max(firstPromise, 0), lane: 0, isWhole: false, query: "", onlyChanged: false, shown: PAGE };
state.lane = data.entries[state.entry].chosen;

function promiseName(entry) {
  const { consistency, metric, loss: kind } = data.objectives[entry.objective];
  const outcome = entry.chosen ? `λ ${short(entry.threshold, 6)}` : "never exit";
  return `${consistency}${kind === "relu" ? " (relu)" : ""}, ${metric}, δ ${short(entry.delta, 6)}, ε ${short(entry.epsilon, 4)}: ${outcome}`;
}

function current() {
  return data.entries[state.entry];
}

function risksNow() {
  return data.objectives[current().objective].risks;
}

// What never changes.
function writeOnce() {
  byId("made").textContent = `${data.model} · ${data.created.slice(0, 16).replace("T", " ")} UTC`;
  byId("entry").append(...data.entries.map((entry, index) => make("option", { value: index }, promiseName(entry))));
  byId("condition").textContent = [data.condition, data.together].filter(Boolean).join(" ");
  // What may void a promise stands right below it.
  for (const [kind, text] of data.cautions) byId(kind === "void" ? "cautions" : "notes").append(make("li", { class: kind }, text));
  for (const remark of data.remarks) byId("notes").append(make("li", {}, remark));
  if (data.failures.length) {
    const failures = data.failures.map(([name, reason]) => make("li", {}, make("code", {}, name), reason ? `: ${reason}` : ""));
    const [, failed] = data.counts.find(([name]) => name.startsWith("failed"));
    const summary = `Which examples failed, and why${failed > failures.length ? ` (${failures.length} of ${whole(failed)})` : ""}`;
    byId("cautions").append(make("li", { class: "void" }, make("details", {}, make("summary", {}, summary), make("ul", {}, ...failures))));
  }
  byId("facts").append(...data.facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  const slider = byId("slider");
  slider.max = data.thresholds.length;
  slider.value = state.lane;
  byId("entry").value = state.entry;
  if (data.exits) {
    byId("exits-scale").append(...scaleOf(data.numLayers, "exit layer"));
    byId("examples-scale").append(...scaleOf(data.numLayers, "exit layer"), make("span", { class: "name" }, make("span", { class: "token different" }, "different"), " from the other output"));
  } else {
    byId("exits").hidden = true;
    byId("examples").hidden = true;
  }
}

function writePromise() {
  const entry = current();
  byId("sentence").replaceChildren(...entry.sentence.map((part, place) => (place % 2 ? make("strong", {}, part) : part)));
  byId("sentence").classList.toggle("never", !entry.chosen);
  byId("end").textContent = entry.end;
  const tile = (value, name, isLoud) => make("li", isLoud ? { class: "loud" } : {}, make("strong", {}, value), make("span", {}, name));
  const cut = data.exits ? data.exits.cut[entry.chosen] : null;
  const cutShare = data.exits && data.exits.outputs < data.counts[0][1] ? ` of ${whole(data.exits.outputs)}` : "";
  byId("tiles").replaceChildren(
    tile(entry.chosen ? short(entry.threshold, 6) : "never exit", "threshold λ"),
    tile(`${entry.layers.toFixed(2)} of ${data.numLayers}`, `layers per token, ${percent(1 - entry.layers / data.numLayers)} saved`),
    tile(loss(entry.risk), `measured risk, at δ ${short(entry.delta, 6)}`),
    ...data.counts.map(([name, count, isLoud]) => tile(whole(count), name, isLoud)),
    ...(cut === null ? [] : [tile(`${whole(cut)}${cutShare}`, `outputs cut at ${data.exits.longest} tokens`, cut > 0)]),
  );
  const tested = entry.tests.filter((test) => test !== NOT_TESTED).length;
  byId("risk-lead").textContent =
    `Mean loss over ${whole(entry.units)} ${data.counts[1][0] === "clusters" ? "clusters" : "examples"} at each threshold; ` +
    `${tested} of ${data.gridSize} thresholds were tested by ${entry.procedure} with p-value ${entry.pValue}.` +
    (data.gridSize > data.thresholds.length ? ` The page shows ${data.thresholds.length} of the grid.` : "") +
    (data.planned > data.gridSize ? ` Of ${data.planned} planned thresholds the lower ones were never decoded: no test went so far.` : "");
  const key = (name, text) => {
    const svg = draw("svg", { width: 14, height: 14, viewBox: "0 0 14 14", "aria-hidden": "true" });
    if (name === "accepted") svg.append(draw("circle", { class: "mark accepted", cx: 7, cy: 7, r: 4 }));
    if (name === "failed") svg.append(draw("path", { class: "mark failed", d: "M2,2l10,10m0,-10l-10,10" }));
    if (name === "open") svg.append(draw("circle", { class: "mark open", cx: 7, cy: 7, r: 3 }));
    if (name === "full") svg.append(draw("rect", { class: "mark full", x: 3, y: 3, width: 8, height: 8 }));
    return make("li", {}, svg, text);
  };
  byId("risk-legend").replaceChildren(
    key("full", "full model"),
    key("accepted", "proved safe"),
    key("failed", entry.procedure === "fixed_sequence" ? "not proved: the test stops" : "not proved safe"),
    ...(entry.tests.slice(1).includes(NOT_TESTED) ? [key("open", "not tested")] : []),
  );
  byId("risk-table").replaceChildren(riskTable(entry));
  writeSavings(entry);
}

function riskTable(entry) {
  const risks = risksNow();
  const rows = risks.map((risk, lane) =>
    make(
      "tr",
      lane === entry.chosen ? { class: "now" } : {},
      make("th", { scope: "row" }, lane ? short(data.thresholds[lane - 1], 6) : "never exit"),
      make("td", {}, data.layers[lane].toFixed(2)),
      make("td", {}, loss(risk)),
      make("td", {}, lane ? short(entry.pValues[lane], 2) : "–"),
      make("td", { class: "word" }, verdict(entry, lane)),
    ),
  );
  return tableOf(["threshold", "layers", "risk", "p-value", "test"], rows);
}

function tableOf(names, rows) {
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}

function writeSavings(entry) {
  const alike = data.entries
    .map((other, index) => ({ other, index }))
    .filter(({ other }) => other.objective === entry.objective && other.epsilon === entry.epsilon)
    .sort((one, two) => one.other.delta - two.other.delta);
  const points = (base, valueOf) =>
    alike
      .map(({ other, index }) => ({ delta: other.delta, value: valueOf(other, index), base, isNow: other === entry }))
      .filter(({ value }) => value !== null);
  const panels = [drawPanel("Layers per token", `of ${data.numLayers}`, points(data.numLayers, (other) => other.layers), (value) => value.toFixed(2))];
  const times = (value) => `×${value.toFixed(2)}`;
  if (data.savings) {
    panels.push(
      drawPanel("FLOPs, as the paper’s table", "full model / with exits", points(1, (_, index) => data.savings.flops[index][1]), times),
      drawPanel("FLOPs, by Appendix B", "full model / with exits", points(1, (_, index) => data.savings.flops[index][0]), times),
    );
  }
  if (data.speedups) {
    const measured = points(1, (_, index) => data.speedups[index]);
    if (measured.length) panels.push(drawPanel("Speedup", "measured, batch of one", measured, times));
  }
  byId("saved-panels").replaceChildren(...panels);
  const { consistency, metric } = data.objectives[entry.objective];
  byId("saved-lead").textContent =
    `At the thresholds chosen for ${consistency} consistency, ${metric}, ε = ${short(entry.epsilon, 4)}. Dashed: the full model.` +
    (data.savings ? ` Operations are the decoder’s, exit tests included, counted over ${whole(data.savings.examples)} examples.` : "") +
    (data.savings && data.savings.flops.flat().some((factor) => factor < 1) ? " Below ×1, exit tests cost more than skipped layers save." : "");
  const rows = data.entries.map((other, index) => {
    const objective = data.objectives[other.objective];
    const choose = make("button", { type: "button", class: "link", "data-entry": index }, objective.consistency, make("small", {}, objective.metric));
    return make(
      "tr",
      other === entry ? { class: "now" } : {},
      make("th", { scope: "row" }, choose),
      make("td", {}, short(other.delta, 6)),
      make("td", {}, short(other.epsilon, 4)),
      make("td", {}, other.chosen ? short(other.threshold, 6) : "never exit"),
      make("td", {}, other.layers.toFixed(2)),
      make("td", {}, percent(1 - other.layers / data.numLayers)),
      make("td", {}, loss(other.risk)),
      ...(data.savings ? [make("td", {}, times(data.savings.flops[index][1])), make("td", {}, times(data.savings.flops[index][0]))] : []),
      ...(data.speedups ? [make("td", {}, data.speedups[index] === null ? "–" : times(data.speedups[index]))] : []),
    );
  });
  const flops = data.savings ? ["FLOPs (table)", "FLOPs (App. B)"] : [];
  const speedups = data.speedups ? ["speedup"] : [];
  byId("saved-table").replaceChildren(tableOf(["promise", "δ", "ε", "threshold", "layers", "saved", "risk", ...flops, ...speedups], rows));
}

function writeLane() {
  const { lane } = state;
  const entry = current();
  const risk = risksNow()[lane];
  byId("lambda").replaceChildren(lane ? make("span", {}, "λ ") : "", lane ? short(data.thresholds[lane - 1], 6) : "never exit");
  byId("reading").replaceChildren(
    make("span", {}, `${data.layers[lane].toFixed(2)} of ${data.numLayers} layers`),
    make("span", {}, `risk ${loss(risk)} ${risk <= entry.delta ? "≤" : ">"} δ ${short(entry.delta, 6)}`),
    make("span", { class: `verdict v${lane ? entry.tests[lane] : 3}` }, verdict(entry, lane)),
  );
  byId("slider").setAttribute("aria-valuetext", laneName(lane));
  byId("chosen").textContent = entry.chosen ? `Back to ${short(entry.threshold, 6)}` : "Never exit";
  byId("chosen").disabled = lane === entry.chosen;
  drawRisk(byId("risk-chart"), entry, lane, state.isWhole);
  byId("range").textContent = state.isWhole ? "Near δ" : "Whole range";
  byId("range").setAttribute("aria-pressed", state.isWhole);
  if (data.exits) {
    drawExits(byId("exits-chart"), lane);
    const { exits, counts } = data;
    const of = exits.outputs < counts[0][1] ? `${whole(exits.outputs)} of ${whole(counts[0][1])}` : `all ${whole(exits.outputs)}`;
    byId("exits-lead").textContent = `Shares of exit layers at each position of the output, ${laneName(lane)}, over ${of} examples; below, how many outputs are that long. ${whole(exits.cut[lane])} outputs were cut at ${exits.longest} tokens.`;
    writeExamples();
  }
}

function writeExamples() {
  const { found, changed } = chosenExamples(state.lane, state.query, state.onlyChanged);
  const { shown, all, seed } = data.sample;
  const sampled = shown < all ? `${whole(shown)} of ${whole(all)} examples, drawn by seed ${seed}.` : `All ${whole(all)} examples.`;
  byId("examples-lead").textContent =
    `${sampled} At ${laneName(state.lane)}, ${whole(changed)} of these outputs differ from the full model’s. Hover, tap, or go with the arrow keys: a token’s layer and confidence.` +
    (data.sample.hasPieces ? "" : " Without the vocabulary, tokens are shown as ids.");
  byId("found").textContent = state.query || state.onlyChanged ? `${whole(found.length)} found` : "";
  byId("list").replaceChildren(...found.slice(0, state.shown).map((index) => exampleCard(index, state.lane)));
  byId("more").hidden = found.length <= state.shown;
  byId("more").textContent = `Show ${whole(Math.min(PAGE, found.length - state.shown))} more of ${whole(found.length - state.shown)}`;
}

const waiting = new Set();

// Several moves of the slider between two frames are drawn once.
function later(write) {
  if (waiting.size === 0) {
    requestAnimationFrame(() => {
      const writes = [...waiting];
      waiting.clear();
      for (const each of writes) each();
    });
  }
  waiting.add(write);
}

function moveTo(lane) {
  state.lane = Math.min(Math.max(lane, 0), data.thresholds.length);
  byId("slider").value = state.lane;
  hideTip();
  later(writeLane);
}

function choose(index) {
  state.entry = index;
  byId("entry").value = index;
  writePromise();
  moveTo(current().chosen);
}

function listenToChart(figure, onPick) {
  let active = 0;
  const show = (column) => {
    active = column;
    const lines = figure.describe(column);
    const box = figure.getBoundingClientRect();
    const [x, y] = figure.place(column);
    showTip(lines, box.left + x, box.top + y);
    return lines;
  };
  figure.addEventListener("pointermove", (event) => show(columnAt(event, figure, figure.columns.plot, figure.columns.count)));
  figure.addEventListener("pointerleave", hideTip);
  figure.addEventListener("blur", hideTip);
  figure.addEventListener("click", (event) => onPick && onPick(columnAt(event, figure, figure.columns.plot, figure.columns.count)));
  figure.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter" && onPick) onPick(active);
    if (event.key === "Escape") hideTip();
    if (!move) return;
    event.preventDefault();
    say(show(Math.min(Math.max(active + move, 0), figure.columns.count - 1)));
  });
}

function showToken(span) {
  const { example } = span.closest(".example").dataset;
  const { lane } = span.closest(".output").dataset;
  const { lines, layer } = tokenLines(Number(example), Number(lane), Number(span.dataset.place));
  const box = span.getBoundingClientRect();
  showTip(lines, box.left + box.width / 2, box.top, `l${layer}`);
  return lines;
}

function listenToTokens(list) {
  const tokenOf = (event) => event.target.closest(".output .token");
  const over = (event) => {
    const span = tokenOf(event);
    if (span) showToken(span);
    else hideTip();
  };
  list.addEventListener("pointerover", over);
  list.addEventListener("click", over);
  list.addEventListener("pointerleave", hideTip);
  list.addEventListener("focusout", (event) => {
    hideTip();
    for (const span of event.target.querySelectorAll(".active")) span.classList.remove("active");
  });
  list.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const output = event.target.closest(".output");
    if (event.key === "Escape") hideTip();
    if (!move || !output) return;
    event.preventDefault();
    const spans = [...output.querySelectorAll(".token")];
    const active = spans.findIndex((span) => span.classList.contains("active"));
    const next = spans[Math.min(Math.max(active + move, 0), spans.length - 1)];
    if (active >= 0) spans[active].classList.remove("active");
    if (!next) return;
    next.classList.add("active");
    say(showToken(next));
  });
}

function listen() {
  byId("entry").addEventListener("change", (event) => choose(Number(event.target.value)));
  byId("slider").addEventListener("input", (event) => moveTo(Number(event.target.value)));
  byId("chosen").addEventListener("click", () => moveTo(current().chosen));
  byId("range").addEventListener("click", () => {
    state.isWhole = !state.isWhole;
    writeLane();
  });
  byId("saved-table").addEventListener("click", (event) => {
    const button = event.target.closest("[data-entry]");
    if (button) choose(Number(button.dataset.entry));
  });
  byId("search").addEventListener("input", (event) => {
    Object.assign(state, { query: event.target.value, shown: PAGE });
    later(writeExamples);
  });
  byId("changed").addEventListener("change", (event) => {
    Object.assign(state, { onlyChanged: event.target.checked, shown: PAGE });
    writeExamples();
  });
  byId("more").addEventListener("click", () => {
    state.shown += PAGE;
    writeExamples();
  });
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
  });
  addEventListener("scroll", hideTip, { passive: true });
  listenToChart(byId("risk-chart"), moveTo);
  if (data.exits) {
    listenToChart(byId("exits-chart"), null);
    listenToTokens(byId("list"));
  }
  let { clientWidth } = document.documentElement;
  addEventListener("resize", () => {
    if (clientWidth === document.documentElement.clientWidth) return;
    ({ clientWidth } = document.documentElement);
    later(writeLane);
  });
}

writeOnce();
writePromise();
writeLane();
listen();

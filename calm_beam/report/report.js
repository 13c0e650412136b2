// The page: what is chosen, and everything that follows it.

const data = JSON.parse(byId("data").textContent);
const firstPromise = data.entries.findIndex((entry) => entry.chosen > 0);
const state = { entry: data.served ?? Math.max(firstPromise, 0), lane: 0, isWhole: false, query: "", onlyChanged: false, shown: PAGE };
state.lane = data.entries[state.entry].chosen;

// A promise of a tail is about the share of outputs that lose more.
function kindName({ consistency, loss, tail }) {
  return `${consistency}${loss === "relu" ? " (relu)" : ""}${tail === null ? "" : ` > ${short(tail, 6)}`}`;
}

// What matters comes first, since narrow screens cut the rest off, and what all promises share is left out.
function promiseName(entry) {
  const nameOf = (other) => {
    const objective = data.objectives[other.objective];
    const group = objective.group === null ? "all prompts" : `group ${isolated(objective.group)}`;
    return [group, `ε ${short(other.epsilon, 4)}`, kindName(objective), isolated(objective.metric)];
  };
  const outcome = entry.chosen ? `λ ${short(entry.threshold, 6)}` : "never exit";
  const differing = nameOf(entry).filter((name, place) => data.entries.some((other) => nameOf(other)[place] !== name));
  return [outcome, `δ ${short(entry.delta, 6)}`, ...differing].join(" · ");
}

function current() {
  return data.entries[state.entry];
}

function examples() {
  return data.counts[0][2];
}

function times(factor) {
  return `×${factor.toFixed(2)}`;
}

// A share more or fewer than the full model has.
function change(share) {
  const text = percent(share);
  return share > 0 && text !== "0 %" ? `+${text}` : minus(text.replace("-0 %", "0 %"));
}

function risksNow() {
  return data.objectives[current().objective].risks;
}

function layersNow() {
  return data.objectives[current().objective].layers;
}

// What never changes.
function writeOnce() {
  byId("made").append(foreign(data.model), ` · ${data.created.slice(0, 16).replace("T", " ")} UTC`);
  byId("entry").append(...data.entries.map((entry, index) => make("option", { value: index }, promiseName(entry))));
  byId("condition").textContent = [data.condition, data.together].filter(Boolean).join(" ");
  // What may void a promise stands right below it.
  for (const [kind, text] of data.cautions) byId(kind === "void" ? "cautions" : "notes").append(make("li", { class: kind }, text));
  for (const remark of data.remarks) byId("notes").append(make("li", {}, foreign(remark)));
  if (data.failures.length) {
    const failures = data.failures.map(([name, reason]) => make("li", {}, make("code", {}, foreign(name)), ...(reason ? [": ", foreign(reason)] : [])));
    const [, , failed] = data.counts.find(([name]) => name.startsWith("failed"));
    const summary = `Which examples failed, and why${failed > failures.length ? ` (${failures.length} of ${whole(failed)})` : ""}`;
    byId("cautions").append(make("li", { class: "void" }, make("details", {}, make("summary", {}, summary), make("ul", {}, ...failures))));
  }
  byId("facts").append(...data.facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, foreign(value))]));
  const slider = byId("slider");
  slider.max = data.thresholds.length;
  slider.value = state.lane;
  byId("entry").value = state.entry;
  if (data.exits) {
    byId("exits-scale").append(...scaleOf(data.numLayers, "exit layer"));
    byId("examples-scale").append(...scaleOf(data.numLayers, "exit layer"), make("span", { class: "name" }, make("span", { class: "token different" }, "words that differ"), " from the other output"));
  } else {
    byId("exits").hidden = true;
    byId("examples").hidden = true;
  }
}

function writePromise() {
  const entry = current();
  byId("sentence").replaceChildren(...entry.sentence.map((part, place) => (place % 2 ? make("strong", {}, foreign(together(part))) : part)));
  byId("sentence").classList.toggle("never", !entry.chosen);
  byId("end").textContent = together(entry.end);
  const tile = (value, name, isLoud) => make("li", isLoud ? { class: "loud" } : {}, make("strong", {}, value), make("span", {}, together(name)));
  const cut = data.exits ? data.exits.cut[entry.chosen] : null;
  const cutShare = data.exits && data.exits.outputs < examples() ? ` of ${whole(data.exits.outputs)}` : "";
  const operations = entry.operations ? `; ${entry.operations} operations` : "";
  byId("tiles").replaceChildren(
    tile(entry.chosen ? short(entry.threshold, 6) : "never exit", "threshold λ"),
    tile(`${entry.layers.toFixed(2)} of ${data.numLayers}`, `layers per token, ${percent(1 - entry.layers / data.numLayers)} saved${operations}`),
    tile(lossBeside(entry.risk, entry.delta), `measured risk, at δ ${short(entry.delta, 6)}`),
    ...data.counts.map(([one, many, count, isLoud], place) =>
      place === 0 && data.objectives[entry.objective].group !== null
        ? tile(`${whole(entry.units)} of ${whole(count)}`, "examples, those of the group", isLoud)
        : tile(whole(count), count === 1 ? one : many, isLoud),
    ),
    ...(cut === null ? [] : [tile(`${whole(cut)}${cutShare}`, `${cut === 1 && !cutShare ? "output" : "outputs"} cut at ${counted(data.exits.longest, "token", "tokens")}`, cut > 0)]),
  );
  const tested = entry.tests.filter((test) => test !== NOT_TESTED).length;
  const hasClusters = data.counts[1][0] === "cluster";
  const { tail, group } = data.objectives[entry.objective];
  byId("risk-lead").textContent =
    `${tail === null ? "Mean loss" : `Share of outputs that lose more than ${short(tail, 6)}`} over ${group === null ? "" : "the group’s "}${hasClusters ? counted(entry.units, "cluster", "clusters") : counted(entry.units, "example", "examples")} at each threshold; ` +
    `${whole(tested)} of ${counted(data.gridSize, "threshold", "thresholds")} ${tested === 1 ? "was" : "were"} tested by ${entry.procedure} with p-value ${entry.pValue}.` +
    (data.gridSize > data.thresholds.length ? ` The page shows ${whole(data.thresholds.length)} of the grid.` : "") +
    (data.planned > data.gridSize ? ` Of ${counted(data.planned, "planned threshold", "planned thresholds")} the lower ones were never decoded: no test went so far.` : "");
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

function writeProof() {
  const entry = current();
  byId("proof").hidden = !entry.looks;
  if (!entry.looks) return;
  const followed = entry.chosen ? entry.threshold : data.thresholds[0];
  byId("proof-lead").textContent =
    `${data.rounds} Capital is what a bettor against “the risk at λ ${short(followed, 6)} exceeds δ” would have made of 1. ` +
    `If that were true, it would come to 1 / ε with probability at most ε, so a capital of 1 / ε proves the threshold, at whatever round. ` +
    `Filled: ${entry.chosen ? "the threshold was proved by then" : "never here, since nothing was proved"}.`;
  drawProof(byId("proof-chart"), entry);
  const rows = entry.looks.map((look, place) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, String(place + 1)),
      make("td", {}, whole(look.n)),
      make("td", {}, look.threshold === null ? "never exit" : short(look.threshold, 6)),
      make("td", {}, look.layers.toFixed(2)),
      make("td", {}, lossBeside(look.risk, entry.delta)),
      make("td", {}, short(Math.exp(look.logCapital))),
    ),
  );
  byId("proof-table").replaceChildren(tableOf(["round", "counted", "proved", "layers", "risk", "capital"], rows));
}

function riskTable(entry) {
  const risks = risksNow();
  const rows = risks.map((risk, lane) =>
    make(
      "tr",
      lane === entry.chosen ? { class: "now" } : {},
      make("th", { scope: "row" }, lane ? short(data.thresholds[lane - 1], 6) : "never exit"),
      make("td", {}, layersNow()[lane].toFixed(2)),
      make("td", {}, lossBeside(risk, entry.delta)),
      make("td", {}, lane ? pValue(entry, lane) : "–"),
      make("td", { class: "word" }, verdict(entry, lane)),
    ),
  );
  return tableOf(["threshold", "layers", "risk", "p-value", "test"], rows);
}

// Every cell also has the name of its column: on narrow screens rows become cards, which have no head.
function tableOf(names, rows) {
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)));
  for (const row of rows) [...row.cells].forEach((cell, place) => cell.setAttribute("data-name", names[place]));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}

// Operations at a promised threshold by one of the counts, as a share more or fewer than the full model has.
function operationsOf(index, count) {
  return 1 / data.savings.flops[index][count] - 1;
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
  // At a single tolerance such drawings would have one point each: what others would buy shows in the curve.
  const panels =
    alike.length === 1
      ? [drawExchange(entry, layersNow())]
      : [drawPanel("Layers per token", `of ${data.numLayers}`, points(data.numLayers, (other) => other.layers), (value) => value.toFixed(2))];
  if (data.savings && alike.length > 1) {
    panels.push(
      drawPanel("Operations", "against the full model", points(0, (_, index) => operationsOf(index, 0)), change),
      drawPanel("Operations, as in Table 2", "against the full model", points(0, (_, index) => operationsOf(index, 1)), change),
    );
  }
  if (data.speedups && alike.length > 1) {
    const measured = points(1, (_, index) => data.speedups[index]);
    if (measured.length) panels.push(drawPanel("Speedup", "measured, batch of one", measured, times));
  }
  byId("saved-panels").replaceChildren(...panels);
  const objective = data.objectives[entry.objective];
  byId("saved-lead").replaceChildren(
    `At the thresholds chosen for ${objective.consistency} consistency${objective.tail === null ? "" : `, losses above ${short(objective.tail, 6)}`}, `,
    foreign(objective.metric),
    objective.group === null ? "" : ", group ",
    objective.group === null ? "" : foreign(objective.group),
    `, ε = ${short(entry.epsilon, 4)}. ${alike.length === 1 ? "Risks are measured: only tests tell what is safe." : "Dashed: the full model."}`,
    data.savings ? ` “Operations” compares the decoder’s with the full model’s, with the tests that each token took${data.savings.byMeanLayers ? ", from the mean layers and without attention" : ""}. “As in Table 2” counts as that table of the CALM paper seems to: for every token the tests of its output’s deepest one, and a projection besides. ${data.savings.byMeanLayers ? "It is" : "Both are"} counted over ${counted(data.savings.examples, "example", "examples")}${data.objectives.some(({ group }) => group !== null) ? " of all groups" : ""}.` : "",
    data.savings && data.savings.flops.flat().some((factor) => factor < 1) ? " A plus sign says more operations than the full model’s: exit tests cost more than skipped layers save." : "",
  );
  const rows = data.entries.map((other, index) => {
    const promised = data.objectives[other.objective];
    const choose = make("button", { type: "button", class: "link", "data-entry": index }, kindName(promised), make("small", {}, foreign(promised.metric)), ...(promised.group === null ? [] : [make("small", {}, "group ", foreign(promised.group))]));
    return make(
      "tr",
      other === entry ? { class: "now" } : {},
      make("th", { scope: "row" }, choose),
      make("td", {}, short(other.delta, 6)),
      make("td", {}, short(other.epsilon, 4)),
      make("td", {}, other.chosen ? short(other.threshold, 6) : "never exit"),
      make("td", {}, other.layers.toFixed(2)),
      make("td", {}, percent(1 - other.layers / data.numLayers)),
      make("td", {}, lossBeside(other.risk, other.delta)),
      ...(data.savings ? [make("td", {}, change(operationsOf(index, 0))), make("td", {}, change(operationsOf(index, 1)))] : []),
      ...(data.speedups ? [make("td", {}, data.speedups[index] === null ? "–" : times(data.speedups[index]))] : []),
    );
  });
  const flops = data.savings ? ["operations", "as in Table 2"] : [];
  const speedups = data.speedups ? ["speedup"] : [];
  byId("saved-table").replaceChildren(tableOf(["promise", "δ", "ε", "threshold", "layers", "layers saved", "risk", ...flops, ...speedups], rows));
}

function writeLane() {
  const { lane } = state;
  const entry = current();
  const risk = risksNow()[lane];
  byId("lambda").replaceChildren(lane ? make("span", {}, "λ ") : "", lane ? short(data.thresholds[lane - 1], 6) : "never exit");
  byId("reading").replaceChildren(
    make("span", {}, `${layersNow()[lane].toFixed(2)} of ${data.numLayers} layers`),
    make("span", {}, together(`risk ${lossBeside(risk, entry.delta)} ${risk <= entry.delta ? "≤" : ">"} δ ${short(entry.delta, 6)}`)),
    make("span", { class: `verdict v${lane ? (lane === entry.unconfirmed ? NOT_ACCEPTED : entry.tests[lane]) : 3}` }, verdict(entry, lane)),
  );
  byId("slider").setAttribute("aria-valuetext", laneName(lane));
  byId("chosen").textContent = entry.chosen ? `Back to ${short(entry.threshold, 6)}` : "Never exit";
  byId("chosen").disabled = lane === entry.chosen;
  drawRisk(byId("risk-chart"), entry, lane, state.isWhole);
  writeProof();
  byId("range").textContent = state.isWhole ? "Near δ" : "Whole range";
  byId("range").setAttribute("aria-pressed", state.isWhole);
  if (data.exits) {
    drawExits(byId("exits-chart"), lane);
    const { exits } = data;
    const of = exits.outputs < examples() ? `${whole(exits.outputs)} of ${counted(examples(), "example", "examples")}` : counted(exits.outputs, "example", "examples");
    const cut = exits.cut[lane];
    byId("exits-lead").textContent =
      `Shares of exit layers at each position of the output, ${laneName(lane)}, over ${of}; below, n, the tokens there. Faded: n below ${FEW_TOKENS}, of which shares say little. ` +
      `${counted(cut, "output was", "outputs were")} cut at ${counted(exits.longest, "token", "tokens")}.`;
    writeExamples();
  }
}

function writeExamples() {
  const { found, changed } = chosenExamples(state.lane, state.query, state.onlyChanged);
  const { shown, all, seed } = data.sample;
  const sampled = shown < all ? `${whole(shown)} of ${counted(all, "example", "examples")}, drawn by seed ${seed}.` : all === 1 ? "The only example." : `All ${whole(all)} examples.`;
  byId("examples-lead").textContent =
    `${sampled} At ${laneName(state.lane)}, ${whole(changed)} of these outputs ${changed === 1 ? "differs" : "differ"} from the full model’s. Hover, tap, or go with the arrow keys: a token’s layer and confidence.` +
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
  addEventListener("scroll", hideTip, { passive: true });
  listenToChart(byId("risk-chart"), moveTo);
  if (current().looks) listenToChart(byId("proof-chart"), null);
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

// The examples: every token in the colour of its exit layer.

const PAGE = 20;
const unpacked = new Map();

function outputsOf(index) {
  if (!unpacked.has(index)) unpacked.set(index, unpack(data.examples[index].outputs || []));
  return unpacked.get(index);
}

// Returns what stands before a token, and the token as it is read.
function written(piece, isFirst) {
  if (piece === "") return { space: isFirst ? "" : " ", text: "end", isEnd: true };
  const text = piece.replace(/▁/g, " ");
  // A token that is a space alone is seen by its colour; in other tokens the space is none of theirs.
  if (text === " " || !text.startsWith(" ")) return { space: "", text, isEnd: false };
  return { space: isFirst ? "" : " ", text: text.slice(1), isEnd: false };
}

function plainText(tokens) {
  return tokens
    .map((token, place) => written(data.pieces[token], place === 0))
    .filter((token) => !token.isEnd)
    .map((token) => token.space + token.text)
    .join("");
}

function tokenSpans(output, isDifferent, isColoured) {
  return output.tokens.flatMap((token, place) => {
    const { space, text, isEnd } = written(data.pieces[token], place === 0);
    const names = ["token"];
    if (isColoured) names.push(`l${output.layers[place]}`, "coloured");
    if (isEnd) names.push("eos");
    if (isDifferent[place]) names.push("different");
    const span = make("span", { class: names.join(" "), "data-place": place }, text);
    return space ? [space, span] : [span];
  });
}

function meanOf(numbers) {
  return numbers.length ? numbers.reduce((sum, number) => sum + number, 0) / numbers.length : 0;
}

function matches(index, words, lane) {
  const example = data.examples[index];
  const outputs = outputsOf(index);
  const texts = [example.id, example.prompt, ...example.references, example.failure || ""];
  if (outputs.length) texts.push(plainText(outputs[0].tokens), plainText(outputs[lane].tokens));
  const text = texts.join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

function isChanged(index, lane) {
  const outputs = outputsOf(index);
  return outputs.length > 0 && !sameTokens(outputs[lane].tokens, outputs[0].tokens);
}

// Returns the examples to show, and how many of all of them an exit changes.
function chosenExamples(lane, query, onlyChanged) {
  const words = query.toLowerCase().split(/\s+/).filter((word) => word !== "");
  const all = data.examples.map((_, index) => index);
  const changed = all.filter((index) => isChanged(index, lane));
  const found = (onlyChanged ? changed : all).filter((index) => words.length === 0 || matches(index, words, lane));
  return { found, changed: changed.length };
}

function labelled(name, note, ...children) {
  return make("div", { class: "row" }, make("p", { class: "label" }, name, note ? make("span", {}, note) : null), ...children);
}

function exampleCard(index, lane) {
  const example = data.examples[index];
  const marks = (example.marks || []).map((mark) => make("span", { class: "badge" }, mark));
  const card = make(
    "li",
    { class: "example", "data-example": index },
    make("p", { class: "id" }, example.id, ...marks),
    make("p", { class: "prompt", dir: "auto" }, example.prompt),
  );
  if (example.failure) {
    card.append(make("p", { class: "failure" }, `failed, counts with loss 1: ${example.failure}`));
    return card;
  }
  const outputs = outputsOf(index);
  const [early, full] = [outputs[lane], outputs[0]];
  const [inEarly, inFull] = differences(early.tokens, full.tokens);
  const changes = inEarly.filter(Boolean).length + inFull.filter(Boolean).length;
  const note = changes === 0 ? "as the full model" : `${changes} ${changes === 1 ? "difference" : "differences"}`;
  const layers = `${meanOf(early.layers).toFixed(1)} layers · ${note}`;
  const text = (output, different, isColoured) =>
    make(
      "p",
      { class: "output", dir: "auto", tabindex: "0", role: "group", "data-lane": isColoured ? lane : 0, "aria-label": isColoured ? "Output with exits; arrow keys go through its tokens" : "Output of the full model; arrow keys go through its tokens" },
      ...(output.tokens.length ? tokenSpans(output, different, isColoured) : [make("em", {}, "nothing")]),
    );
  card.append(
    make(
      "div",
      { class: "pair" },
      labelled(lane ? "early exits" : "full model", layers, text(early, inEarly, true)),
      labelled("full model", null, text(full, inFull, false)),
    ),
  );
  if (example.references.length) {
    card.append(labelled(example.references.length > 1 ? "references" : "reference", null, ...example.references.map((reference) => make("p", { class: "reference", dir: "auto" }, reference))));
  }
  return card;
}

function tokenLines(index, lane, place) {
  const output = outputsOf(index)[lane];
  const layer = output.layers[place];
  const piece = data.pieces[output.tokens[place]];
  return {
    lines: [
      `layer ${layer} of ${data.numLayers}`,
      `confidence ${output.confidences[place].toFixed(3).replace("-", "−")}`,
      piece === "" ? "end of the output" : data.sample.hasPieces ? `token “${piece}”` : `token id ${piece.slice(1)}`,
    ],
    layer,
  };
}

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

// Languages without spaces have words too.
const segmenter = Intl.Segmenter ? new Intl.Segmenter("en", { granularity: "word" }) : null;
const END = "\0";

function segmentsOf(text) {
  const found = segmenter
    ? [...segmenter.segment(text)].map(({ segment, index }) => [segment, index])
    : [...text.matchAll(/\S+/g)].map((match) => [match[0], match.index]);
  return found.filter(([segment]) => segment.trim() !== "");
}

// Returns the words of an output as they are read, with a space before those that have one, and for each word the places
// of its tokens. The end of an output is a word; spaces are none.
function wordsOf(tokens) {
  const pieces = tokens.map((token, place) => written(data.pieces[token], place === 0));
  let text = "";
  const spans = pieces.map((piece) => {
    const start = text.length + (piece.isEnd ? 0 : piece.space.length);
    if (!piece.isEnd) text += piece.space + piece.text;
    return [start, text.length];
  });
  let first = 0;
  const words = segmentsOf(text).map(([segment, start]) => {
    const end = start + segment.length;
    while (first < spans.length && spans[first][1] <= start) first += 1;
    const places = [];
    for (let place = first; place < spans.length && spans[place][0] < end; place += 1) places.push(place);
    const isApart = start === 0 || /\s/.test(text[start - 1]);
    return { word: (isApart ? " " : "") + segment, places };
  });
  pieces.forEach((piece, place) => {
    if (piece.isEnd) words.push({ word: END, places: [place] });
  });
  return words;
}

// Returns for both outputs which of their tokens are in words that differ, and how many words a reader sees differ: where
// words stand for others, the more of the two.
function differingWords(early, full) {
  const [one, other] = [wordsOf(early), wordsOf(full)];
  const [inOne, inOther] = differences(one.map(({ word }) => word), other.map(({ word }) => word));
  const marked = (words, differs, count) => {
    const tokens = new Array(count).fill(false);
    words.forEach(({ places }, index) => differs[index] && places.forEach((place) => (tokens[place] = true)));
    return tokens;
  };
  return { inEarly: marked(one, inOne, early.length), inFull: marked(other, inOther, full.length), count: countedDifferences(inOne, inOther) };
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
  return outputs.length > 0 && !readsAlike(outputs[lane].tokens, outputs[0].tokens);
}

// Whether two outputs have the same words, whatever tokens these are made of.
function readsAlike(one, other) {
  if (sameTokens(one, other)) return true;
  const read = (tokens) => [plainText(tokens).trim().replace(/\s+/g, " "), tokens.some((token) => data.pieces[token] === "")];
  const [[text, ends], [otherText, otherEnds]] = [read(one), read(other)];
  return text === otherText && ends === otherEnds;
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
    make("p", { class: "id" }, foreign(example.id), ...marks),
    make("p", { class: "prompt", dir: "auto" }, example.prompt),
  );
  if (example.failure) {
    card.append(make("p", { class: "failure" }, "failed, counts with loss 1: ", foreign(example.failure)));
    return card;
  }
  const outputs = outputsOf(index);
  const [early, full] = [outputs[lane], outputs[0]];
  const { inEarly, inFull, count } = differingWords(early.tokens, full.tokens);
  const isSame = sameTokens(early.tokens, full.tokens);
  const note = isSame ? "as the full model" : count === 0 ? "same words, other tokens" : counted(count, "word differs", "words differ");
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
      piece === "" ? "end of the output" : data.sample.hasPieces ? `token “${isolated(piece)}”` : `token id ${piece.slice(1)}`,
    ],
    layer,
  };
}

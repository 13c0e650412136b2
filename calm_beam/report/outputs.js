// Outputs of an example, unpacked: the twin of examples.py.

const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";
const MORE_LAYERS = 0x100;

function layerOf(digit) {
  const code = digit.charCodeAt(0);
  return code >= MORE_LAYERS ? code - MORE_LAYERS : DIGITS.indexOf(digit);
}

function spliced(before, splice, between) {
  const [head, tail] = splice;
  return [...before.slice(0, head), ...between, ...before.slice(before.length - tail)];
}

// Returns one output for each lane: places of tokens in the dictionary, layers and confidences.
function unpack(packed) {
  let output = { tokens: [], layers: [], confidences: [] };
  return packed.map((change) => {
    if (change === 0) return output;
    let { tokens, layers, confidences } = output;
    const [ofTokens, ofExits] = change;
    if (ofTokens !== 0) tokens = spliced(tokens, ofTokens, ofTokens[2]);
    if (ofExits !== 0) {
      const exits = ofExits[2].match(/.../gu) || [];
      layers = spliced(layers, ofExits, exits.map((exit) => layerOf(exit[0])));
      confidences = spliced(
        confidences,
        ofExits,
        exits.map((exit) => (DIGITS.indexOf(exit[1]) * DIGITS.length + DIGITS.indexOf(exit[2]) - 1000) / 1000),
      );
    }
    output = { tokens, layers, confidences };
    return output;
  });
}

function sameTokens(one, other) {
  return one === other || (one.length === other.length && one.every((token, place) => token === other[place]));
}

// Returns for both lists which of their members are in no longest common subsequence.
function differences(one, other) {
  let head = 0;
  let tail = 0;
  const most = Math.min(one.length, other.length);
  while (head < most && one[head] === other[head]) head += 1;
  while (tail < most - head && one[one.length - 1 - tail] === other[other.length - 1 - tail]) tail += 1;
  const rows = one.length - head - tail;
  const columns = other.length - head - tail;
  const inOne = new Array(one.length).fill(false);
  const inOther = new Array(other.length).fill(false);
  const longest = Array.from({ length: rows + 1 }, () => new Uint16Array(columns + 1));
  for (let row = rows - 1; row >= 0; row -= 1) {
    for (let column = columns - 1; column >= 0; column -= 1) {
      longest[row][column] =
        one[head + row] === other[head + column]
          ? longest[row + 1][column + 1] + 1
          : Math.max(longest[row + 1][column], longest[row][column + 1]);
    }
  }
  let row = 0;
  let column = 0;
  while (row < rows || column < columns) {
    if (row < rows && column < columns && one[head + row] === other[head + column]) {
      row += 1;
      column += 1;
    } else if (column === columns || (row < rows && longest[row + 1][column] >= longest[row][column + 1])) {
      inOne[head + row] = true;
      row += 1;
    } else {
      inOther[head + column] = true;
      column += 1;
    }
  }
  return [inOne, inOther];
}

// Returns how many members differ, by what `differences` found: of those that stand for each other, the more.
function countedDifferences(inOne, inOther) {
  let count = 0;
  let [one, other] = [0, 0];
  while (one < inOne.length || other < inOther.length) {
    const [fromOne, fromOther] = [one, other];
    while (inOne[one]) one += 1;
    while (inOther[other]) other += 1;
    count += Math.max(one - fromOne, other - fromOther);
    // One that both have.
    one += 1;
    other += 1;
  }
  return count;
}

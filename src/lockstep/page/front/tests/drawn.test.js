import assert from "node:assert/strict";
import { test } from "node:test";
import "./browser.js";

const { coordinates, groups, meshGrid, rankRanges } = await import("../src/grid.js");
const { columnAt, dotted, ends, lastOf, linesModel, nearest, stackModel } = await import("../src/models.js");
const { partColour } = await import("../src/parts.js");
const { ramp, rampEnds } = await import("../src/ramp.js");
const { DARK, LIGHT, dash, mix, seeThrough } = await import("../src/theme.js");
const { STATE_SIGNS } = await import("../src/levels.js");
const { between } = await import("../src/drawing.js");

test("the ramp goes from its first colour to its last, and no further", () => {
  assert.deepEqual(ramp(0), [0x00, 0x22, 0x4e]);
  assert.deepEqual(ramp(1), [0xfe, 0xe8, 0x38]);
  assert.deepEqual([ramp(-1), ramp(2)], [ramp(0), ramp(1)]);
});

test("a few values far above all others do not take the colours of the rest", () => {
  const values = [Array.from({ length: 100 }, (_, at) => (at === 0 ? 50 : 1 + at / 100))];
  const found = rampEnds(values);
  assert.ok(found.isCut && found.most === 50 && found.high < 2 && found.low === 0);
  assert.deepEqual(rampEnds([[1, 2, null]]), { low: 0, high: 2, most: 2, isCut: false, isFlat: false });
  assert.ok(rampEnds([[3, 3.001]]).isFlat);
  assert.equal(rampEnds([[null]]), null);
});

test("ranks have coordinates, the last axis fastest, and talk to those that differ in one", () => {
  assert.deepEqual(coordinates(5, [2, 2, 2]), [1, 0, 1]);
  assert.deepEqual(groups([2, 2], 0), [
    [0, 2],
    [1, 3],
  ]);
  assert.deepEqual(groups([2, 2], 1), [
    [0, 1],
    [2, 3],
  ]);
  assert.equal(rankRanges([0, 1, 2, 5, 7, 8]), "0–2, 5, 7–8");
  assert.ok(rankRanges(Array.from({ length: 20 }, (_, at) => 2 * at)).endsWith(", …"));
});

test("every rank has a place of its own within the room", () => {
  for (const sizes of [[8], [2, 4], [4, 2, 2], [64], [1, 1]]) {
    const grid = meshGrid(sizes, { width: 40, height: 20 }, 300);
    const world = sizes.reduce((product, size) => product * size, 1);
    assert.equal(new Set(grid.places.map(String)).size, world);
    assert.ok(grid.width <= 300);
  }
});

test("curves over different places share one x, and only what is above zero is on a logarithmic axis", () => {
  const curve = (name, x, y, low = null, high = null) => ({ name, x, y, low, high, style: "line" });
  const panel = { x: "step", curves: [curve("a", [1, 2, 3], [1, 0, -1]), curve("b", [2, 4], [5, 6], [4, 5], [6, 7])] };
  const model = linesModel(panel, { start: 0, isLog: false });
  assert.deepEqual([...model.columns[0]], [1, 2, 3, 4]);
  assert.deepEqual(
    model.curves.map(({ at, low, high }) => [at, low, high]),
    [
      [1, null, null],
      [2, 3, 4],
    ],
  );
  const log = linesModel(panel, { start: 0, isLog: true });
  assert.equal(log.lost, 2);
  assert.equal(log.own[0][1], 0);
});

test("times count from the start of the run", () => {
  const panel = { x: "time", curves: [{ name: "a", x: [100, 110], y: [1, 2], low: null, high: null, style: "line" }] };
  assert.deepEqual([...linesModel(panel, { start: 100, isLog: false }).columns[0]], [0, 10]);
});

test("a stack adds up what is not hidden, and begins where its first column does", () => {
  const part = (name, y) => ({ name, x: [10, 20], y });
  const panel = { x: "step", at: [10, 20], begin: 4, parts: [part("compute", [1, 2]), part("input", [3, null])] };
  const all = stackModel(panel, { start: 0, hidden: new Set() });
  assert.deepEqual(all.columns, [
    [4, 10, 20],
    [4, 4, 2],
    [1, 1, 2],
  ]);
  const some = stackModel(panel, { start: 0, hidden: new Set(["compute"]) });
  assert.deepEqual(some.total, [3, 3, 0]);
});

test("values with nothing beside them get a dot", () => {
  assert.deepEqual(dotted([1, null, 2, 3, null, 4], 0), [0, 5]);
  assert.deepEqual(dotted([1, undefined, 2], 5), [0, 2]);
});

test("the nearest value of a curve, the column of a stack, the last value and the ends", () => {
  assert.equal(nearest([1, undefined, undefined, 2], 1, [0, 1, 2, 3]), 0);
  assert.equal(nearest([1, undefined, undefined, 2], 2, [0, 1, 2, 3]), 3);
  assert.equal(nearest([undefined, 1], 0, [0, 1]), null);
  assert.deepEqual([0, 5, 10, 11, 99].map((x) => columnAt([0, 10, 20], x, 1)), [1, 1, 1, 2, 2]);
  assert.equal(lastOf([1, null, undefined]), 0);
  assert.equal(lastOf([]), null);
  assert.deepEqual(ends([null, 3, 1, undefined]), [1, 3]);
  assert.equal(ends([null]), null);
});

test("colours: both themes have as many, a tenth line is told by its dash", () => {
  assert.equal(LIGHT.length, DARK.length);
  assert.notDeepEqual(dash(0), dash(LIGHT.length));
  assert.equal(mix("#000000", "#ffffff", 0.5), "#808080");
  assert.equal(seeThrough("#0067a5", 0.2), "#0067a533");
  assert.equal(partColour("compute", 7), 0);
  assert.equal(partColour("something new", 7), 7);
  assert.equal(between(9, 0, 5), 5);
  assert.ok(Object.values(STATE_SIGNS).every((sign) => sign.length === 1));
});

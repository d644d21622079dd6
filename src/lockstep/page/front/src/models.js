// From a panel of lines or of a stack to what a chart draws: one x for all, and the values of each curve over it.
import uPlot from "uplot";
import { partColour } from "./parts.js";

/** @typedef {number | null | undefined} Value undefined: this curve has no such x */
/** @typedef {{ name: string, style: string, colour: number, at: number, low: number | null, high: number | null }} Drawn */

/**
 * `first` is the first column that was measured. `curves` have a name, a style and the columns of `columns` that are
 * theirs; `told` are these columns with all values, also those that cannot be drawn, and `own` those of each curve.
 * @typedef {{
 *   columns: any, curves: Drawn[], told: Value[][], own: Value[][], total?: number[], lost: number, first: number,
 * }} Model
 */

/**
 * @param {import("./panels").Lines} panel
 * @param {{ start: number, isLog: boolean }} options
 * @returns {Model}
 */
export function linesModel(panel, { start, isLog }) {
  const tables = panel.curves.map((curve) => [
    panel.x === "time" ? curve.x.map((x) => x - start) : curve.x,
    ...[curve.y, curve.low, curve.high]
      .filter((values) => values !== null)
      .map((values) => (isLog ? values.map(abovezero) : values)),
  ]);
  /** @type {any} */
  const columns = tables.length > 0 ? uPlot.join(/** @type {any} */ (tables)) : [[]];
  let next = 1;
  const curves = panel.curves.map((curve, number) => {
    const at = next;
    const hasBand = Boolean(curve.low && curve.high);
    next += hasBand ? 3 : 1;
    return { name: curve.name, style: curve.style, colour: number, at, low: hasBand ? at + 1 : null, high: hasBand ? at + 2 : null };
  });
  const lost = isLog
    ? panel.curves.reduce((sum, curve) => sum + curve.y.filter((y) => y !== null && y <= 0).length, 0)
    : 0;
  const told = isLog ? linesModel(panel, { start, isLog: false }).columns : columns;
  return { columns, curves, told, own: curves.map((curve) => told[curve.at]), lost, first: 0 };
}

/** @param {number | null} value */
function abovezero(value) {
  return value !== null && value > 0 ? value : null;
}

/**
 * Columns on top of one another, without those that are hidden. The last part is the uppermost and drawn first. A column
 * goes from the x before to its own one: one more x before all others, `first` of them, is where the first column begins.
 * @param {import("./panels").Stacked} panel
 * @param {{ start: number, hidden: Set<string> }} options
 * @returns {Model}
 */
export function stackModel(panel, { start, hidden }) {
  const begin = panel.begin ?? panel.at[0] - (panel.at.length > 1 ? panel.at[1] - panel.at[0] : 1);
  const xs = [begin, ...panel.at].map((x) => (panel.x === "time" ? x - start : x));
  const sums = xs.map(() => 0);
  const own = panel.parts.map((part) => [part.y[0], ...part.y]);
  const tops = panel.parts.map((part, number) =>
    own[number].map((value, at) => {
      if (own.every((others) => others[at] === null)) return null;
      if (!hidden.has(part.name)) sums[at] += value ?? 0;
      return sums[at];
    }),
  );
  const curves = panel.parts.map((part, number) => ({
    name: part.name,
    style: "area",
    colour: partColour(part.name, number),
    at: panel.parts.length - number,
    low: null,
    high: null,
  }));
  const columns = [xs, ...tops.reverse()];
  return { columns, curves, told: columns, own, total: sums, lost: 0, first: 1 };
}

/**
 * The values that get a dot: all where they are few, else those with nothing beside them, through which no line goes.
 * @param {Value[]} values
 * @param {number} few
 */
export function dotted(values, few) {
  const known = values.flatMap((value, at) => (value === null || value === undefined ? [] : [at]));
  return known.length <= few ? known : lonely(values);
}

/** @param {Value[]} values */
function lonely(values) {
  const found = [];
  /** @type {Value} */
  let before = null;
  for (let at = 0; at < values.length; at++) {
    if (values[at] === undefined) continue;
    if (values[at] !== null && before === null) {
      let next = at + 1;
      while (next < values.length && values[next] === undefined) next++;
      if (next >= values.length || values[next] === null) found.push(at);
    }
    before = values[at];
  }
  return found;
}

/**
 * The column of a stack that an x is in: the first one that ends there or later.
 * @param {number[]} xs
 * @param {number} x
 * @param {number} least
 */
export function columnAt(xs, x, least) {
  let [low, high] = [least, xs.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] >= x) high = middle;
    else low = middle + 1;
  }
  return low;
}

/**
 * The column nearest to `at` where a curve has a value, within the curve's own ends.
 * @param {Value[]} values
 * @param {number} at
 * @param {number[]} xs
 */
export function nearest(values, at, xs) {
  if (values[at] !== undefined) return at;
  let [left, right] = [at, at];
  while (left >= 0 && values[left] === undefined) left--;
  while (right < values.length && values[right] === undefined) right++;
  if (left < 0 || right >= values.length) return null;
  return xs[at] - xs[left] <= xs[right] - xs[at] ? left : right;
}

/** @param {Value[]} values */
export function lastOf(values) {
  for (let at = values.length - 1; at >= 0; at--) if (values[at] !== null && values[at] !== undefined) return at;
  return null;
}

/** @param {Value[]} values */
export function ends(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

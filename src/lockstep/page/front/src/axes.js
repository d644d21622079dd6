// What stands beside the axes of a chart: steps, times or numbers of ranks below, amounts on the left.
import { TIME_STEPS, isByClock, momentText, timeSplits, timeTexts } from "./clock.js";
import { amount, axisTexts, duration, grouped, logTexts } from "./format.js";
import { ink } from "./theme.js";

/** @typedef {import("./panels").Lines["x"]} XKind */
/** @typedef {import("./format.js").Unit} Unit */

const FONT = '13px system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif';
const WHOLE = [1, 2, 5]
  .flatMap((digit) => Array.from({ length: 12 }, (_, power) => digit * 10 ** power))
  .sort((a, b) => a - b);

const SPLIT_SECONDS = Array.from({ length: 9 }, (_, power) => [1, 2, 5].map((digit) => digit / 10 ** (9 - power))).flat();

/**
 * One place on the x axis in words. Charts over time count from the start of the run.
 * @param {XKind} kind
 * @param {number} x
 * @param {number} start
 */
export function placeText(kind, x, start) {
  if (kind === "time") return momentText(x + start, start);
  if (kind === "seconds") return amount(x, "s");
  return kind === "ranks" ? `${grouped(x)} ${x === 1 ? "rank" : "ranks"}` : `step ${grouped(x)}`;
}

/** @param {XKind} kind */
export function placeHeading(kind) {
  if (kind === "time") return isByClock() ? "time" : "time since the start";
  if (kind === "seconds") return "time";
  return kind === "ranks" ? "ranks" : "step";
}

/**
 * @param {XKind} kind
 * @param {number} start
 * @param {number[]} xs
 */
export function xAxis(kind, start, xs) {
  const isTimed = kind === "time" || kind === "seconds";
  /** @type {any} */
  const axis = {
    ...common(),
    label: isTimed ? undefined : placeHeading(kind),
    labelSize: 22,
    labelGap: 0,
    labelFont: FONT,
    space: isTimed ? 90 : 70,
    size: 34,
  };
  if (kind === "time") {
    axis.incrs = TIME_STEPS;
    axis.space = () => (isByClock() ? 130 : 90);
    axis.splits = (_, __, low, high, step) => timeSplits(low, high, step, start);
    axis.values = (_, splits, __, ___, step) => timeTexts(splits, step, start);
  } else if (kind === "seconds") {
    axis.incrs = [...SPLIT_SECONDS, ...TIME_STEPS.filter((step) => step >= 1)];
    axis.values = (_, splits) => secondsTexts(splits);
  } else {
    axis.incrs = WHOLE;
    axis.values = (_, splits) => splits.map((value) => grouped(value));
    const places = [...new Set(xs)];
    if (kind === "ranks" && places.length <= 12) axis.splits = () => places;
  }
  const texts = axis.values;
  axis.values = (chart, splits, ...rest) => fitting(chart, splits, texts(chart, splits, ...rest));
  return axis;
}

/**
 * @param {Unit} unit
 * @param {boolean} isLog
 */
export function yAxis(unit, isLog) {
  return {
    ...common(),
    size: (chart, values) => (values === null ? 50 : widest(chart, values) + 16),
    space: 30,
    values: (_, splits) => (isLog ? logTexts(decades(splits), unit) : axisTexts(splits, unit)),
  };
}

/** @param {number[]} splits */
function secondsTexts(splits) {
  const most = Math.max(...splits.map(Math.abs));
  return most < 60 ? axisTexts(splits, "s") : splits.map((seconds) => (seconds === 0 ? "0" : duration(seconds)));
}

// The first and the last label may stand out a little; one that would be cut is left out.
export const BESIDE = 24;

function fitting(chart, splits, texts) {
  const { min, max } = chart.scales.x;
  const room = (share) => share * (chart.bbox.width / devicePixelRatio);
  return texts.map((text, at) => {
    const half = widest(chart, [text]) / 2;
    const left = room((splits[at] - min) / (max - min)) + (chart.axes[1]._size ?? 0);
    const right = room((max - splits[at]) / (max - min)) + BESIDE;
    return half <= left && half <= right ? text : "";
  });
}

function common() {
  return {
    font: FONT,
    stroke: () => ink("quiet"),
    grid: { stroke: () => ink("grid"), width: 1 },
    ticks: { stroke: () => ink("grid"), width: 1, size: 5 },
    gap: 6,
  };
}

function widest(chart, values) {
  chart.ctx.save();
  chart.ctx.font = FONT;
  const width = Math.max(...values.map((text) => chart.ctx.measureText(text ?? "").width));
  chart.ctx.restore();
  return Math.ceil(width);
}

// On a logarithmic axis uPlot offers 1 to 9 times every power of ten: name those there is room for.
/** @param {(number | null)[]} splits */
export function decades(splits) {
  const powers = splits.filter((value) => value !== null && isPower(value)).length;
  return splits.map((value) => {
    if (value === null) return null;
    if (isPower(value)) return value;
    const digit = Number(value.toExponential(6).split("e")[0]);
    return powers <= 2 && (digit === 2 || digit === 5) ? value : powers <= 1 && splits.length < 8 ? value : null;
  });
}

/** @param {number} value */
function isPower(value) {
  const power = Math.log10(value);
  return Math.abs(power - Math.round(power)) < 1e-9;
}

/**
 * The ends of the x axis; one place alone gets some room.
 * @param {number | null | undefined} low
 * @param {number | null | undefined} high
 * @returns {[number, number]}
 */
export function xRange(low, high) {
  if (low === null || low === undefined || high === null || high === undefined) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

const FLAT = 1e-3;

/**
 * The ends of the y axis. An amount begins at 0, a bare number (a loss) where its values are.
 * @param {number | null | undefined} low
 * @param {number} high
 * @param {{ unit: string, most?: number | null, isStacked?: boolean, fromZero?: boolean }} options
 * @returns {[number, number]}
 */
export function yRange(low, high, { unit, most, isStacked, fromZero }) {
  if (low === null || low === undefined || !Number.isFinite(low)) return [0, most ?? 1];
  if (unit !== "" || isStacked || fromZero) {
    const bottom = Math.min(0, low * 1.05);
    if (most !== null && most !== undefined && high <= most * 1.0001) return [bottom, most];
    return [bottom, high > 0 ? high * 1.06 : bottom < 0 ? 0 : 1];
  }
  // What hardly changes is drawn as such, and not as if its last digits were mountains.
  const isFlat = high - low < FLAT * Math.max(Math.abs(high), Math.abs(low));
  const room = isFlat ? Math.max(Math.abs(high), Math.abs(low)) * 0.06 : (high - low) * 0.06 || 1;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

/**
 * A logarithmic axis with room above and below.
 * @param {number | null | undefined} low
 * @param {number} high
 * @returns {[number, number]}
 */
export function logRange(low, high) {
  if (low === null || low === undefined || low <= 0) return [0.1, 1];
  return [low / 1.15, high * 1.15];
}

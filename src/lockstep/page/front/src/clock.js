// Moments of a run: since its start, or by the clock of whoever looks.
import { duration } from "./format.js";
import { remember, remembered } from "./store.js";

const MINUTE = 60;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
export const TIME_STEPS = [
  0.001,
  0.01,
  0.1,
  0.5,
  1,
  2,
  5,
  10,
  15,
  30,
  MINUTE,
  2 * MINUTE,
  5 * MINUTE,
  10 * MINUTE,
  15 * MINUTE,
  30 * MINUTE,
  HOUR,
  2 * HOUR,
  3 * HOUR,
  6 * HOUR,
  12 * HOUR,
  DAY,
  2 * DAY,
  7 * DAY,
  14 * DAY,
  28 * DAY,
  91 * DAY,
  365 * DAY,
];

/** @type {Set<() => void>} */
const listeners = new Set();
let byClock = remembered("clock") === "wall";

export function isByClock() {
  return byClock;
}

/** @param {boolean} value */
export function chooseClock(value) {
  byClock = value;
  remember("clock", value ? "wall" : "start");
  for (const listener of listeners) listener();
}

/** @param {() => void} listener */
export function onClock(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/**
 * @param {number} time Unix time
 * @param {number} start that of the run
 */
export function momentText(time, start) {
  return byClock
    ? clockText(time, 1, true)
    : `${time < start ? "−" : "+"}${duration(Math.round(Math.abs(time - start)))}`.replace("+0 s", "start");
}

/** @param {number} time */
export function fullClock(time) {
  return clockText(time, 1, true);
}

/**
 * Round moments between two, for an axis whose values are seconds since `start`.
 * @param {number} low
 * @param {number} high
 * @param {number} step
 * @param {number} start
 */
export function timeSplits(low, high, step, start) {
  const offset = byClock ? start - new Date(start * 1000).getTimezoneOffset() * MINUTE : 0;
  const splits = [];
  for (let at = Math.ceil((low + offset) / step - 1e-9); at * step - offset <= high + 1e-9 && splits.length < 100; at++)
    splits.push(at * step - offset);
  return splits;
}

/**
 * @param {number[]} splits
 * @param {number} step
 * @param {number} start
 */
export function timeTexts(splits, step, start) {
  if (!byClock) return splits.map((seconds) => (seconds === 0 ? "0" : sinceText(seconds, step)));
  return splits.map((seconds, number) => clockText(start + seconds, step, number === 0 && step < DAY));
}

/**
 * @param {number} seconds
 * @param {number} step
 */
function sinceText(seconds, step) {
  if (step < 1) return `${Number(seconds.toFixed(3))} s`;
  return duration(seconds);
}

/**
 * @param {number} time
 * @param {number} step
 * @param {boolean} withDay
 */
function clockText(time, step, withDay) {
  const date = new Date(time * 1000);
  const two = (/** @type {number} */ number) => String(number).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  if (step >= DAY) return day;
  const clock = `${two(date.getHours())}:${two(date.getMinutes())}${step < MINUTE ? `:${two(date.getSeconds())}` : ""}`;
  return withDay ? `${day} ${clock}` : clock;
}

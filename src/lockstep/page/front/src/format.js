// Numbers as people read them, like lockstep/text/units.py.

/** @type {[number, string][]} */
const PREFIXES = [
  [1e18, "E"],
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
  [1, ""],
];
/** @type {[number, string][]} */
const BYTES = [
  [1e15, "PB"],
  [1e12, "TB"],
  [1e9, "GB"],
  [1e6, "MB"],
  [1e3, "kB"],
  [1, "B"],
];
/** @type {[number, string][]} */
const SECONDS = [
  [86400, "d"],
  [3600, "h"],
  [60, "min"],
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "µs"],
];
const NONE = "–";
// From here on the digits that are written say that it is the next unit.
const ROUNDED_UP = 0.9995;
/** @type {[number, string][]} */
const HUNDRED = [[0.01, "%"]];
/** @type {Record<string, string>} */
const ZEROS = { share: "%", count: "" };
/** @type {[number, string, number, string][]} */
const DURATIONS = [
  [86400, "d", 3600, "h"],
  [3600, "h", 60, "min"],
  [60, "min", 1, "s"],
];
const LONGEST_IN_SECONDS = 120;

/** @typedef {"" | "s" | "B" | "B/s" | "share" | "W" | "flop/s" | "/s" | "items" | "count"} Unit */

/**
 * @param {Unit} unit
 * @returns {[number, string][]}
 */
function scales(unit) {
  if (unit === "B" || unit === "B/s") return BYTES.map(([size, name]) => [size, unit === "B" ? name : `${name}/s`]);
  if (unit === "s") return SECONDS;
  if (unit === "count") return PREFIXES;
  if (unit === "share") return HUNDRED;
  if (unit === "items") return [[1, ""]];
  return PREFIXES.map(([size, name]) => [size, name + unit]);
}

/**
 * @param {number} size
 * @param {Unit} unit
 */
function scaleOf(size, unit) {
  const known = scales(unit);
  return known.find(([least]) => size >= ROUNDED_UP * least) ?? known[known.length - 1];
}

/**
 * Few digits, and no exponent where it can be helped.
 * @param {number | null | undefined} value
 * @param {number} digits
 */
export function plain(value, digits = 4) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e9 || size < 1e-4)
    return value
      .toExponential(digits - 2)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  if (size >= 10 ** (digits - 1)) return grouped(value.toFixed(0));
  return String(Number(value.toPrecision(digits)));
}

/** @param {number | string} value */
export function grouped(value) {
  const [whole, rest] = String(value).split(".");
  const text = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return rest === undefined ? text : `${text}.${rest}`;
}

/**
 * One value with its unit: "34.2 ms", "93.1 %", "12.3 k/s".
 * @param {number | null | undefined} value
 * @param {Unit} unit
 */
export function amount(value, unit) {
  if (value === null || value === undefined) return NONE;
  if (unit === "") return plain(value);
  if (unit === "items") return grouped(value);
  if (value === 0) return `0 ${ZEROS[unit] ?? unit}`.trim();
  if (unit === "s" && Math.abs(value) >= LONGEST_IN_SECONDS) return duration(value);
  const [size, name] = scaleOf(unit === "s" ? Math.min(Math.abs(value), 1) : Math.abs(value), unit);
  return `${plain(value / size, 3)} ${name}`.trim();
}

/**
 * The labels of an axis: all in one unit, all with as many digits as their distance needs.
 * @param {(number | null)[]} values
 * @param {Unit} unit
 */
export function axisTexts(values, unit) {
  const most = Math.max(...values.filter((value) => value !== null).map(Math.abs), 0);
  const isNarrow = unit === "" && most < 1e5;
  const [size, name] = isNarrow || most === 0 ? [1, unit === "share" ? "%" : unit] : scaleOf(most, unit);
  const scale = unit === "share" ? 0.01 : size;
  const shown = values.filter((value) => value !== null).map((value) => value / scale);
  const distance = shown.length > 1 ? Math.abs(shown[1] - shown[0]) : Math.abs(shown[0] ?? 1);
  const isExact = (digits) =>
    shown.every((value) => Math.abs(Number(value.toFixed(digits)) - value) <= distance * 1e-6);
  const digits = [0, 1, 2, 3, 4, 5, 6, 7, 8].find(isExact) ?? 9;
  return values.map((value) => {
    if (value === null) return "";
    if (Math.abs(value) <= distance * scale * 1e-6) return "0";
    if (unit === "" && Math.abs(value) < 1e-4) return plain(value, 3);
    return `${grouped((value / scale).toFixed(digits))} ${name}`.trim();
  });
}

/**
 * With decades on the axis every value gets its own unit.
 * @param {(number | null)[]} values
 * @param {Unit} unit
 */
export function logTexts(values, unit) {
  return values.map((value) => (value === null ? "" : amount(Number(value.toPrecision(3)), unit)));
}

/**
 * "1:02:05" would not say what it counts: "1 h 2 min".
 * @param {number} seconds
 */
export function duration(seconds) {
  const sign = seconds < 0 ? "−" : "";
  const size = Math.abs(seconds);
  if (size < 59.5) return sign + (size < 10 ? amount(size, "s") : `${Math.floor(size + 0.5)} s`);
  for (const [unit, large, step, small] of DURATIONS) {
    const whole = Math.floor(size / step + 0.5) * step;
    const rest = whole % unit;
    if (whole >= unit) return `${sign}${(whole - rest) / unit} ${large}${rest ? ` ${rest / step} ${small}` : ""}`;
  }
  return "";
}

/**
 * Whole per cents, but for small ones.
 * @param {number} share
 */
export function percent(share) {
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  return `${(100 * share).toFixed(Math.abs(share) < 0.0095 && share !== 0 ? 1 : 0)} %`;
}

/** @param {number} seconds */
export function ago(seconds) {
  return seconds < 1 ? "now" : `${duration(Math.round(seconds))} ago`;
}

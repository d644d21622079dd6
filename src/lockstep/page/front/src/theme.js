// Light or dark: as the system says, or as a person has chosen; on paper always light.
import { remember, remembered } from "./store.js";

// As in lockstep/text/charts.py: told apart by people who do not see red or green, and strong enough to be read as text.
export const LIGHT = [
  "#0067a5",
  "#b84a00",
  "#00734f",
  "#9b3f78",
  "#7a5c00",
  "#3d3d3d",
  "#5b4fc4",
  "#a01c2c",
  "#2d7d8a",
];
export const DARK = ["#6cb8f0", "#ff9a52", "#41cf9f", "#ee9dcd", "#e3c04a", "#d0d0d0", "#b0a6ff", "#ff8d8d", "#79d3e0"];
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [], [7, 3], [2, 3], [9, 3, 2, 3], []];

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const onPaper = matchMedia("print");
/** @type {Set<() => void>} */
const listeners = new Set();
let chosen = remembered("theme");
let isPrinting = onPaper.matches;

export function isDark() {
  return !isPrinting && (chosen === null ? systemIsDark.matches : chosen === "dark");
}

export function isOnPaper() {
  return isPrinting;
}

/** @param {boolean} dark */
export function choose(dark) {
  chosen = dark ? "dark" : "light";
  remember("theme", chosen);
  show();
}

/** @param {() => void} listener */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function startTheme() {
  systemIsDark.addEventListener("change", show);
  onPaper.addEventListener("change", (event) => setPrinting(event.matches));
  addEventListener("beforeprint", () => setPrinting(true));
  addEventListener("afterprint", () => setPrinting(onPaper.matches));
  show();
}

/** @param {boolean} value */
function setPrinting(value) {
  if (isPrinting === value) return;
  isPrinting = value;
  show();
}

function show() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  for (const listener of listeners) listener();
}

/** @param {number} number */
export function colour(number) {
  const palette = isDark() ? DARK : LIGHT;
  return palette[number % palette.length];
}

/**
 * The tenth line has the first one's colour, and another dash.
 * @param {number} number
 */
export function dash(number) {
  return DASHES[(number + Math.floor(number / LIGHT.length)) % DASHES.length];
}

/**
 * The value of a colour of the style sheet.
 * @param {string} name
 */
export function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/**
 * An opaque colour between two, both as #rrggbb.
 * @param {string} from
 * @param {string} to
 * @param {number} share
 */
export function mix(from, to, share) {
  const parts = [1, 3, 5].map((at) => {
    const [a, b] = [from, to].map((text) => parseInt(text.slice(at, at + 2), 16));
    return Math.round(a + (b - a) * share)
      .toString(16)
      .padStart(2, "0");
  });
  return `#${parts.join("")}`;
}

/**
 * @param {string} hex
 * @param {number} alpha
 */
export function seeThrough(hex, alpha) {
  return (
    hex +
    Math.round(alpha * 255)
      .toString(16)
      .padStart(2, "0")
  );
}

// The signs that tell states and levels apart without colour.
import { make } from "./dom.js";

export const STATE_SIGNS = {
  queued: "…",
  starting: "▷",
  running: "▶",
  restarting: "↻",
  stopped: "■",
  failed: "✕",
  lost: "?",
  finished: "✓",
};
const LEVEL_SIGNS = { good: "✓", info: "•", warning: "▲", error: "✕" };

/** @param {keyof typeof LEVEL_SIGNS} level */
export function levelMark(level) {
  return make("span", { class: "level-mark", "aria-hidden": "true" }, LEVEL_SIGNS[level] ?? "•");
}

// A picture of our own that is drawn anew when its room, the colours or the clock change.
import { onClock } from "./clock.js";
import { make } from "./dom.js";
import { isOnPaper, onTheme } from "./theme.js";

export const PRINTED_WIDTH = 680;
/** @type {Record<string, [number, number]>} */
const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/**
 * `draw(width)` gives the nodes; `move(right, down)` is told of arrow keys, `point(event or null)` of the mouse.
 * @param {(width: number) => Node[]} draw
 * @param {{
 *   move?: ((right: number, down: number) => void) | null,
 *   point?: ((event: PointerEvent | null) => void) | null,
 *   className: string,
 * }} options
 */
export function drawing(draw, { move = null, point = null, className }) {
  const element = make("div", { class: `drawing ${className}`, role: "img", tabindex: move ? "0" : null });
  let width = isOnPaper() ? PRINTED_WIDTH : 0;

  function redraw() {
    if (width > 0) element.replaceChildren(...draw(width));
  }
  function fit() {
    const room = Math.floor(element.clientWidth);
    if (room === width || room === 0) return;
    width = room;
    redraw();
  }
  function toPaper() {
    width = PRINTED_WIDTH;
    redraw();
  }
  element.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step || !move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const far = event.shiftKey ? 10 : 1;
    move(step[0] * far, step[1] * far);
  });
  if (point) {
    element.addEventListener("pointermove", point);
    element.addEventListener("pointerdown", point);
    element.addEventListener("pointerleave", () => point(null));
  }
  const watcher = new ResizeObserver(() => requestAnimationFrame(fit));
  watcher.observe(element);
  const forget = [onTheme(redraw), onClock(redraw)];
  addEventListener("beforeprint", toPaper);
  addEventListener("afterprint", fit);

  return {
    element,
    redraw,
    setLabel: (/** @type {string} */ text) => element.setAttribute("aria-label", text),
    remove() {
      watcher.disconnect();
      forget.forEach((end) => end());
      removeEventListener("beforeprint", toPaper);
      removeEventListener("afterprint", fit);
    },
  };
}

/**
 * @param {number} value
 * @param {number} least
 * @param {number} most
 */
export function between(value, least, most) {
  return Math.max(least, Math.min(most, value));
}

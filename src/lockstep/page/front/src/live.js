// Asks for newer data while the run goes on: often while something changes, rarely when nothing does or nobody looks.
import { make, setText } from "./dom.js";
import { ago } from "./format.js";

const OFTEN = 2000;
const SELDOM = 10000;
const HIDDEN = 30000;

export function follow(url, view) {
  const light = make("span", { class: "live-light", "aria-hidden": "true" });
  const words = make("span", { role: "status" });
  const age = make("span", { class: "live-age" });
  view.status.replaceChildren(light, make("div", {}, words, age));
  let version = null;
  let updated = Date.now();
  let wait = OFTEN;
  let timer = 0;
  let isOver = false;
  let isAsking = false;

  function say(state, text) {
    view.status.dataset.state = state;
    setText(words, text);
    tick();
  }

  function tick() {
    setText(age, isOver ? "" : `, updated ${ago((Date.now() - updated) / 1000)}`);
  }

  function later() {
    clearTimeout(timer);
    if (!isOver) timer = setTimeout(ask, document.hidden ? Math.max(wait, HIDDEN) : wait);
  }

  async function ask() {
    if (isAsking || isOver) return;
    isAsking = true;
    try {
      const answer = await fetch(url, {
        cache: "no-store",
        credentials: "same-origin",
        headers: version ? { "If-None-Match": version } : {},
      });
      if (answer.status === 304) wait = Math.min(SELDOM, wait * 1.5);
      else if (answer.ok) take(await answer.json(), answer.headers.get("ETag"));
      else throw new Error(`status ${answer.status}`);
      if (!isOver) say("live", "Live");
    } catch {
      wait = Math.min(SELDOM, wait * 1.5);
      say("gone", "The board does not answer");
    }
    isAsking = false;
    later();
  }

  function take(page, newVersion) {
    if (newVersion === null || newVersion !== version) {
      updated = Date.now();
      wait = OFTEN;
      view.update(page);
    }
    version = newVersion;
    if (page.live) return;
    isOver = true;
    clearInterval(ticking);
    say("over", "The run is over; this page is complete");
  }

  const ticking = setInterval(tick, 1000);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden || isOver) return;
    wait = OFTEN;
    clearTimeout(timer);
    ask();
  });
  say("live", "Live");
  later();
}

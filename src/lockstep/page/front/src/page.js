// The whole page: a bar on top, a list of sections at the side, the comparison, and the runs, as tabs where several.
import { chooseClock, fullClock, isByClock } from "./clock.js";
import { make, setDown, setText, toggle } from "./dom.js";
import { drawAll } from "./panel.js";
import { runView, sectionLinks, sectionList } from "./run.js";
import { same } from "./same.js";
import { showWholeTables } from "./tables.js";
import { choose, isDark, onTheme } from "./theme.js";

const COMPARISON = "comparison";
const UNDER_BAR = 140;
const LONGEST_FOOT = 48;

export function pageView(first) {
  let page = first;
  let active = 0;
  let runs = [];
  const speaker = make("div", { class: "unseen", "aria-live": "polite" });
  const status = make("div", { class: "live" });
  const dark = toggle("Dark", isDark(), choose, { class: "small", title: "Dark colours" });
  onTheme(() => setDown(dark, isDark()));
  const clock = toggle("Clock time", isByClock(), chooseClock, {
    class: "small",
    title: "Times by the clock, not since the start of the run",
  });
  const bar = make(
    "header",
    { class: "bar-top" },
    make("span", { class: "brand" }, "Lockstep"),
    status,
    make("div", { class: "bar-tools" }, clock, dark),
  );
  const nav = make("nav", { class: "nav", "aria-label": "Sections" });
  const title = make("h1", { class: "page-title" });
  const tabs = make("div", { class: "tabs", role: "tablist", "aria-label": "Runs" });
  const comparison = make("div");
  const holder = make("div");
  const main = make("main", { id: "content", tabindex: "-1" }, title, comparison, tabs, holder);
  const foot = make("footer", { class: "foot" });
  const element = make(
    "div",
    { class: "page" },
    make("a", { class: "skip", href: "#content" }, "Skip to the content"),
    bar,
    make("div", { class: "columns" }, nav, main),
    foot,
    speaker,
  );
  const compared = sectionList(comparison, COMPARISON, { start: () => 0, group: COMPARISON, announce });

  let said = 0;
  function announce(text) {
    clearTimeout(said);
    said = setTimeout(() => setText(speaker, text), 150);
  }

  // A run is drawn when its tab is opened for the first time.
  function open(number) {
    const run = runs[number];
    if (!run || run.view) return;
    const prefix = `run${number}`;
    run.view = runView(page.runs[number], {
      prefix,
      group: prefix,
      announce,
      headingLevel: runs.length > 1 ? "h2" : "h1",
    });
    run.panel.replaceChildren(run.view.element);
  }

  function makeRuns() {
    const isTabbed = page.runs.length > 1;
    runs = page.runs.map((run, number) => {
      const tab = make(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab${number}`,
          "aria-controls": `tabpanel${number}`,
          on: { click: () => activate(number) },
        },
        run.name,
      );
      const panel = make(
        "div",
        isTabbed ? { role: "tabpanel", id: `tabpanel${number}`, "aria-labelledby": `tab${number}` } : {},
      );
      return { name: run.name, tab, panel, view: null };
    });
    tabs.hidden = !isTabbed;
    tabs.replaceChildren(...(isTabbed ? runs.map((run) => run.tab) : []));
    const none = make("p", { class: "nothing" }, "There is no run to show.");
    holder.replaceChildren(...(runs.length > 0 ? runs.map((run) => run.panel) : [none]));
  }

  function activate(number) {
    active = number;
    open(number);
    runs.forEach((run, at) => {
      run.panel.hidden = at !== number;
      run.tab.setAttribute("aria-selected", String(at === number));
      run.tab.tabIndex = at === number ? 0 : -1;
    });
    fillNav();
  }

  tabs.addEventListener("keydown", (event) => {
    const next = { ArrowRight: active + 1, ArrowLeft: active - 1, Home: 0, End: runs.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    activate((next + runs.length) % runs.length);
    runs[active].tab.focus();
  });

  let links = [];
  function fillNav() {
    const next = [...sectionLinks(page.comparison, COMPARISON), ...(runs[active]?.view?.links() ?? [])];
    if (same(next, links)) return;
    links = next;
    nav.hidden = links.length < 2;
    nav.replaceChildren(
      make(
        "ul",
        {},
        links.map(({ id, title: text }) => make("li", {}, make("a", { href: `#${id}` }, text))),
      ),
    );
    follow();
  }

  // Marks the section that is being read.
  function follow() {
    const tops = links.map(({ id }) => document.getElementById(id)?.getBoundingClientRect().top ?? Infinity);
    const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 2 && scrollY > 0;
    const now = atEnd
      ? links.length - 1
      : Math.max(
          0,
          tops.findLastIndex((top) => top <= UNDER_BAR),
        );
    nav.querySelectorAll("a").forEach((link, at) => {
      if ((link.getAttribute("aria-current") === "true") === (at === now)) return;
      if (at !== now) return link.removeAttribute("aria-current");
      link.setAttribute("aria-current", "true");
      const list = nav.firstElementChild;
      if (list) list.scrollLeft = link.offsetLeft - list.clientWidth / 2 + link.offsetWidth / 2;
    });
  }
  let isAsked = false;
  addEventListener(
    "scroll",
    () => {
      if (isAsked) return;
      isAsked = true;
      requestAnimationFrame(() => {
        isAsked = false;
        follow();
      });
    },
    { passive: true },
  );

  // All runs are printed; what is drawn anew measures its words, and can where it is seen.
  addEventListener("beforeprint", () => runs.forEach((run) => (run.panel.hidden = false)), { capture: true });
  addEventListener("afterprint", () => runs.forEach((run, number) => (run.panel.hidden = number !== active)));
  addEventListener("beforeprint", () => {
    runs.forEach((_, number) => open(number));
    drawAll();
    showWholeTables();
  });

  function update(newPage) {
    page = newPage;
    const isTabbed = page.runs.length > 1;
    setText(title, page.title);
    title.hidden = !(isTabbed || page.runs.length === 0);
    compared.update(page.comparison);
    if (
      !same(
        runs.map((run) => run.name),
        page.runs.map((run) => run.name),
      )
    ) {
      runs.forEach((run) => run.view?.remove());
      makeRuns();
      activate(Math.min(active, Math.max(0, runs.length - 1)));
    } else {
      runs.forEach((run, number) => run.view?.update(page.runs[number]));
      fillNav();
    }
    const made = `Made ${fullClock(page.made)} by Lockstep ${page.version}`;
    setText(foot, made);
    // The foot of every printed page.
    document.documentElement.style.setProperty("--foot", cssText(`${page.title.length > LONGEST_FOOT ? `${page.title.slice(0, LONGEST_FOOT - 1)}…` : page.title} · ${made}`));
  }

  update(first);
  return { element, status, update, announce, follow };
}

// A string as CSS writes it.
function cssText(text) {
  return `"${text.replace(/[^\p{L}\p{N}\p{P}\p{S} ]|["\\]/gu, (one) => `\\${one.codePointAt(0).toString(16)} `)}"`;
}

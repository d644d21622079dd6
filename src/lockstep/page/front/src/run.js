// One run: its headline, what to change, and its sections.
import { hiddenText, make, setText } from "./dom.js";
import { keyedList } from "./keyed.js";
import { STATE_SIGNS, levelMark } from "./levels.js";
import { panelKey, panelView } from "./panel.js";
import { same } from "./same.js";

export function runView(first, { prefix, group, announce, headingLevel }) {
  let run = first;
  let start = startOf(run);
  const context = { start: () => start, group, announce };
  const top = `${prefix}-top`;
  const head = make("div", { class: "headline", id: top });
  const unreadable = make("div", { class: "unreadable" });
  const advice = make("section", { class: "advice" });
  const sections = make("div");
  const list = sectionList(sections, prefix, context);
  const element = make("div", { class: "run" }, head, unreadable, advice, sections);
  const shown = {};

  // Rebuilds a part only when what it says has changed.
  function part(name, data, build) {
    if (same(shown[name], data)) return;
    shown[name] = data;
    build();
  }

  function show() {
    part("head", run.headline, () => head.replaceChildren(...headlineParts(run.headline, headingLevel)));
    part("unreadable", run.unreadable, () => unreadable.replaceChildren(...unreadableParts(run.unreadable)));
    part("advice", [run.advice, run.sections.map((section) => section.id)], () =>
      advice.replaceChildren(...adviceParts(run, prefix)),
    );
    unreadable.hidden = run.unreadable.length === 0;
    list.update(run.sections);
  }

  show();
  return {
    element,
    links: () => [{ id: top, title: "Overview" }, ...sectionLinks(run.sections, prefix)],
    update(newRun) {
      run = newRun;
      start = startOf(run);
      show();
    },
    remove() {
      list.clear();
      element.remove();
    },
  };
}

export function sectionList(parent, prefix, context) {
  return keyedList(
    parent,
    (section) => section.id,
    (section) => sectionView(section, prefix, context),
  );
}

export function sectionLinks(sections, prefix) {
  return sections.map((section) => ({ id: sectionId(prefix, section.id), title: section.title }));
}

function sectionId(prefix, id) {
  return `${prefix}-${id.replace(/[^\w-]/g, "-")}`;
}

function sectionView(first, prefix, context) {
  const id = sectionId(prefix, first.id);
  const title = make("h2", { id, tabindex: "-1" });
  const note = make("p", { class: "section-note" });
  const nothing = make("p", { class: "nothing" }, "Nothing was recorded.");
  const panels = make("div", { class: "panels" });
  const list = keyedList(panels, panelKey, (panel) => panelView(panel, context));
  const element = make("section", { class: "section", "aria-labelledby": id }, title, note, nothing, panels);
  const update = (section) => {
    setText(title, section.title);
    setText(note, section.note);
    note.hidden = !section.note;
    nothing.hidden = section.panels.length > 0;
    list.update(section.panels);
    widen(section.panels, list.views());
  };
  update(first);
  return {
    element,
    update,
    remove() {
      list.clear();
      element.remove();
    },
  };
}

// Charts stand two in a row; one that would stand alone takes all of it, like everything else.
function widen(panels, views) {
  const isHalf = (panel) => panel?.kind === "lines" || panel?.kind === "stack";
  let before = 0;
  panels.forEach((panel, at) => {
    const isAlone = isHalf(panel) && before % 2 === 0 && !isHalf(panels[at + 1]);
    before = isHalf(panel) ? before + 1 : 0;
    views[at].element.classList.toggle("wide", !isHalf(panel) || isAlone);
  });
}

function headlineParts(headline, level) {
  const state = make(
    "span",
    { class: `state state-${headline.state}` },
    make("span", { "aria-hidden": "true" }, STATE_SIGNS[headline.state] ?? "•"),
    ` ${headline.state}`,
  );
  const facts = headline.facts.map((fact) =>
    make(
      "div",
      { class: `fact level-${fact.level}` },
      make("dt", {}, fact.label),
      make(
        "dd",
        { class: "fact-value" },
        fact.level === "warning" || fact.level === "error"
          ? [levelMark(fact.level), hiddenText(`${fact.level}: `)]
          : [],
        fact.value,
      ),
      fact.note ? make("dd", { class: "fact-note" }, fact.note) : null,
    ),
  );
  return [
    make("div", { class: "headline-top" }, make(level, { class: "title" }, headline.title), state),
    headline.subtitle ? make("p", { class: "subtitle" }, headline.subtitle) : null,
    headline.verdict ? make("p", { class: `verdict state-${headline.state}` }, headline.verdict) : null,
    facts.length > 0 ? make("dl", { class: "facts" }, facts) : null,
  ].filter((node) => node !== null);
}

function adviceParts(run, prefix) {
  const link = (id) => {
    const section = run.sections.find((one) => one.id === id);
    return section ? make("a", { href: `#${sectionId(prefix, id)}` }, `See ${section.title}`) : null;
  };
  const heading = make("h2", {}, "What to change");
  if (run.advice.length === 0) return [heading, make("p", { class: "nothing" }, "Nothing stands out.")];
  return [
    heading,
    make(
      "ol",
      {},
      run.advice
        .slice(0, 3)
        .map((one) =>
          make(
            "li",
            {},
            make("p", { class: "advice-text" }, one.text),
            make("p", { class: "evidence" }, one.evidence, one.evidence ? " " : null, link(one.section)),
          ),
        ),
    ),
  ];
}

function unreadableParts(sentences) {
  return [
    make("h2", {}, "Not all of the log could be read"),
    make(
      "ul",
      {},
      sentences.map((text) => make("li", {}, text)),
    ),
  ];
}

// The first moment that any panel shows: times count from there.
function startOf(run) {
  let least = Infinity;
  const take = (values) => {
    for (const value of values) if (value !== null && value < least) least = value;
  };
  for (const panel of run.sections.flatMap((section) => section.panels)) {
    if (panel.kind === "timeline")
      take([...panel.spans.map((span) => span.begin), ...panel.moments.map((moment) => moment.time)]);
    if (panel.x !== "time") continue;
    if (panel.kind === "lines") for (const curve of panel.curves) take(curve.x.slice(0, 1));
    else take(panel.at.slice(0, 1));
  }
  return Number.isFinite(least) ? least : 0;
}

// What the page is made of, from panels.py: `python -m tests.unit.page_types` writes it.

export interface Fact {
  label: string;
  value: string;
  note: string;
  level: "good" | "info" | "warning" | "error";
}

export interface Headline {
  title: string;
  subtitle: string;
  state: "queued" | "starting" | "running" | "restarting" | "stopped" | "failed" | "lost" | "finished";
  verdict: string;
  facts: Fact[];
}

export interface Advice {
  text: string;
  evidence: string;
  section: string;
}

export interface Curve {
  name: string;
  x: number[];
  y: (number | null)[];
  low: (number | null)[] | null;
  high: (number | null)[] | null;
  style: "line" | "points" | "dashed";
}

export interface Mark {
  x: number;
  text: string;
  level: "good" | "info" | "warning" | "error";
}

export interface Lines {
  id: string;
  title: string;
  x: "step" | "time" | "ranks" | "seconds";
  y: string;
  curves: Curve[];
  note: string;
  marks: Mark[];
  log: boolean;
  unit: "" | "s" | "B" | "B/s" | "share" | "W" | "flop/s" | "/s";
  most: number | null;
  from_zero: boolean;
  kind: "lines";
}

export interface Stacked {
  id: string;
  title: string;
  x: "step" | "time";
  y: string;
  at: number[];
  parts: Curve[];
  note: string;
  marks: Mark[];
  unit: "" | "s" | "B" | "share" | "W";
  begin: number | null;
  kind: "stack";
}

export interface Share {
  name: string;
  amount: number;
  good: boolean;
  note: string;
}

export interface Shares {
  id: string;
  title: string;
  unit: "s" | "B" | "items";
  parts: Share[];
  note: string;
  kind: "shares";
}

export interface HeatLayer {
  name: string;
  unit: "" | "s" | "B" | "share";
  values: ((number | null)[])[];
}

export interface Heat {
  id: string;
  title: string;
  x: "step" | "time";
  at: number[];
  rows: string[];
  layers: HeatLayer[];
  note: string;
  kind: "heat";
}

export interface Moment {
  time: number;
  attempt: number;
  step: number | null;
  level: "good" | "info" | "warning" | "error";
  what: string;
  text: string;
}

export interface AttemptBar {
  attempt: number;
  begin: number;
  end: number;
  state: "queued" | "starting" | "running" | "restarting" | "stopped" | "failed" | "lost" | "finished";
  text: string;
}

export interface Timeline {
  id: string;
  title: string;
  spans: AttemptBar[];
  moments: Moment[];
  note: string;
  kind: "timeline";
}

export interface MeshAxis {
  name: string;
  size: number;
  talk: string;
}

export interface Mesh {
  id: string;
  title: string;
  axes: MeshAxis[];
  hosts: string[];
  slow: number[];
  note: string;
  kind: "mesh";
}

export interface Timetable {
  id: string;
  title: string;
  seconds: number;
  lanes: [string, number, number, number, number][][];
  busy: number[];
  note: string;
  kind: "timetable";
}

export interface Table {
  id: string;
  title: string;
  columns: string[];
  rows: string[][];
  right: boolean[];
  note: string;
  kind: "table";
}

export interface Text {
  id: string;
  title: string;
  text: string;
  note: string;
  language: "" | "toml";
  kind: "text";
}

export interface Chapter {
  id: string;
  title: string;
  panels: (Lines | Stacked | Shares | Heat | Timeline | Mesh | Timetable | Table | Text)[];
  note: string;
}

export interface RunPage {
  name: string;
  headline: Headline;
  advice: Advice[];
  unreadable: string[];
  sections: Chapter[];
}

export interface Page {
  title: string;
  made: number;
  version: string;
  runs: RunPage[];
  comparison: Chapter[];
  live: boolean;
}

export type Panel = Lines | Stacked | Shares | Heat | Timeline | Mesh | Timetable | Table | Text;

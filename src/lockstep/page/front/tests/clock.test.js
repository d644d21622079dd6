import assert from "node:assert/strict";
import { test } from "node:test";
import { TIME_STEPS, chooseClock, fullClock, isByClock, momentText, onClock, timeSplits, timeTexts } from "../src/clock.js";

process.env.TZ = "UTC";
const START = 1_760_000_000; // 2025-10-09 08:53:20

test("moments count from the start of the run, or follow the clock", () => {
  assert.equal(isByClock(), false);
  assert.equal(momentText(START, START), "start");
  assert.equal(momentText(START + 3725, START), "+1 h 2 min");
  assert.equal(momentText(START - 5, START), "−5 s");
  let told = 0;
  const forget = onClock(() => told++);
  chooseClock(true);
  assert.equal(momentText(START + 40, START), "2025-10-09 08:54:00");
  chooseClock(false);
  forget();
  chooseClock(false);
  assert.equal(told, 2);
  assert.equal(fullClock(START), "2025-10-09 08:53:20");
});

test("round moments between two", () => {
  assert.deepEqual(timeSplits(3, 31, 10, START), [10, 20, 30]);
  assert.deepEqual(timeSplits(1, 120, 60, START), [60, 120]);
  assert.deepEqual(timeTexts([0, 60, 3600], 60, START), ["0", "1 min", "1 h"]);
  assert.deepEqual(timeTexts([0.25, 0.5], 0.25, START), ["0.25 s", "0.5 s"]);
  assert.ok(timeSplits(0, 1e9, 0.001, START).length <= 100);
});

test("by the clock they are round there, and the first one says the day", () => {
  chooseClock(true);
  const splits = timeSplits(0, 130, 60, START);
  assert.deepEqual(splits, [40, 100]);
  assert.deepEqual(timeTexts(splits, 60, START), ["2025-10-09 08:54", "08:55"]);
  assert.deepEqual(timeTexts([0], 86_400, START), ["2025-10-09"]);
  chooseClock(false);
});

test("steps of time grow", () => {
  assert.deepEqual(TIME_STEPS, [...TIME_STEPS].sort((a, b) => a - b));
});

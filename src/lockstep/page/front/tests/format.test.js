import assert from "node:assert/strict";
import { test } from "node:test";
import { ago, amount, axisTexts, duration, grouped, logTexts, percent, plain } from "../src/format.js";

test("an amount has three digits and the unit that fits", () => {
  const texts = [
    [0.25, "s"],
    [1.5e9, "B"],
    [2e6, "B/s"],
    [312, "W"],
    [4.1e14, "flop/s"],
    [182_000, "/s"],
    [1234, "items"],
    [0, "s"],
    [0, "share"],
    [-2500, "W"],
  ].map(([value, unit]) => amount(value, unit));
  assert.deepEqual(texts, [
    "250 ms",
    "1.5 GB",
    "2 MB/s",
    "312 W",
    "410 Tflop/s",
    "182 k/s",
    "1,234",
    "0 s",
    "0 %",
    "-2.5 kW",
  ]);
});

test("what would be written as a thousand is one of the next unit", () => {
  assert.equal(amount(999.7e6, "B"), "1 GB");
  assert.equal(amount(0.9997, "s"), "1 s");
});

test("nothing is a dash", () => {
  assert.equal(amount(null, "s"), "–");
  assert.equal(amount(undefined, ""), "–");
  assert.equal(plain(null), "–");
});

test("a bare number has few digits and no exponent where it can be helped", () => {
  assert.deepEqual(
    [0, 2.5, 3.14159, 12345.6, 0.000123, 1e-7, 3.2e12].map((value) => plain(value)),
    ["0", "2.5", "3.142", "12,346", "0.000123", "1e-7", "3.2e12"],
  );
});

test("thousands are grouped, digits after the point are not", () => {
  assert.deepEqual([grouped(999), grouped(1000), grouped(1234567), grouped("1234.5678")], ["999", "1,000", "1,234,567", "1,234.5678"]);
});

test("a duration names its two largest parts", () => {
  assert.deepEqual([0.2, 59, 60, 3725, 86_400, 90_061, -125].map(duration), [
    "200 ms",
    "59 s",
    "1 min",
    "1 h 2 min",
    "1 d",
    "1 d 1 h",
    "−2 min 5 s",
  ]);
});

test("the labels of an axis share a unit and have as many digits as tell them apart", () => {
  assert.deepEqual(axisTexts([0, 0.05, 0.1], "s"), ["0", "50 ms", "100 ms"]);
  assert.deepEqual(axisTexts([0, 0.25, 0.5, 1], "share"), ["0", "25 %", "50 %", "100 %"]);
  assert.deepEqual(axisTexts([2.5, 2.75, null], ""), ["2.50", "2.75", ""]);
  assert.deepEqual(logTexts([0.001, null, 1], "s"), ["1 ms", "", "1 s"]);
});

test("shares and ages", () => {
  assert.deepEqual([0, 0.0001, 0.034, 0.5, 1].map(percent), ["0 %", "< 0.1 %", "3 %", "50 %", "100 %"]);
  assert.deepEqual([0.4, 61].map(ago), ["now", "1 min 1 s ago"]);
});

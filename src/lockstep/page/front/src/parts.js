// The colour of what time goes to, by its name: the same in every stack and bar, whatever else is shown there.
// What is lost is hatched too, and may have the colour of something useful.
/** @type {Record<string, number>} */
const PARTS = {
  compute: 0,
  optimizer: 2,
  "exposed communication": 1,
  communication: 1,
  "both at once": 8,
  input: 3,
  "between steps": 4,
  idle: 5,
  validation: 6,
  "checkpoint stall": 7,
  "checkpoint stalls": 7,
  profiling: 8,
  "repeated or skipped steps": 3,
  starting: 4,
  stopped: 0,
  other: 5,
};

/**
 * @param {string} name
 * @param {number} otherwise
 */
export function partColour(name, otherwise) {
  return PARTS[name] ?? otherwise;
}

// Cividis (Nuñez, Anderton, Renslow 2018): even steps to the eye, the same for people who do not see red or green.
const STOPS = [
  "#00224e",
  "#123570",
  "#3b496c",
  "#575d6d",
  "#707173",
  "#8a8678",
  "#a59c74",
  "#c3b369",
  "#e1cc55",
  "#fee838",
];
const PARTS = STOPS.map((stop) => [1, 3, 5].map((at) => parseInt(stop.slice(at, at + 2), 16)));

const ALIKE = 0.005;

/**
 * A share from 0 to 1 as [red, green, blue].
 * @param {number} share
 */
export function ramp(share) {
  const place = Math.max(0, Math.min(1, share)) * (PARTS.length - 1);
  const low = Math.min(Math.floor(place), PARTS.length - 2);
  return PARTS[low].map((part, at) => Math.round(part + (PARTS[low + 1][at] - part) * (place - low)));
}

/**
 * The ends of the colours. A few values far above all others (a first step that compiles) would leave one colour for
 * the rest: then the colours end below them, and `isCut` says so. Where all are alike (`isFlat`), all have the middle.
 * @param {(number | null)[][]} values
 */
export function rampEnds(values) {
  const known = values
    .flat()
    .filter((value) => value !== null)
    .sort((a, b) => a - b);
  if (known.length === 0) return null;
  const [least, most] = [known[0], known[known.length - 1]];
  const usual = known[Math.floor(0.98 * (known.length - 1))];
  const isCut = usual > 0 && most > 3 * usual;
  if (most - least <= ALIKE * Math.abs(most)) {
    const around = Math.abs(most) || 1;
    return { low: most - around, high: most + around, most, isCut: false, isFlat: true };
  }
  const low = Math.min(0, least);
  return { low, high: isCut ? usual : most, most, isCut, isFlat: false };
}

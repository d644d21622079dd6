// Where the ranks of a mesh are drawn: the last axis goes to the right, the next one down, and so on, as room allows.

const GAP = 4;

/**
 * A place [x, y] for every rank, and the size of all.
 * @param {number[]} sizes
 * @param {{ width: number, height: number }} cell
 * @param {number} room
 */
export function meshGrid(sizes, cell, room) {
  let block = { places: [[0, 0]], width: cell.width, height: cell.height };
  const wide = sizes.filter((size) => size > 1);
  wide.reverse().forEach((count, level) => {
    const gap = GAP + 7 * level;
    const fits = Math.max(1, Math.floor((room + gap) / (block.width + gap)));
    const columns = level % 2 === 1 && count <= 8 ? 1 : columnsOf(count, fits);
    const places = [];
    for (let number = 0; number < count; number++) {
      const x = (number % columns) * (block.width + gap);
      const y = Math.floor(number / columns) * (block.height + gap);
      for (const place of block.places) places.push([place[0] + x, place[1] + y]);
    }
    const rows = Math.ceil(count / columns);
    block = { places, width: columns * (block.width + gap) - gap, height: rows * (block.height + gap) - gap };
  });
  return block;
}

/**
 * As many as fit, in even rows where that does not cost half of the room.
 * @param {number} count
 * @param {number} fits
 */
function columnsOf(count, fits) {
  if (count <= fits) return count;
  for (let columns = fits; 2 * columns > fits; columns--) if (count % columns === 0) return columns;
  return fits;
}

/**
 * The coordinates of a rank, outermost axis first.
 * @param {number} rank
 * @param {number[]} sizes
 */
export function coordinates(rank, sizes) {
  const found = [];
  let rest = rank;
  for (let at = sizes.length - 1; at >= 0; at--) {
    found.unshift(rest % sizes[at]);
    rest = Math.floor(rest / sizes[at]);
  }
  return found;
}

/**
 * Who talks on an axis: all ranks that differ in its coordinate alone.
 * @param {number[]} sizes
 * @param {number} axis
 */
export function groups(sizes, axis) {
  const stride = sizes.slice(axis + 1).reduce((product, size) => product * size, 1);
  const world = sizes.reduce((product, size) => product * size, 1);
  const found = [];
  for (let rank = 0; rank < world; rank++) {
    if (Math.floor(rank / stride) % sizes[axis] === 0)
      found.push(Array.from({ length: sizes[axis] }, (_, number) => rank + number * stride));
  }
  return found;
}

/**
 * "0-3, 8": ranks in few characters.
 * @param {number[]} ranks
 */
export function rankRanges(ranks) {
  const parts = [];
  for (const rank of ranks) {
    const last = parts.at(-1);
    if (last && rank === last[1] + 1) last[1] = rank;
    else parts.push([rank, rank]);
  }
  const texts = parts.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
  return texts.length > 8 ? `${texts.slice(0, 8).join(", ")}, …` : texts.join(", ");
}
